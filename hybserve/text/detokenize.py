"""Token ids back to text, one token at a time, so that the pieces of a stream are the text of the whole.

Almost every tokenizer of a generating model decodes by concatenation: each token stands for fixed bytes, and the bytes
of all tokens together are UTF-8 (byte-level BPE; sentencepiece with byte fallback). For those a table of bytes and an
incremental UTF-8 decoder are exact, whatever the split: up to three bytes of a character wait for the rest, bytes that
are no character become U+FFFD just where a decode of the whole puts it, and a genuine U+FFFD passes. In one case this
is kinder than the library's byte fallback, which turns a whole run of byte tokens into U+FFFD when any of it is
invalid; that cannot be known before the run ends. Other decoders go through the library over a short window.

A stream begins where its prompt ends, maybe inside a character: the bytes of the prompt that wait are completed by
the first generated ones and are never shown again for themselves.
"""

import copy
import re
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Protocol, Self

from tokenizers import Tokenizer as Backend

from hybserve.text.tokenize import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_WINDOW = 6  # tokens of settled text that a library decoder sees before the new ones
_MAX_HELD = 4  # tokens that may wait for the rest of a character: its bytes can be four tokens


class Stream(Protocol):
    """The text of one choice as it grows."""

    def feed(self, token: int) -> str:
        """The text that ``token`` settles, often "" inside a character."""

    def flush(self) -> str:
        """What still waits, as text; call once, at the end."""

    def fork(self) -> Self:
        """An independent copy that goes on from here."""


class Detokenizer:
    """Shared by all streams of a tokenizer. Tokens without a string (padding of the embedding) have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend: Backend = tokenizer.backend
        self._special = tokenizer.special_ids
        size = max(tokenizer.vocab_size, max(tokenizer.vocab.values(), default=-1) + 1)
        self._strings = [""] * size
        for text, index in tokenizer.vocab.items():
            self._strings[index] = text
        for index in self._backend.get_added_tokens_decoder():
            self._strings[index] = self._backend.id_to_token(index) or ""  # normalised, as the library decodes it
        joined = _Joined.of(tokenizer.decoder)
        self._rule = joined
        self._bytes: list[bytes] = [joined.convert(text) for text in self._strings] if joined else []
        self._visible: list[bytes] = [b"" if i in self._special else data for i, data in enumerate(self._bytes)]

    @property
    def kind(self) -> str:
        return self._rule.name if self._rule is not None else "library"

    def stream(self, prompt: Sequence[int]) -> Stream:
        """A stream that continues ``prompt``; special tokens have no text."""
        if self._rule is None:
            return _WindowStream(self._backend, self._special, prompt)
        return _ByteStream(self._visible, self._rule, prompt)

    def echo(self, prompt: Sequence[int]) -> tuple[list[str], Stream]:
        """The text that each token of ``prompt`` settles, special tokens shown, and the stream that goes on from there.

        Here the prompt is part of the text: bytes at its end that wait for more are shown by the stream, once.
        """
        if self._rule is None:
            window = _WindowStream(self._backend, frozenset(), ())
            pieces = [window.feed(token) for token in prompt]
            window.skipped = self._special
            return pieces, window
        stream = _ByteStream(self._bytes, self._rule, ())
        pieces = [stream.feed(token) for token in prompt]
        stream.table = self._visible
        return pieces, stream

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of the whole, the same as the pieces of a fresh stream joined."""
        if self._rule is None:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special)
            return text
        table = self._visible if skip_special else self._bytes
        chunks = [data for token in ids if (data := table[token])]
        if chunks:
            chunks[0] = self._rule.head(chunks[0])
        return b"".join(chunks).decode("utf-8", "replace")

    def token_string(self, token: int) -> str:
        """The token as the vocabulary spells it (``Ġworld``)."""
        return self._strings[token]

    def is_special(self, token: int) -> bool:
        return token in self._special

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token by itself, special tokens included."""
        if self._rule is not None:
            return self._bytes[token]
        text: str = self._backend.decode([token], skip_special_tokens=False)
        return text.encode()


class _Joined:
    """How a concatenating decoder maps a token's string to bytes, and what it does to the first token of a text."""

    def __init__(self, name: str, replaced: str, byte_fallback: bool, strip: str) -> None:
        self.name = name
        self._replaced = replaced  # the character that stands for a space, "" for byte-level
        self._byte_fallback = byte_fallback
        self._strip = strip  # "" | "one": one leading space of the text | "token": the first token's replaced spaces

    @classmethod
    def of(cls, decoder: dict[str, object] | None) -> Self | None:
        """The rule of a ``decoder`` section, or None if it does not simply concatenate."""
        parts = _parts(decoder)
        kinds = [part.get("type") for part in parts]
        if kinds == ["ByteLevel"]:
            return cls("byte-level", "", False, "")
        if kinds == ["Metaspace"]:
            never = parts[0].get("prepend_scheme") == "never" or parts[0].get("add_prefix_space") is False
            return cls("metaspace", str(parts[0].get("replacement", "▁")), False, "" if never else "token")
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
            pattern, strip = parts[0].get("pattern"), parts[3] if len(parts) == 4 else None
            plain = isinstance(pattern, dict) and len(str(pattern.get("String", ""))) == 1
            one = strip is None or (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0)
            if isinstance(pattern, dict) and plain and one and parts[0].get("content") == " ":
                return cls("byte-fallback", str(pattern["String"]), True, "one" if strip else "")
        return None

    def convert(self, text: str) -> bytes:
        if not self._replaced:
            try:
                return bytes([_BYTE_OF[character] for character in text])
            except KeyError:  # an added token that is no byte-level spelling
                return text.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.match(text)):
            return bytes([int(match.group(1), 16)])
        return text.replace(self._replaced, " ").encode()

    def head(self, data: bytes) -> bytes:
        """``data`` of a token that begins a text."""
        if self._strip == "one":
            return data.removeprefix(b" ")
        return data.replace(b" ", b"") if self._strip == "token" else data


