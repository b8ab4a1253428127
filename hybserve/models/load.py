"""From a checkpoint directory into preallocated parameters of one rank.

Tensors are read with plain file reads through one bounded buffer, never mapped: a file that is replaced or truncated
while the server runs cannot hurt it, and the peak above the parameters themselves is one buffer and its copy.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from hybserve.core.errors import ModelError
from hybserve.core.units import MIB
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
#: Elements of dummy weights made at a time, on the host and on a GPU.
_DUMMY_PIECE, _DUMMY_PIECE_GPU = 1 << 20, 1 << 26


class _Job(NamedTuple):
    """One section of one parameter from one tensor, both seen as [outer, rows, inner]: ``target`` is the place of the
    section in the parameter; source rows are runs (first row, rows), in order."""

    info: TensorInfo
    target: torch.Tensor
    rows: int
    runs: list[tuple[int, int]]


def load_weights(
    model_dir: Path,
    spec: ModelSpec,
    share: RankShare,
    params: Mapping[str, torch.Tensor],
    progress: Progress | None = None,
) -> None:
    """Fill ``params`` (contiguous, of ``params_of(spec, share)``'s names and local shapes, any float dtype).

    Raises ModelError that names file and tensor if the checkpoint is damaged, does not match the model, or holds
    values that are not finite; parameters may then be half filled.
    """
    wanted = params_of(spec, share)
    _check_targets(wanted, share, params)
    binding = bind(spec, read_headers(model_dir))
    jobs = [job for param in wanted for job in _jobs(param, share, params[param.name], binding)]
    jobs.sort(key=lambda job: (job.info.file.name, job.info.start))
    total = sum(job.target.numel() * _DTYPES[job.info.dtype].itemsize for job in jobs)
    buffer, done = bytearray(_BUFFER), 0
    with torch.no_grad(), _Files() as files:
        for job in jobs:
            for target, source in _read(files, job, buffer):
                _copy(job.info, target, source)
                done += source.numel() * source.dtype.itemsize
                if progress is not None:
                    progress(done, total)
        if binding.tied_head is not None:
            _check_tied(files, binding.tied_head, binding.tensors["model.embed_tokens.weight"], buffer)


def dummy_weights(params: Mapping[str, torch.Tensor], seed: int) -> None:
    """Fill parameters with small seeded random values instead of a checkpoint's (``model.load: dummy``)."""
    with torch.no_grad():
        for name, param in params.items():
            random = torch.Generator(param.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            flat = param.view(-1)
            for start, count in _pieces(flat.numel(), _DUMMY_PIECE if param.is_cpu else _DUMMY_PIECE_GPU):
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


def _read(files: "_Files", job: _Job, buffer: bytearray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (place in the parameter, values for it) that cover the job; values live until the next pair only."""
    outer, _, inner = job.target.shape
    size = _DTYPES[job.info.dtype].itemsize
    row_bytes = inner * size
    if outer > 1 and min(rows for _, rows in job.runs) * row_bytes < _SHORT_RUN and job.rows * row_bytes <= _BUFFER:
        yield from _read_slabs(files, job, buffer)
        return
    for index in range(outer):
        begin = 0
        for first, rows in job.runs:
            target = job.target[index, begin : begin + rows].view(-1)
            offset = job.info.start + (index * job.rows + first) * row_bytes
            for place, count in _pieces(target.numel(), len(buffer) // size):
                yield target[place : place + count], files.tensor(job.info, offset + place * size, count, buffer)
            begin += rows


def _read_slabs(files: "_Files", job: _Job, buffer: bytearray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """As ``_read`` for short runs: whole outer blocks are read and the runs are cut out of them."""
    outer, _, inner = job.target.shape
    size = _DTYPES[job.info.dtype].itemsize
    block = job.rows * inner
    for start, count in _pieces(outer, len(buffer) // (block * size)):
        values = files.tensor(job.info, job.info.start + start * block * size, count * block, buffer)
        slab, begin = values.view(count, job.rows, inner), 0
        for first, rows in job.runs:
            yield job.target[start : start + count, begin : begin + rows], slab[:, first : first + rows]
            begin += rows


def _pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, count) pairs that cover [0, total) in steps of at most ``most``."""
    for start in range(0, total, most):
        yield start, min(most, total - start)


def _copy(info: TensorInfo, target: torch.Tensor, source: torch.Tensor) -> None:
    values = source.to(target.dtype)
    if not _finite(values):
        what = "values that are not finite"
        if _finite(source):
            what = f"values beyond the range of {target.dtype}".replace("torch.", "")
        raise ModelError(f"{info.file.name}: tensor {info.name} holds {what}")
    target.copy_(values)


def _finite(values: torch.Tensor) -> bool:
    """Whether all of at least one value are finite. Extremes carry NaN along and cost a twentieth of ``isfinite``."""
    low, high = torch.aminmax(values)
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _check_tied(files: "_Files", head: TensorInfo, embedding: TensorInfo, buffer: bytearray) -> None:
    """A stored head beside a tied embedding must be the embedding, else the checkpoint is not what its config says."""
    half = len(buffer) // 2
    size = _DTYPES[head.dtype].itemsize
    same = head.dtype == embedding.dtype
    for place, count in _pieces((head.end - head.start) // size, half // size) if same else ():
        ours = files.tensor(head, head.start + place * size, count, buffer).clone()
        same = same and bool(torch.equal(ours, files.tensor(embedding, embedding.start + place * size, count, buffer)))
    if not same:
        raise ModelError(
            f"{head.file.name}: tensor {head.name} differs from the embedding, but config.json says tie_word_embeddings"
        )


class _Files:
    """Open weight files, one handle each, for the duration of a load."""

    def __init__(self) -> None:
        self._handles: dict[Path, BinaryIO] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.close()

    def tensor(self, info: TensorInfo, offset: int, count: int, buffer: bytearray) -> torch.Tensor:
        """``count`` elements of a tensor from byte ``offset`` of its file, as a view of ``buffer``."""
        dtype = _DTYPES[info.dtype]
        view = memoryview(buffer)[: count * dtype.itemsize]
        try:
            handle = self._handles.get(info.file)
            if handle is None:
                handle = self._handles[info.file] = info.file.open("rb", buffering=0)
            handle.seek(offset)
            while view:
                got = handle.readinto(view)  # type: ignore[attr-defined]
                if not got:
                    raise ModelError(f"{info.file.name}: tensor {info.name} ends early; the file changed while read")
                view = view[got:]
        except OSError as error:
            raise ModelError(f"{info.file.name}: cannot be read ({error.strerror})") from None
        return torch.frombuffer(buffer, dtype=dtype, count=count)
