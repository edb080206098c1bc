"""Seeded task generators: word problems, list transformations and small Python functions.

Each solution mixes *facts* (numbers, names, list items, program semantics), which are determined by the
prompt and checked, with *free wording* (connectives, verbs, variable names), which is drawn uniformly at
random.  A model trained on these texts is therefore undecided at the wording and certain at the facts,
which is the situation loosely speculative decoding is about.  Choice points are a single word each and mostly
lie several tokens apart, with a continuation that does not depend on the choice.

A problem's *content key* (its numbers, operations and constants, but not its wording) decides by hash
whether it belongs to ``train`` or to ``heldout``; the two splits never share a prompt.  ``ood`` uses
the same words, but longer chains and lists than ``train`` ever has, larger constants, combinations of
operations that never occur together, and questions worded in other ways.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from fly.bundled.sandbox import run_many, run_python

__all__ = [
    "FREE_WORDS",
    "KINDS",
    "SPLITS",
    "Problem",
    "check",
    "check_many",
    "extract_answer",
    "extract_code",
    "problems",
]

KINDS = ("arithmetic", "text", "code")
SPLITS = ("train", "heldout", "ood")

_HELDOUT_SHARE = 10  # one content key in this many is held out


@dataclass(frozen=True)
class Problem:
    """One task: what is asked, a reference solution, and what a right answer is.

    ``answer`` is the text of the final ``####`` line (empty for code); ``tests`` are Python expressions
    that hold for a correct program (empty for the other kinds).
    """

    kind: str
    prompt: str
    solution: str
    answer: str
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Draft:
    """A generated problem together with the content key that decides its split."""

    key: str
    problem: Problem


# ---------------------------------------------------------------------------------------------------------
# Free wording

_OPEN = ("First", "Initially", "Originally", "Today", "Here", "Clearly", "Well", "Okay")
_NEXT = ("Then", "Next", "Now", "So", "Afterwards", "Later", "Second", "Also", "Again", "Soon")
_GIVES = ("gives", "makes", "means", "is", "equals", "yields", "leaves", "shows", "becomes", "brings")
_LAST = ("Therefore", "Finally", "Hence", "Thus", "Overall", "Altogether", "Consequently", "Lastly")
# What introduces a function, how it goes through its argument, and how its comment begins.
_HERE = ("Sure", "Okay", "Well", "Yes", "Right", "Fine", "Good", "Certainly")
_WALKS = ("goes", "loops", "walks", "runs", "moves", "steps", "passes", "iterates")
_RETURN = ("Return", "Give", "Compute", "Find", "Get", "Calculate", "Produce", "Build")

FREE_WORDS = frozenset((*_OPEN, *_NEXT, *_GIVES, *_LAST, *_HERE, *_WALKS, *_RETURN))
"""The words that solutions choose freely (program variables aside)."""


def _open(rng: Random) -> str:
    return rng.choice(_OPEN)


def _next(rng: Random) -> str:
    return rng.choice(_NEXT)


def _gives(rng: Random) -> str:
    return rng.choice(_GIVES)


def _last(rng: Random) -> str:
    return rng.choice(_LAST)


# ---------------------------------------------------------------------------------------------------------
# Arithmetic

_PEOPLE = (
    ("Mia", "she"), ("Tom", "he"), ("Anna", "she"), ("Ben", "he"), ("Lily", "she"), ("Sam", "he"),
    ("Eva", "she"), ("Max", "he"), ("Rosa", "she"), ("Paul", "he"), ("Nina", "she"), ("Leo", "he"),
    ("Clara", "she"), ("Omar", "he"), ("Jane", "she"), ("Hugo", "he"),
)  # fmt: skip
_ITEMS = (
    "apples", "pears", "books", "coins", "stamps", "cards", "shells", "pens",
    "marbles", "cookies", "stones", "flowers", "tickets", "balls", "eggs", "buttons",
)  # fmt: skip
_PLACES = ("market", "park", "school", "shop", "beach", "garden")
_MAX = 99
_TIMES = {2: "doubles", 3: "triples"}


def _add_clause(rng: Random, pronoun: str, items: str, k: int, friend: str, place: str) -> str:
    return rng.choice(
        (
            f"{pronoun} buys {k} more {items}",
            f"{pronoun} finds {k} {items} at the {place}",
            f"{pronoun} gets {k} {items} from {friend}",
            f"{friend} brings {k} more {items}",
        )
    )


def _sub_clause(rng: Random, pronoun: str, items: str, k: int, friend: str, place: str) -> str:
    return rng.choice(
        (
            f"{pronoun} gives {k} {items} to {friend}",
            f"{pronoun} loses {k} {items} at the {place}",
            f"{pronoun} sells {k} of the {items}",
            f"{friend} takes {k} of the {items}",
        )
    )


def _story_steps(rng: Random, start: int, count: int) -> list[tuple[str, int, int]] | None:
    """``count`` operations from ``start`` whose results all stay within 1.._MAX, or None."""
    value, steps = start, []
    for _ in range(count):
        op = rng.choice(("add", "add", "sub", "sub", "mul", "div", "boxes"))
        k, m = rng.randint(2, 20), 0
        if op == "mul":
            k = rng.randint(2, 4)
        elif op == "div":
            k = rng.randint(2, 6)
        elif op == "boxes":
            k, m = rng.randint(2, 6), rng.randint(2, 6)
        if op == "div" and value % k:
            return None
        value = {
            "add": value + k,
            "sub": value - k,
            "mul": value * k,
            "div": value // k,
            "boxes": value + k * m,
        }[op]
        if not 1 <= value <= _MAX:
            return None
        steps.append((op, k, m))
    return steps


def _story(rng: Random, ood: bool) -> _Draft:
    """One person's things are added to, taken from, multiplied and shared."""
    while True:
        start = rng.randint(2, 60)
        steps = _story_steps(rng, start, rng.randint(5, 6) if ood else rng.randint(2, 4))
        if steps is not None:
            break
    name, pronoun = rng.choice(_PEOPLE)
    friend = rng.choice([p for p, _ in _PEOPLE if p != name])
    items = rng.choice(_ITEMS)
    place = rng.choice(_PLACES)
    value = start
    asked, told = [f"{name} has {start} {items}."], [f"{_open(rng)}, {name} has {start} {items}."]
    for op, k, m in steps:
        before, extra = value, ""
        if op == "add":
            clause, sign, value = _add_clause(rng, pronoun, items, k, friend, place), f"+ {k}", value + k
        elif op == "sub":
            clause, sign, value = _sub_clause(rng, pronoun, items, k, friend, place), f"- {k}", value - k
        elif op == "mul":
            grow = f"{_TIMES[k]} in size" if k in _TIMES else f"grows to {k} times its size"
            clause, sign, value = f"the pile of {items} {grow}", f"* {k}", value * k
        elif op == "div":
            share = f"splits the {items} into {k} equal bags and keeps one bag"
            clause, sign, value = f"{pronoun} {share}", f"/ {k}", value // k
        else:
            clause = f"{pronoun} opens {k} boxes with {m} {items} each"
            sign, value, extra = f"+ {k * m}", value + k * m, f", so {k} * {m} = {k * m} more"
        asked.append(f"{clause[0].upper()}{clause[1:]}.")
        told.append(f"{_next(rng)}, {clause}{extra}, which {_gives(rng)} {before} {sign} = {value} {items}.")
    told.append(f"{_last(rng)}, the number of {items} that {name} has is {value}.")
    question = rng.choice(
        (f"Find the final count of {items} for {name}.", f"Tell me {name}'s {items} after all of this.")
        if ood
        else (
            f"How many {items} does {name} have now?",
            f"How many {items} does {name} have in the end?",
            f"What is the number of {items} that {name} has now?",
        )
    )
    return _arithmetic(f"story {start} {steps}", asked + [question], told, value)


