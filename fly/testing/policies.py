"""The conformance kit of acceptance policies: proves or refutes what a policy claims, without a model.

    from fly.testing import check_policy
    print(check_policy(MyRule()))            # raises ConformanceError naming the fault and a small counterexample

In a test-suite::

    @parametrize_with_checks([MyRule(), MyRule(alpha=0.5)])
    def test_my_rule(policy, check):
        check(policy)

From a shell: ``fly check my_rules:MyRule``. Losslessness is an exact sum, without samples (``fly.testing.guarantees``).

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pickle
import timeit
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fly.expressions import check_parameters
from fly.ops import one_hot
from fly.policies import (
    AcceptancePolicy,
    Block,
    Condition,
    dump_policy,
    exact_accept_probs,
    load_policy,
    parse_policy,
    verify,
)
from fly.policies.binding import parts_of
from fly.policies.reads import DRAFT_LOGITS, PARTS, note_logits
from fly.policies.waits import find_wait, see_on_device
from fly.runner.request import Stats
from fly.runner.sampling import BatchSampling
from fly.testing.blocks import (
    TICK,
    TOLERANCE,
    Case,
    bind_to,
    make_block,
    make_cases,
    make_draft_logits,
    once_for_each,
    require_same,
    rounded,
)
from fly.testing.guarantees import check_guarantee, check_tokens_judged_alone, check_trees
from fly.testing.report import Finding, Report, require, run_checks, seeded, title
from fly.testing.toys import make_executor, toy_target
from fly.types import Draft, Noise, SamplingParams, Target, Verdict, Why

if TYPE_CHECKING:
    from fly.runner.executor import Executor

__all__ = ["CHECKS", "check_policy", "parametrize_with_checks"]

R = TypeVar("R", AcceptancePolicy, Condition)


def check_policy(
    policy: AcceptancePolicy,
    *,
    raises: bool = True,
    advance: Callable[[], None] = lambda: None,
    more: Iterable[Callable[[AcceptancePolicy], str | None]] = (),
) -> Report:
    """Run every check of the kit on ``policy``, and ``more`` checks; ``advance`` is called after each.

    Raises ``ConformanceError`` with the whole report if a check fails, unless ``raises`` is False.
    """
    report = Report(str(policy), f"{policy.guarantee.value}{f', {policy.bound}' if policy.bound else ''}")
    try:
        if dataclasses.is_dataclass(type(policy)):
            check_parameters(policy)
    except ValueError as error:  # all other findings would follow from this one
        report.findings.append(Finding("types of the parameters", False, str(error)))
    else:
        run_checks(report, (*CHECKS, *more), policy, advance)
    return report.settle(raises)


def parametrize_with_checks(policies: Iterable[AcceptancePolicy]) -> Any:
    """A pytest decorator: one test for each policy and each check, with arguments ``policy`` and ``check``."""
    import pytest

    params = [
        pytest.param(policy, check, id=f"{policy}-{title(check)}".replace(" ", "_"))
        for policy in policies
        for check in CHECKS
    ]
    return pytest.mark.parametrize(("policy", "check"), params)


def check_shapes_and_ranges(policy: AcceptancePolicy) -> str:
    """accept_probs is [B, K] in [0, 1]; a verdict accepts no more tokens than were drafted, and its codes agree."""
    for case in make_cases():
        shape, vocab = case.draft.shape, case.target.logits_BKV.shape[-1]
        probs = case.chances(policy)
        require(probs.shape == shape, f"accept_probs has shape {tuple(probs.shape)}, expected {shape}")
        drafted_probs, probs_text = probs[case.draft.mask_BK()].float(), f"{rounded(probs.float())} for {case.show()}"
        require(not drafted_probs.isnan().any(), f"accept_probs is NaN: {probs_text}")
        require(bool(((drafted_probs >= 0) & (drafted_probs <= 1)).all()), f"accept_probs outside [0, 1]: {probs_text}")
        verdict = case.verdict(policy)
        shapes = [tuple(t.shape) for t in (verdict.accepted_B, verdict.next_token_B, verdict.why_BK)]
        require(shapes == [shape[:1], shape[:1], shape], f"verdict shapes {', '.join(map(str, shapes))}")
        for b, (n, following, codes) in enumerate(case.outcomes(policy)):
            all_accepted = all(code in (Why.MATCH, Why.RELAXED) for code in codes[:n])
            is_consistent = all_accepted and all(code == Why.REJECTED for code in codes[n:]) and 0 <= n <= len(codes)
            outcome_text = f"accepted {n} of {len(codes)}, codes {codes}, next token {following}, for {case.show(b)}"
            require(is_consistent and 0 <= following < vocab, outcome_text)
    return f"hold on {len(make_cases())} random blocks"


def check_inputs_untouched(policy: AcceptancePolicy) -> None:
    """No input tensor is changed."""
    for case in make_cases():
        parts = {"target": {"logits_BKV": case.target.logits_BKV, "probs_BKV": case.target.probs_BKV}}
        parts |= {"draft": vars(case.draft), "noise": vars(case.noise)}
        tensors = (
            (f"{part}.{name}", tensor) for part, part_tensors in parts.items() for name, tensor in part_tensors.items()
        )
        copies = [(name, tensor, tensor.clone()) for name, tensor in tensors if isinstance(tensor, torch.Tensor)]
        case.verdict(policy)
        for name, tensor, original in copies:
            require(torch.equal(original, tensor), f"{name} changed in place, for {case.show()}")


def check_row_alone_equals_row_in_batch(policy: AcceptancePolicy) -> None:
    """A row's verdict depends on that row alone: not on its neighbours, their number, or their order."""
    for case in make_cases(18):
        lone_outcomes = [case.alone(b).outcomes(policy)[0] for b in case.numbers]
        require_same(case, "alone", lone_outcomes, "in a batch", case.outcomes(policy))
        require_same(case, "alone", lone_outcomes, "in a reversed batch", case.reversed().outcomes(policy)[::-1])


