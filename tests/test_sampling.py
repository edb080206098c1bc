"""Processed distributions against a literal twin, drawing as exact inversion, and randomness as a pure function."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import Tensor

from fly.ops import Stream, derive, draw, uniforms, vocabulary
from fly.policies import Exact
from fly.runner.constraints import constrain
from fly.runner.request import BadWords, Row
from fly.runner.sampling import BatchSampling
from fly.types import SamplingParams

INT64 = st.integers(-(2**63), 2**63 - 1)


# --- the processed distribution -----------------------------------------------------------------------------------


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * max(abs(a), abs(b), 1e-30)


def twin_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The distribution of one position, token by token in double precision; rejects draws that rounding could
    decide."""
    ids = range(len(logits))
    best = max(ids, key=lambda i: (logits[i], -i))
    if params.temperature == 0:
        return [float(i == best) for i in ids]
    mass = [math.exp((z - logits[best]) / params.temperature) for z in logits]
    total = sum(mass)
    mass = [m / total for m in mass]
    kept = [i for i in ids if not params.top_k or sum(z > logits[i] for z in logits) < params.top_k]
    if params.top_p < 1:
        needed = params.top_p * sum(mass[i] for i in kept)
        likelier = {i: sum(mass[j] for j in kept if logits[j] > logits[i]) for i in kept}
        assume(not any(_near(m, needed) for m in likelier.values()))
        kept = [i for i in kept if likelier[i] < needed]
    floor = params.min_p * mass[best]
    assume(all(mass[i] == mass[best] or not _near(mass[i], floor) for i in kept) or params.min_p == 0)
    kept = [i for i in kept if mass[i] >= floor]
    total = sum(mass[i] for i in kept)
    return [mass[i] / total if i in kept else 0.0 for i in ids]


# Few values, so that ties are common; -inf is a banned token.
logit = st.one_of(st.sampled_from([-math.inf, -50.0, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0, 40.0]), st.floats(-8, 8, width=32))
params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.0, 1e-3, 0.3, 1.0, 2.0, 100.0]), st.floats(0.05, 5)),
    top_k=st.integers(0, 8),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
)


@st.composite
def batches(draw_: st.DrawFn) -> tuple[Tensor, list[SamplingParams]]:
    vocab, positions, rows = draw_(st.integers(1, 7)), draw_(st.integers(1, 3)), draw_(st.integers(1, 4))
    one = st.lists(logit, min_size=vocab, max_size=vocab).filter(lambda zs: max(zs) > -math.inf)
    block = st.lists(one, min_size=positions, max_size=positions)
    logits = draw_(st.lists(block, min_size=rows, max_size=rows))
    return torch.tensor(logits), [draw_(params) for _ in range(rows)]


@given(batches())
def test_probs_equal_the_literal_twin(batch: tuple[Tensor, list[SamplingParams]]) -> None:
    logits_BJV, rows = batch
    before = logits_BJV.clone()
    got = BatchSampling.of(rows).probs(logits_BJV)
    assert torch.equal(logits_BJV, before)
    wanted = [[twin_distribution(zs, p) for zs in block] for block, p in zip(logits_BJV.tolist(), rows)]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(wanted), atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(got.sum(-1), torch.ones(got.shape[:2]))
    for b, p in enumerate(rows):
        event(f"greedy={p.temperature == 0} k={p.top_k > 0} p={p.top_p < 1} min={p.min_p > 0}")
        if p.temperature == 0:
            assert torch.equal(got[b].amax(-1), torch.ones(got.shape[1]))
            assert torch.equal((got[b] > 0).sum(-1), torch.ones(got.shape[1], dtype=torch.int64))
        alone = BatchSampling.of([p]).probs(logits_BJV[b : b + 1])
        torch.testing.assert_close(got[b : b + 1], alone, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_k": 3}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_equally_likely_tokens_are_kept_or_cut_together(params: dict[str, float]) -> None:
    distribution = BatchSampling.of([SamplingParams(**params)])
    got = distribution.probs(torch.tensor([[[1.25, -3.0, 1.25, 1.25, 0.0]]]))[0, 0]
    torch.testing.assert_close(got, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3, 0]))


