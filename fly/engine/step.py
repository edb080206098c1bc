"""The step: propose, verify in one forward, decide, commit. Knows nothing of HTTP, files, tokenizers or backends.

The scheduler calls ``Engine.step`` again and again, always on one thread. If the executor can, a step takes several
rounds in one call (``_take_several``); otherwise it takes one round here (``_take_round``). An error anywhere leaves
rows and caches as they were before the round. Another thread can end a call of several rounds early with ``hurry``: no
further round then begins.

Prefill, plain decoding and verification are the same step: a row feeds the tokens that are not cached yet, then its
draft. Prefill is an empty draft over many new tokens, autoregression an empty draft over one
(docs/explanation/step.md).

Shape legend: B rows, K longest draft, J positions of a row (K+1), P prompt tokens, V vocabulary.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections import abc

import torch
from torch import Tensor

from fly.drafts.base import DraftSetup, DraftStrategy
from fly.drafts.limits import check_draft
from fly.drafts.setup import TranslatingSetup
from fly.engine.account import apply, explain_tokens, logprobs
from fly.runner.executor import OpenBlocks, Spent
from fly.runner.request import Row, most_drafted
from fly.runner.runner import Runner
from fly.types import Draft

__all__ = ["Engine"]


class Engine:
    """Speculative decoding of many rows: a target, a draft strategy, and each row's own policy.

    Args:
        runner: the target with its cache.
        strategy: proposes drafts; None decodes autoregressively.
        setup: what the strategy is attached to; None attaches it here, and makes its caches.
    """

    stretch = 0.05  # seconds after which a step begins no further round

    def __init__(self, runner: Runner, strategy: DraftStrategy | None = None, setup: DraftSetup | None = None) -> None:
        if setup is None:
            setup = TranslatingSetup(runner)
            strategy = None if strategy is None else setup.attach(strategy)
            setup.reserve()
        self.runner = runner
        self.strategy = strategy
        self.setup = setup
        self.context = runner.executor.config.max_position_embeddings
        self._hurry = array("i", [0])
        # Whether forwards use threads of their own, and nothing computes beside them.
        runners = (runner, *setup.drafters)
        self._own_threads = setup.all_built_in and all(each.executor.own_threads for each in runners)

    @torch.inference_mode()
    def step(
        self,
        rows: abc.Sequence[Row],
        prefill: abc.Sequence[tuple[Row, int]] = (),
        seconds: float = sys.maxsize,
    ) -> None:
        """Take every row through one round, which emits between 1 and K+1 tokens per row.

        If the executor can take several rounds in one call, rows go through several, until ``stretch`` seconds are over
        or a row ends. The tokens are the same. Calls made to a policy or to ``Row.on_token`` before an error are not
        undone.

        Args:
            prefill: other rows whose prompts are read in chunks, each with the number of its tokens that are cached
                after this step (at most all but the last). They emit nothing in this step. A row with ``max_tokens`` 0
                ends when its prompt is scored.
            seconds: replaces ``stretch`` if it is less.

        Rows that end get their ``finish_reason`` and keep their cache until ``release``.

        Raises:
            OutOfBlocks: the cache cannot hold this round. After this and after any error of a strategy or a policy,
                rows and caches are as they were before the round.
            ValueError: a strategy proposed something that is not a draft, or a row's outcome depends on a NaN from the
                target, the strategy or a policy.
        """
        prompts = [not row.generated or len(row.tokens) - self.runner.cached(row) > 1 for row in rows]
        if prefill and self.strategy is not None:
            self.strategy.prefill(prefill)
        try:
            # Prompts, and rows that need something between two rounds, take one round at a time.
            if prefill or any(prompts) or not self._take_several(rows, seconds):
                self._take_round(rows, prefill, prompts)
        finally:
            # Commit: roll all caches back to the emitted tokens, also after an error.
            self.runner.commit([*rows, *(row for row, _ in prefill)])
            if self.strategy is not None and rows:
                self.strategy.commit(rows)

    def _take_round(self, rows: abc.Sequence[Row], prefill: abc.Sequence[tuple[Row, int]], prompts: list[bool]) -> None:
        """Propose, verify, decide and emit, once for each row."""
        # Propose: the strategy drafts up to K tokens for each row.
        draft = self._propose(rows, prompts)
        # Verify: one forward of the target over the last tokens and the drafts scores K + 1 places of each row.
        target, raw_BJV = self.runner.score(rows, draft, prefill, _score_prompt)
        # Decide: each row's rule keeps a path of its draft, and one token of the target follows.
        decisions = self.runner.decide(rows, target, draft, self.strategy)
        for row, decision in zip(rows, decisions):
            if row.matcher is not None:
                row.matcher.check(decision.end)  # raises if the form allows nothing there
        if self.strategy is not None and rows:
            self.strategy.observe(rows, draft, target)
        # Emit: each row grows by its tokens, up to where it ends.
        emitted = []
        for row, decision, prompt in zip(rows, decisions, prompts):
            emitted.append(apply(row, [decision], self.left(row), prompt))
        explain_tokens(raw_BJV, rows, decisions, emitted, self.runner.executor.numbers)
        for row, _ in prefill:
            if not row.params.max_tokens and not row.scores:
                row.finish_reason = "length"  # nothing but its prompt was asked for

    def _propose(self, rows: abc.Sequence[Row], prompts: list[bool]) -> Draft:
        """Ask the strategy for each row's draft, and check it."""
        # A forward over a prompt has no draft, so that the first token comes soon.
        max_len = [0 if prompt else most_drafted(row.k, self.left(row)) for row, prompt in zip(rows, prompts)]
        if self.strategy is None or not any(max_len):
            return Draft.empty(len(rows), self.runner.executor.device)
        name = type(self.strategy).__name__
        lengths = [len(row.tokens) for row in rows]
        draft = self.strategy.propose(rows, max_len)
        if lengths != [len(row.tokens) for row in rows]:  # the text would contain tokens that were never emitted
            for row, length in zip(rows, lengths):
                del row.tokens[length:]
            raise ValueError(f"{name} changed the tokens of a row: edit a copy, list(row.tokens)")
        check_draft(draft, max_len, self.runner.executor.config.vocab_size, name)
        return draft

    def _take_several(self, rows: abc.Sequence[Row], seconds: float) -> bool:
        """Take the rows through several rounds in one call of the executor. Return False, with nothing changed, if the
        executor cannot do that for these rows, or if the strategy must be asked before each round."""
        drafting = None
        if not rows or not self.stretch or not self.runner.executor.takes(rows):
            return False
        if self.strategy is not None and (drafting := self.strategy.continuation(rows)) is None:
            return False
        left = [self.left(row) for row in rows]
        # Plan: describe the rows by plain values, and reserve room in the caches. Run: the executor proposes, verifies
        # and decides, again and again, until it reaches a limit of the plan or a block whose rule runs only in Python.
        plan = self.runner.plan(rows, left, drafting, min(self.stretch, seconds), self._hurry)
        if plan is None or (rounds := self.runner.executor.rounds(plan)) is None:
            return False
        # Emit: the rows grow by the decisions of all rounds.
        self.runner.note_rounds(rows, drafting, plan, rounds)
        for row, decisions in zip(rows, rounds.decisions):
            apply(row, decisions, self.left(row))
        if drafting is not None and drafting.report is not None:
            drafting.report(rounds.spent)
        # A block whose rule runs only in Python came back open: drafted and scored. Decide it as in a single round.
        if rounds.open is not None:
            begin = time.perf_counter()
            self._decide_open(rows, rounds.open)
            if drafting is not None and drafting.report is not None:
                drafting.report([Spent(0, time.perf_counter() - begin, 0.0, 0.0)])
        return True

    def _decide_open(self, rows: abc.Sequence[Row], blocks: OpenBlocks) -> None:
        """Decide the blocks that the executor left open, except those of rows that have ended since."""
        going = [i for i, b in enumerate(blocks.rows) if not rows[b].finish_reason]
        if not going:
            return
        blocks = blocks if len(going) == len(blocks.rows) else blocks.only(going)
        open_rows = [rows[b] for b in blocks.rows]
        target = self.runner.view(open_rows, blocks.logits_BJV, blocks.choices)
        for row, decision in zip(open_rows, self.runner.decide(open_rows, target, blocks.draft, self.strategy)):
            apply(row, [decision], self.left(row))

    def left(self, row: Row) -> int:
        """Return how many tokens ``row`` may still emit, by its ``max_tokens`` and the target's context."""
        return min(row.params.max_tokens - row.generated, self.context - len(row.tokens))

    def hurry(self, now: bool) -> None:
        """End the running step after its present round, and every later step after one round, because another thread
        waits. With ``now`` False, steps are no longer cut short. May be called from any thread."""
        self._hurry[0] = now

    def enter_thread(self) -> None:
        """Prepare the calling thread, which will take all steps. Called once, before the first."""
        if self._own_threads:
            self.runner.executor.enter_thread()

    def release(self, row: Row) -> None:
        """Free everything ``row`` holds, in the target's cache and the strategy's."""
        self.runner.release(row)
        if self.strategy is not None:
            self.strategy.release(row)


def _score_prompt(row: Row, scored: range, logits_PV: Tensor) -> None:
    """Record the log-probabilities of the ``scored`` tokens of the prompt, whose logits are ``logits_PV``."""
    assert row.params.prompt_logprobs is not None
    ids = row.tokens[scored.start : scored.stop]
    row.prompt_logprobs += logprobs(logits_PV.log_softmax(-1), ids, row.params.prompt_logprobs)
