"""Where in a conversation a checkpoint is worth its memory.

Two places of the rendered text come back in other prompts: the end of the last message, where the next turn goes on
(the generation prompt behind it may carry an opened thought that templates drop later), and the beginning of what the
last user wrote, which every other question to the same history shares. Both are hints: whatever cannot be told is left
out, and no request fails by it.
"""

from time import monotonic
from typing import Any

import msgspec

from hybserve.core.errors import RequestError
from hybserve.core.messages import ChatPrompt
from hybserve.text.chat import ChatTemplates

#: A template that took longer than this many seconds is not run again for hints.
PATIENCE = 1.0
#: Stands in for the last user's words; a private character, so that no text begins like it.
_OTHER_WORDS = "\uf8d7"


def render_with_landmarks(chat: ChatTemplates, prompt: ChatPrompt) -> tuple[str, list[int]]:
    """The text of a conversation and the characters before each landmark in it. Raises RequestError as ``render``."""
    started = monotonic()
    text = chat.render(prompt)
    if monotonic() - started > PATIENCE:
        return text, []
    found = [_end_of_messages(chat, prompt, text), _start_of_last_question(chat, prompt, text)]
    return text, sorted({position for position in found if 0 < position < len(text)})


def _end_of_messages(chat: ChatTemplates, prompt: ChatPrompt, text: str) -> int:
    """Where the generation prompt begins; 0 if there is none, or if the messages before it change with it."""
    if not prompt.add_generation_prompt:
        return 0
    bare = _try(chat, msgspec.structs.replace(prompt, add_generation_prompt=False))
    return len(bare) if text.startswith(bare) else 0


def _start_of_last_question(chat: ChatTemplates, prompt: ChatPrompt, text: str) -> int:
    """How far the text stays the same whatever the last user says.

    Rendering only the messages before would not tell: templates write the last turns otherwise than earlier ones, or
    refuse a conversation without a user.
    """
    messages: list[dict[str, Any]] = msgspec.json.decode(prompt.messages_json)
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return 0
    messages[users[-1]]["content"] = _OTHER_WORDS
    other = _try(chat, msgspec.structs.replace(prompt, messages_json=msgspec.json.encode(messages)))
    return _common_prefix(text, other)


def _try(chat: ChatTemplates, prompt: ChatPrompt) -> str:
    """ "" where the template refuses this form of the conversation."""
    try:
        return chat.render(prompt)
    except RequestError:
        return ""


def _common_prefix(one: str, other: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