def _parts(decoder: dict[str, object] | None) -> list[dict[str, object]]:
    if decoder is None:
        return []
    inner = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return [part for part in inner if isinstance(part, dict)] if isinstance(inner, list) else []


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte: itself, or the next one from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return {chr(byte) if byte in plain else chr(next(spare)): byte for byte in range(256)}


_BYTE_OF = _byte_alphabet()


class _ByteStream:
    """Text by an exact table of bytes. Hot: one table look-up and one C call a token."""

    __slots__ = ("_fresh", "_pending", "_prompt_bytes", "_rule", "table")

    def __init__(self, table: list[bytes], rule: _Joined, prompt: Sequence[int]) -> None:
        self.table = table
        self._rule = rule
        self._pending = _waiting(_tail(table[token] for token in reversed(prompt)))
        self._prompt_bytes = bool(self._pending)
        #: The next bytes are the first: the first of the text, or those that meet the prompt's waiting ones.
        self._fresh = self._prompt_bytes or not any(table[token] for token in prompt)

    def feed(self, token: int) -> str:
        data = self.table[token]
        if self._fresh:
            return self._begin(data)
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def _begin(self, data: bytes) -> str:
        if not data:
            return ""
        self._fresh = False
        if not self._prompt_bytes:
            data = self._rule.head(data)
        text, used = utf_8_decode(self._pending + data, "replace", False)
        if self._prompt_bytes and not _continues(self._pending, data[0]):
            text = text[1:]  # the U+FFFD of the prompt's own bytes
        self._pending, self._prompt_bytes = (self._pending + data)[used:], False
        return text

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        return "" if self._prompt_bytes else pending.decode("utf-8", "replace")

    def fork(self) -> "_ByteStream":
        return copy.copy(self)


def _tail(chunks: Iterable[bytes]) -> bytes:
    """The last three bytes (or a little more) of tokens given from the last to the first."""
    tail = b""
    for data in chunks:
        tail = data + tail
        if len(tail) >= 3:
            break
    return tail


def _waiting(data: bytes) -> bytes:
    """The end of ``data`` that is the beginning of a character."""
    return data[utf_8_decode(data, "replace", False)[1] :]


def _continues(start: bytes, byte: int) -> bool:
    """Whether ``byte`` can be the next one of the character begun by ``start``."""
    try:
        utf_8_decode(start + bytes([byte]), "strict", False)
    except UnicodeDecodeError:
        return False
    return True


class _WindowStream:
    """Text by differences of library decodes, for decoders that are no concatenation."""

    def __init__(self, backend: Backend, skipped: frozenset[int], prompt: Sequence[int]) -> None:
        self._backend = backend
        self.skipped = skipped
        self._ids = [token for token in prompt[-4 * _WINDOW :] if token not in skipped][-_WINDOW:]
        self._settled = len(self._ids)  # tokens of the window whose text was given out
        self._prefix = self._decode()

    def feed(self, token: int) -> str:
        if token in self.skipped:
            return ""
        self._ids.append(token)
        text = self._decode()
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._settled < _MAX_HELD:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        return self._settle(self._decode())

    def fork(self) -> "_WindowStream":
        twin = copy.copy(self)
        twin._ids = list(self._ids)
        return twin

    def _settle(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._ids = self._ids[-_WINDOW:]
        self._settled = len(self._ids)
        self._prefix = self._decode()
        return new

    def _decode(self) -> str:
        text: str = self._backend.decode(self._ids, skip_special_tokens=False)
        return text
