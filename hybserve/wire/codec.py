"""Frames: a msgpack list of tagged structs. One codec per direction, typed by the union that the receiver accepts.

Nothing but the named structs can come out of a frame: an unknown tag, a wrong type or a missing field is a
``FrameError``, and the peer that sent it is closed.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")


class FrameError(ValueError):
    """The bytes are not a frame of this direction."""


class Codec(Generic[M]):
    """Encodes and decodes frames of the message union ``M``."""

    def __init__(self, union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[union])

    def encode(self, messages: Sequence[M]) -> bytes:
        return self._encoder.encode(messages)

    def decode(self, frame: bytes) -> list[M]:
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise FrameError(str(error)) from error
