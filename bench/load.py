"""Weights from disk to the device, as a start reads them, beside plain reads of the same files.

    python -m bench load [--gib N] [--model m1|m2|tiny] [--where FOLDER] [--sweep]

A checkpoint of random values under the names and shapes of the model is written in shards of 4 GiB, or of ``--gib`` in
all by leaving out layers at the end, and read twice in each way: cold, when the system's cache has been told to drop
it, and warm. ``plain`` is one thread that reads the files one after another into one buffer of 16 MiB; ``loader``
fills the parameters on the GPU (on the CPU if there is none), from the headers to the last check of the values. GB are
10^9 bytes. ``--sweep``: the loader with other numbers of threads and sizes of pieces too.

Bars: cold 95 % of plain, warm 4 GB/s to a GPU.
"""

import argparse
import json
import math
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import record
from bench.dummy import MODELS
from hybserve.models import load, reading
from hybserve.spec.from_hf import read_model_spec
from hybserve.spec.inventory import inventory, params_of, weight_bytes
from hybserve.spec.model_spec import DTYPE_BYTES, ModelSpec
from hybserve.spec.safetensors import INDEX, read_headers, weight_files
from hybserve.spec.split import split_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARD, BUFFER = 4 << 30, 16 << 20
#: Bytes of random values made at a time.
_MADE = 64 << 20
_NAMES = {"float32": "F32", "bfloat16": "BF16"}
#: (threads, bytes of a piece)
SWEEP = ((2, 16 << 20), (8, 16 << 20), (8, 4 << 20))

Params = dict[str, torch.Tensor]


# What is read


def write_checkpoint(directory: Path, model: str, most: float = math.inf, shard: int = SHARD) -> ModelSpec:
    """A checkpoint of at most ``most`` bytes (but of one layer), on the disk and not only in the cache."""
    config = MODELS[model]
    for layers in range(config["num_hidden_layers"], 0, -1):
        (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        spec = read_model_spec(directory)
        if weight_bytes(spec, split_ranks(spec)[0], spec.dtype) <= most:
            break
    random = np.random.Generator(np.random.SFC64(0))
    weight_map: dict[str, str] = {}
    for number, header in enumerate(_shards(spec, shard), 1):
        file = directory / f"model-{number:05}.safetensors"
        weight_map |= dict.fromkeys(header, file.name)
        _write(file, header, random)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return spec


def _shards(spec: ModelSpec, most: int) -> Iterator[dict[str, Any]]:
    """The headers of files of at most ``most`` bytes of tensors, or of one tensor."""
    header: dict[str, Any] = {}
    end = 0
    for param in inventory(spec):
        dtype = spec.dtype if param.dtype == "model" else param.dtype
        for name, shape in dict(param.tensors(0)).items():
            size = math.prod(shape) * DTYPE_BYTES[dtype]
            if header and end + size > most:
                yield header
                header, end = {}, 0
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (end, end + size)}
            end += size
    yield header


def _write(file: Path, header: dict[str, Any], random: np.random.Generator) -> None:
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            begin, end = entry["data_offsets"]
            word = np.uint16 if entry["dtype"] == "BF16" else np.uint32
            finite = word(~(1 << (8 * word().itemsize - 2)) & np.iinfo(word).max)  # the exponent's highest bit is off
            for low in range(begin, end, _MADE):
                words = -(-min(_MADE, end - low) // 8)
                values = random.integers(0, 1 << 64, words, dtype=np.uint64).view(word) & finite
                stream.write(values.data.cast("B")[: min(_MADE, end - low)])
        stream.flush()
        os.fsync(stream.fileno())


def drop(files: list[Path]) -> None:
    """Ask the system to forget what it has cached of the files."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Ways of reading it


def plain(files: list[Path]) -> None:
    buffer = memoryview(bytearray(BUFFER))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def allocated(spec: ModelSpec) -> Params:
    """Parameters on the device, their memory touched."""
    share = split_ranks(spec)[0]
    dtypes = {"model": getattr(torch, spec.dtype), "float32": torch.float32}
    return {
        param.name: torch.zeros(param.local_shape(share), dtype=dtypes[param.dtype], device=DEVICE)
        for param in params_of(spec, share)
    }


def check(directory: Path, params: Params) -> None:
    """The first and the last tensor are what the files hold."""
    headers = read_headers(directory)
    for ours, theirs in (("embed.weight", "model.embed_tokens.weight"), ("norm.weight", "model.norm.weight")):
        info = headers[theirs]
        with info.file.open("rb") as stream:
            stream.seek(info.start)
            held = torch.frombuffer(bytearray(stream.read(info.end - info.start)), dtype=torch.uint8)
        assert torch.equal(params[ours].cpu().view(-1).view(torch.uint8), held), theirs


def measure(directory: Path, spec: ModelSpec, sweep: bool) -> dict[str, Any]:
    """GB a second of each way."""
    files, params, share = weight_files(directory), allocated(spec), split_ranks(spec)[0]
    size = sum(file.stat().st_size for file in files)
    told: list[int] = []

    def loader() -> None:
        load.load_weights(directory, spec, share, params, lambda done, total: told.append(done))

    def speed(read: Callable[[], None], cold: bool) -> float:
        if cold:
            drop(files)
        began = time.perf_counter()
        read()
        return size / (time.perf_counter() - began) / 1e9

    figures: dict[str, Any] = {"bytes": size, "files": len(files), "device": DEVICE}
    for name, cold in (("cold", True), ("warm", False)):
        of_plain = speed(lambda: plain(files), cold)
        of_loader = speed(loader, cold)
        figures[name] = {"plain": of_plain, "loader": of_loader, "ratio": of_loader / of_plain}
        print(f"{name}: plain {of_plain:.2f} GB/s, loader {of_loader:.2f} GB/s: {of_loader / of_plain:.2f}", flush=True)
    check(directory, params)
    figures["progress_calls"] = len(told) // 2
    usual = reading._READERS, load._BUFFER
    figures["sweep"] = []
    for readers, buffer in SWEEP if sweep else ():
        reading._READERS, load._BUFFER = readers, buffer
        row = {"readers": readers, "buffer": buffer, "cold": speed(loader, True), "warm": speed(loader, False)}
        figures["sweep"].append(row)
        print(f"{readers} x {buffer >> 20} MiB: cold {row['cold']:.2f} GB/s, warm {row['warm']:.2f} GB/s", flush=True)
    reading._READERS, load._BUFFER = usual
    return figures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench load")
    parser.add_argument("--gib", type=float, default=math.inf)
    parser.add_argument("--model", choices=sorted(MODELS), default="m1")
    parser.add_argument("--where", help="a folder on the disk that is meant")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.where) as folder:
        began = time.perf_counter()
        spec = write_checkpoint(Path(folder), options.model, options.gib * (1 << 30))
        print(f"{options.model}, {len(spec.layers)} layers, written in {time.perf_counter() - began:.1f} s", flush=True)
        figures = {"model": options.model, "layers": len(spec.layers), **measure(Path(folder), spec, options.sweep)}
    print(record("load", figures, ["python", "-m", "bench", "load", *arguments], ("torch",)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
