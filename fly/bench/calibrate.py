"""This machine's figures for the model of costs, and whether what they predict is what happens.

Figures come from stand-ins: random models narrower and wider, shallower and deeper than those that are predicted, run
by the same code, on the same ranks. So nothing of a prediction has seen what it predicts. All runs take turns, so that
what else the machine does falls on all alike.
"""

from __future__ import annotations

import statistics
import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fly.bench.clock import take_turns
from fly.bench.plan import JUDGED, SMALL, Device, Link, Machines, Setting, forecast, share_of, step_seconds, weights
from fly.bench.shapes import random_model, randomise
from fly.bundled import resolve_checkpoint
from fly.bundled.tasks import problems
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.engine import Runner
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.models.loading import resolve_dtype
from fly.ops import argmax
from fly.parallel import Part, Ranks, memory_here, parallelise
from fly.parallel.draft import Placement
from fly.policies import AcceptancePolicy, Exact
from fly.request import Sequence, Stats
from fly.types import Draft, SamplingParams

__all__ = ["Check", "check_here", "explain"]

_WIDTHS, _CONTEXTS = (0.75, 1.25), (64, 320)  # of stand-ins: times the width; tokens behind a forward
_DEEPEST = 6  # layers of what a stand-in stands for: enough to tell a layer's cost
_WINDOW = 0.05  # seconds that one thing is timed for in a turn
_TURNS, _PROMPTS, _TOKENS = 7, 2, 48


@dataclass(frozen=True)
class Check:
    """Tokens a second, predicted and measured, without and with a draft; what a rank took of memory, in bytes; and the
    figures that predicted it, for models of the target's size and of the draft's, ``tokens`` multiplied at once."""

    predicted: tuple[float, float]
    measured: tuple[float, float]
    tau: float
    memory: list[dict[str, int]]
    target: Machines
    draft: Machines
    placement: str
    tokens: int


