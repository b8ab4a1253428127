"""The model's own tokenizer files, checked against the model, and encoding with them.

``tokenizer.json`` says how text becomes ids; ``tokenizer_config.json`` and ``special_tokens_map.json`` may declare
further added and special tokens. The ids are those of transformers' ``AutoTokenizer`` for the same directory; in
particular the post-processor of ``tokenizer.json`` alone decides about BOS and EOS (its ``add_bos_token`` is for
tokenizers without that file).
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from hybserve.core.errors import ErrorBody, ModelError, RequestError, invalid_value

_log = logging.getLogger("hybserve.text")

#: The named special tokens that chat templates may use as variables.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_FILE = 1 << 28  # bytes; the largest public tokenizer.json is about 35 MB
#: A prompt may use this many bytes for each token of context. Above it encoding is not even tried: no text, code or
#: table in any script comes near it over a whole context.
_BYTES_PER_TOKEN = 32
#: Characters to look ahead for the next token where a text position lies in none (trimmed white space).
_LOOK_AHEAD = 64


@dataclass(frozen=True, repr=False)
class Tokenizer:
    """A validated tokenizer, immutable. ``names``: the named special tokens (``eos_token`` …) as text."""

    backend: Backend
    decoder: dict[str, Any] | None  # the ``decoder`` section of tokenizer.json
    names: dict[str, str]
    vocab: dict[str, int]  # text of every token, added tokens included, to its id
    special_ids: frozenset[int]
    vocab_size: int  # width of the embedding; ids at or above it must never reach the model
    longest_token: int  # bytes
    bos_id: int | None
    warnings: tuple[str, ...]
    chat_templates: dict[str, str]  # "default" and others by name, as the directory holds them

    def encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of ``text``; ``param`` names the text in a refusal. Raises RequestError."""
        ids: list[int] = self._encoding(text, add_special_tokens, param).ids
        return ids

    def encode_with(
        self, text: str, add_special_tokens: bool, marks: list[int], param: str = "prompt"
    ) -> tuple[list[int], list[int]]:
        """As ``encode``, and for each position of ``marks`` (in characters, below the length of the text) how many
        tokens lie wholly before it; marks before the first token or behind the last are left out."""
        encoding = self._encoding(text, add_special_tokens, param)
        ids: list[int] = encoding.ids
        counts = {_tokens_before(encoding, mark, len(text)) for mark in marks}
        return ids, sorted(count for count in counts if 0 < count < len(ids))

    def _encoding(self, text: str, add_special_tokens: bool, param: str) -> Encoding:
        refuse_surrogates(text, param)
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and its panics are not even that
            _log.exception("the tokenizer failed on a text of %d characters", len(text))
            raise invalid_value(f"The tokenizer cannot encode {param}.", param) from error

    def byte_limit(self, context: int) -> int:
        """The most bytes of text that can be worth encoding for ``context`` tokens."""
        return context * min(self.longest_token, _BYTES_PER_TOKEN) + 64


def _tokens_before(encoding: Encoding, mark: int, size: int) -> int:
    """The index of the token in which character ``mark`` lies, or of the next one; 0 if there is none near."""
    for position in range(mark, min(mark + _LOOK_AHEAD, size)):
        index: int | None = encoding.char_to_token(position)
        if index is not None:
            return index
    return 0