@given(
    st.integers(0, 10_000),
    st.sampled_from([17, 300, 2100, 5000]),
    st.sampled_from([0.0, 0.3, 1.0, 8.0]),
    st.lists(params, min_size=1, max_size=3),
    st.sampled_from(["small steps", "arrays"]),
)
def test_a_distribution_is_the_same_wherever_one_looks(
    seed: int, vocab: int, sharpness: float, rows: list[SamplingParams], way: str
) -> None:
    """All of it, some positions, some tokens, some rows; for flat and peaked distributions, which decide a nucleus
    early or late; and by the sums of large vocabularies as of small ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(len(rows), 3, vocab, generator=generator)
    distribution = BatchSampling.of(rows)
    dense = distribution.probs(logits)
    torch.testing.assert_close(dense.sum(-1), torch.ones(len(rows), 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "SMALL", 8 if way == "small steps" else 8192)
        lazy = distribution.on(logits)
        tokens = torch.randint(0, vocab, (len(rows), 2), generator=generator)
        close = {"atol": 1e-7, "rtol": 1e-4}
        torch.testing.assert_close(lazy.of(tokens), dense[:, :2].gather(-1, tokens.unsqueeze(-1)).squeeze(-1), **close)
        where = torch.tensor([len(rows) - 1, 0]), torch.tensor([0, 2])
        torch.testing.assert_close(lazy.at(*where), dense[where], **close)
        last = torch.tensor([len(rows) - 1])
        torch.testing.assert_close(lazy.rows(last).dense(), dense[last], **close)
    for b, p in enumerate(rows):
        for j in range(3):
            kept, likelihood = dense[b, j] > 0, logits[b, j]
            if p.temperature and kept.any() and not kept.all():
                # What is kept is all that is at least as likely as the least likely kept one.
                assert likelihood[~kept].max() < likelihood[kept].min() or sharpness * p.temperature > 50
            if p.temperature and p.top_p < 1 and not p.top_k and not p.min_p:
                full = (logits[b, j].double() / max(p.temperature, 1e-30)).softmax(-1)
                least = likelihood[kept].min()
                assert full[kept].sum() >= p.top_p - 1e-4
                assert full[likelihood > least].sum() < p.top_p + 1e-4


@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-38, 1e-6, 1e6, 1e38, 1e40, 1.7e308])
def test_extreme_temperatures_stay_distributions(temperature: float) -> None:
    logits = torch.tensor([[[1.0, 0.5, -math.inf, 1.0, -1e30]]])
    cold, hot = torch.tensor([0.5, 0, 0, 0.5, 0]), torch.tensor([1 / 3, 1 / 3, 0, 1 / 3, 0])
    for extra in ({}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 1e-6}):
        got = BatchSampling.of([SamplingParams(temperature=temperature, **extra)]).probs(logits)[0, 0]
        if temperature < 1:
            torch.testing.assert_close(got, cold)
        elif temperature == 1e6:
            torch.testing.assert_close(got, hot, atol=1e-4, rtol=0)
        else:
            assert torch.isfinite(got).all() and got[2] == 0
            torch.testing.assert_close(got.sum(), torch.tensor(1.0))


# --- drawing ---------------------------------------------------------------------------------------------

masses = st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 50]), min_size=1, max_size=6).filter(any)


@given(masses, st.sampled_from([1, 10, 0.125, 1e-6]))
def test_draw_inverts_the_cumulative_distribution(mass: list[int], scale: float) -> None:
    """Over a grid of uniforms, token v comes up exactly mass[v] times, in order; no mass is never drawn."""
    grid = 4 * sum(mass)
    uniform_N = (torch.arange(grid) + 0.5) / grid
    probs_NV = (torch.tensor(mass, dtype=torch.float32) * scale).expand(grid, -1)
    drawn = draw(probs_NV, uniform_N)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [v for v, m in enumerate(mass) for _ in range(4 * m)]


@given(masses)
def test_the_ends_of_the_unit_interval_draw_tokens_with_mass(mass: list[int]) -> None:
    probs_V = torch.tensor(mass, dtype=torch.float32)
    drawn = draw(probs_V.expand(2, -1), torch.tensor([0.0, 1 - 2.0**-24])).tolist()
    with_mass = [v for v, m in enumerate(mass) if m]
    assert drawn == [with_mass[0], with_mass[-1]]


@given(
    st.sampled_from([513, 1000, 1024, 3001]),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 9)), min_size=1, max_size=12),
    st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=8),
)
def test_a_large_vocabulary_is_drawn_from_as_by_one_sum(
    width: int, mass: list[tuple[int, int]], coins: list[int]
) -> None:
    """Of whole numbers every sum is exact, so chunks must give the token that one cumulative sum gives."""
    probs_V = torch.zeros(width)
    for token, count in mass:
        probs_V[token % width] += count
    uniform_N = torch.tensor(coins) * 2.0**-24
    sums_V, sought_N = probs_V.double().cumsum(0), uniform_N.double() * probs_V.double().sum()
    assert draw(probs_V.expand(len(coins), -1), uniform_N).equal(torch.searchsorted(sums_V, sought_N, right=True))
    assert draw(torch.zeros(2, width), torch.tensor([0.0, 0.9])).tolist() == [0, 0]


def test_a_row_without_mass_gives_token_zero() -> None:
    distribution = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    assert draw(distribution, torch.tensor([0.9, 0.1])).tolist() == [0, 2]


# --- uniforms --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(INT64, st.integers(0, 100_000)), min_size=1, max_size=5), st.integers(0, 8), st.data())
def test_uniforms_depend_on_the_row_alone(rows: list[tuple[int, int]], n: int, data: st.DataObject) -> None:
    stream = data.draw(st.sampled_from(Stream))
    seed_B, round_B = torch.tensor(rows).unbind(1)
    got = uniforms(seed_B, round_B, stream, n)
    assert got.shape == (len(rows), n) and got.dtype == torch.float32
    assert ((got >= 0) & (got < 1)).all()
    b = data.draw(st.integers(0, len(rows) - 1))
    assert torch.equal(uniforms(seed_B[b : b + 1], round_B[b : b + 1], stream, n), got[b : b + 1])
    assert torch.equal(uniforms(seed_B, round_B, stream, n + 3)[:, :n], got)


@given(INT64, st.integers(0, 10_000), INT64, st.integers(0, 10_000))
def test_another_seed_round_or_stream_is_another_sequence(seed: int, at: int, other: int, later: int) -> None:
    assume(seed != other and at != later)
    keys = list(itertools.product((seed, other), (at, later), Stream))
    drawn = [uniforms(torch.tensor([s]), torch.tensor([r]), t, 6)[0].tolist() for s, r, t in keys]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))
    assert all(len(set(row)) == 6 for row in drawn)


def _chi_square(values: Tensor, cells: int) -> float:
    """Distance of the values' histogram from uniform, in standard deviations of the chi-square distribution."""
    counts = torch.histc(values.double(), cells, 0, 1)
    expected = values.numel() / cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))


