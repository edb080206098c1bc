"""Compiles forms of output: JSON schemas, regular expressions and grammars. llguidance does the work.

The library takes some JSON schemas otherwise than JSON Schema means them, and finds only within an answer that nothing
can follow. Here such schemas are put into other words with the same meaning, or refused.

A server runs this file by itself, in the process that tries new forms, so it needs neither torch nor the rest of this
package.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import cache
from typing import Any, TypeGuard
from urllib.parse import unquote, urldefrag, urljoin

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["compile_form", "explain_failure"]

# The library's limits for one grammar: states of its lexer (everyday schemas take a few thousand), work to set it up
# and to compute one mask, symbols. The engine's thread computes masks. Under these limits a mask takes at most 200 ms,
# and 10 ms for an expression such as (\d{1,9}[a-z]{0,30}[A-Z]{0,30}){20}.
_LIMITS = LLParserLimits(
    max_lexer_states=16_384,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=200_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_LIMIT_WORDS = "too many", "max is", "limit"  # words in the library's messages when one of these limits is reached
_MAX_MESSAGE = 800  # messages of the library are cut to this many characters, since they may quote a whole grammar
_AHEAD = 3  # follow a new grammar for this many tokens: one that is too large usually fails there
# The blanks that JSON may have: it may stand on one line or be indented, but has no runs of blanks, which small models
# tend to repeat for ever. And no character is written as \u0041, because the library does not notice that a name
# written so is a listed one. A schema's own "x-guidance" overrides this.
_WRITING = {"whitespace_pattern": r" |\n[ ]{0,16}", "json_allowed_escapes": r"nrbtf\""}
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # characters that only such an escape could write
# The formats that texts are held to.
_FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
_TOO_LARGE = 2**63  # the library makes integers beyond these the last of 64 bits
_EXACT, _MOST_DECIMALS = 2**53, 22  # a float holds each integer up to the one, and 10 to the power of the other
_GAP = 1e-9  # fractions that are closer to an exclusive bound are not written


def compile_form(vocabulary: LLTokenizer, kind: str, source: str) -> LLMatcher:
    """Compile a form, and follow it for a few tokens. Raises ``ValueError`` with the reason if it cannot be used.

    Args:
        vocabulary: the tokens.
        kind: "json_schema", "json_object", "regex" or "grammar" (Lark's syntax).
        source: the schema, the expression or the grammar.
    """
    try:
        if kind == "regex":
            # The library would take the end that it puts after an expression as the escaped character.
            if re.search(r"(?<!\\)(?:\\\\)*\\\Z", source):
                raise ValueError("a single \\ ends it, which escapes nothing")
            grammar = LLMatcher.grammar_from_regex(source)
        elif kind == "grammar":
            grammar = LLMatcher.grammar_from_lark(_prepare_grammar(source))
        else:
            grammar = LLMatcher.grammar_from_json_schema(_prepare_schema(source or '{"type": "object"}'))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        _, reasons = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary, limits=_LIMITS)
        raise ValueError(_join_lines(" ".join(reasons) or matcher.get_error()))
    first = matcher.deep_copy()
    begins = _follow(first)
    if _is_too_large(first):
        raise ValueError(explain_failure(first))
    if not begins:
        raise ValueError("no text of this vocabulary begins it")
    return matcher


def explain_failure(matcher: LLMatcher) -> str:
    """Say why a matcher has failed, with the library's own words."""
    words = _join_lines(matcher.get_error()).removesuffix(" <non-verbose/>").partition("; consider")[0]
    if _is_too_large(matcher):
        return f"it is too large to be followed ({words}); make it simpler"
    return f"nothing that this vocabulary can spell may follow ({words})"


def _is_too_large(matcher: LLMatcher) -> bool:
    return matcher.is_error() and any(words in matcher.get_error() for words in _LIMIT_WORDS)


def _follow(matcher: LLMatcher) -> bool:
    """Follow a grammar for a few tokens, or until it ends or fails. Return whether it allows any first token."""
    begins = False
    for _ in range(_AHEAD):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        begins = True
        if (byte := next((at for at, bits in enumerate(mask) if bits), None)) is None:
            break
        matcher.consume_token(8 * byte + (mask[byte] & -mask[byte]).bit_length() - 1)
        if matcher.is_error() or matcher.is_stopped():
            break
    return begins


def _join_lines(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."


# --- JSON schemas ----------------------------------------------------------------------------------------


def _prepare_schema(source: str) -> str:
    """Return a JSON schema as the library needs it. Raises ``ValueError`` with the reason if it cannot be held."""
    schema = json.loads(source, object_pairs_hook=_read_object, parse_float=_read_fraction)
    if not isinstance(schema, dict):
        return source
    _Schemas(schema).prepare()
    if isinstance(options := schema.get("x-guidance", {}), dict):
        schema["x-guidance"] = _WRITING | options
    return json.dumps(schema, allow_nan=False)


def _read_object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(members)
    if len(value) < len(members):
        names = [name for name, _ in members]
        raise ValueError(f"an object has {next(name for name in names if names.count(name) > 1)!r} twice")
    return value


def _read_fraction(text: str) -> float:
    """Read a number with a point or an exponent. A whole one becomes an integer, which the library reads exactly:
    9007199254740991.0 would be another number to it."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


# What a grammar in Lark's syntax has: texts, expressions and comments, or the start of a schema.
_PARTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(?P<schema>%json\s*(?=\{))')


def _prepare_grammar(source: str) -> str:
    """Prepare the JSON schemas within a grammar. Errors begin with the number of the line, as the library's do."""
    pieces = []
    end = 0
    for part in _PARTS.finditer(source):
        if part["schema"] and part.start() >= end:
            try:
                _, stop = json.JSONDecoder().raw_decode(source, part.end())
            except ValueError:
                continue  # the library says what is wrong
            try:
                schema = _prepare_schema(source[part.end() : stop])
            except ValueError as error:
                line = 1 + source.count("\n", 0, part.start())
                raise ValueError(f"at {line}(1): {error}") from None
            pieces += [source[end : part.end()], schema, "\n" * source.count("\n", part.end(), stop)]
            end = stop
    return "".join([*pieces, source[end:]])


class _Schemas:
    """A JSON schema with all schemas within it, each an object."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._base = urldefrag(name)[0] if isinstance(name := root.get("$id"), str) else ""
        self._named = dict(_list_named(self._base, root))
        self._paths: dict[int, str] = {}  # where each schema stands, by ``id``
        self._used = self._collect("#", root)
        self._all = list(self._used)
        for schema in self._all:  # which grows meanwhile
            for key in ("$defs", "definitions"):
                for name, each in _get_mapping(schema, key).items():
                    self._all += self._collect(f"{self._paths[id(schema)]}/{key}/{name}", each)
        # Whether schemas are merged, so that the names of one may be listed in another.
        self._merged = any("allOf" in each or ("$ref" in each and len(each) > 1) for each in self._all)

    def prepare(self) -> None:
        """Change what the library takes otherwise than JSON Schema. Raises ``ValueError`` for what cannot be held."""
        for schema in self._all:
            _drop_neutral(schema)
            self._name_properties(schema)
        for schema in self._all:
            try:
                _prepare_patterns(schema)
                if "format" in schema and schema["format"] not in _FORMATS:
                    del schema["format"]  # to JSON Schema an unknown format is a comment
                _move_bounds(schema)
                _check_constants(schema)
                if "prefixItems" in schema and "additionalItems" in schema:
                    raise ValueError("additionalItems has no meaning beside prefixItems; give items")
                _check_size(schema)
                _check_text(schema)
                self._check_names(schema)
            except ValueError as error:
                raise ValueError(f"at {self._paths[id(schema)]}: {error}") from None
        self._check_ends()

    def _collect(self, path: str, schema: Any) -> list[dict[str, Any]]:
        """Collect a schema and those within it that were not collected yet."""
        collected: list[dict[str, Any]] = []
        waiting = [(path, schema)]
        while waiting:
            path, schema = waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self._paths:
                self._paths[id(schema)] = path
                collected.append(schema)
                waiting += self._list_within(path, schema)
        return collected

    def _list_within(self, path: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the schemas directly within one, and the one that it refers to, each with its path."""
        for key in ("items", "additionalItems", "additionalProperties"):
            yield f"{path}/{key}", schema.get(key)
        for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            yield from ((f"{path}/{key}/{number}", each) for number, each in enumerate(_get_list(schema, key)))
        for key in ("properties", "patternProperties"):
            yield from ((f"{path}/{key}/{name}", each) for name, each in _get_mapping(schema, key).items())
        yield str(schema.get("$ref")), self._resolve(schema)

    def _resolve(self, schema: dict[str, Any]) -> Any:
        """Return what a schema refers to, if it is within the same document."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        address = urljoin(self._base, reference)
        if address in self._named:
            return self._named[address]
        pointer = address.removeprefix(self._base)
        if not re.match("(#|$)(/|$)", pointer):
            return None
        place: Any = self._root
        for step in unquote(pointer).split("/")[1:]:
            if isinstance(place, list) and step.isdecimal():
                place = dict(enumerate(place)).get(int(step))
            else:
                place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
        return place

    def _name_properties(self, schema: dict[str, Any]) -> None:
        """Replace ``propertyNames`` that lists names, or has a pattern, as records of zod and dictionaries of pydantic
        have it: the values then stand under these names."""
        names = _get_mapping(schema, "propertyNames")
        names = {**names, **_get_mapping({"": self._resolve(names)}, "")}
        if schema.keys() & {"properties", "patternProperties"} or names.get("type", "string") != "string":
            return
        values = schema.get("additionalProperties", True)
        limits = names.keys() - {"$ref", "type", "title", "description"}
        if limits == {"pattern"} and isinstance(names["pattern"], str):
            schema["patternProperties"] = {names["pattern"]: values}
        elif limits in ({"enum"}, {"const"}):
            listed = [names["const"]] if "const" in names else _get_list(names, "enum")
            schema["properties"] = {name: values for name in listed if isinstance(name, str)}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _check_names(self, schema: dict[str, Any]) -> None:
        """Raise ``ValueError`` if patterns match no other name than those that are listed, and further names may be
        forbidden: the library lets a comma come before such a name, and nothing after it. Where schemas are merged, one
        may forbid what another allows, so each pattern must match another name."""
        values = _get_mapping(schema, "patternProperties")
        patterns = [pattern for pattern, value in values.items() if value is not False]
        if not patterns:
            return
        if not _has_more_names(_list_names([schema]), {"patternProperties": dict.fromkeys(patterns, False)}):
            schema["additionalProperties"] = False  # each name matches a pattern
        closed = schema.get("additionalProperties", True) is not True
        listed = _list_names(self._all if self._merged else [schema])
        for group in [[pattern] for pattern in patterns] if self._merged else [patterns]:
            alone = {"patternProperties": dict.fromkeys(group, True), "additionalProperties": False}
            if not _has_more_names(listed, alone) and (closed or self._merged):
                raise ValueError(
                    f"patternProperties {', '.join(map(repr, group))} match no other name than those that are listed; "
                    "give properties alone"
                )

    def _check_ends(self) -> None:
        """Raise ``ValueError`` if a schema needs itself within itself, so that no value under it ever ends."""
        needs = {id(schema): self._list_needs(schema) for schema in self._all}
        missing = {each: set(range(len(needs[each]))) for each in needs}  # numbers of needs that nothing meets yet
        needed_by: dict[int, list[tuple[int, int]]] = {each: [] for each in needs}
        for each, lists in needs.items():
            for number, choices in enumerate(lists):
                for choice in choices:
                    needed_by[id(choice)].append((each, number))
        ended = [each for each, numbers in missing.items() if not numbers]
        for met in ended:  # which grows meanwhile
            for each, number in needed_by[met]:
                if number in missing[each]:
                    missing[each].remove(number)
                    if not missing[each]:
                        ended.append(each)
        if endless := [schema for schema in self._used if missing[id(schema)]]:
            raise ValueError(f"at {self._paths[id(endless[0])]}: it requires itself, so no value under it ever ends")

    def _list_needs(self, schema: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Return lists of schemas. Any value under ``schema`` is, or has within itself, a value under one of each."""
        needs = [[each] for each in (*_get_list(schema, "allOf"), self._resolve(schema))]
        needs += [[each for each in _get_list(schema, key) if each is not False] for key in ("anyOf", "oneOf")]
        if schema.get("type") in ("object", ["object"]):
            required = _get_list(schema, "required")
            needs += [[each] for name, each in _get_mapping(schema, "properties").items() if name in required]
        if schema.get("type") in ("array", ["array"]) and isinstance(least := schema.get("minItems"), int):
            needs += [[each] for each in [*_get_list(schema, "prefixItems"), schema.get("items")][:least]]
        return [choices for choices in needs if choices and all(isinstance(each, dict) for each in choices)]


def _list_named(base: str, root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the address of each schema that has a name, ``$id`` or ``$anchor``, and the schema."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value is not root and isinstance(value.get("$id"), str):
                yield urljoin(base, value["$id"]), value
            if isinstance(value.get("$anchor"), str):
                yield f"{base}#{value['$anchor']}", value
        waiting += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _get_list(schema: dict[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := schema.get(key), list) else []


def _get_mapping(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return value if isinstance(value := schema.get(key), dict) else {}


def _list_names(schemas: Iterable[dict[str, Any]]) -> set[str]:
    """List the names that schemas give under ``properties`` or ``required``."""
    names = (name for each in schemas for name in (*_get_mapping(each, "properties"), *_get_list(each, "required")))
    return {name for name in names if isinstance(name, str)}


def _drop_neutral(schema: dict[str, Any]) -> None:
    """Remove keywords that the library does not know, where their values say nothing."""
    everything: tuple[Any, ...] = (True, {})
    neutral: dict[str, tuple[Any, ...]] = {
        "not": (False,),
        "uniqueItems": (False,),
        "unevaluatedItems": everything,
        "unevaluatedProperties": everything,
        "propertyNames": (*everything, {"type": "string"}),
        **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
    }
    if "contains" not in schema:
        neutral |= {key: (schema.get(key),) for key in ("minContains", "maxContains")}
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        neutral |= {key: (schema.get(key),) for key in ("if", "then", "else")}
    for key, values in neutral.items():
        if key in schema and schema[key] in values:
            del schema[key]
    if schema.get("not") in everything:  # nothing is valid, as zod writes it
        schema.clear()
        schema["enum"] = []


# What a regular expression has: an escaped character, a class of characters, a bracket.
_PATTERN_PARTS = re.compile(r"\\.?|[()]|\[(?P<begin>\^?\]?)(?P<members>(?:\\.|[^\]\\])*)\]", re.DOTALL)


def _prepare_patterns(schema: dict[str, Any]) -> None:
    """Write the classes in patterns as the library reads them."""
    if _may_be(schema, "string") and isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _prepare_pattern(pattern, "pattern")
    if _may_be(schema, "object") and (values := _get_mapping(schema, "patternProperties")):
        prepared = {_prepare_pattern(pattern, "patternProperties"): value for pattern, value in values.items()}
        if len(prepared) == len(values):
            schema["patternProperties"] = prepared


def _escape_member(member: re.Match[str]) -> str:
    return member[0] if member[0].startswith("\\") else f"\\{member[0]}"


def _prepare_pattern(pattern: str, key: str) -> str:
    """Escape what has a meaning within the library's classes, but stands for itself in those of JSON Schema. Raises
    ``ValueError`` for what the library would take otherwise."""
    depth = 0

    def escape(part: re.Match[str]) -> str:
        nonlocal depth
        depth += {"(": 1, ")": -1}.get(part[0], 0)
        if depth < 0 or part[0] == "\\":  # the library, which puts brackets around a pattern, finds neither
            raise ValueError(f"{key} {pattern!r} is no regular expression: it has a {part[0]} too many")
        if part["members"] is None:
            return part[0]
        if "--" in re.sub(r"\\.", "", part["members"], flags=re.DOTALL):
            raise ValueError(f"{key} {pattern!r}: write \\- for a - next to another one in {part[0]}")
        members = re.sub(r"\\.|[\[&~]", _escape_member, part["members"])
        return f"[{part['begin']}{members}]"

    return _PATTERN_PARTS.sub(escape, pattern)


def _move_bounds(schema: dict[str, Any]) -> None:
    """Replace bounds that the library does not hold exactly by others, a little further in. It reaches some exclusive
    bounds, and rounds integers that are no floats and fractions of many digits. Raises ``ValueError`` if no number is
    left between the new bounds."""
    crossed = _is_crossed(schema)
    for bound, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        limits = []
        if _is_number(value := schema.get(bound)):
            limits.append(_round_inwards(value, sign))
        beyond = schema.get(exclusive)
        if _is_number(beyond := value if beyond is True else beyond):
            del schema[exclusive]
            edge = _round_inwards(beyond, sign)
            if schema.get("type") == "integer":
                limits.append(_round_inwards(math.floor(beyond) + 1 if sign > 0 else math.ceil(beyond) - 1, sign))
            else:
                limits.append(sign * max(sign * edge + _GAP, math.nextafter(sign * edge, math.inf)))
        if limits:
            schema[bound] = _shorten_inwards(sign * max(sign * limit for limit in limits), sign)
    if _is_crossed(schema) and not crossed:
        raise ValueError("no number of 15 digits is within the bounds")


def _is_crossed(schema: dict[str, Any]) -> bool:
    least, most = schema.get("minimum"), schema.get("maximum")
    return _is_number(least) and _is_number(most) and least > most


def _round_inwards(bound: Any, sign: int) -> float:
    """Return the float at a bound or, if there is none, the next one further in: above if ``sign`` is 1."""
    try:
        nearest = float(bound)
    except OverflowError:
        nearest = math.inf
    if not math.isfinite(nearest):
        raise ValueError("a bound is beyond the numbers of 64 bits")
    return math.nextafter(nearest, sign * math.inf) if sign * nearest < sign * bound else nearest


def _is_read_exactly(value: float) -> bool:
    """Return whether the library reads this number as it is. It reads digits as one integer, which it multiplies or
    divides by a power of ten in 64 bits: both are exact if they are small."""
    digits, _, exponent = json.dumps(value).lstrip("-").partition("e")
    whole, _, decimals = digits.partition(".")
    return int(whole + decimals) < _EXACT and abs(int(exponent or 0) - len(decimals)) <= _MOST_DECIMALS


def _shorten_inwards(bound: float, sign: int) -> float:
    """Return a bound that the library reads exactly: an integer, a fraction as it is, or the next one of 15 digits,
    which is above if ``sign`` is 1."""
    if bound.is_integer():
        return int(bound) if abs(bound) < _TOO_LARGE else bound
    if _is_read_exactly(bound):
        return bound
    exact = Decimal(bound)
    decimals = max(0, min(_MOST_DECIMALS, 14 - exact.adjusted()))
    shorter = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    return float(shorter) if decimals else int(shorter)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_constants(schema: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a constant that the library would change."""
    waiting = [schema.get("const"), *_get_list(schema, "enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and _UNWRITABLE.search(value):
            raise ValueError(f"the constant {value[:60]!r} has a control character, which answers here never have")
        elif _is_number(value) and not -_TOO_LARGE < value < _TOO_LARGE:
            raise ValueError(f"the constant {str(value)[:60]} is beyond the integers of 64 bits")
        elif _is_number(value) and abs(value) >= _EXACT and int(Decimal(str(value))) != int(float(value)):
            raise ValueError(f"the constant {value} is between two numbers of 64 bits")
        elif isinstance(value, float) and not _is_read_exactly(value):
            raise ValueError(f"the constant {value} has more than 15 digits, or more than 22 after its point")


def _check_size(schema: dict[str, Any]) -> None:
    """Raise ``ValueError`` if an object must have several names that are not listed: the library lets them be equal."""
    least = schema.get("minProperties")
    required = len(set(map(str, _get_list(schema, "required"))))
    if isinstance(least, int) and least > required + 1 and _may_be(schema, "object"):
        raise ValueError(
            f"minProperties {least} cannot be held with {required} names in required: the other names might be equal"
        )


def _has_more_names(listed: Iterable[str], schema: dict[str, Any]) -> bool:
    """Return whether an object under a schema may have other names than those that are listed."""
    return _begins({**schema, "type": "object", "properties": dict.fromkeys(listed, False), "minProperties": 1}, "{")


def _check_text(schema: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a text cannot be followed, or cannot be written."""
    limits: dict[str, Any] = {
        key: schema[key] for key in ("pattern", "minLength", "maxLength", "format") if key in schema
    }
    if not limits.keys() & {"pattern", "format"} or not _may_be(schema, "string"):
        return
    if not _begins({"type": "string", **limits}, '"'):
        raise ValueError(f"no text that can be written here has this form: {json.dumps(limits)[:200]}")


def _may_be(schema: dict[str, Any], kind: str) -> bool:
    return kind in (kinds if isinstance(kinds := schema.get("type", kind), list) else [kinds])


def _begins(schema: dict[str, Any], text: str) -> bool:
    """Return whether a text of ``schema`` goes on after ``text``; also if the library refuses the schema, because it
    will then refuse the whole. Raises ``ValueError`` if the schema is too large, or names a pattern that is refused."""
    alone = json.dumps({"x-guidance": {**_WRITING, "whitespace_pattern": None, "whitespace_flexible": False}, **schema})
    matcher = _compile_alone(alone)
    if matcher.is_error() and not _is_too_large(matcher):
        patterns = [("patternProperties", pattern) for pattern in schema.get("patternProperties", ())]
        for key, pattern in [("pattern", schema.get("pattern", "")), *patterns]:
            matcher = _compile_alone(json.dumps({"type": "string", "pattern": pattern}))
            if matcher.is_error():
                reason = _join_lines(matcher.get_error()).removesuffix(" <non-verbose/>")
                raise ValueError(f"{key} {pattern!r}: {reason}")
        return True
    matcher.consume_tokens(list(text.encode()))
    begins = _follow(matcher)
    if _is_too_large(matcher):
        raise ValueError(explain_failure(matcher))
    return begins


def _compile_alone(source: str) -> LLMatcher:
    return LLMatcher(_byte_vocabulary(), LLMatcher.grammar_from_json_schema(source), log_level=0, limits=_LIMITS)


@cache
def _byte_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")
