"""Channels: frames over a connected Unix stream socket, each a 4-byte little-endian length and a codec's bytes.

``Channel`` serves roles with a blocking loop, ``AsyncChannel`` those on asyncio; either may sit at either end. Sending
never blocks: what the socket does not take at once waits in memory and leaves with the next send or receive, so two
peers that flood each other cannot deadlock. A peer that is lost, or that sends anything but frames of its direction,
is noticed by ``receive``: messages that came whole before are still delivered, then ``ChannelClosed`` is raised.
"""

import asyncio
import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from hybserve.wire.codec import Codec, FrameError

In = TypeVar("In")
Out = TypeVar("Out")

#: Largest frame, in bytes: well above the largest request body that the server takes.
MAX_FRAME = 1 << 28
_HEADER = struct.Struct("<I")
_CHUNK = 1 << 18
_CHUNKS_PER_READ = 64  # one read stops here, so that a fast sender cannot hold the reader for ever
_LINGER = 1.0  # seconds that close() tries to hand over what is still buffered


class ChannelClosed(Exception):
    """The peer is gone or was cut off; the text says why."""


class _Link(Generic[In, Out]):
    """What both channels share: the non-blocking halves over one socket."""

    def __init__(self, sock: socket.socket, incoming: Codec[In], outgoing: Codec[Out]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = incoming
        self._outgoing = outgoing
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        self._lost: str | None = None

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Hand over what is buffered (for a second at most), then close. Closing twice is fine."""
        deadline = time.monotonic() + _LINGER
        while self._flush() and (left := deadline - time.monotonic()) > 0:
            _wait(self._sock, select.POLLOUT, left)
        self._outbox.clear()
        self._lost = self._lost or "closed on this side"
        self._release()

    def _release(self) -> None:
        self._sock.close()

    def _push(self, messages: Sequence[Out]) -> bool:
        """Queue one frame and write what the socket takes; true if something is left."""
        frame = self._outgoing.encode(messages)
        if len(frame) > MAX_FRAME:
            raise ValueError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME}")
        if self._lost is None:
            self._outbox.append(memoryview(_HEADER.pack(len(frame)) + frame))
        return self._flush()

    def _flush(self) -> bool:
        """Write what the socket takes; true if something is left. A lost peer empties the outbox."""
        while self._outbox:
            try:
                sent = self._sock.send(self._outbox[0])
            except BlockingIOError:
                return True
            except OSError:  # the reading side still holds what the peer sent before: it reports the loss
                self._outbox.clear()
                return False
            if sent == len(self._outbox[0]):
                self._outbox.popleft()
            else:
                self._outbox[0] = self._outbox[0][sent:]
        return False

    def _pull(self) -> list[In]:
        """All messages that are here now. Raises ChannelClosed when none are left and none can come."""
        messages: list[In] = []
        if self._lost is None:
            self._read_available()
            self._decode_into(messages)
        if not messages and self._lost is not None:
            self._release()
            raise ChannelClosed(self._lost)
        return messages

    def _read_available(self) -> None:
        for _ in range(_CHUNKS_PER_READ):
            try:
                data = self._sock.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost = f"the link broke: {error.strerror}"
                return
            if not data:
                self._lost = "the peer closed the link"
                return
            self._inbox += data
            if len(data) < _CHUNK:
                return

    def _decode_into(self, messages: list[In]) -> None:
        start, end = 0, len(self._inbox)
        try:
            while end - start >= _HEADER.size:
                (size,) = _HEADER.unpack_from(self._inbox, start)
                if size > MAX_FRAME:
                    raise FrameError(f"a frame claims {size} bytes, the limit is {MAX_FRAME}")
                if end - start - _HEADER.size < size:
                    break
                start += _HEADER.size
                messages += self._incoming.decode(bytes(self._inbox[start : start + size]))
                start += size
        except FrameError as error:
            self._lost = f"the peer sent garbage: {error}"
            self._inbox.clear()
            return
        del self._inbox[:start]


class Channel(_Link[In, Out]):
    """For one thread with a blocking loop."""

    def send(self, messages: Sequence[Out]) -> None:
        """One frame; never blocks. A lost peer is reported by ``receive``, not here."""
        self._push(messages)

    def receive(self, timeout: float | None = None) -> list[In]:
        """The messages that are here, waiting up to ``timeout`` seconds (None: for ever) for the first of them.

        Writes buffered output while it waits. Returns [] on timeout; raises ChannelClosed when the peer is lost.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            writing = self._flush()
            messages = self._pull()
            if messages:
                return messages
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return []
            _wait(self._sock, select.POLLIN | (select.POLLOUT if writing else 0), left)


class AsyncChannel(_Link[In, Out]):
    """For one asyncio loop. One task at a time may wait in ``receive``; cancelling it loses no message."""

    def __init__(self, sock: socket.socket, incoming: Codec[In], outgoing: Codec[Out]) -> None:
        super().__init__(sock, incoming, outgoing)
        self._loop: asyncio.AbstractEventLoop | None = None  # while the loop watches the socket
        self._reading: asyncio.Event | None = None
        self._writing = False

    def send(self, messages: Sequence[Out]) -> None:
        """One frame; never blocks, the loop writes what is left. A lost peer is reported by ``receive``, not here.

        Must be called on the loop's thread.
        """
        if self._push(messages) and not self._writing:
            self._loop = asyncio.get_running_loop()
            self._loop.add_writer(self._sock, self._continue_writing)
            self._writing = True

    async def receive(self) -> list[In]:
        """The next messages, all that are here at once. Raises ChannelClosed when the peer is lost or we closed."""
        await asyncio.sleep(0)  # a busy peer must not keep the loop from its other tasks
        while not (messages := self._pull()):
            await self._readable()
        return messages

    async def _readable(self) -> None:
        assert self._reading is None, "two tasks wait on one channel"
        self._loop = asyncio.get_running_loop()
        self._reading = asyncio.Event()
        self._loop.add_reader(self._sock, self._reading.set)
        try:
            await self._reading.wait()
        finally:
            self._stop_reading()

    def _continue_writing(self) -> None:
        if not self._flush():
            self._stop_writing()

    def _stop_reading(self) -> None:
        if self._loop is not None and self._reading is not None:
            self._loop.remove_reader(self._sock)
            self._reading.set()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._loop is not None and self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False

    def _release(self) -> None:
        self._stop_reading()
        self._stop_writing()
        super()._release()


def _wait(sock: socket.socket, events: int, timeout: float | None) -> None:
    poller = select.poll()
    poller.register(sock, events)
    with contextlib.suppress(InterruptedError):
        poller.poll(None if timeout is None else max(timeout, 0) * 1000)
