"""Reads request bodies, and words the errors for bad ones. Knows nothing of endpoints or engines."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fly.errors import message_of, shorten
from fly.serve.errors import ApiError
from fly.serve.jsons import Twice, loads
from fly.serve.messages import Part

__all__ = ["read"]

_UNKNOWN = ("unknown_parameter", "extra_forbidden")  # pydantic's names for an unknown field
Model = TypeVar("Model", bound=BaseModel)


def read(kind: type[Model], data: bytes, content_type: str) -> Model:
    """Parse a body. Raises ``ApiError`` naming what is wrong with it. A large body takes a second: call this in a
    thread."""
    if not data:
        raise ApiError(400, "the body is missing", code="invalid_value")
    form = content_type.partition(";")[0].strip().lower()
    if form != "application/json" and not re.fullmatch(r"application/.*\+json", form):
        type_text = f"is {content_type[:100]!r}" if content_type else "is missing"
        message = f"the header content-type {type_text}; a body must be 'application/json'"
        raise ApiError(400, message, code="invalid_content_type")
    try:
        value = loads(data)
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} at character {error.pos}"
        raise ApiError(400, message, code="invalid_value") from None
    except Twice as error:
        name = str(error)
        message = f"{shorten(name)} is given twice in one object of the body"
        raise ApiError(400, message, name[:100], "invalid_value") from None
    except ValueError as error:
        raise ApiError(400, f"the body cannot be read as JSON: {error}", code="invalid_value") from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        try:
            api_error = _wrong(error, value)
        except UnicodeEncodeError:  # pydantic cannot report a field name that is not valid Unicode
            api_error = ApiError(400, "the body has half a surrogate pair in the name of a field")
    raise api_error


def _wrong(error: ValidationError, body: Any) -> ApiError:
    """Word the error of a body that does not validate.

    Unknown fields come first, unless their object is of another ``type``. If a value may have several types, pydantic
    reports one error per type. Then an error about the value's own type is shown or, if there is none, the one deepest
    in the body: the client most likely meant that type.
    """

    # The location of a problem in the body. pydantic's own location also has the names of types.
    def path(problem: Any) -> list[str | int]:
        place, value = [], body
        for part in problem["loc"]:
            if part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int):
                value = value[part]
            elif problem["type"] != "missing" or part != problem["loc"][-1]:  # the name of a type
                continue
            place.append(part)
        if problem["type"] == "unknown_parameter":
            place.append(problem["ctx"]["name"])
        return place

    # Problems other than a wrong type rank first, then those that are deepest in the body.
    def rank(problem: Any) -> tuple[Any, ...]:
        return not problem["type"].endswith("_type"), [(isinstance(part, int), part) for part in path(problem)]

    problems = error.errors(include_url=False)
    fault: Any = next((p for p in problems if p["type"] in _UNKNOWN), problems[0])
    place = path(fault)
    if of_type := [p for p in problems if p["type"] == "literal_error" and path(p) == [*place[:-1], "type"]]:
        fault = of_type[0]
    elif fault["type"] not in _UNKNOWN:
        fault = max((p for p in problems if path(p)[:1] == path(fault)[:1]), key=rank)
    # Describe the problem, and name its field.
    location, message = list(map(str, path(fault))), message_of(fault)
    if fault["type"] == "model_type" and not location:
        message = f"the body must be a JSON object, not {shorten(fault['input'])}"
    elif fault["type"] == "value_error" and not location:
        location = [name] if (name := message.partition(":")[0]).isidentifier() else []
    elif fault["type"] == "extra_forbidden":
        message = f"unknown or unsupported: {shorten(location[-1])}; known: {', '.join(Part.__annotations__)}"
    elif fault["type"] not in _UNKNOWN and location:
        shows_value = isinstance(fault["input"], (int, float, str)) and fault["type"] not in ("value_error", "missing")
        message = f"{'.'.join(location)}: {message}" + (f", got {shorten(fault['input'])}" if shows_value else "")
    code = "unknown_parameter" if fault["type"] in _UNKNOWN else "invalid_value"
    return ApiError(400, message, ".".join(location)[:200] or None, code)