def _shop(rng: Random, ood: bool) -> _Draft:
    """Several things are bought at unit prices; out of domain, change is returned as well."""
    count = 3 if ood else 2
    while True:
        lines = [(rng.randint(2, 9), rng.randint(2, 9)) for _ in range(count)]
        total = sum(k * price for k, price in lines)
        if total <= _MAX:
            break
    name, pronoun = rng.choice(_PEOPLE)
    items = rng.sample(_ITEMS, count)
    place = rng.choice(_PLACES)
    bought = " and ".join(f"{k} {item} for {price} dollars each" for (k, price), item in zip(lines, items))
    asked = [f"{name} buys {bought} at the {place}."]
    told, sums = [], []
    for i, ((k, price), item) in enumerate(zip(lines, items)):
        lead = _open(rng) if i == 0 else _next(rng)
        told.append(
            f"{lead}, {pronoun} pays for the {k} {item}, which {_gives(rng)} {k} * {price} = {k * price} dollars."
        )
        sums.append(k * price)
    running = sums[0]
    for part in sums[1:]:
        equation = f"{running} + {part} = {running + part}"
        told.append(f"{_next(rng)}, both of the costs are added up, which {_gives(rng)} {equation} dollars.")
        running += part
    key = f"shop {lines}"
    if ood:
        asked.append(f"{name} hands over 100 dollars. Find the change.")
        answer = 100 - total
        equation = f"100 - {total} = {answer}"
        told.append(f"{_next(rng)}, the cost is taken from 100 dollars, which {_gives(rng)} {equation} dollars.")
    else:
        asked.append(rng.choice(("How much is the total cost?", f"How many dollars does {name} pay?")))
        answer = total
    told.append(f"{_last(rng)}, the number of dollars that {name} {'gets' if ood else 'pays'} is {answer}.")
    return _arithmetic(key, asked, told, answer)


