"""The headers of safetensors files: which tensor lies where. Read by ourselves, because offsets are foreign input.

A file is 8 bytes of header length (little endian), a JSON header, then the tensors' bytes without gap or overlap.
Nothing here reads or maps tensor data; no torch.
"""

import math
import stat
import struct
from pathlib import Path
from typing import Any

import msgspec

from hybserve.core.errors import ModelError
from hybserve.core.units import format_bytes
from hybserve.spec.json_file import one_line, parse_object, read_object, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: Bits of one element.
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

#: Upper limits of what a header may claim; the format's own limit for the header, ample ones for the rest.
_MOST_HEADER = 100_000_000
_MOST_INDEX = 100_000_000
_MOST_DIMS = 8
_MOST_ELEMENTS = 1 << 48
_LENGTH = struct.Struct("<Q")
_FIELDS = {"dtype", "shape", "data_offsets"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a file: its bytes are [start, end) of the whole file, row-major."""

    name: str
    file: Path
    dtype: str  # as the header says it: "BF16"
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint in a fixed order; empty if there are none. Raises ModelError (index)."""
    if (model_dir / SINGLE).exists():
        return [model_dir / SINGLE]
    if (model_dir / INDEX).exists():
        return [model_dir / name for name in sorted(set(_weight_map(model_dir).values()))]
    return []


def read_headers(model_dir: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint by name, from one file or from those of its index, in file order.

    Raises ModelError if a header is damaged or lies about its file, if two files hold one tensor, if the index and
    the files disagree, or if there is nothing but pickled weights, which could run code when opened.
    """
    single = (model_dir / SINGLE).exists()
    weight_map = {} if single or not (model_dir / INDEX).exists() else _weight_map(model_dir)
    files = [model_dir / SINGLE] if single else [model_dir / name for name in sorted(set(weight_map.values()))]
    if not files:
        raise ModelError(_nothing_found(model_dir))
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if info.name in tensors:
                raise ModelError(f"{file.name}: tensor {shown(info.name)} is also in {tensors[info.name].file.name}")
            tensors[info.name] = info
    if not single:
        _check_index(weight_map, tensors)
    return tensors


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file in the order of their bytes. Raises ModelError."""
    try:
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode):  # opening a pipe would wait for ever
            raise ModelError(f"{file.name}: not a regular file")
        with file.open("rb") as stream:
            size = facts.st_size
            prefix = stream.read(_LENGTH.size)
            if len(prefix) < _LENGTH.size:
                raise ModelError(f"{file.name}: only {size} bytes, not a safetensors file")
            (length,) = _LENGTH.unpack(prefix)
            if length > min(_MOST_HEADER, size - _LENGTH.size):
                raise ModelError(f"{file.name}: claims a header of {length} bytes in a file of {size} bytes")
            header = stream.read(length)
    except FileNotFoundError:
        raise ModelError(f"{file.name}: not found") from None
    except OSError as error:
        raise ModelError(f"{file.name}: cannot be read ({error.strerror})") from None
    begin = _LENGTH.size + length
    tensors = _sound_tensors(file, header, begin) or _examined_tensors(file, header, begin)
    tensors.sort(key=lambda info: (info.start, info.end))
    _check_cover(file, tensors, begin, size)
    return tensors


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)


def _sound_tensors(file: Path, header: bytes, begin: int) -> list[TensorInfo] | None:
    """The tensors of a header in which nothing is wrong, quickly (a large MoE has 74 000); None if anything is odd.

    A name that occurs twice would be dropped by the decoder; it shows in the number of ``data_offsets``.
    """
    try:
        content = _HEADER.decode(header)
        _check_metadata(file, msgspec.json.decode(content.pop("__metadata__", b"{}")))
        entries = {name: _ENTRY.decode(entry) for name, entry in content.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ModelError):
        return None
    if header.count(b'"data_offsets"') != len(entries):
        return None
    tensors = []
    for name, entry in entries.items():
        bits, shape, (start, end) = _BITS.get(entry.dtype, 0), entry.shape, entry.data_offsets
        odd = not bits or len(shape) > _MOST_DIMS or min(shape, default=0) < 0 or not 0 <= start <= end < 1 << 62
        if odd or math.prod(shape) * bits != 8 * (end - start) or math.prod(shape) > _MOST_ELEMENTS or 0 in shape:
            return None
        tensors.append(TensorInfo(name, file, entry.dtype, tuple(shape), begin + start, begin + end))
    return tensors