def check_padding_is_ignored(policy: AcceptancePolicy) -> None:
    """Padding after a row's draft never matters."""
    for case in make_cases(18):
        unpadded, padded = ([case.alone(b, padding).outcomes(policy)[0] for b in case.numbers] for padding in (0, 3))
        require_same(case, "without padding", unpadded, "with padding", padded)


def check_empty_and_full_drafts(policy: AcceptancePolicy) -> None:
    """An empty draft emits one token of the target's distribution; a draft that the target is sure of is kept whole."""
    for temperature in (0.0, 1.0):
        case = make_block(1, 3, 4, 5, temperature)
        probs = case.target.probs_BKV[:, :1] if temperature else None
        target = case.target.about(torch.arange(3), case.target.logits_BKV[:, :1], probs)
        empty_draft = dataclasses.replace(Draft.empty(3), logits_BKV=torch.zeros(3, 0, 5))
        empty_case = Case(target, empty_draft, Noise(torch.zeros(3, 0), case.noise.sample_B))
        for b, (accepted, token, _) in enumerate(empty_case.outcomes(policy)):
            require(not accepted, "accepted tokens of an empty draft")
            is_possible = float(target.probs_BKV[b, 0, token]) > 0
            require(is_possible, f"an empty draft emitted token {token}, which the target's distribution excludes")
    tokens = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1]])
    logits = one_hot(torch.zeros(2, 5, 4), torch.cat([tokens, tokens[:, :1]], 1)) * 40 - 20
    for probs in (None, logits.softmax(-1)):
        draft = Draft(tokens, torch.tensor([4, 4]), None if probs is None else probs[:, :-1], None, logits[:, :-1])
        noise = Noise(torch.full((2, 4), 1 - TICK), torch.full((2,), 0.5))
        outcomes = Case(Target(logits, probs, history=[[0], [1]]), draft, noise).outcomes(policy)
        accepted_counts = [n for n, _, _ in outcomes]
        all_kept = accepted_counts == [4, 4] and [token for _, token, _ in outcomes] == [0, 3]
        require(all_kept, f"{accepted_counts} of 4 tokens are kept of drafts that the target is sure of")


def check_control_tokens_inside(policy: AcceptancePolicy) -> str:
    """A drafted end-of-sequence is judged like any other token. The report says whether one is ever excused."""
    relaxed = asked_count = 0
    for case, verdict in _judged(policy, 10, 4):
        assert case.target.control_V is not None
        control_BK = case.target.control_V[case.draft.tokens_BK] & case.draft.mask_BK()
        asked_count += int((control_BK & verdict.asked_BK).sum())
        relaxed += int((control_BK & (verdict.why_BK == Why.RELAXED)).sum())
    if relaxed:
        advice = "" if policy.relaxation is None else "; '& ~control' protects them"
        return f"note: excused {relaxed} of {asked_count} drafted control tokens{advice}"
    return f"none of {asked_count} excused"


def _judged(policy: AcceptancePolicy, longest: int, vocab: int) -> Iterator[tuple[Case, Verdict]]:
    """Yield random blocks, greedy and sampled in turn, with the policy's verdicts."""
    for seed in range(60):
        case = make_block(seed, 6, longest, vocab, (0.0, 1.0)[seed % 2])
        yield case, case.verdict(policy)