def _compare(rng: Random, ood: bool) -> _Draft:
    """People whose counts are given relative to each other; asks for the sum."""
    while True:
        counts = [rng.randint(5, 30)]
        relations: list[tuple[str, int]] = []
        for _ in range(3 if ood else rng.randint(1, 2)):
            relation = rng.choice(("more", "fewer", "times"))
            k = rng.randint(2, 4) if relation == "times" else rng.randint(2, 20)
            last = counts[-1]
            counts.append({"more": last + k, "fewer": last - k, "times": last * k}[relation])
            relations.append((relation, k))
        if min(counts) >= 1 and sum(counts) <= _MAX:
            break
    names = rng.sample([p for p, _ in _PEOPLE], len(counts))
    items = rng.choice(_ITEMS)
    asked, told = (
        [f"{names[0]} has {counts[0]} {items}."],
        [f"{_open(rng)}, {names[0]} has {counts[0]} {items}."],
    )
    for i, (relation, k) in enumerate(relations, start=1):
        sign = {"more": "+", "fewer": "-", "times": "*"}[relation]
        clause = (
            f"{names[i]} has {k} times as many" if relation == "times" else f"{names[i]} has {k} {relation} {items}"
        )
        clause += f" {'as' if relation == 'times' else 'than'} {names[i - 1]}"
        asked.append(f"{clause}.")
        told.append(f"{_next(rng)}, {clause}, which {_gives(rng)} {counts[i - 1]} {sign} {k} = {counts[i]} {items}.")
    running = counts[0]
    for name, part in zip(names[1:], counts[1:]):
        equation = f"{running} + {part} = {running + part}"
        told.append(f"{_next(rng)}, we add the {items} of {name}, which {_gives(rng)} {equation} {items}.")
        running += part
    asked.append(f"Find the sum of all the {items}." if ood else f"How many {items} do they have together?")
    told.append(f"{_last(rng)}, the number of {items} that they have is {running}.")
    return _arithmetic(f"compare {counts[0]} {relations}", asked, told, running)


def _arithmetic(key: str, asked: list[str], told: list[str], answer: int) -> _Draft:
    solution = " ".join(told) + f"\n#### {answer}"
    return _Draft(key, Problem("arithmetic", " ".join(asked), solution, str(answer)))


def _make_arithmetic(rng: Random, ood: bool) -> _Draft:
    return rng.choice((_story, _story, _shop, _compare))(rng, ood)


# ---------------------------------------------------------------------------------------------------------
# Text and list transformations

_WORDS = (
    "apple", "bird", "cat", "door", "earth", "fish", "gold", "horse", "island", "jar", "king", "lamp",
    "moon", "night", "ocean", "paper", "queen", "river", "snow", "tree", "uncle", "voice", "water", "year",
    "bread", "cloud", "dog", "egg", "fire", "grass", "hat", "ice", "key", "leaf", "milk", "nose",
)  # fmt: skip
_SEPARATORS = ("and", "or", "plus", "then")

