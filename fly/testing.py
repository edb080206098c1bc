"""The conformance kit: proves or refutes, on a laptop and without a model, what an acceptance policy claims.

    from fly.testing import check_policy
    print(check_policy(MyRule()))            # raises ConformanceError naming the fault and a small counterexample

In a test-suite::

    @parametrize_with_checks([MyRule(), MyRule(alpha=0.5)])
    def test_my_rule(policy, check):
        check(policy)

From a shell: ``fly check my_rules:MyRule``.

Shape legend: B rows, K longest draft, V vocabulary, N evaluations, A axes of noise (K coins and one draw).

Losslessness is no sampling test. For a block, the verdict is a step function of its noise; its steps are found by
bisection, the unit cube falls into cells on which the verdict is constant, and the distribution of what is emitted is a
sum over all drafts and cells. It is compared with the target's distribution over all strings of K+1 tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fly.errors import origin
from fly.ops import depths
from fly.policies import AcceptancePolicy, Exact, dump_policy, load_policy, parse_policy, verify
from fly.policies.base import exact_accept_probs
from fly.policies.registry import check_types
from fly.request import Stats
from fly.sampling import BatchSampling
from fly.types import Draft, Guarantee, Noise, SamplingParams, Target, Verdict, Why

if TYPE_CHECKING:
    from fly.drafts.check import check_draft

__all__ = [
    "CHECKS",
    "ConformanceError",
    "Finding",
    "Report",
    "check_draft",
    "check_policy",
    "parametrize_with_checks",
    "run_checks",
]

_TOLERANCE = 1e-5  # of a probability: float32 distributions, and bisection to 2^-24
_TICK = 2.0**-24  # the finest step of the engine's uniforms


class ConformanceError(AssertionError):
    """A policy breaks the contract; the message holds the smallest counterexample that was found."""


@dataclass(frozen=True)
class Finding:
    """What one check found: ``detail`` is a counterexample if it failed, else what was measured."""

    check: str
    passed: bool
    detail: str = ""


@dataclass
class Report:
    """All findings about one policy or draft strategy; ``promise`` is what it declares, if anything."""

    subject: str
    promise: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        promise = f", declared {self.promise}" if self.promise else ""
        lines = [f"{self.subject}: {'passes' if self.passed else 'FAILS'}{promise}"]
        for finding in self.findings:
            lines.append(f"  {'ok  ' if finding.passed else 'FAIL'} {finding.check}: {finding.detail}".rstrip(": "))
        return "\n".join(lines)


def check_policy(
    policy: AcceptancePolicy, *, raises: bool = True, advance: Callable[[], None] = lambda: None
) -> Report:
    """Run every check of the kit on ``policy``; ``advance`` is called after each.

    Raises ``ConformanceError`` with the whole report if a check fails, unless ``raises`` is False.
    """
    report = Report(str(policy), f"{policy.guarantee.value}{f', {policy.bound}' if policy.bound else ''}")
    try:
        if hasattr(policy, "__dataclass_fields__"):
            check_types(policy)
    except ValueError as error:  # nothing else that could be found out would be of interest
        report.findings.append(Finding("types of the parameters", False, str(error)))
    else:
        run_checks(report, CHECKS, policy, advance)
    if raises and not report.passed:
        raise ConformanceError(str(report))
    return report


def run_checks(
    report: Report, checks: Iterable[Callable[[Any], str]], subject: Any, advance: Callable[[], None]
) -> None:
    """Add to ``report`` what each check finds out about ``subject``; what is found twice is told once."""
    told: dict[str, str] = {}  # what went wrong, and the check in which it was seen first
    for check in checks:
        try:
            report.findings.append(Finding(_title(check), True, check(subject) or ""))
        except Exception as error:
            detail, where = str(error), ""
            if not isinstance(error, ConformanceError):
                detail, where = f"raised {type(error).__name__}: {error}", f" ({origin(error)})"
            first = told.setdefault(detail, _title(check))
            detail = f"{detail}{where}" if first == _title(check) else f"the same as in '{first}'"
            report.findings.append(Finding(_title(check), False, detail))
        advance()


def __getattr__(name: str) -> Any:
    if name == "check_draft":  # on first use: that kit is made of parts of this one
        from fly.drafts.check import check_draft

        return check_draft
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def parametrize_with_checks(policies: Iterable[AcceptancePolicy]) -> Any:
    """A pytest decorator: one test for each policy and each check, with arguments ``policy`` and ``check``."""
    import pytest

    cases = [
        pytest.param(policy, check, id=f"{policy}-{_title(check)}".replace(" ", "_"))
        for policy in policies
        for check in CHECKS
    ]
    return pytest.mark.parametrize(("policy", "check"), cases)


def _title(check: Callable[..., Any]) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def _require(condition: bool, message: Callable[[], str]) -> None:
    if not condition:
        raise ConformanceError(message())


# ----------------------------------------------------------------------------------------------- random blocks


@dataclass(frozen=True)
class _Case:
    """A block with everything a verdict depends on."""

    target: Target
    draft: Draft
    noise: Noise

    def verdict(self, policy: AcceptancePolicy) -> Verdict:
        return verify(policy, self.target, self.draft, self.noise)


def _block(seed: int, rows: int = 4, longest: int = 9, vocab: int = 6, temperature: float | None = None) -> _Case:
    """A random ragged block: sure and undecided positions, drafts that mostly agree, distributions with zeros.

    ``temperature`` None mixes greedy and sampled rows; 0 is all greedy.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    sharpness = 0.3 + 6 * rand(rows, longest + 1, 1)
    logits = torch.randn(rows, longest + 1, vocab, generator=generator) * sharpness
    if temperature is None:
        temperatures = [0.0 if b % 2 else 0.7 for b in range(rows)]
    else:
        temperatures = [temperature] * rows
    params = [SamplingParams(temperature=t, top_k=vocab - 1 if b % 3 == 0 else 0) for b, t in enumerate(temperatures)]
    distribution = BatchSampling.of(params)
    target_distribution = distribution.probs(logits)
    draft_distribution = distribution.probs(logits[:, :-1] + torch.randn(rows, longest, vocab, generator=generator))
    greedy = logits[:, :-1].argmax(-1)
    sampled = torch.multinomial(draft_distribution.flatten(0, 1) + 1e-9, 1, generator=generator).view(rows, longest)
    tokens = torch.where(rand(rows, longest) < 0.6, greedy, sampled)
    # A drafted token always has mass in the distribution it was drawn from; mix some in, and let greedy rows be
    # one-hot.
    one_hot = torch.zeros_like(draft_distribution).scatter_(-1, tokens.unsqueeze(-1), 1.0)
    draft_distribution = torch.where(
        distribution.greedy_B.view(-1, 1, 1), one_hot, 0.9 * draft_distribution + 0.1 * one_hot
    )
    lengths = torch.randint(0, longest + 1, (rows,), generator=generator)
    lengths[0] = longest
    all_greedy = all(t == 0 for t in temperatures)
    stochastic = not all_greedy and seed % 2 == 0
    control = torch.zeros(vocab, dtype=torch.bool)
    control[vocab - 1] = True
    history = [torch.randint(0, vocab, (5 + b,), generator=generator).tolist() for b in range(rows)]
    target = Target(
        logits,
        None if all_greedy else target_distribution,
        greedy_B=distribution.greedy_B,
        control_V=control,
        generated_B=torch.arange(rows),
        relaxed_B=torch.arange(rows) // 2,
        nats_B=torch.arange(rows) / 2,
        history=history,
    )
    return _Case(
        target,
        Draft(tokens, lengths, draft_distribution if stochastic else None),
        Noise(rand(rows, longest), rand(rows)),
    )