def refuse_surrogates(text: str, param: str) -> None:
    """Half a surrogate pair is not a character: no encoder takes it. Raises RequestError with its offset."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise invalid_value(f"{param} holds half a surrogate pair at character {error.start}.", param) from None


def too_many_bytes(size: int, limit: int, context: int, param: str = "prompt") -> RequestError:
    message = (
        f"This model's maximum context length is {context} tokens; the prompt has {size} bytes, more than the {limit} "
        "bytes that such a context can hold. Shorten the prompt."
    )
    return RequestError(ErrorBody(message, "invalid_request_error", "context_length_exceeded", param, 400))


def load_tokenizer(model_dir: Path, vocab_size: int, eos_ids: tuple[int, ...] = ()) -> Tokenizer:
    """Read and check the tokenizer files of ``model_dir``.

    Raises ModelError when they are missing or broken, or when the base vocabulary or a special token does not fit the
    embedding of width ``vocab_size``; what is merely odd stands in ``warnings``.
    """
    config = _read_json(model_dir / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(model_dir / "special_tokens_map.json")
    backend = _backend(model_dir / "tokenizer.json")
    _add_declared_tokens(backend, config)
    names = {name: text for name in SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    warnings = _check_ids(vocab, {i: str(t.content) for i, t in added.items()}, names, vocab_size, eos_ids)
    return Tokenizer(
        backend=backend,
        decoder=json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None,
        names=names,
        vocab=vocab,
        special_ids=frozenset(index for index, token in added.items() if token.special),
        vocab_size=vocab_size,
        longest_token=max((len(text.encode()) for text in vocab), default=1),
        bos_id=vocab.get(names["bos_token"]) if "bos_token" in names else None,
        warnings=tuple(warnings),
        chat_templates=_chat_templates(model_dir, config),
    )


def _read_text(path: Path) -> str:
    """Raises ModelError."""
    if path.stat().st_size > _MAX_FILE:
        raise ModelError(f"{path.name} has {path.stat().st_size} bytes, more than the {_MAX_FILE} allowed")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path.name} is not UTF-8: {error.reason} at byte {error.start}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} when the file is missing. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} must be a JSON object")
    return content


def _backend(path: Path) -> Backend:
    if not path.is_file():
        raise ModelError(f"{path.name} is missing from the model directory; it is the only tokenizer format read")
    try:
        backend = Backend.from_str(_read_text(path))
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        raise ModelError(f"tokenizer.json cannot be loaded: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    if backend.get_vocab_size(with_added_tokens=True) == 0:
        raise ModelError("tokenizer.json has an empty vocabulary")
    return backend


def _add_declared_tokens(backend: Backend, config: dict[str, Any]) -> None:
    """Tokens that the configuration declares and tokenizer.json lacks, or declares with other flags."""
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    try:
        by_id = sorted((int(index), AddedToken(**token)) for index, token in declared.items())
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"tokenizer_config.json: added_tokens_decoder is malformed: {error}") from error
    backend.add_tokens([token for _, token in by_id if repr(token) not in known])
    present = {str(token.content) for token in backend.get_added_tokens_decoder().values()}
    specials = [_content(config.get(name)) for name in SPECIAL_NAMES]
    specials += [_content(token) for token in _extra_specials(config)]
    missing = [text for text in specials if text is not None and text not in present]
    backend.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(missing)])


def _extra_specials(config: dict[str, Any]) -> list[Any]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        return list(extra.values())
    if not isinstance(extra, list):
        raise ModelError("tokenizer_config.json: extra_special_tokens must be a list")
    return extra


def _content(token: Any) -> str | None:
    """The text of a token that stands in the configuration as a string or as an object."""
    if token is None or isinstance(token, str):
        return token
    if isinstance(token, dict) and isinstance(token.get("content"), str):
        return str(token["content"])
    raise ModelError(f"tokenizer_config.json: a special token must be a string or an object, got {token!r}")


def _check_ids(
    vocab: dict[str, int],
    added: dict[int, str],
    names: dict[str, str],
    vocab_size: int,
    eos_ids: tuple[int, ...],
) -> list[str]:
    """Warnings about ids; raises ModelError where an id would index past the embedding in ordinary use."""
    for name, text in names.items():
        if vocab[text] >= vocab_size:
            raise ModelError(
                f"tokenizer: {name} {text!r} has id {vocab[text]}, but the embedding has only {vocab_size} rows"
            )
    for index in eos_ids:
        if not 0 <= index < vocab_size:
            raise ModelError(f"eos_token_id {index} does not exist: the embedding has only {vocab_size} rows")
    base = max((index for index in vocab.values() if index not in added), default=-1)
    if base >= vocab_size:
        raise ModelError(f"tokenizer: the vocabulary reaches id {base}, but the embedding has only {vocab_size} rows")
    warnings = []
    beyond = sorted(text for index, text in added.items() if index >= vocab_size)
    if beyond:
        warnings.append(f"{len(beyond)} added tokens have no embedding; prompts with them are refused: {beyond[:4]}")
    if not eos_ids:
        warnings.append("the model names no end-of-sequence token: answers end by length or stop strings only")
    return warnings


def _chat_templates(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files win over tokenizer_config.json, which holds one string or a list of named ones."""
    files: dict[str, str] = {}
    if (model_dir / "chat_template.jinja").is_file():
        files["default"] = _read_text(model_dir / "chat_template.jinja")
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = _read_text(path)
    if files:
        return files
    inline = config.get("chat_template")
    if inline is None:
        return {}
    if isinstance(inline, str):
        return {"default": inline}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in inline}
    except (TypeError, KeyError) as error:
        raise ModelError("tokenizer_config.json: chat_template must be a string or a list of named ones") from error
