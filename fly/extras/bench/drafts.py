"""Measure draft strategies on every kind of task, and their cost on texts that no draft can predict.

Shape legend: B rows, K longest draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import Any

from fly.drafts import DraftStrategy, parse_draft
from fly.drafts.adaptive import AdaptiveDraft
from fly.drafts.base import Wrapper
from fly.extras.bench.clock import clocked
from fly.extras.bench.loaded import target_of
from fly.extras.eval import Result, Setting, compare
from fly.extras.statistics import median_interval
from fly.llm import LLM
from fly.models.bundled.tasks import KINDS, problems
from fly.policies import AcceptancePolicy
from fly.runner.request import Row, Stats
from fly.types import Draft, SamplingParams

__all__ = ["PROMISE", "STRATEGIES", "Drafted", "Misleading", "Promise", "Ratio", "measure_drafts", "measure_promise"]

STRATEGIES = (
    "fly-draft",
    "fly-tiny",
    "model(fly-draft)",
    "ngram",
    "suffix",
    "model(fly-draft, confidence=0.4)",
    "tree(fly-draft)",
    "suffix+fly-draft",
    "ngram+fly-tiny+fly-draft",
    "fly-tiny+fly-draft",
    "adaptive(ngram)",
    "adaptive(fly-draft)",
)
"""The strategies that ``fly bench drafts`` measures by default. The others are compared with the first."""

RANDOM, WRONG = "random, T 1.5", "always wrong"
"""The names of the two unpredictable texts: random tokens, and a drafter that is always wrong."""

PROMISE = 0.98
"""The share of the speed of autoregressive decoding that an adaptive strategy keeps on unpredictable texts."""


@dataclass(frozen=True)
class Drafted:
    """The results of a strategy on each kind of task."""

    name: str
    kinds: dict[str, Result]

    @property
    def tokens_per_second(self) -> float:
        return sum(r.stats.generated for r in self.kinds.values()) / sum(r.seconds for r in self.kinds.values())


def measure_drafts(
    names: Sequence[str],
    policy: AcceptancePolicy,
    count: int = 12,
    k: int = 15,
    model: str = "fly-target",
    advance: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[Drafted]:
    """Measure autoregressive decoding (``none``, first in the list) and every strategy of ``names``.

    Each decodes ``count`` held-out problems of each kind, greedily, with batch size 1. All take turns of a few prompts.
    ``advance`` is called after every completion: ``len(KINDS) * count`` times for each strategy, and as often for
    ``none``. ``options`` (dtype, device, kernels) are those of ``LLM``.
    """
    # All share one copy of the weights, since several copies would compete for the processor's caches.
    plain = LLM(model, **options)
    drafts = [("none", None), *((name, parse_draft(name, trusted=True)) for name in names)]
    settings = [Setting(name, plain if draft is None else LLM(plain, draft), k, policy) for name, draft in drafts]
    greedy = SamplingParams(temperature=0.0, max_tokens=400)
    by_kind = {
        kind: compare(settings, problems(kind, "heldout", 0, count), greedy, lambda name: advance()) for kind in KINDS
    }
    return [
        Drafted(name, {kind: results[number] for kind, results in by_kind.items()})
        for number, (name, _) in enumerate(drafts)
    ]


@dataclass(frozen=True)
class Ratio:
    """A speed relative to autoregressive decoding, from many pairs of neighbouring runs: its median, and that median's
    interval (``median_interval``)."""

    median: float
    low: float
    high: float
    pairs: int

    @staticmethod
    def of(ratios: Sequence[float]) -> Ratio:
        """Summarise ratios. Raises ``ValueError`` if there are none."""
        return Ratio(*median_interval(ratios), len(ratios))


@dataclass(frozen=True)
class Promise:
    """The speed of a strategy on a text that it cannot predict: as it is, and wrapped in ``AdaptiveDraft``. ``again``
    compares autoregressive decoding with itself, to show how far such a measurement can be trusted on this machine.
    """

    name: str
    text: str
    again: Ratio
    fixed: Ratio
    adaptive: Ratio
    tau: float  # tokens per round of the strategy as it is

    @property
    def kept(self) -> bool | None:
        """Whether the promise is kept; None if the interval is too wide to decide, or there are too few pairs."""
        if self.adaptive.pairs < 6:
            return None
        if self.adaptive.low >= PROMISE:
            return True
        return False if self.adaptive.high < PROMISE else None


class Misleading(Wrapper):
    """A strategy that is always wrong and costs as much as the strategy that it wraps. It changes the tokens of that
    strategy's chains: it adds ``shift`` to each id, modulo the vocabulary. The rule sees these drafts as deterministic.
    """

    def __init__(self, strategy: DraftStrategy, vocab_size: int, shift: int = 1) -> None:
        super().__init__([strategy])
        self._strategy = strategy
        self._size = vocab_size
        self._shift = shift

    def propose(self, rows: Sequence[Row], max_len: Sequence[int]) -> Draft:
        draft = self._strategy.propose(rows, max_len)
        return Draft((draft.tokens_BK + self._shift) % self._size, draft.lengths_B)


def measure_promise(
    names: Sequence[str],
    policy: AcceptancePolicy,
    count: int = 8,
    repeats: int = 3,
    k: int = 15,
    model: str = "fly-target",
    advance: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[Promise]:
    """Compare strategies, as they are and adaptive, with autoregressive decoding on texts that cannot be predicted.

    There are two kinds of text, of 256 tokens each. ``RANDOM`` is the continuation of 32 random tokens at temperature
    1.5, where the strategy may still be right at times. ``WRONG`` is the greedy answer to a held-out problem, with a
    drafter that costs as much as the strategy and is always wrong. Settings take turns, in an order that rotates, so
    that none is favoured. Strategies start with nothing learned. ``advance`` is called ``2 * len(names) * count *
    repeats`` times; ``options`` are those of ``measure_drafts``."""
    plain = LLM(model, **options)
    target, rng = target_of(plain), Random(0)
    vocabulary = target.config.vocab_size
    prompts = {
        RANDOM: [[rng.randrange(vocabulary) for _ in range(32)] for _ in range(count)],
        WRONG: [plain.chat_prompt(problem.prompt) for problem in problems(None, "heldout", 0, count)],
    }

    def with_draft(name: str, text: str, adaptive: bool) -> LLM:
        if (draft := parse_draft(name, trusted=True)) is None:
            raise ValueError(f"draft {name!r} drafts nothing: there is nothing to measure")
        if text == WRONG:
            draft = Misleading(draft, vocabulary)
        # All settings share the weights, since where a copy lies in memory affects its speed.
        return LLM(target, AdaptiveDraft(draft) if adaptive else draft)

    promises = []
    for name, text in product(names, prompts):
        llms = {"plain": plain, "again": plain}
        llms |= {"fixed": with_draft(name, text, False), "adaptive": with_draft(name, text, True)}
        params = SamplingParams(temperature=0.0 if text == WRONG else 1.5, max_tokens=256, seed=0, ignore_eos=True)
        for llm in llms.values():  # do the work of a first call before timing
            llm.generate([[0, 1, 2, 3]], params.model_copy(update={"max_tokens": 8}), policy=policy, k=0)
        seconds: dict[str, list[float]] = {label: [] for label in llms}
        order, stats = list(llms), Stats()
        for prompt in prompts[text] * repeats:
            order.append(order.pop(0))
            for label in order:
                (out,), elapsed = clocked(partial(llms[label].generate, [prompt], params, policy=policy, k=k))
                seconds[label].append(elapsed)
                stats += out.stats if label == "fixed" else Stats()
            advance()
        over = {label: Ratio.of([a / b for a, b in zip(seconds["plain"], each)]) for label, each in seconds.items()}
        promises.append(Promise(name, text, over["again"], over["fixed"], over["adaptive"], stats.tau))
    return promises