def _cases(count: int = 12) -> list[_Case]:
    """Small ones first, so that the first to fail makes a small counterexample."""
    temperatures = (0.0, 1.0, None)
    return [
        _block(seed, 1 + seed % 5, longest, 3 + seed % 4, temperatures[seed % 3])
        for seed, longest in enumerate(int(1 + 11 * i / max(count - 1, 1)) for i in range(count))
    ]


def _alone(case: _Case, b: int, padding: int | None = None) -> _Case:
    """Row ``b`` by itself, without padding (or with that many columns of it, filled with other content)."""
    n = int(case.draft.lengths_B[b])
    index_B = torch.tensor([b])
    t, d, z = case.target.rows(index_B), case.draft.rows(index_B), case.noise.rows(index_B)
    width = n if padding is None else n + padding
    source = torch.arange(width + 1).clamp_max(n)  # positions beyond the row's own repeat its last
    logits = t.logits_BKV[:, source].clone()
    probs = None if t.all_greedy else t.probs_BKV[:, source].clone()
    columns = torch.arange(width).clamp_max(max(n - 1, 0))
    if n == 0 and width:
        tokens = torch.zeros(1, width, dtype=torch.int64)
        distribution = None if d.probs_BKV is None else torch.full((1, width, logits.shape[-1]), 1 / logits.shape[-1])
        coins = torch.zeros(1, width)
    else:
        tokens, coins = d.tokens_BK[:, columns].clone(), z.accept_BK[:, columns].clone()
        distribution = None if d.probs_BKV is None else d.probs_BKV[:, columns].clone()
    if padding:
        logits[:, n + 1 :] = -logits[:, n + 1 :]
        tokens[:, n:] = (tokens[:, n:] + 1) % logits.shape[-1]
        coins[:, n:] = 0.0
    target = Target(
        logits,
        probs,
        greedy_B=t.greedy_B,
        control_V=t.control_V,
        generated_B=t.generated_B,
        relaxed_B=t.relaxed_B,
        nats_B=t.nats_B,
        history=t.history,
    )
    return _Case(target, Draft(tokens, d.lengths_B, distribution), Noise(coins, z.sample_B))


def _outcome(verdict: Verdict, b: int, length: int) -> tuple[int, int, list[int]]:
    return int(verdict.accepted_B[b]), int(verdict.next_token_B[b]), verdict.why_BK[b, :length].tolist()


def _show(case: _Case, b: int = 0) -> str:
    """A row of a block in a few lines."""
    n = int(case.draft.lengths_B[b])
    kind = "temperature 0" if bool(case.target.greedy_B[b]) else "sampled"
    parts = [f"{kind}, draft {case.draft.tokens_BK[b, :n].tolist()}"]
    if n <= 3:
        parts.append(f"target {_round(case.target.probs_BKV[b, : n + 1])}")
        if case.draft.probs_BKV is not None:
            parts.append(f"draft distribution {_round(case.draft.probs_BKV[b, :n])}")
        parts.append(f"coins {_round(case.noise.accept_BK[b, :n])}")
    return ", ".join(parts)


def _round(values: Tensor) -> str:
    return str([[round(v, 4) for v in row] if isinstance(row, list) else round(row, 4) for row in values.tolist()])


# ----------------------------------------------------------------------------------------------------- checks


def check_shapes_and_ranges(policy: AcceptancePolicy) -> str:
    """accept_probs is [B, K] in [0, 1]; a verdict never accepts more than was drafted, and its codes fit."""
    blocks = _cases()
    for case in blocks:
        rows, longest = case.draft.tokens_BK.shape
        probs = policy.accept_probs(case.target, case.draft)
        _require(
            tuple(probs.shape) == (rows, longest),
            lambda: f"accept_probs has shape {tuple(probs.shape)}, expected {(rows, longest)}",  # noqa: B023
        )
        inside = probs[case.draft.mask_BK()].float()
        _require(
            bool((torch.isfinite(inside) & (inside >= 0) & (inside <= 1)).all()),
            lambda: f"accept_probs outside [0, 1]: {_round(probs.float())} for {_show(case)}",  # noqa: B023
        )
        verdict = case.verdict(policy)
        accepted, following = verdict.accepted_B, verdict.next_token_B
        vocab = case.target.logits_BKV.shape[-1]
        _require(
            accepted.shape == (rows,) and following.shape == (rows,) and verdict.why_BK.shape == (rows, longest),
            lambda: f"verdict shapes {accepted.shape}, {following.shape}, {verdict.why_BK.shape}",  # noqa: B023
        )
        for b in range(rows):
            n, length = int(accepted[b]), int(case.draft.lengths_B[b])
            codes = verdict.why_BK[b, :length].tolist()
            fits = 0 <= n <= length and 0 <= int(following[b]) < vocab
            kept = all(code in (Why.MATCH, Why.RELAXED) for code in codes[:n])
            gone = all(code == Why.REJECTED for code in codes[n:])
            _require(
                fits and kept and gone,
                lambda: f"accepted {n} of {length}, codes {codes}, for {_show(case, b)}",  # noqa: B023
            )
    return f"{len(blocks)} random blocks"


