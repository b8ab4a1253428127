"""From a checkpoint directory into preallocated parameters of one rank.

Tensors go through a ring of bounded buffers (``reading``): threads read ahead, and on a GPU the copies, the change of
dtype and the check of the values run on the device meanwhile. The peak above the parameters themselves is that ring.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from hybserve.core.errors import ModelError
from hybserve.core.units import MIB
from hybserve.models.reading import read_ahead
from hybserve.spec.inventory import Binding, ParamSpec, Source, bind, params_of, tensor_name
from hybserve.spec.model_spec import ModelSpec
from hybserve.spec.safetensors import TensorInfo, read_headers
from hybserve.spec.split import RankShare, width

#: ``progress(done_bytes, total_bytes)``, in bytes of the checkpoint that end up on this rank.
Progress = Callable[[int, int], None]

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BUFFER = 16 * MIB
#: Runs shorter than this are cut out of a larger read instead of being read one by one.
_SHORT_RUN = 64 * 1024
#: Pieces whose values are checked at once on a GPU: each check waits for the device.
_UNCHECKED = 256
#: Elements of dummy weights made at a time, on the host and on a GPU.
_DUMMY_PIECE, _DUMMY_PIECE_GPU = 1 << 20, 1 << 26


class _Job(NamedTuple):
    """One section of one parameter from one tensor, both seen as [outer, rows, inner]: ``target`` is the place of the
    section in the parameter; source rows are runs (first row, rows), in order."""

    info: TensorInfo
    target: torch.Tensor
    rows: int
    runs: list[tuple[int, int]]


class _Piece(NamedTuple):
    """What one read brings: ``shape`` = [blocks, rows, inner] elements from byte ``offset`` of the file, and of these
    what goes where: (place in the parameter [blocks, some rows, inner], first of those rows)."""

    info: TensorInfo
    offset: int
    shape: tuple[int, int, int]
    cuts: list[tuple[torch.Tensor, int]]

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.info.dtype]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def used(self) -> int:
        """Bytes of it that go into parameters."""
        return sum(target.numel() for target, _ in self.cuts) * self.dtype.itemsize


def load_weights(
    model_dir: Path,
    spec: ModelSpec,
    share: RankShare,
    params: Mapping[str, torch.Tensor],
    progress: Progress | None = None,
) -> None:
    """Fill ``params`` (contiguous, of ``params_of(spec, share)``'s names and local shapes, any float dtype, all on one
    device).

    Raises ModelError that names file and tensor if the checkpoint is damaged, does not match the model, or holds
    values that are not finite; parameters may then be half filled.
    """
    wanted = params_of(spec, share)
    _check_targets(wanted, share, params)
    binding = bind(spec, read_headers(model_dir))
    jobs = [job for param in wanted for job in _jobs(param, share, params[param.name], binding)]
    jobs.sort(key=lambda job: (job.info.file.name, job.info.start))
    total = sum(job.target.numel() * _DTYPES[job.info.dtype].itemsize for job in jobs)
    device, done = next(iter(params.values())).device, 0
    with torch.inference_mode():  # the parameters may be of one already: ``Model.bind`` joins some
        checks = _Checks(_UNCHECKED if device.type == "cuda" else 1)
        for piece, held in read_ahead((piece for job in jobs for piece in _pieces(job)), _BUFFER, device):
            checks.add(piece, _put(piece, held, device))
            done += piece.used
            if progress is not None:
                progress(done, total)
        checks.finish()
        if binding.tied_head is not None:
            _check_tied(binding.tied_head, binding.tensors["model.embed_tokens.weight"])


def dummy_weights(params: Mapping[str, torch.Tensor], seed: int) -> None:
    """Fill parameters with small seeded random values instead of a checkpoint's (``model.load: dummy``)."""
    with torch.inference_mode():  # the parameters may be of one already: ``Model.bind`` joins some
        for name, param in params.items():
            random = torch.Generator(param.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            flat = param.view(-1)
            for start, count in _spans(flat.numel(), _DUMMY_PIECE if param.is_cpu else _DUMMY_PIECE_GPU):
                flat[start : start + count] = _dummy(name, count, random)


def _dummy(name: str, count: int, random: torch.Generator) -> torch.Tensor:
    values = torch.empty(count, device=random.device)
    if name.endswith("A_log"):
        return values.uniform_(1, 16, generator=random).log_()
    if name.endswith("dt_bias"):  # time steps between 0.001 and 0.1, through the inverse of softplus
        steps = values.uniform_(-6.9, -2.3, generator=random).exp_()
        return steps + torch.log(-torch.expm1(-steps))
    centre = 1.0 if name.endswith("gated_delta.norm.weight") else 0.0
    return values.normal_(centre, 0.02, generator=random)


def _check_targets(wanted: tuple[ParamSpec, ...], share: RankShare, params: Mapping[str, torch.Tensor]) -> None:
    names = {param.name for param in wanted}
    if names != params.keys():
        raise ValueError(f"parameters differ from the inventory: {sorted(names ^ params.keys())}")
    for param in wanted:
        target = params[param.name]
        if tuple(target.shape) != param.local_shape(share) or not target.is_contiguous():
            raise ValueError(f"{param.name}: {tuple(target.shape)}, expected {param.local_shape(share)}, contiguous")


def _jobs(param: ParamSpec, share: RankShare, target: torch.Tensor, binding: Binding) -> Iterator[_Job]:
    layout, begin = binding.layouts[param.name], 0
    for section in param.sections:
        low, high = section.range(share)
        rows, source = (high - low) * section.rows, section.sources[layout]
        part = target.narrow(param.axis, begin, rows)
        begin += rows
        if part.numel() == 0:
            continue
        for expert in param.experts_of(source):
            info = binding.tensors[tensor_name(source, expert)]
            if expert is None:
                yield _job(info, part, param.axis, source, section.rows, (low, high))
            else:
                yield _job(info, part[expert], param.axis - 1, source, section.rows, (low, high))


def _job(info: TensorInfo, part: torch.Tensor, axis: int, source: Source, unit: int, units: tuple[int, int]) -> _Job:
    low, high = units
    if source.stride == unit:
        runs = [(source.offset + low * unit, width(units) * unit)]
    else:
        runs = [(source.offset + index * source.stride, unit) for index in range(low, high)]
    rows, inner = info.shape[axis], math.prod(part.shape[axis + 1 :])
    target = part.view(-1, part.shape[axis], inner)
    if runs == [(0, rows)] and target.is_contiguous():  # all of it: one run over all outer indices
        rows *= target.shape[0]
        return _Job(info, target.view(1, rows, inner), rows, [(0, rows)])
    return _Job(info, target, rows, runs)


def _pieces(job: _Job) -> Iterator[_Piece]:
    """Reads of at most one buffer that cover the job, in the order of the file."""
    outer, _, inner = job.target.shape
    size = _DTYPES[job.info.dtype].itemsize
    row_bytes = inner * size
    if outer > 1 and min(rows for _, rows in job.runs) * row_bytes < _SHORT_RUN and job.rows * row_bytes <= _BUFFER:
        yield from _slabs(job)
        return
    for index in range(outer):
        begin = 0
        for first, rows in job.runs:
            target = job.target[index, begin : begin + rows].view(1, -1, 1)
            offset = job.info.start + (index * job.rows + first) * row_bytes
            for place, count in _spans(target.numel(), _BUFFER // size):
                cut = target[:, place : place + count]
                yield _Piece(job.info, offset + place * size, (1, count, 1), [(cut, 0)])
            begin += rows


def _slabs(job: _Job) -> Iterator[_Piece]:
    """As ``_pieces`` for short runs: whole outer blocks are read and the runs are cut out of them."""
    outer, _, inner = job.target.shape
    block_bytes = job.rows * inner * _DTYPES[job.info.dtype].itemsize
    for start, count in _spans(outer, _BUFFER // block_bytes):
        cuts, begin = [], 0
        for first, rows in job.runs:
            cuts.append((job.target[start : start + count, begin : begin + rows], first))
            begin += rows
        yield _Piece(job.info, job.info.start + start * block_bytes, (count, job.rows, inner), cuts)


def _spans(total: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, count) pairs that cover [0, total) in steps of at most ``most``."""
    for start in range(0, total, most):
        yield start, min(most, total - start)


def _put(piece: _Piece, held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a piece to where it belongs, on a GPU as soon as the device gets there; the least and the greatest value of
    what is now there, in fp32 on the device [2 · cuts]. Extremes carry NaN along and cost a twentieth of ``isfinite``.
    """
    values = held.view(piece.dtype).view(piece.shape)
    (target, _), *others = piece.cuts
    if others or target.shape != values.shape or target.dtype != values.dtype or not target.is_contiguous():
        values = values.to(device, non_blocking=True)  # a plain copy is the only one that a GPU does by itself
    extremes: list[torch.Tensor] = []
    for target, first in piece.cuts:
        target.copy_(values[:, first : first + target.shape[1]], non_blocking=True)
        extremes += torch.aminmax(target)
    return torch.stack(extremes).float()


class _Checks:
    """Extremes of pieces, looked at ``most`` pieces at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: list[_Piece] = []
        self._extremes: list[torch.Tensor] = []

    def add(self, piece: _Piece, extremes: torch.Tensor) -> None:
        self._pieces.append(piece)
        self._extremes.append(extremes)
        if len(self._pieces) >= self._most:
            self.finish()

    def finish(self) -> None:
        """Raises ModelError that names the first tensor with a value that is not finite."""
        if not self._pieces:
            return
        finite = torch.cat(self._extremes).isfinite().tolist()
        owners = [piece for piece, extremes in zip(self._pieces, self._extremes, strict=True) for _ in extremes]
        self._pieces, self._extremes = [], []
        for piece, good in zip(owners, finite, strict=True):
            if not good:
                raise _refusal(piece)


def _refusal(piece: _Piece) -> ModelError:
    """Of a piece that is not finite where it was put."""
    what = "values that are not finite"
    for _, held in read_ahead([piece], piece.size, torch.device("cpu")):
        values = held.view(piece.dtype).view(piece.shape)
        sources = [values[:, first : first + target.shape[1]] for target, first in piece.cuts]
        if all(bool(source.isfinite().all()) for source in sources):
            what = f"values beyond the range of {piece.cuts[0][0].dtype}".replace("torch.", "")
    return ModelError(f"{piece.info.file.name}: tensor {piece.info.name} holds {what}")


def _check_tied(head: TensorInfo, embedding: TensorInfo) -> None:
    """A stored head beside a tied embedding must be the embedding, else the checkpoint is not what its config says."""
    size = _DTYPES[head.dtype].itemsize
    same = head.dtype == embedding.dtype
    pairs = (
        _Piece(info, info.start + place * size, (1, count, 1), [])
        for place, count in (_spans((head.end - head.start) // size, _BUFFER // size) if same else ())
        for info in (head, embedding)
    )
    ours = torch.empty(0)
    for piece, held in read_ahead(pairs, _BUFFER, torch.device("cpu")):
        if piece.info is head:
            ours = held.clone()
        else:
            same = same and bool(torch.equal(ours, held))
    if not same:
        raise ModelError(
            f"{head.file.name}: tensor {head.name} differs from the embedding, but config.json says tie_word_embeddings"
        )
