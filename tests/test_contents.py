"""When two values count as the same: what ``fly.contents`` says of values that Python compares otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fly.contents import Keyed, content_of

LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=2) | st.binary(max_size=2)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3)
        | st.sets(st.integers(0, 3), max_size=3)
    ),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """The slow twin: a value written out with the types of all its parts."""
    if isinstance(value, dict):
        return "dict", [(typed(key), typed(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [typed(part) for part in value]
    if isinstance(value, set):
        return "set", sorted(value)
    return type(value).__name__, value


@dataclass
class Holder:
    """Cannot be hashed, and compares by nothing."""

    value: Any = field(compare=False)
    function: Any = field(default=None, compare=False, repr=False)


@given(VALUES, VALUES)
def test_values_are_the_same_if_they_and_their_types_are(one: Any, other: Any) -> None:
    assert Keyed(one) == Keyed(copy.deepcopy(one))
    assert (Keyed(one) == Keyed(other)) == (typed(one) == typed(other))
    assert (Keyed(Holder(one)) == Keyed(Holder(other))) == (typed(one) == typed(other))
    assert len({Keyed(one): 1, Keyed(copy.deepcopy(one)): 2}) == 1


def adder(captured: Any, default: Any = 0) -> Callable[[Any], Any]:
    return lambda text, also=default: (text, captured, also)


@given(VALUES, VALUES)
def test_a_function_is_its_code_and_what_it_captured(one: Any, other: Any) -> None:
    same = typed(one) == typed(other)
    assert (Keyed(adder(one)) == Keyed(adder(other))) == same
    assert (Keyed(adder(0, one)) == Keyed(adder(0, other))) == same
    assert (Keyed(partial(adder, one)) == Keyed(partial(adder, other))) == same
    assert (Keyed(Holder(one).__eq__) == Keyed(Holder(other).__eq__)) == same
    assert Keyed(adder(one)) != Keyed(lambda text: text)


def test_what_cannot_be_compared_is_the_same_as_itself_alone() -> None:
    ones, others = torch.ones(3), torch.ones(3)
    assert Keyed([ones]) == Keyed([ones]) != Keyed([others])
    assert Keyed(Holder(ones, adder(ones))) == Keyed(Holder(ones, adder(ones))) != Keyed(Holder(ones, adder(others)))
    linear = torch.nn.Linear(2, 1)
    assert Keyed(linear) == Keyed(linear) != Keyed(torch.nn.Linear(2, 1))


@pytest.mark.parametrize(
    "make", [lambda: np.float32(0.5), lambda: Path("a"), lambda: Fraction(1, 3), lambda: str.isdigit]
)
def test_values_of_other_packages_are_the_same_if_they_are_equal(make: Callable[[], Any]) -> None:
    assert Keyed([make()]) == Keyed([make()]) != Keyed([0.5])


def test_values_may_hold_themselves() -> None:
    around: list[Any] = [1]
    around.append(around)

    def factorial(n: int) -> int:
        return n * factorial(n - 1) if n else 1

    assert content_of(around) == content_of(around) and Keyed(factorial) == Keyed(factorial)