def check_correction_is_a_distribution(policy: AcceptancePolicy) -> None:
    """Wherever a token can be rejected, the correction's distribution is finite, nowhere negative, and has mass."""
    for seed, longest in enumerate((1, 1, 2, 3, 5, 8)):
        case = make_block(seed, 4, longest, 4, 1.0 if seed % 2 else None)
        chances = case.chances(policy)
        judged = case.draft.mask_BK() & ~case.target.greedy_B.unsqueeze(1) & (chances < 1)
        for b, j in judged.nonzero().tolist():
            row = case.correction(policy, j)[b]
            # A rejection that only rounding makes possible needs no correction.
            mass = float(row.sum()) > 0 or float(chances[b, j]) > 1 - TOLERANCE
            is_distribution = mass and bool((torch.isfinite(row) & (row >= 0)).all())
            require(is_distribution, f"correction {rounded(row)} at position {j}: {case.show(b)}")


def check_no_hidden_randomness(policy: AcceptancePolicy) -> str | None:
    """The verdict depends on its inputs alone: it is the same every time, on every rank, after other blocks, and in
    every state of the global random generators."""
    _require_function(policy)
    try:
        copy = pickle.loads(pickle.dumps(policy))
    except Exception as error:  # a user's class may raise anything
        return f"note: it cannot be pickled, as processes that share a model need it: {error}"
    for case in make_cases():
        require_same(case, "by the policy", case.outcomes(policy), "by a pickled copy", case.outcomes(copy))
    return None


@once_for_each
def _require_function(policy: AcceptancePolicy) -> None:
    """Raise ``ConformanceError`` if a verdict depends on anything but its inputs."""
    for case in make_cases():
        first, again, other = (seeded(seed, lambda: case.outcomes(policy)) for seed in (1, 1, 2))  # noqa: B023
        require_same(case, "asked once", first, "asked again (a rule keeps no state)", again)
        require_same(case, "on one of two ranks", first, "on the other", other)


def check_written_and_read(policy: AcceptancePolicy) -> str:
    """It is a frozen dataclass, and reading its text or its mapping gives the same rule."""
    for part in parts_of(policy):
        params = getattr(part, "__dataclass_params__", None)
        is_frozen = params is not None and params.frozen
        require(is_frozen, f"{type(part).__name__} is no frozen dataclass: write @dataclass(frozen=True) above it")
    data = dump_policy(policy)
    try:
        json.dumps(data)
    except (TypeError, ValueError) as error:
        return f"note: only Python can make this rule, no text and no file: {error}"
    read_policy = load_policy(data, trusted=True)
    require(read_policy.keyed == policy.keyed, f"{data} reads as {read_policy!r} (a list is read as a tuple)")
    has_name = _has_names(data)
    read_policy = parse_policy(str(policy)) if has_name else policy
    require(read_policy.keyed == policy.keyed, f"'{policy}' reads as {read_policy!r}")
    return f"{policy}, read from its {'text and its ' if has_name else ''}mapping, is the same rule"


def _has_names(data: Any) -> bool:
    """Return whether every rule in a mapping is registered. Others are written ``module:Class``."""
    if isinstance(data, dict):
        return ":" not in str(data.get("name")) and all(_has_names(value) for value in data.values())
    return all(_has_names(item) for item in data) if isinstance(data, list) else True


def check_monotone(policy: AcceptancePolicy) -> str:
    """A larger value of a parameter that the policy lists in ``monotone`` never accepts fewer tokens (or more, if the
    parameter is listed with -1), and its conditions hold for no fewer mismatches where they list one."""
    claims = _check_steps(policy, lambda case, rule: case.verdict(rule).accepted_B, "accepts")
    for condition in _conditions_of(policy):
        condition_claims = _check_steps(condition, _count_held, "holds for")
        claims += [f"{claim} (of {condition})" for claim in condition_claims]
    return ", ".join(claims) or "declares no parameter that accepts ever more, or ever less, as it grows ('monotone')"


def _conditions_of(policy: AcceptancePolicy) -> list[Condition]:
    """Return the conditions that a policy is made of, each once."""
    rules = [policy] if policy.relaxation is None else [policy, policy.relaxation]
    parts = {id(part): part for rule in rules for part in parts_of(rule)}
    return [part for part in parts.values() if isinstance(part, Condition)]


def _count_held(case: Case, condition: Condition) -> torch.Tensor:
    """Return at which mismatches of the exact rule a condition holds, int64 [B, K]."""
    drafted_BK = case.draft.mask_BK()
    agree_BK = (case.noise.accept_BK < exact_accept_probs(case.target, case.draft)) & drafted_BK
    held_BK = bind_to(condition, case.target).holds(Block(case.target, case.draft, agree_BK))
    return (held_BK & ~agree_BK & drafted_BK).long()


