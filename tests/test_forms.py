"""Which JSON schemas are taken: each is refused before anything runs, with words, or its answers are valid under it.

The right value of each answer is jsonschema's, of each format pydantic's.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import ipaddress
import json
import math
import random
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema
import pydantic
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from fly.runner import forms
from fly.runner.forms import compile_form

Schema = dict[str, Any]
BYTES = LLTokenizer("byte")  # a token for each byte


def compile_schema(schema: Schema) -> LLMatcher:
    return compile_form(BYTES, "json_schema", json.dumps(schema))


def takes(schema: Schema, text: str) -> bool:
    """Whether a text is an answer under a schema."""
    matcher = compile_schema(schema)
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def write(matcher: LLMatcher, seed: int, long: int = 60) -> str | None:
    """Write a random answer, of letters of few kinds. Return None if it has no end soon; fail if nothing may follow."""
    rng = random.Random(seed)
    text = bytearray()
    while len(text) < 4 * long:
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (bytes(text), matcher.get_error())
        allowed = [byte for byte in range(128) if mask[byte // 8] >> byte % 8 & 1]
        allowed = allowed or [byte for byte in range(128, 256) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_accepting() and (not allowed or rng.random() < 0.5 or len(text) > long):
            return text.decode()
        assert allowed, f"nothing may follow {bytes(text)!r}"
        closing = [byte for byte in allowed if byte in b'"}]']
        common = [byte for byte in allowed if byte in b'",abx1']
        if closing and (rng.random() < 0.3 or len(text) > long):
            allowed = closing
        elif common and rng.random() < 0.8:
            allowed = common
        text.append(rng.choice(allowed))
        assert matcher.try_consume_tokens([text[-1]]) == 1, (bytes(text), matcher.get_error())
    return None


def read(text: str) -> Any:
    """Read JSON. Numbers beyond the floats, which JSON may have, are read as the last float."""
    most = sys.float_info.max
    return json.loads(text, parse_float=lambda digits: max(-most, min(most, float(digits))))


# --- any schema ------------------------------------------------------------------------------------------

NAMES = ["a", "ab", "b", "x_1", "é", 'q"', "", "a b", "x/y", "~"]
PATTERNS = [
    "^[[a&&b]+$",
    "^a",
    "^ab$",
    "b$",
    "^[ab]+$",
    "^(ab|b)$",
    "^.$",
    "a.b",
    "^[^a]*$",
    "^a{3}$",
    "^(?:a|ab|b)$",
    "é",
    '^"',
    "",
]
numbers = st.sampled_from([0, 1, -1, 2, 3, 10, 100, -7, 0.5, 1.5, 0.25, 1e3, 2**53, 2**53 + 1, 10**20, 1e20])
names = st.sampled_from(NAMES)
constants = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, names, st.sampled_from(["\t", "/", "\x01", "\x7f", "😀"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(names, inner, max_size=2)),
    max_leaves=3,
)
few = st.integers(0, 3)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    """Any of some keywords."""
    return st.fixed_dictionaries({}, optional=fields)


def join(*parts: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})


strings = some(
    pattern=st.sampled_from(PATTERNS),
    minLength=few,
    maxLength=st.integers(0, 6),
    format=st.sampled_from(["path", "date", "binary", "ipv4", "anything"]),
)
bounds = some(
    minimum=numbers, maximum=numbers, exclusiveMinimum=numbers, exclusiveMaximum=numbers, multipleOf=st.integers(1, 3)
)


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    objects = some(
        properties=st.dictionaries(names, inner, max_size=3),
        required=st.lists(names, max_size=2, unique=True),
        patternProperties=st.dictionaries(st.sampled_from(PATTERNS[:-1]), inner, min_size=1, max_size=2),
        additionalProperties=st.one_of(st.booleans(), inner),
        propertyNames=st.sampled_from(
            [{"enum": ["a", "b", "é"]}, {"const": "ab"}, {"type": "string", "pattern": "^a"}]
        ),
        minProperties=few,
        maxProperties=few,
    )
    arrays = some(items=inner, prefixItems=st.lists(inner, min_size=1, max_size=2), minItems=few, maxItems=few)
    several = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        join(st.just({"type": "object"}), objects),
        join(st.just({"type": "array"}), arrays),
        join(objects, arrays, strings, bounds),
        join(some(anyOf=several), objects),
        join(some(allOf=several, oneOf=several)),
        join(st.just({"$ref": "#/$defs/d"}), objects),
    )


leaves = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["null", "boolean", ["string", "integer"]])),
    join(st.just({"type": "string"}), strings),
    join(st.builds(lambda kind: {"type": kind}, st.sampled_from(["integer", "number"])), bounds),
    st.builds(lambda values: {"enum": values}, st.lists(constants, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, constants),
)
parts = st.recursive(leaves, nest, max_leaves=4)


def check(schema: Schema, seeds: range) -> bool:
    """Check a schema's answers if it is taken. Return whether it is."""
    try:
        matcher = compile_schema(schema)
    except ValueError as error:
        assert str(error)
        return False
    # The end of a line is no end of a text, as in ECMA's expressions.
    judge = jsonschema.Draft202012Validator(json.loads(json.dumps(schema).replace('$"', '\\\\Z"')))
    for seed in seeds:
        if (text := write(matcher.deep_copy(), seed)) is not None:
            with contextlib.suppress(
                RecursionError
            ):  # a schema that stands for itself means nothing, and is not judged
                judge.validate(read(text))
    return True


