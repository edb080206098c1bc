"""Problems that ask for a small Python function, with tests for the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

from fly.models.bundled.tasks import Problem
from tools.lists import WORDS
from tools.wording import HERE, RETURN, WALKS, Made

__all__ = ["make"]

_LOOP_NAMES = ("x", "n", "num", "item", "value", "v", "element", "entry")
_TOTAL_NAMES = ("total", "result", "acc", "out", "answer", "res", "found", "output")
_NUMBER_ARGS = ("nums", "values", "numbers", "data", "xs", "items")
_WORD_ARGS = ("words", "names", "texts", "strings", "terms", "tokens")
_FUNCTION_HEADS = ("get", "make", "find", "my", "do", "run", "pick", "calc", "list", "new")
_FUNCTION_TAILS = ("values", "result", "it", "them", "numbers", "data", "all", "items", "part", "value")
_LETTERS = "abcdefghilmnoprst"


class _Condition(NamedTuple):
    """A filter: its description, its Python test with ``{v}`` for the variable, and its meaning."""

    phrase: str
    test: str
    holds: Callable[[Any], bool]


class _Change(NamedTuple):
    """A change made to each kept element, described after a comma; ``{v}`` stands for the variable."""

    phrase: str
    expression: str
    apply: Callable[[Any], Any]


_SAME = _Change("", "{v}", lambda x: x)


def _number_condition(rng: Random, big: bool) -> _Condition:
    k = rng.randint(50, 99) if big else rng.randint(2, 30)
    choice = rng.randrange(9)
    if choice == 6:
        k = rng.randint(3, 12)
    high = k + rng.randint(2, 30) if choice == 8 else k
    return (
        _Condition("even numbers", "{v} % 2 == 0", lambda x: x % 2 == 0),
        _Condition("odd numbers", "{v} % 2 == 1", lambda x: x % 2 == 1),
        _Condition("positive numbers", "{v} > 0", lambda x: x > 0),
        _Condition("negative numbers", "{v} < 0", lambda x: x < 0),
        _Condition(f"numbers greater than {k}", f"{{v}} > {k}", lambda x: x > k),
        _Condition(f"numbers less than {k}", f"{{v}} < {k}", lambda x: x < k),
        _Condition(f"numbers divisible by {k}", f"{{v}} % {k} == 0", lambda x: x % k == 0),
        _Condition(f"numbers not equal to {k}", f"{{v}} != {k}", lambda x: x != k),
        _Condition(f"numbers between {k} and {high}", f"{k} <= {{v}} <= {high}", lambda x: k <= x <= high),
    )[choice]


def _word_condition(rng: Random, big: bool) -> _Condition:
    k = rng.randint(10, 12) if big else rng.randint(2, 9)
    a = rng.choice(_LETTERS)
    return (
        _Condition(f"words longer than {k} letters", f"len({{v}}) > {k}", lambda w: len(w) > k),
        _Condition(f"words shorter than {k} letters", f"len({{v}}) < {k}", lambda w: len(w) < k),
        _Condition(f"words with {k} letters", f"len({{v}}) == {k}", lambda w: len(w) == k),
        _Condition(f'words that start with "{a}"', f'{{v}}.startswith("{a}")', lambda w: w.startswith(a)),
        _Condition(f'words that end with "{a}"', f'{{v}}.endswith("{a}")', lambda w: w.endswith(a)),
        _Condition(f'words that contain "{a}"', f'"{a}" in {{v}}', lambda w: a in w),
    )[rng.randrange(6)]


def _number_change(rng: Random) -> _Change:
    k = rng.randint(2, 20)
    return rng.choice(
        (
            _SAME,
            _SAME,
            _Change(f", each multiplied by {k}", f"{{v}} * {k}", lambda x: x * k),
            _Change(f", each increased by {k}", f"{{v}} + {k}", lambda x: x + k),
            _Change(f", each decreased by {k}", f"{{v}} - {k}", lambda x: x - k),
            _Change(", each squared", "{v} * {v}", lambda x: x * x),
        )
    )


def _word_change(rng: Random) -> _Change:
    return rng.choice(
        (
            _SAME,
            _SAME,
            _Change(", each in upper case", "{v}.upper()", lambda w: w.upper()),
            _Change(", each written backwards", "{v}[::-1]", lambda w: w[::-1]),
            _Change(", each written twice", "{v} * 2", lambda w: w * 2),
        )
    )


def _filter(rng: Random, level: int) -> Made:
    """Filter a list, change the remaining elements, and collect, add up, count or search them."""
    words = rng.random() < 0.4
    phrase, test, holds = (_word_condition if words else _number_condition)(rng, level == 2)
    operation = rng.choice(
        ("list", "list", "count", "first", "any", "join" if words else "sum", "longest" if words else "max")
    )
    draw_change = _word_change if words else _number_change
    change = draw_change(rng)
    if level == 2:  # in training, these operations never come with a change
        operation = rng.choice(("first", "longest" if words else "max"))
        while not change.phrase:
            change = draw_change(rng)
    elif operation not in ("list", "sum", "join"):
        change = _SAME
    argument = rng.choice(_WORD_ARGS if words else _NUMBER_ARGS)
    function = _function_name(rng)
    t = rng.choice(_TOTAL_NAMES)
    v = rng.choice([name for name in _LOOP_NAMES if name != argument])
    expression = change.expression.format(v=v)
    append, separator = f"{t}.append({expression})", ""
    if operation == "join":
        separator = rng.choice(("-", " ", ", ", "+", "/"))
    # For each operation: what is asked for; how the total starts, is updated and is returned; its value.
    ways: dict[str, tuple[str, str, str, str, Callable[[list[Any]], object]]] = {
        "list": (f"a list of the {phrase}", "[]", append, t, list),
        "count": (f"the count of the {phrase}", "0", f"{t} += 1", t, len),
        "first": (f"the first of the {phrase}, or None", "", f"return {expression}", "None", lambda xs: (*xs, None)[0]),
        "any": (f"True if there are any {phrase}", "", "return True", "False", bool),
        "sum": (f"the sum of the {phrase}", "0", f"{t} += {expression}", t, sum),
        "join": (
            f'a string of the {phrase}, joined by "{separator}"',
            "[]",
            append,
            f'"{separator}".join({t})',
            separator.join,
        ),
        "max": (
            f"the largest of the {phrase}, or None",
            "[]",
            append,
            f"max({t}, default=None)",
            partial(max, default=None),
        ),
        "longest": (
            f"the longest of the {phrase}, or None",
            "[]",
            append,
            f"max({t}, key=len, default=None)",
            partial(max, key=len, default=None),
        ),
    }
    goal, start, update, result, expected = ways[operation]
    goal += change.phrase
    body = [
        *([f"    {t} = {start}"] if start else []),
        f"    for {v} in {argument}:",
        f"        if {test.format(v=v)}:",
        f"            {update}",
        f"    return {result}",
    ]
    prompt = rng.choice(_prompts(level > 0, f"{function}({argument})", f"{goal}, in `{argument}`"))
    doc = f"{rng.choice(RETURN)} {goal}"
    note = rng.choice((f'    """{doc}."""' if '"' not in doc else f"    # {doc}.", f"    # {doc}."))
    lead = _lead(rng, function, f"through `{argument}`")
    cases: list[Sequence[Any]] = [_word_case(rng) if words else _number_case(rng, test) for _ in range(4)]
    tests = [
        f"{function}({case!r}) == {expected([change.apply(x) for x in case if holds(x)])!r}" for case in [*cases, []]
    ]
    key = f"program {operation} {phrase} {change.phrase} {goal}"
    return _made(key, prompt, lead, [f"def {function}({argument}):", note, *body], tests)


def _number_case(rng: Random, test: str) -> list[int]:
    """Numbers around the constants in ``test``, so that off-by-one comparisons fail."""
    near = [int(k) for k in re.findall(r"\d+", test)]
    pool = [k + d for k in near for d in (-1, 0, 1)] + [2 * k for k in near]
    return [rng.choice(pool) if rng.random() < 0.5 else rng.randint(-40, 140) for _ in range(8)] + near


def _word_case(rng: Random) -> list[str]:
    """Made-up words of 1 to 13 letters, in which each letter is likely to stand at both ends somewhere."""
    return ["".join(rng.choices(_LETTERS, k=rng.randint(1, 13))) for _ in range(14)]


def _scalar(rng: Random, ood: bool) -> Made:
    """A function of one number that returns a formula's value, a label or a yes/no."""
    edge = (40, 99) if ood else (2, 39)
    a, b = rng.randint(*edge), rng.randint(*edge)
    argument = rng.choice(("n", "x", "number", "value"))
    function = _function_name(rng)
    v = rng.choice(_TOTAL_NAMES)
    choice = rng.randrange(4)
    yes, no = rng.sample(WORDS, 2) if choice == 2 else ("", "")
    low, high = min(a, b), max(a, b)
    ways: tuple[tuple[str, list[str], Callable[[int], object]], ...] = (
        (f"times {a} plus {b}", [f"    {v} = {argument} * {a}", f"    return {v} + {b}"], lambda x: x * a + b),
        (f"times {a} minus {b}", [f"    {v} = {argument} * {a}", f"    return {v} - {b}"], lambda x: x * a - b),
        (
            f'"{yes}" if {argument} is greater than {a} and "{no}" otherwise',
            [f'    {v} = "{no}"', f"    if {argument} > {a}:", f'        {v} = "{yes}"', f"    return {v}"],
            lambda x: yes if x > a else no,
        ),
        (
            f"{argument}, but at least {low} and at most {high}",
            [f"    {v} = max({argument}, {low})", f"    return min({v}, {high})"],
            lambda x: min(max(x, low), high),
        ),
    )
    goal, body, expected = ways[choice]
    if choice < 2:
        goal = f"{argument} {goal}"
    prompts = _prompts(ood, f"{function}({argument})", goal)
    prompt = prompts[0] if ood else rng.choice(prompts)
    lead = _lead(rng, function, f"from `{argument}` to the result")
    code = [f"def {function}({argument}):", f"    # {rng.choice(RETURN)} {goal}.", *body]
    values = sorted({0, a - 1, a, a + 1, b - 1, b, b + 1, rng.randint(-50, 150)})
    tests = [f"{function}({x}) == {expected(x)!r}" for x in values]
    return _made(f"scalar {choice} {goal.replace(argument, '', 1)}", prompt, lead, code, tests)


def _function_name(rng: Random) -> str:
    return f"{rng.choice(_FUNCTION_HEADS)}_{rng.choice(_FUNCTION_TAILS)}"


def _prompts(ood: bool, call: str, goal: str) -> tuple[str, ...]:
    if ood:
        return (f"I need Python code: `{call}` should give {goal}.",)
    return (
        f"Write a function `{call}` that returns {goal}.",
        f"Write Python code for `{call}`, which returns {goal}.",
        f"Define `{call}` so that it returns {goal}.",
    )


def _lead(rng: Random, function: str, way: str) -> str:
    return f"{rng.choice(HERE)}, this is the function `{function}`, which {rng.choice(WALKS)} {way}."


def _made(key: str, prompt: str, lead: str, code: list[str], tests: list[str]) -> Made:
    text = "\n".join(code)
    return Made(key, Problem("code", prompt, f"{lead}\n```python\n{text}\n```", "", tuple(tests)))


def make(rng: Random, level: int) -> Made:
    """A function to write. ``level`` 1 asks in other words than training; 2 also has larger constants and combinations
    that training never has."""
    if level == 1:
        return _filter(rng, level)
    return _scalar(rng, level == 2) if rng.random() < 0.2 else _filter(rng, level)
