"""The step: propose, verify in one forward, commit. Knows nothing of HTTP, files, tokenizers or backends.

Shape legend: B rows, K longest draft, J positions of a row (K+1), P prompt tokens, V vocabulary.

Prefill, plain decoding and verification are the same step: a row feeds whatever it has that is not cached yet,
then its draft. Prefill is an empty draft over many new tokens, autoregression an empty draft over one
(docs/explanation/step.md).
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
from fly.drafts.translate import TranslatingSetup
from fly.engine.account import OnToken, apply, logprobs, note
from fly.runtime.executor import OpenBlocks, Spent
from fly.runtime.request import Sequence, Token
from fly.runtime.runner import Runner
from fly.types import Draft

__all__ = ["Engine"]


class Engine:
    """Speculative decoding of many rows: a target, a draft strategy, and each row's own policy.

    Args:
        runner: the target with its cache.
        strategy: proposes drafts; None decodes autoregressively.
        setup: what the strategy is attached to; None attaches it here, and makes its caches.
    """

    stretch = 0.05  # a step that takes several rounds begins no further round after so many seconds

    def __init__(self, runner: Runner, strategy: DraftStrategy | None = None, setup: DraftSetup | None = None) -> None:
        if setup is None:
            setup = TranslatingSetup(runner)
            strategy = None if strategy is None else setup.attach(strategy)
            setup.reserve()
        self.runner, self.strategy, self.setup = runner, strategy, setup
        self.context = runner.executor.config.max_position_embeddings
        self._hurry = array("i", [0])

    @torch.inference_mode()
    def step(
        self,
        rows: abc.Sequence[Sequence],
        stopped: OnToken | None = None,
        prefill: abc.Sequence[tuple[Sequence, int]] = (),
        seconds: float = sys.maxsize,
    ) -> list[list[Token]]:
        """One round for every row: each emits between one and K+1 tokens. Returns what each row emitted.

        If the executor takes several rounds in one call, rows go through several, until ``stretch`` is over or one of
        them ends. The tokens are the same. Calls made to a policy or to ``stopped`` before an error are not undone.

        Args:
            stopped: gets every emitted token in order, and may end the row there (stop strings).
            prefill: further rows that emit nothing yet, and how many more of their tokens to cache in the same forward
                (at most all but the last): a long prompt is read in chunks, beside rows that decode. A row that will
                emit nothing at all (``max_tokens`` 0) ends when its prompt is scored.
            seconds: limits rounds in one call, if it is less than ``stretch``.

        Rows that end get their ``finish_reason`` and keep their cache until ``release``.

        Raises:
            OutOfBlocks: the cache cannot hold this round. Rows and caches are as they were before the round; the same
                holds after any error of a strategy or a policy.
            ValueError: a draft that is none, or a NaN of the target, the strategy or a policy on which a row depends.
        """
        runner, strategy = self.runner, self.strategy
        before = [len(row.provenance) for row in rows]
        prompts = [runner.pending(row) > 1 or not row.generated for row in rows]
        if prefill and strategy is not None:
            strategy.prefill([(row, len(runner.begin(row)) + n) for row, n in prefill])
        try:
            # Several rounds in one call, where nothing has to be done between two of them.
            if prefill or any(prompts) or not self._take_rounds(rows, stopped, seconds):
                # Propose: a cheap draft guesses up to K tokens for each row.
                draft = self._propose(rows, prompts)
                # Verify: one forward of the target over the last tokens and the drafts scores K + 1 places of each row.
                target, raw_BJV = self.runner.score(rows, draft, prefill, _score_prompt)
                # Decide: each row's rule keeps a path of its draft, and one token of the target's own follows it.
                decisions = self.runner.judge(rows, target, draft, strategy)
                for row, decision in zip(rows, decisions):
                    if row.matcher is not None:
                        row.matcher.check(decision.path[-1] + 1 if len(decision.path) else 0)
                if strategy is not None and rows:
                    strategy.observe(rows, draft, target)
                # Emit: the rows grow by these tokens, up to where they end.
                for row, decision, prompt in zip(rows, decisions, prompts):
                    apply(row, [decision], self.left(row), stopped, prompt)
                note(raw_BJV, rows, decisions, before, runner.executor.numbers)
                for row, _ in prefill:
                    if not row.params.max_tokens and not row.scores:
                        row.finish_reason = "length"  # only its prompt was to be scored
        finally:
            # Commit: what was emitted is the truth. All caches roll back to it, also after an error.
            runner.commit([*rows, *(row for row, _ in prefill)])
            if strategy is not None and rows:
                strategy.commit(rows)
        return [row.provenance[start:] for row, start in zip(rows, before)]

    def left(self, row: Sequence) -> int:
        """How many tokens ``row`` may still emit, by its ``max_tokens`` and the target's context."""
        return min(row.params.max_tokens - row.generated, self.context - len(row.tokens))

    def hurry(self, now: bool) -> None:
        """Let steps, also a running one, take one round each while another thread waits for their end. From any
        thread."""
        self._hurry[0] = now

    def enter_thread(self) -> None:
        """Called once on the thread that will take all steps, before the first."""
        executor = self.runner.executor
        beside = [drafter.executor for drafter in self.setup.drafters]
        if self.setup.only_ours and all(each is not None and each.own_threads for each in (executor, *beside)):
            executor.enter_thread()

    def release(self, row: Sequence) -> None:
        """Free everything ``row`` holds, in the target's cache and the strategy's."""
        self.runner.release(row)
        if self.strategy is not None:
            self.strategy.release(row)

    def _propose(self, rows: abc.Sequence[Sequence], prompts: list[bool]) -> Draft:
        # A prompt's forward drafts nothing, so that its first token comes as soon as it can. A round emits one
        # token beyond its draft, hence one less than what is left.
        max_len = [0 if prompt else min(row.k, self.left(row) - 1) for row, prompt in zip(rows, prompts)]
        if self.strategy is None or not any(max_len):
            return Draft.empty(len(rows), self.runner.executor.device)
        lengths, name = [len(row.tokens) for row in rows], type(self.strategy).__name__
        draft = self.strategy.propose(rows, max_len)
        if lengths != [len(row.tokens) for row in rows]:  # the text would continue from tokens that were never emitted
            raise ValueError(f"{name} changed the tokens of a row: edit a copy, list(row.tokens)")
        check_draft(draft, max_len, self.runner.executor.config.vocab_size, name)
        return draft

    def _take_rounds(self, rows: abc.Sequence[Sequence], stopped: OnToken | None, seconds: float) -> bool:
        """Take rows through several rounds in one call of the executor. False if it does not take them, or if their
        strategy has to be asked before each round; nothing has changed then."""
        runner, drafting = self.runner, None
        if not rows or not self.stretch or not runner.executor.takes(rows):
            return False
        if self.strategy is not None and (drafting := self.strategy.continuation(rows)) is None:
            return False
        left = [self.left(row) for row in rows]
        # The plan is plain values, and room in the caches. The executor proposes, verifies and decides, again and
        # again, as long as it can decide by itself. Then the rows grow by what it decided.
        plan = runner.plan(rows, left, drafting, min(self.stretch, seconds), self._hurry)
        if plan is None or (ran := runner.executor.rounds(plan)) is None:
            return False
        runner.note_rounds(rows, drafting, plan, ran)
        for row, decisions in zip(rows, ran.decisions):
            apply(row, decisions, self.left(row), stopped)
        report = None if drafting is None else drafting.report
        if report is not None:
            report(ran.spent)
        # Blocks of the last round may be left for the rule itself to decide.
        if ran.open is not None:
            begin = time.perf_counter()
            self._decide_open(rows, ran.open, stopped)
            if report is not None:
                report([Spent(0, time.perf_counter() - begin, 0.0, 0.0)])
        return True

    def _decide_open(self, rows: abc.Sequence[Sequence], blocks: OpenBlocks, stopped: OnToken | None) -> None:
        """Decide what the executor has left open, as in a round of its own; not of rows that have ended meanwhile."""
        going = [i for i, b in enumerate(blocks.rows) if not rows[b].finish_reason]
        if not going:
            return
        blocks = blocks if len(going) == len(blocks.rows) else blocks.only(going)
        own = [rows[b] for b in blocks.rows]
        target = self.runner.view(own, blocks.logits_BJV, blocks.choices)
        for row, decision in zip(own, self.runner.judge(own, target, blocks.draft, self.strategy)):
            apply(row, [decision], self.left(row), stopped)


def _score_prompt(row: Sequence, scored: range, logits_PV: Tensor) -> None:
    """Note how likely these tokens of the prompt are after those before them."""
    assert row.params.prompt_logprobs is not None
    ids = row.tokens[scored.start : scored.stop]
    row.prompt_logprobs += logprobs(logits_PV.log_softmax(-1), ids, row.params.prompt_logprobs)