CLOSED = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}


@settings(max_examples=100)
@given(schema=nest(parts), other=parts, seed=st.integers(0, 10**6))
@example(schema=CLOSED | {"patternProperties": {"^a$": {}}}, other=True, seed=0)
@example(schema={"type": "object", "minProperties": 2}, other=True, seed=0)
@example(schema={"anyOf": [{"type": "integer"}], "enum": [1e20, 1]}, other=True, seed=0)
@example(schema={"const": 2**53 + 1}, other=True, seed=0)
@example(schema={"$ref": "#/$defs/d"}, other={"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1}, seed=0)
def test_a_schema_is_refused_with_words_or_its_answers_are_valid(schema: Schema, other: Schema, seed: int) -> None:
    event(f"taken: {check({**schema, '$defs': {'d': other}}, range(seed, seed + 6))}")


BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]


@given(
    value=st.floats(-100, 100) | st.floats(-(2.0**62), 2.0**62) | st.floats(-1e-6, 1e-6) | st.integers(-(2**59), 2**59),
    key=st.sampled_from(["const", *BOUNDS]),
    kind=st.sampled_from(["number", "integer"]),
)
@example(94.52706955539223, "const", "number")
@example(94.52706955539223, "maximum", "number")
@example(7e-25, "const", "number")
@example(1e-30, "exclusiveMaximum", "number")
@example(1000000000000000.0, "const", "number")
@example(2**53 + 1, "exclusiveMinimum", "integer")
@example(2.0**53, "maximum", "integer")
def test_a_number_of_many_digits_is_refused_or_held(value: float, key: str, kind: str) -> None:
    """llguidance would read some of these numbers as their neighbours."""
    schema = {key: value} if key == "const" else {"type": kind, key: value}
    is_taken = check(schema, range(2))
    whole = value == int(value)
    many_digits = abs(value) > 2**53 if whole else len(str(value)) > 15 or abs(value) < 1e-6
    assert is_taken or abs(value) > 9e17 or (key == "const" and many_digits)
    if is_taken and key != "const":
        sign = 1 if "aximum" in key else -1
        beyond = math.nextafter(value, sign * math.inf) if kind == "number" else math.floor(value) + (sign > 0)
        for number in (beyond, value) if key.startswith("exclusive") else (beyond,):
            if kind == "number" or (number == int(number) and sign * number > sign * value):
                assert not takes(schema, format(decimal.Decimal(repr(number)), "f"))


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("value", [0, 5, -7, 2**53 - 1, 2**53, 2**53 + 2])
def test_a_whole_bound_is_exact(kind: str, value: int) -> None:
    for bound in (value, float(value)):
        schema = {"type": kind, "minimum": bound, "maximum": bound}
        assert takes(schema, str(value)) and not takes(schema, str(value - 2)) and not takes(schema, str(value + 2))


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"minimum": 0.30000000000000004, "maximum": 0.30000000000000004}, "no number of 15 digits"),
        ({"exclusiveMinimum": 5, "maximum": 5}, "no number of 15 digits"),
        ({"minimum": 5, "maximum": 3}, "minimum"),
        ({"minimum": math.nan}, "a bound is beyond"),
        ({"minimum": 10**400}, "a bound is beyond"),
    ],
)
def test_bounds_without_a_number_between_are_refused_in_words(bounds: Schema, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compile_schema({"type": "number", **bounds})


# --- refused ---------------------------------------------------------------------------------------------


REFUSED: list[tuple[Schema, str]] = [
    (CLOSED | {"patternProperties": {"^a$": {}}}, "'^a$' match no other name than those that are listed"),
    (CLOSED | {"patternProperties": {"^a$": {}, "^b$": {}}, "required": ["b"]}, "'^a$', '^b$' match no other name"),
    ({"type": "object", "minProperties": 3, "required": ["a"]}, "minProperties 3"),
    ({"type": "object", "minProperties": 2, "required": ["a", "b"], "maxProperties": 1}, "maxProperties"),
    ({"const": {"a": ["\x01"]}}, "control character"),
    ({"enum": [1, 2**70]}, "1180591620717411303424"),
    ({"const": 2**53 + 1}, "9007199254740993"),
    ({"type": "number", "maximum": 10**400}, "beyond the numbers of 64 bits"),
    ({"type": "array", "prefixItems": [{}], "additionalItems": False}, "additionalItems"),
    ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "too large"),
    ({"type": "object", "patternProperties": {"^(a{1000}){1000}$": {}}}, "too large"),
    ({"type": "string", "pattern": "^\\x01$"}, "no text that can be written"),
    ({"type": "string", "format": "date", "pattern": "x"}, "Regex is empty"),
    ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "it requires itself"),
    ({"$anchor": "x", "type": "object", "required": ["a"], "properties": {"a": {"$ref": "#x"}}}, "at #: it requires"),
    ({"$id": "http://x/y", "type": "array", "minItems": 1, "items": {"$ref": "http://x/y#"}}, "it requires itself"),
    ({"$ref": "d", "x": [{"$id": "d", "type": "object", "minProperties": 2}]}, "at d: minProperties 2"),
    ({"properties": {"a": {"pattern": "^(?!a)"}}}, "at #/properties/a: pattern '^(?!a)': regex parse error"),
    ({"patternProperties": {"^(?=a)": {}}}, "at #: patternProperties '^(?=a)': regex parse error"),
    ({"pattern": "[a--b]"}, "pattern '[a--b]': write \\- for a -"),
    # The library puts these within brackets, so it took them.
    *[({"pattern": text}, f"pattern {text!r} is no regular expression") for text in ["a)|(b", ")(", "a\\", "a|)"]],
    ({"propertyNames": {"minLength": 2}}, "propertyNames"),
    ({"propertyNames": {"pattern": 5}}, "propertyNames"),
    ({"properties": {"c": {}}, "propertyNames": {"enum": ["a"]}}, "propertyNames"),
    ({"uniqueItems": True}, "uniqueItems"),
    ({"contains": {}, "minContains": 0}, "contains"),
    ({"if": {}, "else": {}}, "if"),
    ({"not": {}}, "Unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_schema_that_would_fail_within_an_answer_is_refused(schema: Schema, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        compile_schema(schema)


# Values of keywords that say nothing, though the library knows none of the keywords.
NEUTRAL: list[Schema] = [
    *[{key: value} for key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames") for value in (True, {})],
    *[{"propertyNames": {"type": "string"}}, {"uniqueItems": False}, {"not": False}, {"dependentRequired": {}}],
    *[{"minContains": 1}, {"then": False}, {"if": {"minimum": 3}}, {"then": False, "else": False}],
]


@pytest.mark.parametrize("schema", NEUTRAL, ids=str)
def test_keywords_that_say_nothing_are_no_error(schema: Schema) -> None:
    assert takes({"type": ["object", "array"], **schema}, '{"a":1}') and takes(schema, "[1, 1]")


def test_records_of_zod_and_dictionaries_of_pydantic_are_held() -> None:
    """What ``z.record(z.enum(["a", "b"]), z.number())`` and ``dict[Literal["a", "b"], int]`` are as schemas."""
    record = {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a"]}
    record["additionalProperties"] = {"type": "number"}
    assert takes(record, '{"a":1, "b":2.5}')
    assert not takes(record, '{"a":1, "c":2}') and not takes(record, '{"a":"x"}') and not takes(record, '{"b":1}')
    for names in (Literal["a", "b"], Enum("Names", {"A": "a", "B": "b"}), Annotated[str, pydantic.Field(pattern="^x")]):
        assert check(pydantic.TypeAdapter(dict[names, int]).json_schema(), range(20))  # type: ignore[valid-type]
    schema = {"type": "object", "additionalProperties": {"not": {}}, "properties": {"a": {}}}  # zod's z.never()
    assert takes(schema, '{"a":1}') and not takes(schema, '{"b":1}')


# Within a class these stand for themselves in JSON Schema's expressions (ECMA-262), but not in the library's.
@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        ("^[[]$", "[", "a"),
        ("^[a~~b]+$", "~a", "c"),
        (r"^[\w&&a]$", "b", "-"),
        (r"^[^[\]]+$", "a", "["),
        ("^[a[b]$", "[", "c"),
        (r"^\[a&&b\]$", "[a&&b]", "a"),
    ],
)
def test_classes_are_those_of_json_schema(pattern: str, text: str, other: str) -> None:
    assert takes({"pattern": pattern}, json.dumps(text)) and not takes({"pattern": pattern}, json.dumps(other))
    schema = {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False}
    assert takes(schema, json.dumps({text: 1})) and not takes(schema, json.dumps({other: 1}))


@pytest.mark.parametrize("source", ["\\", "a\\", "\\\\\\"])
def test_an_expression_that_ends_within_an_escape_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"a single \\ ends it"):
        compile_form(BYTES, "regex", source)
    compile_form(BYTES, "regex", f"{source}\\")