def _examined_tensors(file: Path, header: bytes, begin: int) -> list[TensorInfo]:
    """The same, entry by entry, with the exact complaint if there is one. Raises ModelError."""
    content = parse_object(header, file.name, unique=True)
    _check_metadata(file, content.pop("__metadata__", {}))
    return [_tensor(file, name, entry, begin) for name, entry in content.items()]


def _check_metadata(file: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{file.name}: __metadata__ must map names to strings")


def _tensor(file: Path, name: str, entry: Any, begin: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise _lie(file, name, "must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _lie(file, name, f"has the unknown dtype {shown(dtype)}")
    if not _whole_numbers(shape) or len(shape) > _MOST_DIMS or math.prod(max(n, 1) for n in shape) > _MOST_ELEMENTS:
        raise _lie(file, name, f"has an impossible shape {one_line(shape)}")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _lie(file, name, f"has impossible offsets {one_line(offsets)}")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise _lie(
            file,
            name,
            f"is {dtype} {list(shape)} and needs {format_bytes(-(-bits // 8))}, "
            f"but its offsets span {format_bytes(offsets[1] - offsets[0])}",
        )
    return TensorInfo(name, file, dtype, tuple(shape), begin + offsets[0], begin + offsets[1])


def _lie(file: Path, name: str, what: str) -> ModelError:
    return ModelError(f"{file.name}: tensor {shown(name)} {what}")


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry < 1 << 62 for entry in value)


def _check_cover(file: Path, tensors: list[TensorInfo], begin: int, size: int) -> None:
    """The tensors must tile the rest of the file: no overlap, no gap, nothing beyond its end, nothing left over."""
    position = begin
    for info in tensors:
        if info.end > size:
            raise ModelError(
                f"{file.name}: tensor {shown(info.name)} ends at byte {info.end}, but the file has {size} bytes; "
                "it is truncated or damaged"
            )
        if info.start != position:
            problem = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
            raise ModelError(f"{file.name}: tensor {shown(info.name)} {problem}")
        position = info.end
    if position != size:
        raise ModelError(f"{file.name}: {size - position} bytes at its end belong to no tensor")


def _weight_map(model_dir: Path) -> dict[str, str]:
    weight_map = read_object(model_dir / INDEX, _MOST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX}: weight_map must name the file of every tensor")
    known: set[str] = set()  # of 70 000 tensors, few files
    for name, file in weight_map.items():
        if isinstance(file, str) and file in known:
            continue
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ModelError(f"{INDEX}: {shown(file)} of {shown(name)} is not the name of a safetensors file beside it")
        known.add(file)
    return weight_map


def _check_index(weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    names = {path: path.name for path in {info.file for info in tensors.values()}}
    for name, file in weight_map.items():
        if name not in tensors or names[tensors[name].file] != file:
            raise ModelError(f"{INDEX}: tensor {shown(name)} is not in {file}")
    extra = next((info for name, info in tensors.items() if name not in weight_map), None)
    if extra is not None:
        raise ModelError(f"{INDEX}: tensor {shown(extra.name)} of {extra.file.name} is missing")


def _nothing_found(model_dir: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLES for path in model_dir.glob(pattern))
    if pickled:
        return (
            f"{one_line(pickled[0])}: pickled weights are not read, because opening them can run code; "
            f"convert the checkpoint to {SINGLE}"
        )
    return f"neither {SINGLE} nor {INDEX} in {str(model_dir)!r}"