@torch.inference_mode()
def check_here(
    target: str, draft: str, policy: AcceptancePolicy, k: int, dtype: str, ranks: Ranks | None, placement: Placement
) -> Check:
    """Predict a setting on this machine from figures that are none of its own, run it, and compare.

    ``draft`` is one checkpoint. Rounds emit as many tokens as they do (``tau`` is measured); every time is predicted.
    Raises ``ValueError`` for a draft on the first rank alone, which the model of costs knows nothing of.
    """
    if placement == "first":
        raise ValueError("draft_placement 'first' is no part of the plan; choices: ['auto', 'replicated', 'sharded']")
    llm = LLM(
        *(target, draft, policy, k, dtype, "cpu"),
        cache_tokens=4096,
        prefix_reuse=False,
        kernels="torch",  # whose costs these are
        ranks=ranks,
        draft_placement=placement,
    )
    memory = [memory_here()] if ranks is None else ranks.collect(memory_here())
    large, raw = LlamaConfig.read(resolve_checkpoint(target))
    small, _ = LlamaConfig.read(resolve_checkpoint(draft))
    kind = resolve_dtype(dtype, raw)
    sharded = _is_sharded(llm)
    timer = _Timer(ranks)
    figures = (
        _StandIns(timer, large, kind, k + 1, ranks),
        _StandIns(timer, small, kind, k + 1, ranks if sharded else None),
    )
    rounds = _Rounds(timer, llm, large, small, kind, policy, k, ranks, sharded)
    prompts = [llm.chat_prompt(problem.prompt) for problem in problems(None, "heldout", 0, _PROMPTS)]
    runs = [_Run(timer, llm, prompts, most) for most in (0, k)]
    timer.measure()

    here, beside = (each.machines() for each in figures)
    here = rounds.host(here)
    plain, drafted = (run.stats for run in runs)
    length = round(plain.prompt_tokens / len(prompts))
    setting = Setting(large, small, round(drafted.drafted / drafted.rounds), drafted.tau, context=length + _TOKENS // 2)
    found = forecast(replace(setting, itemsize=kind.itemsize), here, beside)
    where = "sharded" if sharded else "replicated"
    # Prompts are read once in a turn; the draft has them from the turn before.
    prompt = len(prompts) * (step_seconds(large, here, length, 1, length // 2, kind.itemsize) + here.device.round)
    predicted = [prompt + plain.rounds * found.plain, prompt + drafted.rounds * found.round(where)]
    speeds = tuple(run.stats.generated / seconds for run, seconds in zip(runs, predicted))
    measured = tuple(1 / run.timing.seconds for run in runs)
    return Check(speeds, measured, drafted.tau, memory, here, beside, where, k + 1)  # type: ignore[arg-type]


class _Timed:
    """Something that is timed, turn after turn."""

    times: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        return _middle(self.times)


class _Timer:
    """Times many things in turns, on all ranks at once; ranks all get the first one's figures."""

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks
        self._timed: list[tuple[_Timed, Callable[[], float]]] = []

    def add(self, run: Callable[[], float | None], once: bool = False) -> _Timed:
        """Time ``run`` a call, again and again for a window; or ``once`` a turn, by what it returns."""
        count = 1 if once else 0

        def turn() -> float:
            nonlocal count
            if not count:
                each = min(_seconds(run) for _ in range(5))
                count = min(200, max(8, int(_WINDOW / each)))  # ranks that have waited for one another begin unevenly
                count = count if self.ranks is None else self.ranks.share(count)
            if self.ranks is not None:
                self.ranks.collect(None)  # so that all begin together
            own = 0.0
            start = time.perf_counter()
            for _ in range(count):
                own += run() or 0.0
            return own or (time.perf_counter() - start) / count

        timed = _Timed()
        self._timed.append((timed, turn))
        return timed

    def measure(self) -> None:
        """Take all turns."""
        timings = take_turns([turn for _, turn in self._timed], _TURNS, torch.device("cpu"))
        times = [timing.times for timing in timings]
        for (timed, _), each in zip(self._timed, times if self.ranks is None else self.ranks.share(times)):
            timed.times = each


def _middle(times: abc.Sequence[float]) -> float:
    """The mean but for the least and the most: a median would show short runs a machine that is free in between, and
    long ones one that is not."""
    return statistics.mean(sorted(times)[1:-1])


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _stand_ins(config: LlamaConfig, ranks: int) -> list[LlamaConfig]:
    """Models that surround ``config`` (or its first layers, if it is deep), and are none like it."""
    depth = min(config.num_hidden_layers, _DEEPEST)

    def scaled(size: int, width: float) -> int:
        unit = 16 * ranks
        return max(unit, round(size * width / unit) * unit)

    return [
        LlamaConfig.model_validate(
            {
                **config.model_dump(),
                "hidden_size": scaled(config.hidden_size, width),
                "intermediate_size": scaled(config.intermediate_size, width),
                "num_hidden_layers": layers,
                "max_position_embeddings": 1024,
                "tie_word_embeddings": True,
            }
        )
        for width in _WIDTHS
        for layers in (max(1, depth // 2), depth + 2)
    ]


def _part(config: LlamaConfig, dtype: torch.dtype, ranks: Ranks | None, joined: bool) -> Llama:
    """A random model: this rank's part of it, whose forwards are ``joined`` with the others' or left to itself."""
    if ranks is None or ranks.size == 1:
        return random_model(config, dtype)
    part = Part(config, ranks.rank, ranks.size)
    model = randomise(part.build(), dtype, seed=ranks.rank)
    return parallelise(model, part, ranks) if joined else model


def _forward(model: Llama, tokens: int, context: int) -> Callable[[], None]:
    """A forward over ``tokens`` behind ``context``, and its most likely tokens."""
    row = Sequence([1, 2, 3, 4] * (context // 4), context, SamplingParams(temperature=0.0), Exact(), seed=0, k=0)
    runner = Runner(model, PagedKVCache.for_model(model, context + tokens + 64))
    draft = [4] * (tokens - 1)

    def run() -> None:
        argmax(runner.feed([row], [draft])).tolist()
        runner.commit([row])

    return run


class _StandIns:
    """Forwards of the models around ``config``, of one token and of as many as a verification looks at."""

    def __init__(
        self, timer: _Timer, config: LlamaConfig, dtype: torch.dtype, tokens: int, ranks: Ranks | None
    ) -> None:
        self.size, self.dtype = 1 if ranks is None else ranks.size, dtype
        self.local: list[tuple[LlamaConfig, int, int, _Timed]] = []
        self.joined: list[tuple[LlamaConfig, int, _Timed, _Timed]] = []
        for shape in _stand_ins(config, self.size):
            model = _part(shape, dtype, ranks, joined=False)
            for count in (1, tokens):
                for context in _CONTEXTS:
                    timed = timer.add(_forward(model, count, context))
                    self.local.append((shape, count, context, timed))
                if self.size > 1:
                    together = timer.add(_forward(_part(shape, dtype, ranks, joined=True), count, _CONTEXTS[0]))
                    self.joined.append((shape, count, together, self.local[-len(_CONTEXTS)][3]))

    def machines(self) -> Machines:
        """All ranks, whose engine's time is not known yet."""
        local = [(config, tokens, context, timed.seconds) for config, tokens, context, timed in self.local]
        more = [(config, tokens, both.seconds - local.seconds) for config, tokens, both, local in self.joined]
        return explain(local, more, self.size, self.dtype.itemsize)


def explain(
    local: abc.Sequence[tuple[LlamaConfig, int, int, float]],
    more: abc.Sequence[tuple[LlamaConfig, int, float]],
    size: int,
    itemsize: int,
) -> Machines:
    """The figures by which ``step_seconds`` comes closest to what was measured.

    Args:
        local: model, tokens, context and seconds of forwards over a rank's part alone.
        more: model, tokens, and what the same took longer for what ``size`` ranks exchange; empty for one rank.
    """
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    ones, many, exchanges = [], [], []
    for config, tokens, context, seconds in local:
        if tokens == 1:
            stored = PagedKVCache.bytes_per_token(share_of(config, size).sizes, dtype) * context
            read = weights(config) / size * itemsize
            ones.append(((1.0, config.num_hidden_layers, read, stored), seconds, seconds))
    forward, layer, read, cached = _fit(ones)
    for config, tokens, context, seconds in local:
        if tokens > 1:
            layers = config.num_hidden_layers
            attended = (
                4 * tokens * context * share_of(config, size).sizes.num_attention_heads * config.head_dim * layers
            )
            multiplied = 2 * tokens * weights(config) / size
            many.append(((multiplied, attended), seconds - forward - layers * layer, seconds))
    product, attention = _fit(many)
    for config, tokens, seconds in more:
        large, each = 2 * config.num_hidden_layers + 1, tokens * config.hidden_size * itemsize
        passed = 2 * (size - 1) / size * (large * each + SMALL * tokens * 8 * size)
        exchanges.append(((large + SMALL, passed), seconds, abs(seconds) + 1e-9))
    latency, passing = _fit(exchanges) if exchanges else (0.0, 0.0)
    bandwidth, flops, attending, reading, link = (
        1 / max(each, 1e-15) for each in (read, product, attention, cached, passing)
    )
    figures = ("here", float("inf"), bandwidth, flops, Link(latency, link), layer, forward, 0.0, 0.0, False)
    return Machines(Device(*figures, attention=attending, cached=reading), size, size)


def _fit(equations: abc.Sequence[tuple[abc.Sequence[float], float, float]]) -> list[float]:
    """Least squares of (factors, result, scale), each by its scale, of numbers that are none below 0."""
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


class _Slips(SingleDraft):
    """A draft that is wrong once in the middle of each block, so that a rule has something to judge: the most likely
    token of a small random model is its last one, be it the target or the draft."""

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        draft = super().propose(rows, max_len)
        tokens_BK = draft.tokens_BK.clone()
        tokens_BK[:, tokens_BK.shape[1] // 2 :].add_(1).remainder_(self.vocab_size)
        return replace(draft, tokens_BK=tokens_BK)


class _Rounds:
    """What the engine takes beside forwards: rounds of stand-ins, less their forwards."""

    def __init__(
        self,
        timer: _Timer,
        llm: LLM,
        large: LlamaConfig,
        small: LlamaConfig,
        dtype: torch.dtype,
        policy: AcceptancePolicy,
        k: int,
        ranks: Ranks | None,
        sharded: bool,
    ) -> None:
        size = 1 if ranks is None else ranks.size
        small = LlamaConfig.model_validate({**small.model_dump(), "vocab_size": large.vocab_size})
        large, small = (_stand_ins(config, size)[0] for config in (large, small))
        model, helper = _part(large, dtype, ranks, True), _part(small, dtype, ranks if sharded else None, True)
        self.k, self.config = k, large
        self.step, self.verify = (timer.add(_forward(model, tokens, _TOKENS // 2)) for tokens in (1, k + 1))
        self.draft = timer.add(_forward(helper, 1, _TOKENS // 2))
        drafts = _Slips(helper, cache_tokens=1024)
        stand_in = LLM(model, drafts, policy, k, cache_tokens=1024, ranks=ranks, draft_placement="replicated")
        stand_in.tokenizer = llm.tokenizer
        self.runs = [_Run(timer, stand_in, [[1, 2, 3, 4]], most) for most in (0, k)]

    def host(self, machines: Machines) -> Machines:
        """``machines`` with the seconds of a round, and of a drafted token besides."""
        (plain, drafted), judged = self.runs, JUDGED * machines.all_reduce((self.k + 1) * 8 * machines.ranks)
        rounds, count = plain.stats.rounds + 1, drafted.stats  # the prompt's is one more
        taken = zip(*(timed.times for timed in (plain.timing, drafted.timing, self.step, self.verify, self.draft)))
        beside, besides = [], []  # what a run without a draft, and one with it, takes beside its forwards
        for alone, together, step, verify, draft in taken:  # turn by turn: what slows one down slows all
            beside.append(alone * plain.stats.generated - rounds * step)
            besides.append(together * count.generated - step - count.rounds * (verify + judged) - count.drafted * draft)
        round_seconds = max(_middle(beside) / rounds, 0.0)
        left = _middle(besides) - (count.rounds + 1) * round_seconds
        device = replace(machines.device, round=round_seconds, drafted=max(left / count.drafted, 0.0))
        return replace(machines, device=device)


class _Run:
    """Completions of prompts, drafted for or not; seconds are those of a token."""

    def __init__(self, timer: _Timer, llm: LLM, prompts: list[list[int]], k: int) -> None:
        self.stats = Stats()
        params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)

        def run() -> float:
            start = time.perf_counter()
            outputs = [llm.generate([prompt], params, k=k)[0] for prompt in prompts]
            seconds = time.perf_counter() - start
            self.stats = sum((output.stats for output in outputs), Stats())
            return seconds / self.stats.generated

        self.timing = timer.add(run, once=True)


def _is_sharded(llm: LLM) -> bool:
    model = llm.draft.runner.model if isinstance(llm.draft, SingleDraft) else None
    return isinstance(model, Llama) and model.lm_head.weight.shape[0] < model.config.vocab_size