def splitmix(x: int) -> int:
    """The finaliser of splitmix64, on whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.sampled_from(list(Stream)), st.integers(1, 20))
def test_uniforms_are_hashes_here_and_on_every_device(seed: int, position: int, stream: Stream, n: int) -> None:
    step = 0x9E3779B97F4A7C15
    key = splitmix((splitmix((seed + step) % 2**64) + position * step + stream) % 2**64)
    wanted = [(splitmix((key + index * step) % 2**64) >> 40) / 2**24 for index in range(1, n + 1)]
    seed_B, round_B = torch.tensor([seed]), torch.tensor([position])
    assert uniforms(seed_B, round_B, stream, n)[0].tolist() == wanted
    derived = splitmix((splitmix((seed % 2**64) ^ 0x94D049BB133111EB) + position * step) % 2**64)
    assert derive(seed, position) % 2**64 == derived


def test_uniforms_are_uniform_along_every_axis() -> None:
    n = 1 << 15
    zeros, count = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    for stream in Stream:
        along = {
            "seed": uniforms(count, zeros + 5, stream, 1).flatten(),
            "round": uniforms(zeros + 5, count, stream, 1).flatten(),
            "index": uniforms(zeros[:1], zeros[:1], stream, n).flatten(),
        }
        for axis, values in along.items():
            assert abs(_chi_square(values, 64)) < 4, (stream, axis)
            # neighbours are independent: their sum's fractional part is uniform, and so is each half's histogram
            assert abs(_chi_square((values[1:] + values[:-1]) % 1, 64)) < 4, (stream, axis)
            correlation = torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1]
            assert abs(correlation) < 4 / math.sqrt(n), (stream, axis)
    streams = [uniforms(count, zeros, stream, 1).flatten() for stream in Stream]
    assert abs(torch.corrcoef(torch.stack(streams))[0, 1]) < 4 / math.sqrt(n)
    assert abs(_chi_square(torch.full((n,), 0.3), 64)) > 100  # the yardstick itself refutes


@given(INT64, st.integers(0, 100_000))
def test_derived_seeds_are_seeds_of_their_own(seed: int, position: int) -> None:
    got = derive(seed, position)
    assert got == derive(seed, position) and -(2**63) <= got < 2**63
    others = {derive(seed, position + 1), derive(seed ^ 1, position), seed}
    assert got not in others
    SamplingParams(seed=got)
    row = [uniforms(torch.tensor([s]), torch.tensor([position]), Stream.SAMPLE, 8) for s in (seed, got)]
    assert not torch.equal(row[0], row[1])


def test_derived_streams_are_independent_of_their_parents() -> None:
    n = 1 << 12
    derived = torch.tensor([derive(seed, 7) for seed in range(n)])
    at = torch.full((n,), 7)
    own, below = uniforms(torch.arange(n), at, Stream.SAMPLE, 1), uniforms(derived, at, Stream.SAMPLE, 1)
    assert abs(_chi_square(below.flatten(), 32)) < 4
    assert abs(torch.corrcoef(torch.cat([own, below], 1).T)[0, 1]) < 4 / math.sqrt(n)
    assert len(set(derived.tolist())) == n


# --- ends that come too early ----------------------------------------------------------------------------


@st.composite
def speculations(draw_: st.DrawFn) -> tuple[Row, list[int], list[int]]:
    """A row with penalties and bans, and what is drafted to follow it: a tree."""
    token = st.integers(0, 4)
    penalty = st.sampled_from([0.0, -1.5, 0.25, 2.0])
    sampling = SamplingParams(
        min_tokens=draw_(st.integers(0, 6)),
        max_tokens=9,
        presence_penalty=draw_(penalty),
        frequency_penalty=draw_(penalty),
        repetition_penalty=draw_(st.sampled_from([1.0, 0.5, 1.3])),
        logit_bias=draw_(st.dictionaries(token, st.sampled_from([-100.0, 3.0]), max_size=2)),
        bad_words=("so",) if (bad := draw_(st.lists(st.lists(token, min_size=1, max_size=3), max_size=2))) else (),
    )
    prompt, text = draw_(st.lists(token, min_size=1, max_size=4)), draw_(st.lists(token, max_size=4))
    stops = draw_(st.frozensets(token, max_size=3))
    row = Row(prompt + text, len(prompt), sampling, Exact(), 0, 4, stops, bad=BadWords(tuple(map(tuple, bad))))
    draft = draw_(st.lists(token, max_size=4))
    return row, draft, [draw_(st.integers(-1, i - 1)) for i in range(len(draft))]


@given(st.lists(speculations(), min_size=1, max_size=3), st.booleans(), st.integers(0, 1000))
def test_constraints_hold_at_every_drafted_position(
    batch: list[tuple[Row, list[int], list[int]]], trees: bool, seed: int
) -> None:
    """Written out token by token from the definitions, for the text that leads to each position."""
    rows, drafts = [row for row, _, _ in batch], [draft for _, draft, _ in batch]
    longest = max(map(len, drafts))
    logits = torch.randn(len(rows), longest + 1, 5, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    got = constrain(logits, rows, drafts, [parents for _, _, parents in batch] if trees else None)
    assert torch.equal(logits, before)
    for b, (row, draft, parents) in enumerate(batch):
        for j in range(longest + 1):
            if j > len(draft):
                assert torch.equal(got[b, j], before[b, j])
                continue
            path: list[int] = []
            at = j - 1
            while at >= 0:
                path.insert(0, draft[at])
                at = parents[at] if trees else at - 1
            text, p = row.tokens[row.prompt_length :] + path, row.params
            for v in range(5):
                wanted = float(before[b, j, v])
                if v in row.tokens[: row.prompt_length] + text:
                    wanted = wanted / p.repetition_penalty if wanted > 0 else wanted * p.repetition_penalty
                wanted -= p.frequency_penalty * text.count(v) + p.presence_penalty * (v in text)
                wanted += p.logit_bias.get(v, 0.0)
                whole = row.tokens[: row.prompt_length] + text
                for bad in row.bad.words:
                    if v == bad[-1] and whole[len(whole) - len(bad) + 1 :] == list(bad[:-1]):
                        wanted = -math.inf
                if v in row.stop_ids and len(text) < p.min_tokens:
                    wanted = -math.inf
                assert float(got[b, j, v]) == pytest.approx(wanted, abs=1e-4)
            event(f"penalised: {p.penalises}")


def test_uniforms_want_numbers_of_64_bits_for_every_row() -> None:
    two = torch.tensor([1, 2])
    for seeds, rounds in ((two.int(), two), (two, two[:1]), (two, two.float()), (two.view(1, 2), two.view(1, 2))):
        with pytest.raises(ValueError, match="int64 of one shape"):
            uniforms(seeds, rounds, Stream.SAMPLE, 3)