def check_inputs_untouched(policy: AcceptancePolicy) -> str:
    """No tensor that comes in is changed."""
    for case in _cases():
        tensors = {
            "logits": case.target.logits_BKV,
            "target distribution": case.target.probs_BKV,
            "drafted tokens": case.draft.tokens_BK,
            "lengths": case.draft.lengths_B,
            "draft distribution": case.draft.probs_BKV,
            "coins": case.noise.accept_BK,
            "draws": case.noise.sample_B,
        }
        before = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        case.verdict(policy)
        for name, copy in before.items():
            same = torch.equal(copy, tensors[name])  # type: ignore[arg-type]  # only those that are not None
            _require(same, lambda: f"{name} changed in place, for {_show(case)}")  # noqa: B023
    return ""


def check_row_alone_equals_row_in_batch(policy: AcceptancePolicy) -> str:
    """A row's verdict depends on that row alone: not on its neighbours, their number, or their order."""
    for case in _cases(18):
        whole = case.verdict(policy)
        order = torch.arange(case.draft.tokens_BK.shape[0] - 1, -1, -1)
        turned = _Case(case.target.rows(order), case.draft.rows(order), case.noise.rows(order)).verdict(policy)
        for b in range(len(order)):
            length = int(case.draft.lengths_B[b])
            expected = _outcome(_alone(case, b).verdict(policy), 0, length)
            batches = {
                "in a batch": _outcome(whole, b, length),
                "in a reversed batch": _outcome(turned, len(order) - 1 - b, length),
            }
            for how, found in batches.items():
                _require(
                    found == expected,
                    lambda: f"row {b} alone gives (accepted, next, why) {expected}, {how} {found}: {_show(case, b)}",  # noqa: B023
                )
    return ""


def check_padding_is_ignored(policy: AcceptancePolicy) -> str:
    """What stands right of a row's length never matters."""
    for case in _cases(18):
        for b in range(case.draft.tokens_BK.shape[0]):
            length = int(case.draft.lengths_B[b])
            expected = _outcome(_alone(case, b).verdict(policy), 0, length)
            found = _outcome(_alone(case, b, padding=3).verdict(policy), 0, length)
            _require(
                found == expected,
                lambda: f"without padding (accepted, next, why) {expected}, with {found}: {_show(case, b)}",  # noqa: B023
            )
    return ""


def check_empty_and_full_drafts(policy: AcceptancePolicy) -> str:
    """An empty draft emits one token of the target's distribution; a draft the target is sure of stands whole."""
    for temperature in (0.0, 1.0):
        case = _block(1, 3, 4, 5, temperature)
        empty = Draft.empty(3)
        target = Target(case.target.logits_BKV[:, :1], None if temperature == 0 else case.target.probs_BKV[:, :1])
        verdict = verify(policy, target, empty, Noise(torch.zeros(3, 0), case.noise.sample_B))
        _require(int(verdict.accepted_B.sum()) == 0, lambda: "accepted tokens of an empty draft")
        for b, token in enumerate(verdict.next_token_B.tolist()):
            _require(
                float(target.probs_BKV[b, 0, token]) > 0,
                lambda: f"an empty draft emitted token {token}, which the target's distribution excludes",  # noqa: B023
            )
    logits = torch.full((2, 5, 4), -20.0)
    tokens = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1]])
    logits.scatter_(2, torch.cat([tokens, tokens[:, :1]], 1).unsqueeze(-1), 20.0)
    for probs in (None, logits.softmax(-1)):
        draft = Draft(tokens, torch.tensor([4, 4]), None if probs is None else probs[:, :-1])
        verdict = verify(
            policy, Target(logits, probs), draft, Noise(torch.full((2, 4), 1 - _TICK), torch.full((2,), 0.5))
        )
        _require(
            verdict.accepted_B.tolist() == [4, 4] and verdict.next_token_B.tolist() == tokens[:, 0].tolist(),
            lambda: f"a draft equal to a sure target stood only {verdict.accepted_B.tolist()} of 4",  # noqa: B023
        )
    return ""


def check_control_tokens_inside(policy: AcceptancePolicy) -> str:
    """Drafts with an end-of-sequence inside are judged like any other; whether one is ever excused is reported."""
    relaxed = asked = 0
    for seed in range(60):
        case = _block(seed, 6, 10, 4, (0.0, 1.0)[seed % 2])
        verdict = case.verdict(policy)
        assert case.target.control_V is not None
        control = case.target.control_V[case.draft.tokens_BK] & case.draft.mask_BK()
        asked += int((control & verdict.asked_BK).sum())
        relaxed += int((control & (verdict.why_BK == Why.RELAXED)).sum())
    if relaxed:
        return f"note: excused {relaxed} of {asked} drafted control tokens; '& ~control' protects them"
    return f"none of {asked} excused"