KEYWORDS = [
    "type", "format", "pattern", "minLength", "minimum", "exclusiveMaximum", "multipleOf", "properties", "required",
    "minProperties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems", "minItems",
    "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$defs", "x-guidance", "$id", "$schema",
    "propertyNames", "not", "if", "then", "uniqueItems", "minContains", "unevaluatedItems", "$anchor",
]  # fmt: skip
any_json = st.recursive(
    st.one_of(constants, st.sampled_from(["string", "object", "array", "#", "#/x", "(", 1e400, -1])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(KEYWORDS), any_json, min_size=1, max_size=4))
@example({"type": "object", "required": [["a"]], "properties": {"a": {}}})
@example({"format": []})
def test_what_is_no_schema_is_refused_with_words(schema: Schema) -> None:
    with contextlib.suppress(ValueError):
        compile_schema(schema)


def test_a_keyword_is_given_once() -> None:
    with pytest.raises(ValueError, match="an object has 'type' twice"):
        compile_form(BYTES, "json_schema", '{"properties": {"a": {"type": "string", "type": "integer"}}}')


def test_an_error_names_the_place() -> None:
    schema = {"type": "object", "properties": {"a/b": {"items": {"const": 2**70}}}, "$defs": {"c": {"const": 1e400}}}
    with pytest.raises(ValueError, match=r"^at #/properties/a/b/items: the constant 11805"):
        compile_schema(schema)
    grammar = f"start: one two\none: /a+/\ntwo: %json {json.dumps(schema)}"
    with pytest.raises(ValueError, match=r"^at 3\(1\): at #/properties/a/b/items"):
        compile_form(BYTES, "grammar", grammar)
    with pytest.raises(ValueError, match="nested too deeply"):
        compile_form(BYTES, "grammar", "start: %json " + '{"items":' * 10_000 + "{}" + "}" * 10_000)


