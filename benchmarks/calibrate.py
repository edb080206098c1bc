"""Measures this machine's figures for the cost model (``fly bench plan``), and checks its predictions:
``python -m benchmarks.calibrate``, or ``torchrun --nproc-per-node N -m benchmarks.calibrate``.

The figures come from stand-ins: random models that are narrower, wider, shallower and deeper than the predicted models,
run by the same code on the same ranks. So the predicted models themselves never contribute to a prediction. All runs
take turns, so that other work on the machine affects all of them alike.
"""

from __future__ import annotations

import statistics
from collections import abc
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.markup import escape
from rich.table import Column

from fly.backends.torch import TorchExecutor
from fly.cache import PagedKVCache
from fly.cli.options import RANKS, Policy, takes
from fly.cli.run import command, memory_in_words, ranks_of
from fly.cli.show import console, print_list, ratio
from fly.config import DEFAULT_K
from fly.drafts import DraftStrategy, SingleDraft
from fly.extras.bench.clock import clocked, take_turns
from fly.extras.bench.plan import JUDGED, Device, Link, Machines, Setting, Work, forecast, step_seconds
from fly.extras.bench.shapes import random_model, randomise
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.models.bundled import open_model
from fly.models.bundled.tasks import problems
from fly.models.loading import resolve_dtype
from fly.ops import argmax
from fly.parallel import Part, Ranks, memory_here, parallelise
from fly.policies import AcceptancePolicy, Exact, parse_policy
from fly.runner.executor import Executor
from fly.runner.request import Row, Stats
from fly.runner.runner import Runner
from fly.types import Draft, SamplingParams

_WIDTHS, _CONTEXTS = (0.75, 1.25), (64, 320)  # of stand-ins: factors on the width; cached tokens
_DEEPEST = 6  # layers of the largest model that stand-ins are built around: enough to measure a layer's cost
_WINDOW = 0.05  # seconds for which one thing is timed in a turn
_TURNS, _PROMPTS, _TOKENS = 7, 2, 48
_Figure = TypeVar("_Figure")


@dataclass(frozen=True)
class Check:
    """Tokens per second, predicted and measured, without and with a draft; a rank's memory in bytes; and the figures
    behind the prediction, for models of the target's and the draft's size and ``tokens`` per forward."""

    predicted: tuple[float, float]
    measured: tuple[float, float]
    tau: float
    memory: list[dict[str, int]]
    target: Machines
    draft: Machines
    placement: str
    tokens: int


