"""Fields that clients know and this server does not do yet: accepted at the value that asks for nothing, else refused.

Ignoring such a field would give an answer that looks right and is not; fields that no one documents are only listed
in the ``x-hybserve-ignored`` header.
"""

from typing import Any

from hybserve.api.fields import Fields, shown
from hybserve.core.errors import unsupported_parameter

#: field -> values that ask for nothing (beside null).
_BOTH: dict[str, tuple[Any, ...]] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "structured_outputs": ({},),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": ("",),
    "prompt_logprobs": (),
    "prompt_embeds": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "typical_p": (1, 1.0),
    "mirostat": (0,),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "thinking_token_budget": (),
    "thinking_budget": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_prompt_text": (False,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "lora_path": (),
    "multi_modal_data": ({},),
    "mm_processor_kwargs": ({},),
}
_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "documents": ([],),
    "echo": (False,),
    "suffix": ("",),
    "images": ([],),
}
_COMPLETIONS: dict[str, tuple[Any, ...]] = {"suffix": ("",)}


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality with types: ``0`` is not ``false`` here."""
    return value is None or any(type(value) is type(one) and value == one for one in neutral)


def refuse_unsupported(fields: Fields, *, chat: bool, n: int) -> None:
    """Raises RequestError (400 ``unsupported_parameter``) for the first field that asks for what is not there."""
    for key, neutral in (_BOTH | (_CHAT if chat else _COMPLETIONS)).items():
        value = fields.get(key)
        if not _asks_nothing(value, neutral):
            param = fields.param(key)
            raise unsupported_parameter(f"{param} is not supported by this server yet; leave it out.", param)
    _refuse_best_of(fields, n)
    _refuse_response_format(fields)


def _refuse_best_of(fields: Fields, n: int) -> None:
    best_of = fields.integer("best_of", 1, 1 << 31, n)
    if best_of not in (1, n):
        param = fields.param("best_of")
        raise unsupported_parameter(f"{param} other than n ({n}) is not supported; sample with n instead.", param)


def _refuse_response_format(fields: Fields) -> None:
    value = fields.object("response_format")
    if value is None:
        return
    param = fields.param("response_format")
    kind = value.get("type")
    if kind in ("json_object", "json_schema", "structural_tag", "grammar"):
        raise unsupported_parameter(f"{param} {kind!r} is not supported yet; only {{'type': 'text'}} is.", param)
    if kind != "text":
        raise fields.refuse("response_format", "{'type': 'text'}", kind if isinstance(kind, str) else shown(kind))
