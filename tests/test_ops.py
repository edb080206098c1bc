"""Passes over the vocabulary against torch's own, ties and bans included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fly.ops import argmax, log_mass, pick, top, vectors_at, vocabulary


@st.composite
def values(draw: st.DrawFn) -> Tensor:
    """[B, J, V] with many equal values (a coarse grid) or few, and bans."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 5, 511, 512, 640, 1000, 3001])))
    found = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 1.0, 8.0]))
    if draw(st.booleans()):
        found = found.round()
    banned = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    banned[..., draw(st.integers(0, shape[-1] - 1))] = False
    return found.masked_fill(banned, -torch.inf)


@given(values(), st.booleans())
def test_argmax_is_the_first_of_the_largest(values: Tensor, transposed: bool) -> None:
    given_ = values.transpose(0, 1) if transposed else values
    assert torch.equal(argmax(given_), given_.argmax(-1))
    assert torch.equal(pick(given_, argmax(given_)), given_.amax(-1))


@given(values(), st.data(), st.sampled_from(["whole", "transposed", "all but the last place"]))
def test_vectors_are_those_that_indexing_gives(values: Tensor, data: st.DataObject, part: str) -> None:
    taken = {"whole": values, "transposed": values.transpose(0, 1), "all but the last place": values[:, :-1]}[part]
    rows, places, _ = taken.shape
    shape = (data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    assume(places)
    rows_N1 = torch.randint(0, rows, (shape[0], 1), generator=generator)
    places_NJ = torch.randint(0, places, shape, generator=generator)
    assert torch.equal(vectors_at(taken, rows_N1, places_NJ), taken[rows_N1, places_NJ])


@given(values(), st.sampled_from([1, 2, 3, 16, 700]))
def test_top_is_topk(values: Tensor, n: int) -> None:
    found = top(values, n)
    assert torch.equal(found.values, values.topk(min(n, values.shape[-1]), dim=-1).values)
    assert torch.equal(values.gather(-1, found.indices), found.values)
    assert all(len(set(row)) == len(row) for row in found.indices.flatten(0, 1).tolist())


@given(values(), st.sampled_from([None, 0.3, 1.0, 5.0]), st.booleans(), st.booleans())
def test_log_mass_is_the_sum_written_out(
    values: Tensor, temperature: float | None, cuts: bool, in_a_small_buffer: bool
) -> None:
    values = values.flatten(0, 1)
    peak = values.amax(-1)
    least = values.sort(-1, descending=True).values[:, min(3, values.shape[1] - 1)] if cuts else None
    masses = ((values.double() - peak.unsqueeze(1)) / (temperature or 1.0)).exp()
    if least is not None:
        masses[values < least.unsqueeze(1)] = 0.0
    before = values.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "SMALL", 0 if in_a_small_buffer else 1 << 30)
        got = log_mass(values, peak, None if temperature is None else torch.full_like(peak, temperature), least)
    assert torch.equal(values, before)
    torch.testing.assert_close(got, masses.sum(-1).log().float(), atol=2e-5, rtol=1e-5)