def check_correction_is_a_distribution(policy: AcceptancePolicy) -> str:
    """Wherever a token can be rejected, the correction's distribution is finite, nowhere negative, and has mass."""
    for seed, longest in enumerate((1, 1, 2, 3, 5, 8)):
        case = _block(seed, 4, longest, 4, 1.0 if seed % 2 else None)
        probs = policy.accept_probs(case.target, case.draft)
        for j in range(longest):
            distribution = policy.correction(case.target, case.draft, torch.full((4,), j))
            for b in range(4):
                if j < int(case.draft.lengths_B[b]) and not bool(case.target.greedy_B[b]) and float(probs[b, j]) < 1:
                    row = distribution[b]
                    good = bool(torch.isfinite(row).all() and (row >= 0).all())
                    mass = float(row.sum())
                    # A rejection that rounding alone makes possible needs no correction of its own.
                    _require(
                        good and (mass > 0 or float(probs[b, j]) > 1 - _TOLERANCE),
                        lambda: f"correction {_round(row)} at position {j}: {_show(case, b)}",  # noqa: B023
                    )
    return ""


def check_no_hidden_randomness(policy: AcceptancePolicy) -> str:
    """The same inputs give the same verdict on every rank: whatever the state of the global generators."""
    copy = pickle.loads(pickle.dumps(policy))
    _require(copy == policy, lambda: "a pickled copy differs from the policy")
    for case in _cases():
        state = torch.get_rng_state()
        try:
            outcomes = []
            for seed, rule in ((1, policy), (2, copy)):
                torch.manual_seed(seed)
                random.seed(seed)
                verdict = case.verdict(rule)
                outcomes.append((verdict.accepted_B.tolist(), verdict.next_token_B.tolist(), verdict.why_BK.tolist()))
        finally:
            torch.set_rng_state(state)
        _require(
            outcomes[0] == outcomes[1],
            lambda: f"two ranks decide {outcomes[0][:2]} and {outcomes[1][:2]} on the same block: {_show(case)}",  # noqa: B023
        )
    return ""


def check_written_and_read(policy: AcceptancePolicy) -> str:
    """A frozen dataclass that its text and its mapping give back."""
    params = getattr(policy, "__dataclass_params__", None)
    _require(
        params is not None and params.frozen,
        lambda: f"{type(policy).__name__} is no frozen dataclass",
    )
    hash(policy)
    data = dump_policy(policy)
    again = load_policy(data, trusted=True)
    _require(again == policy, lambda: f"{data} reads as {again!r}")
    if _has_names(data):
        _require(parse_policy(str(policy)) == policy, lambda: f"'{policy}' reads as {parse_policy(str(policy))!r}")
    return str(policy)


def _has_names(data: Any) -> bool:
    """Whether every rule in a mapping is registered; those that are not are written ``module:Class``."""
    if isinstance(data, dict):
        return ":" not in str(data.get("name")) and all(_has_names(value) for value in data.values())
    return all(_has_names(item) for item in data) if isinstance(data, list) else True


def check_monotone(policy: AcceptancePolicy) -> str:
    """Where the policy claims it (``monotone``), a larger parameter never accepts less (or more, for -1)."""
    claims = policy.monotone
    for name, direction in claims.items():
        values = _around(getattr(policy, name))
        for seed in range(40):
            case = _block(seed, 4, 8, 5, (0.0, 1.0, None)[seed % 3])
            previous: Tensor | None = None
            for value in values:
                try:
                    variant = dataclasses.replace(policy, **{name: value})  # type: ignore[type-var]
                except ValueError:
                    continue  # outside the parameter's range
                accepted = case.verdict(variant).accepted_B
                if previous is not None:
                    falls = (accepted - previous) * direction < 0
                    _require(
                        not bool(falls.any()),
                        lambda: f"{name}={value} accepts {accepted.tolist()}, a smaller one {previous.tolist()}",  # type: ignore[union-attr]  # noqa: B023
                    )
                previous = accepted
    return ", ".join(f"{name} {'up' if sign > 0 else 'down'}" for name, sign in claims.items()) or "nothing claimed"


def _around(value: float | int) -> list[float | int]:
    """Values about ``value``, ascending, of its own type."""
    if isinstance(value, int):
        return sorted({max(0, value + step) for step in (-3, -1, 0, 1, 3)})
    return sorted({value * factor for factor in (0.0, 0.25, 0.5, 1.0, 1.5, 3.0)} | {0.05})


def check_guarantee(policy: AcceptancePolicy) -> str:
    """Lossless as declared, within the bound as declared, or, for a heuristic, how far from the target it strays."""
    worst, where = 0.0, ""
    for claim in _distribution_cases():
        for divergence in claim(policy):
            if policy.guarantee is Guarantee.LOSSLESS and divergence.gap > _TOLERANCE:
                reasons = "".join(f"; {reason}" for reason in _suspicions(policy))
                raise ConformanceError(f"declared lossless, but {divergence.story}{reasons}")
            if policy.bound is not None and divergence.first is not None:
                distance = divergence.first[0 if policy.bound.measure == "kl" else 1]
                if distance > policy.bound.value + 1e-4:
                    raise ConformanceError(f"declared {policy.bound}, found {distance:.5f}: {divergence.story}")
            if divergence.total > worst:
                worst, where = divergence.total, divergence.story
    if policy.guarantee is Guarantee.BOUNDED and policy.bound is None:
        raise ConformanceError("declared bounded, but names no bound")
    if policy.guarantee is Guarantee.LOSSLESS:
        return f"lossless: exact sum over all drafts, K = 1, 2, 3 (largest gap {worst:.1e})"
    if worst <= _TOLERANCE:
        return f"declared {policy.guarantee.value}; no draft of up to 3 tokens (11 at temperature 0) changed it"
    return f"moves the distribution of a block by up to {worst:.3f} in total variation: {where}"