def _check_steps(rule: R, measure: Callable[[Case, R], torch.Tensor], does: str) -> list[str]:
    """Check that ``measure`` [B, ...] grows, or falls, with each parameter that a rule or condition lists in
    ``monotone``. Returns the claims."""
    claims = []
    for name, direction in rule.monotone.items():
        require(hasattr(rule, name), f"{rule}: monotone lists {name!r}, which is no parameter")
        variants: list[tuple[float, R]] = []
        for value in _around(getattr(rule, name)):
            with contextlib.suppress(ValueError):  # the value is outside of the parameter's range
                variants.append((value, dataclasses.replace(rule, **{name: value})))  # type: ignore[type-var]
        for seed in range(40):
            case = make_block(seed, 4, 8, 5, (0.0, 1.0, None)[seed % 3])
            measured = [(value, measure(case, variant)) for value, variant in variants]
            for (_, less), (value, more) in itertools.pairwise(measured):
                detail = f"{rule}: {name}={value} {does} {more.tolist()}, a smaller one {less.tolist()}"
                require(bool(((more - less) * direction >= 0).all()), detail)
        claims.append(f"a larger {name} never {does} {'less' if direction > 0 else 'more'}")
    return claims


def _around(value: float | int) -> list[float | int]:
    """Return values near ``value``, ascending, of the same type."""
    if isinstance(value, int):
        return sorted({max(0, value + step) for step in (-3, -1, 0, 1, 3)})
    return sorted({value * factor for factor in (0.0, 0.25, 0.5, 1.0, 1.5, 3.0)} | {0.05})


def check_gates(policy: AcceptancePolicy) -> str:
    """Count how often each clause of a relaxation is asked and holds on random blocks, and name the clauses that never
    hold."""
    asked_count = relaxed = 0
    stats, relaxation = Stats(), policy.relaxation
    for _, verdict in _judged(policy, 15, 6):
        asked_count += int(verdict.asked_BK.sum())
        relaxed += int((verdict.why_BK == Why.RELAXED).sum())
        if relaxation is not None and verdict.clauses:
            for b, j in verdict.asked_BK.nonzero().tolist():
                holds = {name: bool(clause[b, j]) for name, clause in verdict.clauses.items()}
                stats.count_gates(holds, *relaxation.deciding(holds))
    if not stats.gates and not relaxed:
        return "no mismatch is excused, so there is no condition (gate) to count"
    shares = "; ".join(
        f"{name} holds at {gate.passed / gate.asked:.0%}, alone refuses {gate.refused / gate.asked:.0%}"
        for name, gate in stats.gates.items()
    )
    never = f"; NEVER OPENS: {', '.join(stats.silent_gates)}" if stats.silent_gates else ""
    return (
        f"excuses {relaxed} of {asked_count} mismatches"
        f"{f'; of its conditions (gates), {shares}' if shares else ''}{never}"
    )


def check_what_it_reads(policy: AcceptancePolicy) -> str:
    """A rule reads the draft's logits in all blocks, or says so by ``also_reads``: the engine finds out by a few blocks
    whether to supply them."""
    reads = frozenset[str]()
    for case in make_cases():
        rule, noted_parts = bind_to(policy, case.target), set[str]()
        reads |= rule.reads
        verify(rule, case.target, note_logits(case.draft, noted_parts), case.noise)
        require(
            noted_parts <= rule.reads,
            f"it reads draft.logits_BKV in some blocks only: write 'also_reads = ({DRAFT_LOGITS!r},)' into its class, "
            f"or it gets none from the engine: {case.show()}",
        )
    part_names = [name for name in PARTS if name in reads]
    return f"reads {', '.join(part_names) or 'nothing'} besides the target's output and the drafted tokens"


def check_in_a_graph(policy: AcceptancePolicy) -> str:
    """On a CUDA device the rule decides as elsewhere, in a graph or outside of it."""
    graph_count = 0
    for case in make_cases():
        is_drawn = not case.target.all_greedy
        if case.target.some_greedy and is_drawn:
            continue  # a graph decides greedy rows and others apart
        waits = _find_wait(policy, is_drawn, case.draft.probs_BKV is not None) is not None
        graph_count += not waits
        device_case = dataclasses.replace(case, target=see_on_device(case.target, not waits))
        require_same(case, "elsewhere", case.outcomes(policy), "on a CUDA device", device_case.outcomes(policy))
    return f"holds on random blocks, {graph_count} of them inside a graph"


