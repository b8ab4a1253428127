import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybserve.core.errors import ModelError
from hybserve.spec.safetensors import INDEX, read_header, read_headers, weight_files
from tests.checkpoints import make_checkpoint


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_headers_are_those_that_were_saved(tmp_path: Path) -> None:
    tensors = {
        "b": torch.zeros(3, 5, dtype=torch.bfloat16),
        "a": torch.zeros((), dtype=torch.float32),
        "empty": torch.zeros(0, 4),
        "fp8": torch.zeros(7, dtype=torch.float8_e4m3fn),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    found = {info.name: info for info in read_header(file)}
    assert {name: info.shape for name, info in found.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {name: info.end - info.start for name, info in found.items()} == {n: t.nbytes for n, t in tensors.items()}
    assert found["b"].dtype == "BF16"
    assert max(info.end for info in found.values()) == file.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "only 0 bytes"),
        (b"\x01\x02", "only 2 bytes"),
        (struct.pack("<Q", 2**60) + b"{}", f"claims a header of {2**60} bytes in a file of 10 bytes"),
        (struct.pack("<Q", 3) + b"{}", "claims a header of 3 bytes"),
        (raw(""), "not valid JSON"),
        (raw("[]"), "expected a JSON object"),
        (raw('{"a": ' + "[" * 50_000), "nested too deeply"),
        (raw('{"a": 1, "a": 1}'), "key 'a' occurs twice"),
        (raw('{"a": {"dtype": "F32", "dtype": "F16"}}'), "key 'dtype' occurs twice"),
        (raw({"a": 1}), "tensor 'a' must have exactly dtype, shape and data_offsets"),
        (raw({"a": {**entry("F32", [1], 0, 4), "x": 1}}, bytes(4)), "must have exactly"),
        (raw({"a": entry("F33", [1], 0, 4)}, bytes(4)), "unknown dtype 'F33'"),
        (raw({"a": entry([], [1], 0, 4)}, bytes(4)), "unknown dtype"),
        (raw({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "impossible shape"),
        (raw({"a": entry("F32", [1.0], 0, 4)}, bytes(4)), "impossible shape"),
        (raw({"a": entry("F32", [True], 0, 4)}, bytes(4)), "impossible shape"),
        (raw({"a": entry("F32", "1", 0, 4)}, bytes(4)), "impossible shape"),
        (raw({"a": entry("F32", [2**61, 2**61, 0], 0, 0)}), "impossible shape"),
        (raw({"a": entry("F32", [1] * 9, 0, 4)}, bytes(4)), "impossible shape"),
        (raw({"a": entry("F32", [1], 4, 0)}, bytes(4)), "impossible offsets"),
        (raw({"a": entry("F32", [1], -4, 0)}, bytes(4)), "impossible offsets"),
        (raw({"a": entry("F32", [1], 0, 2**63)}, bytes(4)), "impossible offsets"),
        (raw({"a": entry("F32", [2], 0, 4)}, bytes(4)), r"is F32 \[2\] and needs 8 B, but its offsets span 4 B"),
        (
            raw({"a": entry("F32", [2], 0, 8)}, bytes(4)),
            r"ends at byte \d+, but the file has \d+ bytes; it is truncated",
        ),
        (raw({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, bytes(4)), "tensor 'b' overlaps the tensor"),
        (raw({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)), "tensor 'b' overlaps"),
        (raw({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)), "tensor 'b' leaves a gap"),
        (raw({"a": entry("F32", [1], 4, 8)}, bytes(8)), "tensor 'a' leaves a gap"),
        (raw({"a": entry("F32", [1], 0, 4)}, bytes(9)), "5 bytes at its end belong to no tensor"),
        (raw({"__metadata__": {"format": 1}}), "__metadata__ must map names to strings"),
        (raw({"__metadata__": []}), "__metadata__ must map names to strings"),
        (raw({"a\nb\x1b" * 100: 1}), "must have exactly"),
    ],
    ids=range(32),
)
def test_f80_headers_that_lie(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=f"^model.safetensors: .*{message}") as error:
        read_headers(tmp_path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "dense", shards=3)


def change_index(path: Path, change: Any) -> None:
    content = json.loads((path / INDEX).read_text())
    change(content["weight_map"])
    (path / INDEX).write_text(json.dumps(content))


NORM = "model.norm.weight"


def test_index_lists_the_files_once(sharded: Path) -> None:
    assert [file.name for file in weight_files(sharded)] == [
        f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)
    ]
    assert NORM in read_headers(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({NORM: "../model-00001-of-00003.safetensors"}), "is not the name of a safetensors file"),
        (lambda m: m.update({NORM: "/etc/passwd"}), "is not the name of a safetensors file"),
        (lambda m: m.update({NORM: "model.bin"}), "is not the name of a safetensors file"),
        (lambda m: m.update({NORM: 3}), "is not the name of a safetensors file"),
        (lambda m: m.update({NORM: "a\0.safetensors"}), "is not the name of a safetensors file"),
        (lambda m: m.update({NORM: "gone.safetensors"}), r"^gone.safetensors: not found"),
        (lambda m: m.update({"ghost": m[NORM]}), "tensor 'ghost' is not in model-"),
        (lambda m: m.pop(NORM), f"tensor '{NORM}' of model-.* is missing"),
        (lambda m: m.clear(), "weight_map must name the file"),
    ],
)
def test_f80_index_that_lies(sharded: Path, change: Any, message: str) -> None:
    change_index(sharded, change)
    with pytest.raises(ModelError, match=message):
        read_headers(sharded)


def test_f80_index_that_names_the_wrong_file(sharded: Path) -> None:
    files = [file.name for file in weight_files(sharded)]
    change_index(sharded, lambda m: m.update({NORM: next(file for file in files if file != m[NORM])}))
    with pytest.raises(ModelError, match=f"tensor '{NORM}' is not in model-"):
        read_headers(sharded)


def test_f80_one_tensor_in_two_files(sharded: Path) -> None:
    first, second, _ = weight_files(sharded)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=f"^{second.name}: tensor .* is also in {first.name}"):
        read_headers(sharded)


def test_f80_shard_missing(sharded: Path) -> None:
    weight_files(sharded)[1].unlink()
    with pytest.raises(ModelError, match=r"^model-00002-of-00003.safetensors: not found"):
        read_headers(sharded)


def test_f80_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"^model.safetensors: not a regular file"):
        read_headers(tmp_path)


def test_f81_only_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        read_headers(tmp_path)
    for name in ("consolidated.pt", "pytorch_model-00001-of-00002.bin"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"^consolidated.pt: pickled weights are not read"):
        read_headers(tmp_path)