def _suspicions(policy: AcceptancePolicy) -> list[str]:
    """What may be wrong with a rule that is not lossless: each an experiment on random sampled blocks."""
    found: dict[str, None] = {}
    for seed in range(24):
        for case in (_block(seed, 4, 5, 4, 0.0), _block(seed, 4, 5, 4, 1.0)):
            lowest, next_BK = torch.zeros_like(case.noise.accept_BK), torch.full_like(case.noise.accept_BK, _TICK)
            kept_B, without_B = (
                verify(policy, case.target, case.draft, Noise(coins, case.noise.sample_B)).accepted_B
                for coins in (lowest, next_BK)
            )
            if bool((kept_B > without_B).any()):
                found["a coin of 0 keeps a token that the target excludes (keep where coin < chance, strictly)"] = None
        case = _block(seed, 4, 5, 4, 1.0)
        target, draft, mask_BK = case.target, case.draft, case.draft.mask_BK()
        chances_BK = policy.accept_probs(target, draft)

        def changes(target: Target, draft: Draft) -> bool:
            difference_BK = policy.accept_probs(target, draft) - chances_BK  # noqa: B023
            return bool((difference_BK[mask_BK].abs() > _TOLERANCE).any())  # noqa: B023

        if changes(Target(target.logits_BKV * 1.7, target.probs_BKV), draft):
            found["its chances change with the unprocessed logits while the target's processed distribution stays"] = (
                None
            )
        exact_BK = exact_accept_probs(target, draft)
        exact = bool(((exact_BK - chances_BK)[mask_BK].abs() <= _TOLERANCE).all())
        if draft.probs_BKV is not None and not exact:
            one_hot = torch.zeros_like(draft.probs_BKV).scatter_(-1, draft.tokens_BK.unsqueeze(-1), 1.0)
            other = Draft(draft.tokens_BK, draft.lengths_B, 0.5 * draft.probs_BKV + 0.5 * one_hot)
            if not changes(target, other):
                found["its chances ignore the distribution that the draft was drawn from (draft.probs_BKV)"] = None
        if not exact:
            where = int(((exact_BK - chances_BK).abs() * mask_BK).flatten().argmax())
            b, j = divmod(where, draft.tokens_BK.shape[1])
            if not any(reason.startswith("its chances") for reason in found):
                found[
                    f"its chances are not min(1, target/draft): {float(chances_BK[b, j]):.4f} where that is "
                    f"{float(exact_BK[b, j]):.4f}"
                ] = None
            continue
        for j in range(draft.tokens_BK.shape[1]):
            at_B = torch.full((len(mask_BK),), j)
            own_BV, exact_BV = policy.correction(target, draft, at_B), Exact().correction(target, draft, at_B)
            asked_B = mask_BK[:, j] & (exact_BV.sum(-1) > 1e-3)
            apart_B = (_shares(own_BV) - _shares(exact_BV)).abs().amax(-1)
            if bool((apart_B[asked_B] > 1e-3).any()):
                found["its correction is not drawn from max(target - draft, 0)"] = None
    return list(found)


def _shares(probs_BV: Tensor) -> Tensor:
    return probs_BV / probs_BV.sum(-1, keepdim=True)


def check_trees(policy: AcceptancePolicy) -> str:
    """On trees: a chain written as a tree is judged as a chain, and a lossless rule stays lossless with several
    candidates for a place, certain ones and sampled ones (an exact sum, as for chains)."""
    if type(policy).verdict is AcceptancePolicy.verdict:
        for case in _cases():
            rows, longest = case.draft.tokens_BK.shape
            parents = torch.arange(-1, longest - 1).expand(rows, -1)
            tree = dataclasses.replace(case, draft=dataclasses.replace(case.draft, parents_BK=parents))
            chain, found = case.verdict(policy), tree.verdict(policy)
            for b in range(rows):
                n = int(case.draft.lengths_B[b])
                _require(
                    _outcome(found, b, n) == _outcome(chain, b, n),
                    lambda: (
                        f"as a chain (accepted, next, why) {_outcome(chain, b, n)}, as a tree "  # noqa: B023
                        f"{_outcome(found, b, n)}: {_show(case, b)}"  # noqa: B023
                    ),
                )
    if policy.guarantee is not Guarantee.LOSSLESS:
        return "chains written as trees"
    worst = 0.0
    for shape, vocab in (([-1, -1], 3), ([-1, -1, 0], 3), ([-1, -1, 1], 2), ([-1, 0, 0], 2)):
        for story, gap in _tree_gaps(policy, shape, vocab):
            _require(gap <= _TOLERANCE, lambda: f"declared lossless, but a tree of parents {shape}, {story}")  # noqa: B023
            worst = max(worst, gap)
    return f"lossless: exact sum over trees of up to 3 tokens (largest gap {worst:.1e})"


def _tree_gaps(policy: AcceptancePolicy, parents: list[int], vocab: int) -> list[tuple[str, float]]:
    """For a shape of tree, the largest difference between emitted and target distribution of any string: for siblings
    drawn independently from a distribution, and for every certain tree (of different siblings)."""
    longest = max(depths(parents)) + 1
    logits, targets, distributions = _distribution_table(longest, vocab, len(parents))
    drawn = torch.tensor(list(itertools.product(range(vocab), repeat=len(parents))))
    tree_BK = torch.tensor(parents).expand(len(drawn), -1)
    draft = Draft(drawn, torch.full((len(drawn),), len(parents)), None, tree_BK)
    prefixes = [[_spelled(draft, b, place) for place in range(len(parents) + 1)] for b in range(len(drawn))]

    def at(tables: list[Tensor], prefix: list[int]) -> Tensor:
        index = 0
        for token in prefix:
            index = index * vocab + token
        return tables[len(prefix)][index]

    raw_BMV, target_BMV = (
        torch.stack([torch.stack([at(tables, prefix) for prefix in places]) for places in prefixes])
        for tables in (logits, targets)
    )
    draft_BKV = torch.stack([torch.stack([at(distributions, places[p + 1]) for p in parents]) for places in prefixes])
    chance_B = draft_BKV.gather(-1, drawn.unsqueeze(-1)).squeeze(-1).double().prod(-1)
    wanted = _joint(targets, longest + 1, vocab)

    def distribution_of(rows_N: Tensor, probs_BKV: Tensor | None) -> Tensor:
        target = Target(raw_BMV[rows_N], target_BMV[rows_N], history=[[0]] * len(rows_N))
        some = dataclasses.replace(draft, probs_BKV=probs_BKV).rows(rows_N)
        return _emitted_distribution(policy, target, some, targets, vocab)

    possible = (chance_B > 0).nonzero().squeeze(1)
    emitted = (distribution_of(possible, draft_BKV) * chance_B[possible].unsqueeze(1)).sum(0)

    def compare(emitted: Tensor, what: str) -> tuple[str, float]:
        found = _compare(emitted, wanted, vocab, longest, what, targets)
        return found.story, found.gap

    found = [compare(emitted, f"siblings drawn from one distribution {_round(distributions[0])}")]
    different = torch.tensor(
        [
            b
            for b, tokens in enumerate(drawn.tolist())
            if len(set(zip(parents, tokens))) == len(parents)  # no two siblings alike
        ]
    )
    for b, distribution in zip(different.tolist(), distribution_of(different, None)):
        found.append(compare(distribution, f"certain tokens {drawn[b].tolist()}"))
    return found


