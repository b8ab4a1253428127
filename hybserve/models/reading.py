"""Pieces of files through a ring of buffers: threads read ahead of what is made of them.

One thread reads no faster than the system copies out of its cache, and asks a disk for little at a time; several
together are as fast as the disk is. Files are read, never mapped: one that is replaced or truncated while the server
runs cannot hurt it.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

import torch

from hybserve.core.errors import ModelError
from hybserve.spec.safetensors import TensorInfo

#: Threads, and buffers for each of them: one is filled while others wait for their turn or for the device.
_READERS, _BUFFERS_EACH = 4, 2


class Piece(Protocol):
    """``size`` bytes of a tensor from byte ``offset`` of its file."""

    @property
    def info(self) -> TensorInfo: ...

    @property
    def offset(self) -> int: ...

    @property
    def size(self) -> int: ...


P = TypeVar("P", bound=Piece)


def read_ahead(pieces: Iterable[P], buffer_size: int, device: torch.device) -> Iterator[tuple[P, torch.Tensor]]:
    """Every piece in order with its bytes (uint8 on the host, pinned if ``device`` is a GPU). They stay until the next
    piece is asked for, or until all that was put on the device's current stream by then has run.

    Raises ModelError that names the file and the tensor for what cannot be read.
    """
    files = _Files()
    free = deque(_Buffer(buffer_size, device) for _ in range(_READERS * _BUFFERS_EACH))
    under_way: deque[tuple[P, _Buffer, Future[None]]] = deque()
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="weights")
    try:
        for piece in pieces:
            buffer = free.popleft()
            under_way.append((piece, buffer, pool.submit(buffer.fill, files, piece)))
            if not free:
                yield from _first(under_way, free)
        while under_way:
            yield from _first(under_way, free)
    finally:
        pool.shutdown(cancel_futures=True)
        files.close()


def _first(
    under_way: "deque[tuple[P, _Buffer, Future[None]]]", free: "deque[_Buffer]"
) -> Iterator[tuple[P, torch.Tensor]]:
    piece, buffer, read = under_way.popleft()
    read.result()
    yield piece, buffer.bytes[: piece.size]
    buffer.used()
    free.append(buffer)


class _Buffer:
    """On a GPU its bytes are free again once the copies out of them have run."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._view: memoryview = self.bytes.numpy().data
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fill(self, files: "_Files", piece: Piece) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        files.read(piece.info, piece.offset, self._view[: piece.size])

    def used(self) -> None:
        if self._copied is not None:
            self._copied.record()


class _Files:
    """Each thread has one file open, the one it read last. A file must be the same whenever it is opened."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[BinaryIO] = []
        self._seen: dict[Path, tuple[int, ...]] = {}

    def read(self, info: TensorInfo, offset: int, view: memoryview) -> None:
        try:
            handle = self._handle(info)
            handle.seek(offset)
            while view:
                got = handle.readinto(view)  # type: ignore[attr-defined]
                if not got:
                    raise ModelError(f"{info.file.name}: tensor {info.name} ends early; the file changed while read")
                view = view[got:]
        except OSError as error:
            raise ModelError(f"{info.file.name}: cannot be read ({error.strerror})") from None

    def _handle(self, info: TensorInfo) -> BinaryIO:
        opened: tuple[Path, BinaryIO] | None = getattr(self._own, "opened", None)
        if opened is not None:
            if opened[0] == info.file:
                return opened[1]
            opened[1].close()
        handle: BinaryIO = info.file.open("rb", buffering=0)
        self._own.opened = info.file, handle
        self._all.append(handle)
        facts = os.fstat(handle.fileno())
        now = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if self._seen.setdefault(info.file, now) != now:
            raise ModelError(f"{info.file.name}: the file changed while read")
        return handle

    def close(self) -> None:
        for handle in self._all:
            handle.close()
