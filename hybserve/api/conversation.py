"""Chat messages: checked, and normalised to what chat templates read.

``developer`` becomes ``system``; text parts become one string (concatenated as the official templates do);
``reasoning`` becomes ``reasoning_content``; arguments of tool calls become objects where they are valid JSON, and
stay strings where they are not, so that a model's malformed call never blocks its own conversation.
"""

import json
from typing import Any

from hybserve.api.fields import Fields, shown
from hybserve.core.errors import RequestError, invalid_value, unsupported_parameter

MAX_MESSAGES = 65_536
ROLES = ("system", "developer", "user", "assistant", "tool")


def normalise_messages(fields: Fields) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation and the ignored keys of its messages. Raises RequestError (400)."""
    messages = fields.array("messages", MAX_MESSAGES)
    param = fields.param("messages")
    if messages is None:
        raise invalid_value(f"{param} is required.", param)
    if not messages:
        raise invalid_value(f"{param} must have at least one message.", param)
    ignored: dict[str, None] = {}
    normal = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid_value(f"{param}[{index}] must be an object, got {shown(message)}.", f"{param}[{index}]")
        reader = Fields(message, f"{param}[{index}]")
        normal.append(_normalise(reader))
        ignored.update((f"messages[].{key}", None) for key in reader.unread() if message[key] not in (None, ""))
    return normal, list(ignored)


def _normalise(fields: Fields) -> dict[str, Any]:
    role = _role(fields)
    message: dict[str, Any] = {"role": role}
    calls = fields.array("tool_calls", 1024) or []
    if calls and role != "assistant":
        param = fields.param("tool_calls")
        raise invalid_value(f"{param} belongs to assistant messages only.", param)
    message["content"] = _content(fields, may_be_absent=role == "assistant" and bool(calls))
    name = fields.string("name", max_bytes=256)
    if name:
        message["name"] = name
    if calls:
        message["tool_calls"] = [_tool_call(call, f"{fields.param('tool_calls')}[{i}]") for i, call in enumerate(calls)]
    if role == "tool":
        message["tool_call_id"] = fields.string("tool_call_id", max_bytes=256) or ""
    if role == "assistant":
        reasoning = fields.string("reasoning_content")
        other = fields.string("reasoning")
        if reasoning or other:
            message["reasoning_content"] = reasoning or other
    return message


def _role(fields: Fields) -> str:
    role = fields.string("role")
    if role is None:
        raise invalid_value(f"{fields.param('role')} is required.", fields.param("role"))
    if role not in ROLES:
        raise fields.refuse("role", f"one of {', '.join(ROLES)}", role)
    return "system" if role == "developer" else role


def _content(fields: Fields, *, may_be_absent: bool) -> str:
    content = fields.get("content")
    param = fields.param("content")
    if isinstance(content, str):
        return content
    if content is None:
        if may_be_absent:
            return ""
        raise invalid_value(f"{param} is required (only assistant messages with tool_calls may do without).", param)
    if not isinstance(content, list):
        raise fields.refuse("content", "a string or a list of text parts", content)
    return "".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise invalid_value(f"{param} must be an object, got {shown(part)}.", param)
    kind = part.get("type")
    if kind != "text":
        if isinstance(kind, str):
            raise unsupported_parameter(f"{param} is of type {shown(kind)}; this server reads text only.", param)
        raise invalid_value(f"{param}.type must be 'text', got {shown(kind)}.", f"{param}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid_value(f"{param}.text must be a string, got {shown(text)}.", f"{param}.text")
    return text


def _tool_call(call: Any, param: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise _bad_call(param, "must be an object with a function")
    function = call["function"]
    if not isinstance(function.get("name"), str):
        raise _bad_call(f"{param}.function.name", "must be a string")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, (str, dict)):
        raise _bad_call(f"{param}.function.arguments", "must be a string of JSON")
    call_id = call.get("id", "")
    if not isinstance(call_id, str):
        raise _bad_call(f"{param}.id", "must be a string")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(arguments)},
    }


def _arguments(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _bad_call(param: str, what: str) -> RequestError:
    return invalid_value(f"{param} {what}.", param)
