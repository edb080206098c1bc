"""Messages as OpenAI's clients send them, turned into those that chat templates expect. Knows nothing of templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["for_template"]


def for_template(messages: Iterable[Any], parse: Callable[[str], Any] = json.loads) -> list[Any]:
    """Convert messages to the form that chat templates expect. Anything else in the list stays as it is.

    - A ``developer`` is the ``system``.
    - The arguments of a call are an object, by ``parse``. Without arguments it is empty, and a text that is not the
      JSON of an object stays a text. ``parsed_arguments``, in which OpenAI's client repeats them, is left out.
    - A result of a tool without a name has that of the call with its id: OpenAI's clients send the id alone, and some
      templates show the name alone.
    """
    names: dict[str, Any] = {}  # of calls, by their ids
    converted = []
    for message in messages:
        if not isinstance(message, Mapping):
            converted.append(message)
            continue
        fields = dict(message)
        if fields.get("role") == "developer":
            fields["role"] = "system"
        if isinstance(calls := fields.get("tool_calls"), (list, tuple)):
            fields["tool_calls"] = [_read_call(call, parse) for call in calls]
            names |= {
                call["id"]: call["function"].get("name") for call in fields["tool_calls"] if _is_call_with_id(call)
            }
        if fields.get("role") == "tool" and fields.get("name") is None:
            id_ = fields.get("tool_call_id")
            fields["name"] = names.get(id_) if isinstance(id_, str) else None
        converted.append(fields)
    return converted


def _is_call_with_id(call: Any) -> bool:
    return _is_call(call) and isinstance(call.get("id"), str) and bool(call["id"])


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _read_call(call: Any, parse: Callable[[str], Any]) -> Any:
    """Return a call with its arguments as an object. Those that are not the JSON of an object stay as they are."""
    if not _is_call(call):
        return call
    function = {name: value for name, value in call["function"].items() if name != "parsed_arguments"}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments.strip() or "null")
        except (ValueError, RecursionError):
            return {**call, "function": function}
    if arguments is None:
        arguments = {}
    if isinstance(arguments, Mapping):
        function["arguments"] = arguments
    return {**call, "function": function}