def check_cuda_graph(policy: AcceptancePolicy) -> str:
    """Report whether the decision can be captured in a CUDA graph, for drawn drafts and for others."""
    kinds = {"at temperature 0": (False, False), "above it": (True, True), "above it, of copied drafts": (True, False)}
    waits = {kind: _find_wait(policy, *settings) for kind, settings in kinds.items()}
    reasons: dict[str, list[str]] = {}
    for kind, reason in waits.items():
        if reason is not None:
            reasons.setdefault(reason, []).append(kind)
    if not reasons:
        return "runs inside the graph"
    prefix = "" if len(reasons) == 1 and None not in waits.values() else "{}: "
    reasons_text = "; ".join(prefix.format(", ".join(kinds)) + reason for reason, kinds in reasons.items())
    return f"runs outside of the graph: {reasons_text}"


@once_for_each
def _find_wait(policy: AcceptancePolicy, is_drawn: bool, is_sampled: bool) -> str | None:
    """Return why a graph cannot hold the decision (``find_wait``), by a vocabulary of the size that it tries."""
    return find_wait(bind_to(policy, Target(torch.zeros(1, 2, 32))), is_drawn, is_sampled)


@functools.cache
def _projection() -> float:
    """Measure the output projection of a block of 16 places, in seconds for each token of the vocabulary. Decisions are
    compared with it."""
    generator = torch.Generator().manual_seed(0)
    head, hidden = torch.randn(32_000, 1024, generator=generator), torch.randn(16, 1024, generator=generator)
    return min(timeit.repeat(lambda: hidden @ head.T, number=1, repeat=3)) / len(head)


@functools.cache
def _cost_block(vocab: int) -> tuple[Executor, torch.Tensor, list[list[int]], Draft]:
    """Make one row of 15 drafted tokens: an executor, the target's logits [1, 16, V] and its choices, and the draft."""
    generator = torch.Generator().manual_seed(vocab)
    # Normal logits with a standard deviation above sqrt(2 ln V) are about as uncertain as a trained model's.
    logits = torch.randn(1, 16, vocab, generator=generator) * 1.3 * math.sqrt(2 * math.log(vocab))
    choices = logits.argmax(-1).tolist()  # a forward returns them too
    drafted = [(token + (j % 5 == 4)) % vocab for j, token in enumerate(choices[0][:-1])]  # one in five is wrong
    return make_executor(toy_target(vocab)), logits, choices, Draft.of([drafted])


def check_cost(policy: AcceptancePolicy) -> str:
    """Measure how long a decision takes, from logits to kept tokens (the fastest of five runs). The block is one row
    of 15 drafted tokens, at temperature 0 and at 0.8 with top-p 0.95."""
    nucleus = BatchSampling.of([SamplingParams(temperature=0.8, top_p=0.95)])
    cost_texts = []
    for vocab in (32_000, 128_256):
        executor, logits, choices, draft = _cost_block(vocab)
        rule = bind_to(policy, Target(logits))
        if rule.reads_logits:
            draft = dataclasses.replace(draft, logits_BKV=make_draft_logits(draft, vocab))

        def decide(kind: str) -> None:
            probs = None if kind == "greedy" else executor.process(nucleus, logits)  # noqa: B023
            target = Target(logits, probs, history=[[0]], choices=choices)  # noqa: B023
            executor.decide_group(rule, target, draft, [0], [1])  # noqa: B023

        costs = []
        for kind in ("greedy", "sampled"):
            cost = min(timeit.repeat(functools.partial(decide, kind), number=1, repeat=5))
            costs.append(f"{cost * 1e6:,.0f} µs {kind} ({cost / _projection() / vocab:.1%})")
        cost_texts.append(f"{', '.join(costs)} for a vocabulary of {vocab:,}")
    return f"{'; '.join(cost_texts)}; in brackets, relative to the output projection of a model of width 1,024"


def _if_a_function(check: Callable[[AcceptancePolicy], str | None]) -> Callable[[AcceptancePolicy], str | None]:
    """Guard a check that sums over all noise. If a verdict depends on anything but its inputs, the search for its steps
    would not end."""

    @functools.wraps(check)
    def checked(policy: AcceptancePolicy) -> str | None:
        _require_function(policy)
        return check(policy)

    return checked


CHECKS: tuple[Callable[[AcceptancePolicy], str | None], ...] = (
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
    check_tokens_judged_alone,
    _if_a_function(check_guarantee),
    _if_a_function(check_trees),
    check_gates,
    check_what_it_reads,
    check_in_a_graph,
    check_cuda_graph,
    check_cost,
)