def test_a_pattern_that_matches_a_listed_name_holds_for_its_value() -> None:
    schema = CLOSED | {"patternProperties": {"^a": {"type": "integer"}, "^b": False}}
    assert takes(schema, '{"a":1, "ab":2}')
    assert not takes(schema, '{"a":"x"}') and not takes(schema, '{"a":1, "b":2}')
    # where other names may follow, the pattern need not match another one
    assert takes({"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}}, '{"a":1, "b":2}')


# --- formats ---------------------------------------------------------------------------------------------


@given(st.text(), st.text(st.characters(exclude_categories=["Cs", "Cc"])))
@example("path", "C:\\a b")
@example("binary", "é")
@example("password", "")
@example("unknown", "?")
def test_an_unknown_format_is_a_comment(name: str, text: str) -> None:
    """To JSON Schema (2020-12, section 7.2.3 of its validation), a format that is not known says nothing."""
    assert name in forms._FORMATS or takes({"type": "string", "format": name}, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("name", [None, 1, ["date"], {"a": 1}])
def test_a_format_that_is_no_text_is_a_comment(name: Any) -> None:
    assert takes({"type": "string", "format": name}, '"x"')


HELD: list[Any] = [datetime.date, UUID, ipaddress.IPv4Address, ipaddress.IPv6Address]  # pydantic reads each answer
OF_PYDANTIC: list[Any] = [
    Path, pydantic.FilePath, pydantic.DirectoryPath, pydantic.NewPath, bytes, pydantic.SecretStr, pydantic.SecretBytes,
    pydantic.Json, pydantic.Base64Bytes, pydantic.Base64UrlStr, datetime.datetime, datetime.time, datetime.timedelta,
    pydantic.UUID1, pydantic.UUID4, ipaddress.IPv4Network, ipaddress.IPv6Network, ipaddress.IPv4Interface,
    ipaddress.IPv6Interface, pydantic.IPvAnyAddress, pydantic.IPvAnyNetwork, pydantic.IPvAnyInterface, pydantic.AnyUrl,
    pydantic.HttpUrl, pydantic.PostgresDsn, decimal.Decimal, re.Pattern, pydantic.ByteSize,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", [*HELD, *OF_PYDANTIC], ids=lambda kind: getattr(kind, "__name__", str(kind)))
def test_formats_of_pydantic(kind: Any, mode: Any) -> None:
    reader = pydantic.TypeAdapter(kind)
    schema = reader.json_schema(mode=mode)
    assert check(schema, range(20))
    if kind in HELD:
        for seed in range(20):
            text = write(compile_schema(schema), seed)
            assert text is not None
            reader.validate_json(text)