def check_gates(policy: AcceptancePolicy) -> str:
    """How often each clause of a relaxation is asked and holds on random blocks; one that never opens is named."""
    asked = relaxed = 0
    stats, relaxation = Stats(), policy.relaxation
    for seed in range(60):
        case = _block(seed, 6, 15, 6, (0.0, 1.0)[seed % 2])
        verdict = case.verdict(policy)
        asked += int(verdict.asked_BK.sum())
        relaxed += int((verdict.why_BK == Why.RELAXED).sum())
        if relaxation is not None and verdict.clauses:
            for b, j in verdict.asked_BK.nonzero().tolist():
                held = {name: bool(clause[b, j]) for name, clause in verdict.clauses.items()}
                stats.count_gates(held, *relaxation.deciding(held))
    if not stats.gates and not relaxed:
        return "excuses nothing"
    shares = [
        f"{name} holds at {gate.passed / gate.asked:.0%}, alone refuses {gate.refused / gate.asked:.0%}"
        for name, gate in stats.gates.items()
    ]
    note = f"; NEVER OPENS: {', '.join(stats.silent_gates)}" if stats.silent_gates else ""
    told = f" ({'; '.join(shares)})" if shares else ""
    return f"excuses {relaxed} of {asked} mismatches{told}{note}"


def check_cost(policy: AcceptancePolicy) -> str:
    """Microseconds a decision (the least of seven), for one row of 15 drafted tokens over 32,000."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 16, 32_000, generator=generator)
    costs = []
    for probs in (None, logits.softmax(-1)):
        tokens = logits[:, :-1].argmax(-1)
        distribution = None if probs is None else probs[:, :-1]
        draft, noise = (
            Draft(tokens, torch.tensor([15]), distribution),
            Noise(torch.rand(1, 15, generator=generator), torch.rand(1)),
        )
        times = []
        for _ in range(7):
            target = Target(logits, probs, history=[[0]])
            times.append(_seconds(lambda: verify(policy, target, draft, noise)))  # noqa: B023
        costs.append(min(times) * 1e6)
    # Something to hold it against: what the target does with these logits at the least.
    head, hidden = torch.randn(32_000, 1024, generator=generator), torch.randn(16, 1024, generator=generator)
    projection = min(_seconds(lambda: hidden @ head.T) for _ in range(3)) * 1e6
    shares = [f"{cost:,.0f} µs {kind} ({cost / projection:.0%})" for cost, kind in zip(costs, ("greedy", "sampled"))]
    return (
        f"{', '.join(shares)} for 1 × 15 × 32,000; in brackets the share of an output projection of width 1,024 over "
        f"the same tokens, a small part of a forward"
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


CHECKS: tuple[Callable[[AcceptancePolicy], str], ...] = (
    check_shapes_and_ranges,
    check_inputs_untouched,
    check_row_alone_equals_row_in_batch,
    check_padding_is_ignored,
    check_empty_and_full_drafts,
    check_control_tokens_inside,
    check_correction_is_a_distribution,
    check_no_hidden_randomness,
    check_written_and_read,
    check_monotone,
    check_guarantee,
    check_trees,
    check_gates,
    check_cost,
)


# ---------------------------------------------------------------------------------------- distributions as exact sums


@dataclass(frozen=True)
class _Divergence:
    """How the distribution of K+1 tokens differs from the target's."""

    gap: float  # largest difference of any string's probability
    total: float  # total variation distance; at temperature 0 the share of drafts that change the text
    first: tuple[float, float] | None  # KL(emitted || target) and total variation of the first token alone
    story: str


def _distribution_cases() -> list[Callable[[AcceptancePolicy], list[_Divergence]]]:
    """BatchSampling comparisons from the smallest to the largest, so that the first that fails is a small
    counterexample."""
    tables: list[tuple[int, int, int]] = [(1, 2, seed) for seed in range(24)]
    tables += [(1, 3, seed) for seed in range(6)] + [(2, 2, seed) for seed in range(4)]
    tables += [(2, 3, seed) for seed in range(3)] + [(3, 2, seed) for seed in range(3)] + [(3, 3, 0)]
    greedy = [lambda policy, s=s: _greedy_divergence(policy, *s) for s in ((1, 3), (2, 3), (3, 3), (11, 2))]
    return [*greedy, *(lambda policy, t=t: _divergences(policy, *t) for t in tables)]


def _greedy_divergence(policy: AcceptancePolicy, longest: int, vocab: int) -> list[_Divergence]:
    """At temperature 0 the emitted tokens must be the target's argmax path, for every draft of ``longest`` tokens.

    ``total`` is the share of all drafts that change the text.
    """
    generator = torch.Generator().manual_seed(longest)
    drafts = torch.tensor(list(itertools.product(range(vocab), repeat=longest)))
    rows = drafts.shape[0]
    # Position j's logits depend on the drafted prefix, as a model's do.
    tables = [torch.randn(vocab**j, vocab, generator=generator) for j in range(longest + 1)]
    logits = torch.stack([tables[j][_prefix_index(drafts, j, vocab)] for j in range(longest + 1)], dim=1)
    target = Target(logits, history=[[0]] * rows)
    found = []
    for coin in (0.0, 0.5, 1 - _TICK):  # coins must not matter, the lowest least of all
        noise = Noise(torch.full((rows, longest), coin), torch.full((rows,), coin))
        verdict = verify(policy, target, Draft(drafts, torch.full((rows,), longest)), noise)
        kept = torch.arange(longest) < verdict.accepted_B.unsqueeze(1)
        choice = target.argmax_BK
        wrong = (kept & (drafts != choice[:, :-1])).any(-1)
        wrong |= verdict.next_token_B != choice.gather(1, verdict.accepted_B.unsqueeze(1)).squeeze(1)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            n = int(verdict.accepted_B[b])
            emitted = [*drafts[b, :n].tolist(), int(verdict.next_token_B[b])]
            story = (
                f"at temperature 0 draft {drafts[b].tolist()} emits {emitted}, the target {choice[b, : n + 1].tolist()}"
            )
            found.append(_Divergence(1.0, float(wrong.float().mean()), None, story))
    return found


