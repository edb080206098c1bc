"""The target drafts for itself, with some of its layers skipped.

Shape legend: T packed tokens, C hidden width, V vocabulary.
"""

from __future__ import annotations

from collections import abc

from torch import Tensor

from fly.cache import BlockAllocator, PagedKVCache
from fly.drafts.base import Load, Loaded
from fly.drafts.model import SingleDraft
from fly.executor import Batch, Executor
from fly.request import Sequence
from fly.runner import Runner
from fly.types import Draft

__all__ = ["LayerSkipDraft", "expected_speedup"]

_LONGEST = 16  # draft length up to which the search looks by default


def expected_speedup(acceptance: float, cost: float, k: int) -> tuple[float, int]:
    """Of speculation over autoregression, with independent acceptance and a drafter that takes ``cost`` of a target
    step: (1 - a^(n+1)) / ((1 - a)(n·cost + 1)) (Leviathan et al. 2023, theorem 3.8), at the best length n up to ``k``,
    which is returned as well."""

    def at(length: int) -> float:
        emitted = length + 1 if acceptance >= 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)
        return emitted / (length * cost + 1)

    best = max(range(k + 1), key=at)
    return at(best), best


class LayerSkipDraft(SingleDraft):
    """Self-speculation (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916): the target drafts with a set of its
    layers skipped. No second model, and no second cache: the layers that are not skipped read the target's keys and
    values, and what drafting writes after them is overwritten by verification.

    Args:
        skip: numbers of the layers to leave out. None finds them on the first row with ``calibration`` tokens, and
            drafts nothing until then.
        k: tokens it proposes at most; a search sets it to the best length up to that.
        confidence, entropy: where it stops, as for ``SingleDraft``.
        calibration: tokens of text that the search for layers looks at.

    The search takes two forwards a layer: first each layer's own effect, as the share of tokens on which the model
    without it still agrees with itself; then the sets of the most harmless 1, 2, 3, ... layers. The best by
    ``expected_speedup`` stays, or none, if none is expected to gain.

    Raises ``ValueError`` when it is attached to a model that is no ``Llama``, or one without such layers.
    """

    def __init__(
        self,
        skip: abc.Sequence[int] | None = None,
        k: int | None = None,
        confidence: float = 0.0,
        entropy: float = float("inf"),
        calibration: int = 64,
    ) -> None:
        if calibration < 2:
            raise ValueError(f"calibration {calibration} must be at least 2 tokens")
        super().__init__(None, k=k, confidence=confidence, entropy=entropy)
        self._most = k
        self.skip = None if skip is None else tuple(sorted(set(skip)))
        self.calibration = calibration
        self.learns = skip is None  # what it skips for all rows, from the first text that is long enough
        self._target: Runner | None = None

    def attach(self, target: Runner) -> None:
        layers = range(target.executor.config.num_hidden_layers)
        whole = target.executor.with_layers(layers)
        if self.skip is not None and (bad := [number for number in self.skip if number not in layers]):
            raise ValueError(f"skip {bad}: this model has the layers 0 to {len(layers) - 1}")
        self._target = target
        self._take(Loaded(whole))
        self._use(self.skip or ())

    def resolve(self, load: Load) -> None:
        """Its model is the target's."""

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        if self._target is None:
            raise ValueError("this strategy drafts with the layers of a target, and is attached to none")
        if self.skip is None:
            longest = max(rows, key=lambda row: len(row.tokens))
            if len(longest.tokens) >= self.calibration:
                self.calibrate(longest.tokens[-self.calibration :])
        if not self.skip:
            return Draft.empty(len(rows), self._target.executor.device)
        target = self._target
        # What the target has cached is a prefix of every row; it is cached here as well, in the same place.
        most = [n if target.pending(row) == 1 else 0 for row, n in zip(rows, max_len)]
        drafted = [row for row, n in zip(rows, most) if n]
        self.runner.adopt(target, drafted)
        try:
            return super().propose(rows, most)
        finally:
            self.runner.commit(drafted)  # back to what the target knows of
            self.runner.forget(drafted)

    def prefill(self, parts: abc.Sequence[tuple[Sequence, int]]) -> None:
        """The cache is the target's, which takes in its prompts itself."""

    def commit(self, rows: abc.Sequence[Sequence]) -> None:
        """The cache is the target's, which rolls it back itself."""

    def release(self, row: Sequence) -> None:
        """The cache is the target's, which frees it itself."""

    def executors(self) -> list[Executor]:
        return []

    def allocators(self) -> list[BlockAllocator]:
        return []

    def bytes_per_token(self) -> int:
        return 0

    def reserve(self, tokens: int) -> None:
        """It has no cache of its own."""

    def calibrate(self, tokens: list[int]) -> dict[tuple[int, ...], float]:
        """Find the layers to skip on a text of token ids, at least 2. Returns the sets that were tried, and the share
        of tokens on which the model without them agrees with the whole model."""
        assert self._target is not None
        count = self._target.executor.config.num_hidden_layers
        whole = self._choices(tokens, list(range(count)))
        tried: dict[tuple[int, ...], float] = {(): 1.0}

        def agreement(skip: tuple[int, ...]) -> float:
            if skip not in tried:
                choices = self._choices(tokens, [number for number in range(count) if number not in skip])
                tried[skip] = float((choices == whole).float().mean())
            return tried[skip]

        harmless = sorted(range(count), key=lambda number: -agreement((number,)))
        sets = [()] + [tuple(sorted(harmless[:n])) for n in range(1, count)]

        def gain(skip: tuple[int, ...]) -> tuple[float, int]:
            # A step costs its share of the layers; an agreement of 1 on a short text is not certain to hold.
            sure = agreement(skip) - 1 / len(tokens)
            return (1.0, 0) if not skip else expected_speedup(sure, 1 - len(skip) / count, self._most or _LONGEST)

        self.skip = max(sets, key=lambda skip: gain(skip)[0])
        self.k = gain(self.skip)[1] or None
        self._use(self.skip)
        return tried

    def _use(self, skip: abc.Sequence[int]) -> None:
        assert self._target is not None
        executor = self._target.executor
        layers = [number for number in range(executor.config.num_hidden_layers) if number not in skip]
        # what it caches after a row is of some layers only
        self.__dict__["runner"] = Runner(executor.with_layers(layers), self._target.cache, share=False)

    def _choices(self, tokens: list[int], layers: list[int]) -> Tensor:
        """[T] the most likely token after each of ``tokens``, by some layers alone."""
        assert self._target is not None
        executor = self._target.executor.with_layers(layers)
        cache = PagedKVCache(executor.config, 1, len(tokens), executor.dtype, executor.device)
        cache.resize(0, len(tokens))
        return executor.score(Batch.of([tokens], cache.batch([0], [0], [len(tokens)]))).logits_NV.argmax(-1)
