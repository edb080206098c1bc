"""Texts for errors: what was wrong with an input, and where a plug-in failed."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

__all__ = [
    "PlacedError",
    "describe_error",
    "did_you_mean",
    "explain",
    "fault_place",
    "message_of",
    "origin",
    "shorten",
    "suggest",
]

_SIMILAR = 0.65  # how similar a name must be to be suggested

# Names that vLLM, transformers and OpenAI use, and the names here for the same thing.
_ELSEWHERE = {
    "assistant_model": "draft",
    "cache_bytes": "cache",
    "cache_share": "cache",
    "cache_tokens": "cache",
    "do_sample": "temperature",
    "function_call": "tool_choice",
    "functions": "tools",
    "gpu_memory_utilization": "cache",
    "guided_decoding": "structured",
    "max_length": "max_tokens",
    "memory_share": "cache",
    "max_model_len": "max_context",
    "max_new_tokens": "max_tokens",
    "max_num_batched_tokens": "step_tokens",
    "max_num_seqs": "max_rows",
    "num_return_sequences": "n",
    "num_speculative_tokens": "k",
    "response_format": "structured",
    "speculative_config": "draft",
    "speculative_model": "draft",
    "stop_strings": "stop",
    "structured_outputs": "structured",
    "tensor_parallel_size": "ranks",
    "torch_dtype": "dtype",
}


class PlacedError(ValueError):
    """An error in a part of an input. ``place`` is the path to the part: keys of mappings and indices of lists."""

    def __init__(self, message: str, *place: str | int) -> None:
        super().__init__(message)
        self.place = place


def explain(
    error: ValidationError, fields: Iterable[str] = (), where: Callable[[tuple[str | int, ...]], str] | None = None
) -> str:
    """Describe all wrong fields in one line: name, fault and value. For a field that does not exist, suggest one of
    ``fields``. ``where`` returns what comes before the description of each: it gets the path to the wrong value."""
    parts = []
    for problem in error.errors(include_url=False):
        name = ".".join(map(str, problem["loc"]))
        extra = problem.get("ctx", {})
        tag = extra["discriminator"].strip("'") if "discriminator" in extra else None  # the field that picks a class
        place = (*problem["loc"], *([tag] if tag else getattr(extra.get("error"), "place", ())))
        start = where(place) if where else ""
        if problem["type"] == "extra_forbidden":
            choices = fields if len(problem["loc"]) == 1 else ()
            parts.append(f"{start}{name}: there is no such field{suggest(name, choices, 'fields') if choices else ''}")
            continue
        text = message_of(problem)
        # Our own validators name the value themselves.
        value_text = "" if problem["type"] in ("value_error", "missing") else f", got {problem['input']!r}"
        has_name = not name or text.startswith(f"{name} ")
        parts.append(f"{start}{text}{value_text}" if has_name else f"{start}{name}: {text}{value_text}")
    return "; ".join(parts)


def describe_error(error: Exception) -> str:
    """Return what an error of input says, in one line: for an error of the system, the file and the reason."""
    if isinstance(error, ValidationError):
        return explain(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{str(error.filename)!r}: {error.strerror}"
    return str(error)


def message_of(problem: Mapping[str, Any]) -> str:
    """Return pydantic's text of one of its errors, without what only a programmer knows."""
    return problem["msg"].removeprefix("Value error, ").partition(" or instance of ")[0]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question whether ``word`` means a similar name in ``known``; an empty text if none is similar."""
    known = list(known)
    synonym = _ELSEWHERE.get(word)
    if synonym not in known:
        likeness, closest = max(((_likeness(word, name), name) for name in known), default=(0.0, ""))
        synonym = closest if likeness >= _SIMILAR else None
    return f" (did you mean {synonym!r}?)" if synonym else ""


def _likeness(one: str, other: str) -> float:
    """Return how similar two words are, from 0 to 1; capitals do not count. Either order counts, since difflib's own
    result depends on it."""
    one, other = one.casefold(), other.casefold()
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in ((one, other), (other, one)))


def suggest(word: str, known: Iterable[str], title: str = "choices") -> str:
    """Return a hint what to write instead of an unknown ``word``: a similar name, or all names if none is similar."""
    known = list(known)
    return did_you_mean(word, known) or f"; {title}: {known}"


def origin(error: BaseException) -> str:
    """Return where an error was raised: the innermost line outside torch and this package, if there is one."""
    import torch

    frames = traceback.extract_tb(error.__traceback__)
    packages = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
    # Skip methods that dataclasses generate, since they have no lines, but keep a rule typed into an interpreter.
    source_frames = [frame for frame in frames if not (frame.filename == "<string>" and frame.name.startswith("__"))]
    outside_frames = [frame for frame in source_frames if not frame.filename.startswith((*packages, "<frozen"))]
    frame = (outside_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def fault_place(error: BaseException) -> str:
    """Return where the code of a plug-in failed by mistake, for example in a rule that unpacks two values into three.
    Return an empty text for an error that the plug-in or this package raised on purpose."""
    import torch

    library = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(library)]
    last = frames[-1] if frames else None
    is_packaged = (
        last is None or last.filename.startswith(str(Path(__file__).parent)) or "site-packages" in last.filename
    )
    if last is None or is_packaged or not last.line or last.line.startswith("raise"):
        return ""
    return f"{last.filename}:{last.lineno} in {last.name}"


def shorten(value: object) -> str:
    """Write a value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