def _prefix_index(drafts_BK: Tensor, length: int, vocab: int) -> Tensor:
    """[B] number of each row's prefix of ``length`` tokens, in base ``vocab``."""
    index = torch.zeros(drafts_BK.shape[0], dtype=torch.int64)
    for j in range(length):
        index = index * vocab + drafts_BK[:, j]
    return index


def _distribution_table(longest: int, vocab: int, seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Raw logits, processed target distributions and draft distributions by prefix: tables [V^j, V] for each position
    j."""
    generator = torch.Generator().manual_seed(1000 * longest + 100 * vocab + seed)
    simple = [[0.5, 0.5], [1.0, 0.0], [0.25, 0.75], [0.0, 1.0], [0.75, 0.25]]
    logits, targets, drafts = [], [], []
    params = SamplingParams(temperature=0.6, top_k=vocab - 1 if vocab > 2 else 0)
    for j in range(longest + 1):
        size = vocab**j
        if longest == 1 and vocab == 2 and seed < 20:
            target = torch.tensor([simple[seed % 5]] * size)
            draft = torch.tensor([simple[(seed // 5 + 2 * j + 2) % 5]] * size)
            raw = target.clamp_min(1e-6).log() * 0.6  # what temperature 0.6 turns into the target's distribution
        else:
            raw = torch.randn(size, vocab, generator=generator) * 1.5
            target = BatchSampling.of([params]).probs(raw.unsqueeze(0))[0]
            noisy = raw + torch.randn(size, vocab, generator=generator)
            draft = BatchSampling.of([params]).probs(noisy.unsqueeze(0))[0]
        logits.append(raw)
        targets.append(target)
        drafts.append(draft)
    return logits, targets, drafts[:-1]


def _divergences(policy: AcceptancePolicy, longest: int, vocab: int, seed: int) -> list[_Divergence]:
    """Emitted against target distribution for one table of distributions: with a sampled draft, and with every certain
    draft."""
    logits, targets, drafts = _distribution_table(longest, vocab, seed)
    strings = torch.tensor(list(itertools.product(range(vocab), repeat=longest)))
    prefixes = [_prefix_index(strings, j, vocab) for j in range(longest + 1)]
    raw = torch.stack([logits[j][prefixes[j]] for j in range(longest + 1)], dim=1)
    target_distribution = torch.stack([targets[j][prefixes[j]] for j in range(longest + 1)], dim=1)
    draft_distribution = torch.stack([drafts[j][prefixes[j]] for j in range(longest)], dim=1)
    chance = draft_distribution.gather(-1, strings.unsqueeze(-1)).squeeze(-1).prod(-1).double()
    wanted = _joint(targets, longest + 1, vocab)
    found = []

    def distribution_of(rows: Tensor, stochastic: bool) -> Tensor:
        """[rows, V^(K+1)] distribution of the emitted tokens, completed by the target, for each given draft."""
        target = Target(raw[rows], target_distribution[rows], history=[[0]] * len(rows))
        draft = Draft(
            strings[rows], torch.full((len(rows),), longest), draft_distribution[rows] if stochastic else None
        )
        return _emitted_distribution(policy, target, draft, targets, vocab)

    possible = (chance > 0).nonzero().squeeze(1)
    emitted = (distribution_of(possible, True) * chance[possible].unsqueeze(1)).sum(0)
    found.append(_compare(emitted, wanted, vocab, longest, f"draft distribution {_round(drafts[0])}", targets))
    certain = distribution_of(torch.arange(len(strings)), False)
    for row, string in zip(certain, strings.tolist()):
        found.append(_compare(row, wanted, vocab, longest, f"certain draft {string}", targets))
    return found


def _joint(tables: list[Tensor], length: int, vocab: int) -> Tensor:
    """[V^length] probability of every string under conditional tables, float64."""
    joint = torch.ones(1, dtype=torch.float64)
    for j in range(length):
        joint = (joint.unsqueeze(1) * tables[j].double()).reshape(-1)
    return joint


def _compare(
    emitted: Tensor, wanted: Tensor, vocab: int, longest: int, what: str, targets: list[Tensor]
) -> _Divergence:
    difference = (emitted - wanted).abs()
    worst = int(difference.argmax())
    string = [worst // vocab**i % vocab for i in range(longest, -1, -1)]
    first, first_wanted = (distribution.view(vocab, -1).sum(1) for distribution in (emitted, wanted))
    support = first > 1e-12
    kl = float((first[support] * (first[support] / first_wanted[support].clamp_min(1e-300)).log()).sum())
    return _Divergence(
        gap=float(difference.max()),
        total=float(difference.sum() / 2),
        first=(kl, float((first - first_wanted).abs().sum() / 2)),
        story=(
            f"K={longest}, {what}, target distribution {_round(targets[0])}: emits {string} with probability "
            f"{float(emitted[worst]):.5f}, the target {float(wanted[worst]):.5f}"
        ),
    )


def _emitted_distribution(
    policy: AcceptancePolicy, target: Target, draft: Draft, targets: list[Tensor], vocab: int
) -> Tensor:
    """[B, V^(D+1)] distribution of D+1 tokens, D the longest draft: those the verdict emits, the rest by the target;
    exact over all noise."""
    rows, longest = draft.tokens_BK.shape[0], len(targets) - 1
    cells = _cells(policy, target, draft)
    distribution = torch.zeros(rows, vocab ** (longest + 1), dtype=torch.float64)
    for b, volume, place, token in cells:
        prefix = [*_spelled(draft, b, place), token]
        index = 0
        for t in prefix:
            index = index * vocab + t
        rest = torch.ones(1, dtype=torch.float64)
        start = index
        for j in range(len(prefix), longest + 1):
            block = vocab ** (j - len(prefix))
            table = targets[j][start * block : (start + 1) * block].double()
            rest = (rest.unsqueeze(1) * table).reshape(-1)
        width = vocab ** (longest + 1 - len(prefix))
        distribution[b, start * width : (start + 1) * width] += volume * rest
    return distribution


def _cells(policy: AcceptancePolicy, target: Target, draft: Draft) -> list[tuple[int, float, int, int]]:
    """``(row, volume, place, next token)`` of every cell of the noise cube on which a row's verdict is constant; the
    place is what the next token follows: 0 the row, j + 1 the drafted token j."""
    rows, longest = draft.tokens_BK.shape
    axes = longest + 1
    steps = _steps(policy, target, draft)
    found, where, volumes = [], [], []
    for b in range(rows):
        edges = [[0.0, *steps[b][axis], 1.0] for axis in range(axes)]
        sides = [list(itertools.pairwise(e)) for e in edges]
        for corner in itertools.product(*sides):
            where.append([(low + high) / 2 for low, high in corner])
            volume = 1.0
            for low, high in corner:
                volume *= high - low
            volumes.append(volume)
            found.append(b)
    accepted, tokens = _evaluate(policy, target, draft, torch.tensor(found), torch.tensor(where, dtype=torch.float64))
    return list(zip(found, volumes, accepted.tolist(), tokens.tolist()))


def _evaluate(
    policy: AcceptancePolicy, target: Target, draft: Draft, index_N: Tensor, noise_NA: Tensor
) -> tuple[Tensor, Tensor]:
    """Places and next tokens [N] of the rows ``index_N`` under N points of noise."""
    noise_NA = noise_NA.float().clamp_max(1 - _TICK)
    verdict = verify(policy, target.rows(index_N), draft.rows(index_N), Noise(noise_NA[:, :-1], noise_NA[:, -1]))
    place_N = verdict.accepted_B
    if verdict.path_BK is not None:
        place_N = torch.tensor([path[-1] + 1 if path else 0 for path in verdict.paths()])
    return place_N, verdict.next_token_B


def _spelled(draft: Draft, b: int, place: int) -> list[int]:
    """The drafted tokens of a row on the way to a place."""
    tokens = draft.tokens_BK[b].tolist()
    if draft.parents_BK is None:
        return tokens[:place]
    spelled, parents = [], draft.parents_BK[b].tolist()
    while place:
        spelled.append(tokens[place - 1])
        place = parents[place - 1] + 1
    return spelled[::-1]


def _steps(policy: AcceptancePolicy, target: Target, draft: Draft) -> list[list[list[float]]]:
    """Where each row's verdict changes along each axis of noise, to 2^-24: found on a grid, refined by bisection.

    An axis is scanned with the other coins at both ends (accepting and rejecting), which shows every step of rules
    whose thresholds do not depend on other coins; all published ones are such.
    """
    rows, longest = draft.tokens_BK.shape
    axes, grid = longest + 1, 65
    ends = (0.0, 1.0 - _TICK)
    lines: list[tuple[int, int, list[float]]] = []  # row, axis, the other coordinates
    for b in range(rows):
        for axis in range(axes):
            others = (
                itertools.product(ends, repeat=longest)
                if axis == longest
                else ((*coins, draw) for coins in itertools.product(ends, repeat=longest - 1) for draw in (0.0,))
            )
            lines += [(b, axis, list(rest)) for rest in others]
    points = torch.linspace(0, 1, grid, dtype=torch.float64)

    def outcomes(which: list[int], at: Tensor) -> Tensor:
        """Codes of the verdicts of lines ``which`` at coordinate ``at`` each."""
        noise = torch.tensor([lines[i][2] for i in which], dtype=torch.float64).reshape(len(which), axes - 1)
        axis = torch.tensor([lines[i][1] for i in which])
        columns = torch.arange(axes - 1)
        full = torch.zeros(len(which), axes, dtype=torch.float64)
        target_column = columns + (columns >= axis.unsqueeze(1)).long()
        full.scatter_(1, target_column, noise)
        full.scatter_(1, axis.unsqueeze(1), at.unsqueeze(1))
        accepted, tokens = _evaluate(policy, target, draft, torch.tensor([lines[i][0] for i in which]), full)
        return accepted * (target.logits_BKV.shape[-1] + 1) + tokens

    numbers = [i for i in range(len(lines)) for _ in range(grid)]
    codes = outcomes(numbers, points.repeat(len(lines))).view(len(lines), grid)
    changed = (codes[:, 1:] != codes[:, :-1]).nonzero().tolist()
    pending = [(i, float(points[g]), float(points[g + 1]), int(codes[i, g]), int(codes[i, g + 1])) for i, g in changed]
    found: list[list[set[float]]] = [[set() for _ in range(axes)] for _ in range(rows)]
    while pending:
        low, high = torch.tensor([p[1] for p in pending]).double(), torch.tensor([p[2] for p in pending]).double()
        left = torch.tensor([p[3] for p in pending])
        which = [p[0] for p in pending]
        for _ in range(20):
            middle = (low + high) / 2
            same = outcomes(which, middle) == left
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        after = outcomes(which, high).tolist()
        again = []
        for (i, _, end, _, right), step, code in zip(pending, high.tolist(), after):
            b, axis, _ = lines[i]
            found[b][axis].add(round(step * 2**22) / 2**22)
            if code != right and end - step > 2 * _TICK:
                again.append((i, step, end, code, right))
        pending = again
    return [[sorted(s for s in steps if 0 < s < 1) for steps in row] for row in found]