# A step's request in the prompt, its clause in the solution, and the list after it.
_Step = tuple[str, str, list[str]]


def _op_reverse(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    return "reverse the list", "we reverse the list so that the last one comes first", items[::-1]


def _op_first(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    n = rng.randint(2, max(2, len(items) - 1))
    return f"keep the first {n}", f"we keep only the first {n} of the list", items[:n]


def _op_last(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    n = rng.randint(2, max(2, len(items) - 1))
    return f"keep the last {n}", f"we keep only the last {n} of the list", items[-n:]


def _op_replace(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    old, new = rng.choice(items), rng.choice(pool)
    after = [new if x == old else x for x in items]
    return f"replace every {old} with {new}", f"we replace every {old} in the list with {new}", after


def _op_remove(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    old = rng.choice(items)
    return f"remove every {old}", f"we take every {old} out of the list", [x for x in items if x != old]


def _op_front(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    new = rng.choice(pool)
    return f"put {new} at the front", f"we put {new} at the front of the list", [new, *items]


def _op_back(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    new = rng.choice(pool)
    return f"put {new} at the end", f"we put {new} at the end of the list", [*items, new]


def _op_swap(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    after = [items[-1], *items[1:-1], items[0]] if len(items) > 1 else items
    return "swap the first and the last", "we swap the first and the last of the list", after


def _op_sort_up(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    return "sort from low to high", "we sort the list from low to high", sorted(items, key=int)


def _op_sort_down(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    return "sort from high to low", "we sort the list from high to low", sorted(items, key=int, reverse=True)


def _op_above(rng: Random, items: list[str], pool: tuple[str, ...]) -> _Step:
    k = rng.randint(1, 7)
    return (
        f"keep those above {k}",
        f"we keep only those of the list above {k}",
        [x for x in items if int(x) > k],
    )


_Op = Callable[[Random, list[str], tuple[str, ...]], _Step]
# Rearranging is learned in training; picking items by what they are is asked of out-of-domain problems only.
_WORD_OPS: tuple[_Op, ...] = (_op_reverse, _op_first, _op_last, _op_front, _op_back, _op_swap)
_NUMBER_OPS: tuple[_Op, ...] = (*_WORD_OPS, _op_sort_up, _op_sort_down)
_OOD_WORD_OPS: tuple[_Op, ...] = (*_WORD_OPS, _op_remove, _op_replace)
_OOD_NUMBER_OPS: tuple[_Op, ...] = (*_NUMBER_OPS, _op_remove, _op_above)
_NUMBERS = tuple(str(i) for i in range(10))


def _pipeline(rng: Random, ood: bool) -> _Draft:
    """One or two (out of domain: three) operations applied to a list, possibly counted or joined last."""
    words = rng.random() < 0.7
    pool: tuple[str, ...] = _WORDS if words else _NUMBERS
    if ood:
        ops = _OOD_WORD_OPS if words else _OOD_NUMBER_OPS
    else:
        ops = _WORD_OPS if words else _NUMBER_OPS
    length = rng.randint(6, 8) if ood else rng.randint(3, 5)
    while True:
        items = rng.sample(pool, length)
        if words and rng.random() < 0.5:  # repeats make counting non-trivial
            items[rng.randrange(length)] = rng.choice(items)
        chosen = rng.sample(ops, 3 if ood else rng.randint(1, 2))
        requests, clauses, states, state = [], [], [], items
        for op in chosen:
            request, clause, state = op(rng, state, pool)
            requests.append(request)
            clauses.append(clause)
            states.append(" ".join(state))
            if len(state) < 1:
                break
        if len(state) >= 1:
            break
    ending = rng.choice(("list", "list", "list", "count", "join"))
    answer = states[-1]
    if ending == "count":
        target = rng.choice(state if words else items)
        requests.append(f"count how often {target} occurs")
        clauses.append(f"we count how often {target} occurs in the list")
        answer = str(state.count(target))
        states.append(answer)
    elif ending == "join":
        separator = rng.choice(_SEPARATORS)
        requests.append(f"join them with {separator}")
        clauses.append(f"we join the ones in the list with {separator}")
        answer = f" {separator} ".join(state)
        states.append(answer)
    listed = " ".join(items)
    wanted = ", then ".join(requests)
    prompt = rng.choice(
        (
            f"Here are some entries: {listed}. Please {wanted}.",
            f"My notes say {listed}. I want you to {wanted}.",
        )
        if ood
        else (
            f"The list is {listed}. {wanted[0].upper()}{wanted[1:]}. What is the result?",
            f"Take the list {listed}. {wanted[0].upper()}{wanted[1:]}.",
            f"Given the list {listed}, {wanted}.",
            f"What is the result when you take {listed} and {wanted}?",
        )
    )
    told = [f"{_open(rng)}, the list is {listed}."]
    told += [f"{_next(rng)}, {clause}, which {_gives(rng)} {state}." for clause, state in zip(clauses, states)]
    told.append(f"{_last(rng)}, the result of the task is {answer}.")
    return _text(f"list {listed} {wanted}", prompt, told, answer)


def _text(key: str, prompt: str, told: list[str], answer: str) -> _Draft:
    return _Draft(key, Problem("text", prompt, " ".join(told) + f"\n#### {answer}", answer))


def _make_text(rng: Random, ood: bool) -> _Draft:
    return _pipeline(rng, ood)


# ---------------------------------------------------------------------------------------------------------
# Code

_LOOP_NAMES = ("x", "n", "num", "item", "value", "v", "element", "entry")
_TOTAL_NAMES = ("total", "result", "acc", "out", "answer", "res", "found", "output")
_NUMBER_ARGS = ("nums", "values", "numbers", "data", "xs", "items")
_WORD_ARGS = ("words", "names", "texts", "strings", "terms", "tokens")
_FUNCTION_HEADS = ("get", "make", "find", "my", "do", "run", "pick", "calc", "list", "new")
_FUNCTION_TAILS = ("values", "result", "it", "them", "numbers", "data", "all", "items", "part", "value")
_LETTERS = "abcdefghilmnoprst"


@dataclass(frozen=True)
class _Condition:
    """A filter: how it is described, its Python test with ``{v}`` for the variable, and what it means."""

    phrase: str
    test: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class _Change:
    """A change made to each kept element, described after a comma; ``{v}`` stands for the variable."""

    phrase: str
    expression: str
    apply: Callable[[Any], Any]


def _number_condition(rng: Random, big: bool) -> _Condition:
    k = rng.randint(50, 99) if big else rng.randint(2, 30)
    choice = rng.randrange(9)
    if choice == 0:
        return _Condition("even numbers", "{v} % 2 == 0", lambda x: x % 2 == 0)
    if choice == 1:
        return _Condition("odd numbers", "{v} % 2 == 1", lambda x: x % 2 == 1)
    if choice == 2:
        return _Condition("positive numbers", "{v} > 0", lambda x: x > 0)
    if choice == 3:
        return _Condition("negative numbers", "{v} < 0", lambda x: x < 0)
    if choice == 4:
        return _Condition(f"numbers greater than {k}", f"{{v}} > {k}", lambda x: x > k)
    if choice == 5:
        return _Condition(f"numbers less than {k}", f"{{v}} < {k}", lambda x: x < k)
    if choice == 6:
        k = rng.randint(3, 12)
        return _Condition(f"numbers divisible by {k}", f"{{v}} % {k} == 0", lambda x: x % k == 0)
    if choice == 7:
        return _Condition(f"numbers not equal to {k}", f"{{v}} != {k}", lambda x: x != k)
    high = k + rng.randint(2, 30)
    return _Condition(f"numbers between {k} and {high}", f"{k} <= {{v}} <= {high}", lambda x: k <= x <= high)


def _word_condition(rng: Random, big: bool) -> _Condition:
    k = rng.randint(10, 12) if big else rng.randint(2, 9)
    letter = rng.choice(_LETTERS)
    choice = rng.randrange(6)
    if choice == 0:
        return _Condition(f"words longer than {k} letters", f"len({{v}}) > {k}", lambda w: len(w) > k)
    if choice == 1:
        return _Condition(f"words shorter than {k} letters", f"len({{v}}) < {k}", lambda w: len(w) < k)
    if choice == 2:
        return _Condition(f"words with {k} letters", f"len({{v}}) == {k}", lambda w: len(w) == k)
    if choice == 3:
        return _Condition(
            f'words that start with "{letter}"',
            f'{{v}}.startswith("{letter}")',
            lambda w: w.startswith(letter),
        )
    if choice == 4:
        return _Condition(
            f'words that end with "{letter}"', f'{{v}}.endswith("{letter}")', lambda w: w.endswith(letter)
        )
    return _Condition(f'words that contain "{letter}"', f'"{letter}" in {{v}}', lambda w: letter in w)


def _number_change(rng: Random) -> _Change:
    k = rng.randint(2, 20)
    return rng.choice(
        (
            _Change("", "{v}", lambda x: x),
            _Change("", "{v}", lambda x: x),
            _Change(f", each multiplied by {k}", f"{{v}} * {k}", lambda x: x * k),
            _Change(f", each increased by {k}", f"{{v}} + {k}", lambda x: x + k),
            _Change(f", each decreased by {k}", f"{{v}} - {k}", lambda x: x - k),
            _Change(", each squared", "{v} * {v}", lambda x: x * x),
        )
    )


def _word_change(rng: Random) -> _Change:
    return rng.choice(
        (
            _Change("", "{v}", lambda w: w),
            _Change("", "{v}", lambda w: w),
            _Change(", each in upper case", "{v}.upper()", lambda w: w.upper()),
            _Change(", each written backwards", "{v}[::-1]", lambda w: w[::-1]),
            _Change(", each written twice", "{v} * 2", lambda w: w * 2),
        )
    )


def _program(rng: Random, ood: bool) -> _Draft:
    """Filter a list, change what is left, and collect, add up, count or look for it."""
    words = rng.random() < 0.4
    condition = (_word_condition if words else _number_condition)(rng, ood)
    test, phrase, holds = condition.test, condition.phrase, condition.holds
    operation = rng.choice(
        ("list", "list", "count", "first", "any", "join" if words else "sum", "longest" if words else "max")
    )
    draw_change = _word_change if words else _number_change
    change = draw_change(rng)
    if ood:  # these operations never come with a change in training
        operation = rng.choice(("first", "longest" if words else "max"))
        while not change.phrase:
            change = draw_change(rng)
    elif operation not in ("list", "sum", "join"):
        change = _Change("", "{v}", lambda x: x)
    args = _WORD_ARGS if words else _NUMBER_ARGS
    argument = rng.choice(args)
    function = "_".join(
        (
            rng.choice(_FUNCTION_HEADS),
            rng.choice(_FUNCTION_TAILS),
        )
    )
    total = rng.choice(_TOTAL_NAMES)
    v = rng.choice([name for name in _LOOP_NAMES if name != argument])
    kept, expression = test.format(v=v), change.expression.format(v=v)

    def loop(start: str, update: str, end: str = "{t}") -> list[str]:
        lines = [f"    {total} = {start}"] if start else []
        lines += [
            f"    for {v} in {argument}:",
            f"        if {kept}:",
            f"            {update.format(t=total)}",
        ]
        return [*lines, f"    return {end.format(t=total)}"]

    def select(xs: Sequence[Any]) -> list[Any]:
        return [change.apply(x) for x in xs if holds(x)]

    expected: Callable[[Sequence[Any]], object]
    if operation == "list":
        goal, body, expected = f"a list of the {phrase}", loop("[]", f"{{t}}.append({expression})"), select
    elif operation == "count":
        goal, body = f"the count of the {phrase}", loop("0", "{t} += 1")
        expected = lambda xs: len(select(xs))  # noqa: E731
    elif operation == "first":
        goal, body = f"the first of the {phrase}, or None", loop("", f"return {expression}", "None")
        expected = lambda xs: (select(xs) or [None])[0]  # noqa: E731
    elif operation == "any":
        goal, body = f"True if there are any {phrase}", loop("", "return True", "False")
        expected = lambda xs: bool(select(xs))  # noqa: E731
    elif operation == "sum":
        goal, body = f"the sum of the {phrase}", loop("0", f"{{t}} += {expression}")
        expected = lambda xs: sum(select(xs))  # noqa: E731
    elif operation == "join":
        separator = rng.choice(("-", " ", ", ", "+", "/"))
        goal = f'a string of the {phrase}, joined by "{separator}"'
        body = loop("[]", f"{{t}}.append({expression})", f'"{separator}".join({{t}})')
        expected = lambda xs: separator.join(select(xs))  # noqa: E731
    elif operation == "max":
        goal = f"the largest of the {phrase}, or None"
        body = loop("[]", f"{{t}}.append({expression})", "max({t}, default=None)")
        expected = lambda xs: max(select(xs), default=None)  # noqa: E731
    else:
        goal = f"the longest of the {phrase}, or None"
        body = loop("[]", f"{{t}}.append({expression})", "max({t}, key=len, default=None)")
        expected = lambda xs: max(select(xs), key=len, default=None)  # noqa: E731
    goal += change.phrase

    where = f"in `{argument}`"
    prompt = rng.choice(
        (f"I need Python code: `{function}({argument})` should give {goal}, {where}.",)
        if ood
        else (
            f"Write a function `{function}({argument})` that returns {goal}, {where}.",
            f"Write Python code for `{function}({argument})`, which returns {goal}, {where}.",
            f"Define `{function}({argument})` so that it returns {goal}, {where}.",
        )
    )
    doc = f"{rng.choice(_RETURN)} {goal}"
    note = rng.choice((f'    """{doc}."""' if '"' not in doc else f"    # {doc}.", f"    # {doc}."))
    lead = f"{rng.choice(_HERE)}, this is the function `{function}`, which {rng.choice(_WALKS)} through `{argument}`."
    code = "\n".join([f"def {function}({argument}):", note, *body])
    cases: list[Sequence[Any]] = [_word_case(rng) if words else _number_case(rng, test) for _ in range(4)]
    tests = tuple(f"{function}({case!r}) == {expected(case)!r}" for case in [*cases, []])
    key = f"program {operation} {phrase} {change.phrase} {goal}"
    return _Draft(key, Problem("code", prompt, f"{lead}\n```python\n{code}\n```", "", tests))


def _number_case(rng: Random, test: str) -> list[int]:
    """Numbers around the constants of ``test``, so that an off-by-one comparison is noticed."""
    near = [int(k) for k in re.findall(r"\d+", test)]
    pool = [k + d for k in near for d in (-1, 0, 1)] + [2 * k for k in near]
    return [rng.choice(pool) if rng.random() < 0.5 else rng.randint(-40, 140) for _ in range(8)] + near


def _word_case(rng: Random) -> list[str]:
    """Made-up words of 1 to 13 letters, each letter likely at both ends somewhere."""
    return ["".join(rng.choices(_LETTERS, k=rng.randint(1, 13))) for _ in range(14)]


def _scalar(rng: Random, ood: bool) -> _Draft:
    """One number in; a formula, a label or a yes/no out."""
    low, high = (40, 99) if ood else (2, 39)
    a, b = rng.randint(low, high), rng.randint(low, high)
    argument = rng.choice(("n", "x", "number", "value"))
    function = f"{rng.choice(_FUNCTION_HEADS)}_{rng.choice(_FUNCTION_TAILS)}"
    v = rng.choice(_TOTAL_NAMES)
    compute: Callable[[int], object]
    choice = rng.randrange(4)
    if choice == 0:
        goal = f"{argument} times {a} plus {b}"
        body, compute = [f"    {v} = {argument} * {a}", f"    return {v} + {b}"], lambda x: x * a + b
    elif choice == 1:
        goal = f"{argument} times {a} minus {b}"
        body, compute = [f"    {v} = {argument} * {a}", f"    return {v} - {b}"], lambda x: x * a - b
    elif choice == 2:
        yes, no = rng.sample(_WORDS, 2)
        goal = f'"{yes}" if {argument} is greater than {a} and "{no}" otherwise'
        body = [f'    {v} = "{no}"', f"    if {argument} > {a}:", f'        {v} = "{yes}"', f"    return {v}"]
        compute = lambda x: yes if x > a else no  # noqa: E731
    else:
        goal = f"{argument}, but at least {min(a, b)} and at most {max(a, b)}"
        body = [f"    {v} = max({argument}, {min(a, b)})", f"    return min({v}, {max(a, b)})"]
        compute = lambda x: min(max(x, min(a, b)), max(a, b))  # noqa: E731
    if ood:
        prompt = f"I need Python code: `{function}({argument})` should give {goal}."
    else:
        prompt = rng.choice(
            (
                f"Write a function `{function}({argument})` that returns {goal}.",
                f"Write Python code for `{function}({argument})`, which returns {goal}.",
                f"Define `{function}({argument})` so that it returns {goal}.",
            )
        )
    way = f"from `{argument}` to the result"
    lead = f"{rng.choice(_HERE)}, this is the function `{function}`, which {rng.choice(_WALKS)} {way}."
    code = "\n".join([f"def {function}({argument}):", f"    # {rng.choice(_RETURN)} {goal}.", *body])
    values = sorted({0, a - 1, a, a + 1, b - 1, b, b + 1, rng.randint(-50, 150)})
    tests = tuple(f"{function}({x}) == {compute(x)!r}" for x in values)
    key = f"scalar {choice} {goal.replace(argument, '', 1)}"
    return _Draft(key, Problem("code", prompt, f"{lead}\n```python\n{code}\n```", "", tests))


def _make_code(rng: Random, ood: bool) -> _Draft:
    return (_scalar if rng.random() < 0.2 else _program)(rng, ood)


# ---------------------------------------------------------------------------------------------------------
# Public interface

_MAKERS: dict[str, Callable[[Random, bool], _Draft]] = {
    "arithmetic": _make_arithmetic,
    "text": _make_text,
    "code": _make_code,
}


def problems(kind: str | None, split: str, seed: int, n: int | None = None) -> Iterator[Problem]:
    """Yield ``n`` problems (without end if None) of one kind, or round-robin of all for None or "all".

    The sequence depends on the arguments alone.  Raises ValueError for an unknown kind or split.
    """
    if kind is not None and kind != "all" and kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; choose one of {', '.join(KINDS)} or all")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    if n is not None and n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    # A separate function so that bad arguments are refused by the call, not by the first next().
    stream = _round_robin(split, seed) if kind is None or kind == "all" else _stream(kind, split, seed)
    return islice(stream, n)


def _stream(kind: str, split: str, seed: int) -> Iterator[Problem]:
    rng = Random(f"{kind}/{split}/{seed}")
    make = _MAKERS[kind]
    while True:
        draft = make(rng, split == "ood")
        if split == "ood" or _is_heldout(draft.key) == (split == "heldout"):
            yield draft.problem


def _round_robin(split: str, seed: int) -> Iterator[Problem]:
    streams = [_stream(kind, split, seed) for kind in KINDS]
    while True:
        for stream in streams:
            yield next(stream)


def _is_heldout(key: str) -> bool:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELDOUT_SHARE == 0


def extract_answer(completion: str) -> str | None:
    """The text of the last ``####`` line, or None if there is none."""
    found = re.findall(r"^####[ \t]*(.*?)[ \t]*$", completion, flags=re.MULTILINE)
    return found[-1] if found else None


def extract_code(completion: str) -> str:
    """The first ```` ```python ```` block (closed or not), or the whole text if there is no block."""
    found = re.search(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", completion, flags=re.DOTALL)
    return found.group(1) if found else completion


def check(problem: Problem, completion: str) -> bool:
    """Whether ``completion`` solves ``problem``; code is run on the problem's tests in the sandbox."""
    if problem.kind == "code":
        return run_python(extract_code(completion), problem.tests).ok
    return extract_answer(completion) == problem.answer


def check_many(pairs: list[tuple[Problem, str]]) -> list[bool]:
    """``check`` for many (problem, completion) pairs, with one sandbox process for all the code."""
    jobs = [(extract_code(text), problem.tests) for problem, text in pairs if problem.kind == "code"]
    results = iter(run_many(jobs))
    return [next(results).ok if problem.kind == "code" else check(problem, text) for problem, text in pairs]