@torch.inference_mode()
def check_here(target: str, draft: str, policy: AcceptancePolicy, k: int, dtype: str, ranks: Ranks | None) -> Check:
    """Predict the speed of a setting on this machine from the figures of other models, run it, and compare.

    ``draft`` is one checkpoint. The tokens that a round emits (``tau``) are measured; every time is predicted.
    """
    llm = LLM(
        *(target, draft, policy, k),
        dtype=dtype,
        device="cpu",
        cache=4096,
        prefix_reuse=False,
        kernels="torch",  # the cost model is about these kernels
        ranks=ranks,
    )
    memory = [memory_here()] if ranks is None else ranks.collect(memory_here())
    checkpoint = open_model(target)
    large, raw, small = checkpoint.config, checkpoint.raw, open_model(draft).config
    kind = resolve_dtype(dtype, raw)
    sharded, timer = is_divided(llm.draft), _Timer(ranks)
    figures = (
        _time_stand_ins(timer, large, kind, k + 1, ranks),
        _time_stand_ins(timer, small, kind, k + 1, ranks if sharded else None),
    )
    with_engine = _time_rounds(timer, llm, large, small, kind, policy, k, ranks, sharded)
    prompts = [llm.chat_prompt(problem.prompt) for problem in problems(None, "heldout", 0, _PROMPTS)]
    runs = [_Run(timer, llm, prompts, most) for most in (0, k)]
    timer.measure()

    here, beside = (explained() for explained in figures)
    here = with_engine(here)
    plain, drafted = (run.stats for run in runs)
    length = round(plain.prompt_tokens / len(prompts))
    setting = Setting(large, small, round(drafted.drafted / drafted.rounds), drafted.tau, context=length + _TOKENS // 2)
    found = forecast(replace(setting, itemsize=kind.itemsize), here, beside)
    where = "sharded" if sharded else "replicated"
    # Prompts are read once per turn; the draft has them cached from the turn before.
    prompt = len(prompts) * (step_seconds(large, here, length, 1, length // 2, kind.itemsize) + here.device.round)
    return Check(
        predicted=(
            plain.generated / (prompt + plain.rounds * found.plain),
            drafted.generated / (prompt + drafted.rounds * found.round(where)),
        ),
        measured=(1 / _middle(runs[0].times), 1 / _middle(runs[1].times)),
        tau=drafted.tau,
        memory=memory,
        target=here,
        draft=beside,
        placement=where,
        tokens=k + 1,
    )


class _Timer:
    """Times many things in turns, on all ranks at once. All ranks get the first rank's figures."""

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks
        self._timed: list[tuple[Callable[[], float], list[float]]] = []

    def add(self, run: Callable[[], float | None], once: bool = False) -> list[float]:
        """Register ``run`` for timing: per call, repeated for a window, or with ``once`` one call per turn that returns
        its own time. The returned list will hold the seconds of every turn."""
        count = 1 if once else 0

        def calls() -> float:
            return sum(run() or 0.0 for _ in range(count))

        def turn() -> float:
            nonlocal count
            if not count:
                each = min(clocked(run)[1] for _ in range(5))
                count = self._shared(min(200, max(8, int(_WINDOW / each))))  # ranks begin unevenly
            if self.ranks is not None:
                self.ranks.collect(None)  # a barrier: all ranks begin together
            own, seconds = clocked(calls)
            return own or seconds / count

        times: list[float] = []
        self._timed.append((turn, times))
        return times

    def measure(self) -> None:
        """Take all turns."""
        timings = take_turns([turn for turn, _ in self._timed], _TURNS)
        for (_, times), found in zip(self._timed, self._shared([timing.times for timing in timings])):
            times += found

    def _shared(self, figure: _Figure) -> _Figure:
        return figure if self.ranks is None else self.ranks.share(figure)


def _middle(times: abc.Iterable[float]) -> float:
    """The mean without the smallest and the largest value. A median would favour short runs, which may fall between
    other work on the machine, over long ones, which cannot."""
    return statistics.mean(sorted(times)[1:-1])


def _stand_ins(config: LlamaConfig, ranks: int) -> list[LlamaConfig]:
    """Configurations of models smaller and larger than ``config`` (or than its first layers, if it is deep), none of
    the same size."""
    depth, unit = min(config.num_hidden_layers, _DEEPEST), 16 * ranks
    return [
        config.resized(
            layers,
            hidden_size=max(unit, round(config.hidden_size * width / unit) * unit),
            intermediate_size=max(unit, round(config.intermediate_size * width / unit) * unit),
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
        for width in _WIDTHS
        for layers in (max(1, depth // 2), depth + 2)
    ]


def _part(config: LlamaConfig, dtype: torch.dtype, ranks: Ranks | None, joined: bool) -> Executor:
    """Build this rank's part of a random model; with ``joined``, forwards include communication with other ranks."""
    if ranks is None or ranks.size == 1:
        return TorchExecutor(random_model(config, dtype))
    part = Part(config, ranks.rank, ranks.size)
    model = randomise(part.build(), dtype, seed=ranks.rank)
    return TorchExecutor(parallelise(model, part, ranks) if joined else model)


def _time_stand_ins(
    timer: _Timer, config: LlamaConfig, dtype: torch.dtype, tokens: int, ranks: Ranks | None
) -> Callable[[], Machines]:
    """Time forwards of the models around ``config``, over one token and over as many as a verification has.

    Returns a function that, after all timing, computes the figures of all ranks, without the engine's time.
    """
    size = 1 if ranks is None else ranks.size
    local: list[tuple[LlamaConfig, int, int, list[float]]] = []
    joined: list[tuple[LlamaConfig, int, list[float], list[float]]] = []
    for shape in _stand_ins(config, size):
        model = _part(shape, dtype, ranks, joined=False)
        for count in (1, tokens):
            alone = [timer.add(feeding(model, count, context)) for context in _CONTEXTS]
            local += [(shape, count, context, times) for context, times in zip(_CONTEXTS, alone)]
            if size > 1:
                together = feeding(_part(shape, dtype, ranks, joined=True), count, _CONTEXTS[0])
                joined.append((shape, count, timer.add(together), alone[0]))

    def explained() -> Machines:
        seconds = [(config, tokens, context, _middle(times)) for config, tokens, context, times in local]
        more = [(config, tokens, _middle(both) - _middle(one)) for config, tokens, both, one in joined]
        return explain(seconds, more, size, dtype.itemsize)

    return explained


def explain(
    local: abc.Sequence[tuple[LlamaConfig, int, int, float]],
    more: abc.Sequence[tuple[LlamaConfig, int, float]],
    size: int,
    itemsize: int,
) -> Machines:
    """Fit the figures with which ``step_seconds`` comes closest to the measurements.

    Args:
        local: model, tokens, context and seconds of forwards of a rank's part alone.
        more: model, tokens and additional seconds for the communication of ``size`` ranks; empty for one rank.
    """
    forwards = [(Work.of(config, size, n, 1, context, itemsize), n, seconds) for config, n, context, seconds in local]
    ones = [((1.0, work.layers, work.read, work.cached), seconds, seconds) for work, n, seconds in forwards if n == 1]
    forward, layer, read, cached = _fit(ones)
    product, attention = _fit(
        [
            ((work.multiplied, work.attended), seconds - forward - work.layers * layer, seconds)
            for work, n, seconds in forwards
            if n > 1
        ]
    )
    exchanges = []
    for config, n, seconds in more:
        exchanged = Work.of(config, size, n, 1, 0, itemsize).exchanged
        passed = 2 * (size - 1) / size * sum(count * each for count, each in exchanged)
        exchanges.append(((sum(count for count, _ in exchanged), passed), seconds, abs(seconds) + 1e-9))
    latency, passing = _fit(exchanges) if exchanges else (0.0, 0.0)
    bandwidth, flops, attending, reading, link = (
        1 / max(each, 1e-15) for each in (read, product, attention, cached, passing)
    )
    figures = ("here", float("inf"), bandwidth, flops, Link(latency, link), layer, forward, 0.0, 0.0)
    return Machines(Device(*figures, attention=attending, cached=reading), size, size)


def _fit(equations: abc.Sequence[tuple[abc.Sequence[float], float, float]]) -> list[float]:
    """Weighted least squares of (factors, result, scale), each divided by its scale, with solutions of at least 0."""
    a = torch.tensor([[factor / scale for factor in factors] for factors, _, scale in equations], dtype=torch.float64)
    b = torch.tensor([result / scale for _, result, scale in equations], dtype=torch.float64)
    units = a.norm(dim=0).clamp_min(1e-300)
    left = list(range(a.shape[1]))
    while left:
        found = torch.linalg.lstsq(a[:, left] / units[left], b.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        if (found >= 0).all():
            break
        del left[int(found.argmin())]
    solution = torch.zeros(a.shape[1], dtype=torch.float64)
    if left:
        solution[left] = found / units[left]
    return [float(value) for value in solution]


def feeding(executor: Executor, tokens: int, context: int) -> Callable[[], None]:
    """Return a function that runs a forward over ``tokens`` after ``context`` and picks the most likely tokens."""
    text = [1, 2, 3, 4] * (context // 4)
    row = Row(text, context, SamplingParams(temperature=0.0), Exact(), seed=0, k=0)
    runner = Runner(executor, PagedKVCache.for_model(executor, context + tokens + 64))
    draft = [4] * (tokens - 1)

    def run() -> None:
        argmax(runner.feed([row], [draft])[0]).tolist()
        runner.commit([row])

    return run


def is_divided(draft: DraftStrategy | None) -> bool:
    """Whether the draft is one model of which each rank has a part."""
    executor = draft.runner.executor if isinstance(draft, SingleDraft) else None
    if not isinstance(executor, TorchExecutor) or not isinstance(model := executor.model, Llama):
        return False
    return model.lm_head.weight.shape[0] < model.config.vocab_size


class _Slips(SingleDraft):
    """A draft with one error in the middle of each block, so that the rule has something to judge: the argmax of a
    small random model is always its last token, for the target as for the draft."""

    def propose(self, rows: abc.Sequence[Row], max_len: abc.Sequence[int], worth: float = 0.0) -> Draft:
        draft = super().propose(rows, max_len, worth)
        tokens_BK = draft.tokens_BK.clone()
        tokens_BK[:, tokens_BK.shape[1] // 2 :].add_(1).remainder_(self.executor.config.vocab_size)
        return replace(draft, tokens_BK=tokens_BK)


def _time_rounds(
    timer: _Timer,
    llm: LLM,
    large: LlamaConfig,
    small: LlamaConfig,
    dtype: torch.dtype,
    policy: AcceptancePolicy,
    k: int,
    ranks: Ranks | None,
    sharded: bool,
) -> Callable[[Machines], Machines]:
    """Time rounds of stand-ins and their forwards; the difference is the engine's time.

    Returns a function that, after all timing, adds to machines the engine's seconds per round and per drafted token.
    """
    size = 1 if ranks is None else ranks.size
    small = LlamaConfig.model_validate({**small.model_dump(), "vocab_size": large.vocab_size})
    large, small = (_stand_ins(config, size)[0] for config in (large, small))
    model, helper = _part(large, dtype, ranks, True), _part(small, dtype, ranks if sharded else None, True)
    forwards = [feeding(made, n, _TOKENS // 2) for made, n in ((model, 1), (model, k + 1), (helper, 1))]
    alone = [timer.add(forward) for forward in forwards]
    drafts = _Slips(helper, cache_tokens=1024)
    if ranks is not None:
        ranks = copy(ranks)
        ranks.draft_placement = "replicated"  # the stand-ins are placed already
    stand_in = LLM(model, drafts, policy, k, cache=1024, ranks=ranks)
    stand_in.tokenizer = llm.tokenizer
    plain, drafted = (_Run(timer, stand_in, [[1, 2, 3, 4]], most) for most in (0, k))

    def with_engine(machines: Machines) -> Machines:
        judged = JUDGED * machines.all_reduce((k + 1) * 8 * machines.ranks)
        rounds, count = plain.stats.rounds + 1, drafted.stats  # plus the prompt's
        beside, besides = [], []  # time outside forwards, without and with a draft
        for one, both, step, verify, draft in zip(plain.times, drafted.times, *alone):
            # Turn by turn: interference slows both alike.
            beside.append(one * plain.stats.generated - rounds * step)
            besides.append(both * count.generated - step - count.rounds * (verify + judged) - count.drafted * draft)
        each = max(_middle(beside) / rounds, 0.0)
        left = _middle(besides) - (count.rounds + 1) * each
        return replace(machines, device=replace(machines.device, round=each, drafted=max(left / count.drafted, 0.0)))

    return with_engine


class _Run:
    """Completions of prompts, with or without a draft; times are per token."""

    def __init__(self, timer: _Timer, llm: LLM, prompts: list[list[int]], k: int) -> None:
        self.stats = Stats()
        params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)

        def run() -> float:
            outputs, seconds = clocked(lambda: [llm.generate([prompt], params, k=k)[0] for prompt in prompts])
            self.stats = sum((output.stats for output in outputs), Stats())
            return seconds / self.stats.generated

        self.times = timer.add(run, once=True)


@command
@takes(RANKS)
def main(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="The target: a checkpoint.")] = "fly-target",
    draft: Annotated[str, typer.Option(help="The draft: a checkpoint.")] = "fly-draft",
    policy: Policy = "exact",
    k: Annotated[int, typer.Option(min=0, help="The most tokens drafted in a round.")] = DEFAULT_K,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    **_: Any,
) -> None:
    """Predict a pair's speed on this machine, on as many ranks as torchrun starts, run it, and compare."""
    with ranks_of(context) as ranks:
        rule = parse_policy(policy, trusted=True)
        _show_check(check_here(target, draft, rule, k, dtype, ranks), target, draft)


def _show_check(found: Check, target: str, draft: str) -> None:
    """Print the prediction, the measurement, and the figures behind the prediction."""
    here, beside = found.target.device, found.draft.device
    speeds = [
        (name, f"{predicted:,.0f} tokens/s", f"{measured:,.0f} tokens/s", f"{predicted / measured:.2f}")
        for name, predicted, measured in zip(("plain", f"draft, {found.placement}"), found.predicted, found.measured)
    ]
    gains = [drafted / plain for plain, drafted in (found.predicted, found.measured)]
    speeds.append(("gain", ratio(gains[0]), ratio(gains[1]), f"{gains[0] / gains[1]:.2f}"))
    title = f"{target} : {draft} on {found.target.ranks} ranks, here"
    print_list(speeds, *_columns("", "predicted", "measured", "predicted / measured"), title=title)
    figures: dict[str, Callable[[Device], str]] = {
        "weights read": lambda d: f"{d.bandwidth / 1e9:.1f} GB/s",
        f"multiplied, {found.tokens} tokens": lambda d: f"{d.flops / 1e9:,.0f} GFLOP/s",
        "keys and values read": lambda d: f"{(d.cached or d.bandwidth) / 1e9:.1f} GB/s",
        "a layer's calls": lambda d: f"{d.layer * 1e6:,.0f} µs",
        "a forward's calls": lambda d: f"{d.forward * 1e6:,.0f} µs",
    }
    both = ((name, figure(here), figure(beside)) for name, figure in figures.items())
    print_list(both, *_columns("", escape(target), escape(draft)), title="figures, of stand-ins for")
    exchange = f" · all-reduce {here.link.latency * 1e6:,.0f} µs" if found.target.ranks > 1 else ""
    engine = f"a round {here.round * 1e6:,.0f} µs, a drafted token {here.drafted * 1e6:,.0f} µs"
    for line in (f"τ {found.tau:.2f} · engine: {engine}{exchange}", memory_in_words(found.memory)):
        console.print(line, highlight=False, soft_wrap=True)


def _columns(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
