"""The step: propose, verify in one forward, commit. Knows nothing of HTTP, files, tokenizers or backends.

Shape legend: B rows, K longest draft, J positions of a row (K+1), P prompt tokens, V vocabulary.

Prefill, plain decoding and verification are the same step: a row feeds whatever it has that is not cached yet,
then its draft. Prefill is an empty draft over many new tokens, autoregression an empty draft over one
(docs/explanation/step.md).
"""

from __future__ import annotations

import sys
from array import array
from collections import abc
from dataclasses import replace

import torch
from torch import Tensor

from fly.account import OnToken, Watched, apply, logprobs, note
from fly.drafts.base import DraftSetup, DraftStrategy, pad_trees
from fly.drafts.limits import check_draft
from fly.drafts.translate import TranslatingSetup
from fly.executor import Answer, DraftSpec, Question, RoundPlan
from fly.request import Sequence, Token
from fly.runner import Runner
from fly.types import Decision, Draft

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
        if prefill and self.strategy is not None:
            self.strategy.prefill([(row, len(self.runner.begin(row)) + n) for row, n in prefill])
        prompts = [self.runner.pending(row) > 1 or not row.generated for row in rows]
        try:
            if rows and not prefill and (emitted := self._rounds(rows, prompts, stopped, seconds)) is not None:
                self._commit(rows)
                return emitted
            draft = self._propose(rows, prompts)
            target, raw_BJV = self.runner.score(rows, draft, prefill, _score_prompt)
            decisions = self.runner.judge(rows, target, draft, self.strategy)
            for row, decision in zip(rows, decisions):
                if row.matcher is not None:
                    row.matcher.check(decision.path[-1] + 1 if len(decision.path) else 0)
            if self.strategy is not None and rows:
                self.strategy.observe(rows, draft, target)
        except BaseException:
            self._commit(rows)  # forget what was speculated
            raise
        self.runner.commit(row for row, _ in prefill)
        for row, _ in prefill:
            if not row.params.max_tokens and not row.scores:
                row.finish_reason = "length"  # only its prompt was to be scored
        emitted, watched = [], []
        for b, (row, decision, prompt) in enumerate(zip(rows, decisions, prompts)):
            tokens = apply(row, [decision], self.left(row), stopped, prompt)
            if row.params.logprobs is not None or row.params.explain:
                places = [0, *(node + 1 for node in decision.path)][: len(tokens)]
                watched.append(Watched(row, tokens, b, places))
            emitted.append(tokens)
        if watched:
            note(raw_BJV, watched, self.runner.executor.numbers)
        self._commit(rows)
        return emitted

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

    def _commit(self, rows: abc.Sequence[Sequence]) -> None:
        self.runner.commit(rows)
        if self.strategy is not None and rows:
            self.strategy.commit(rows)

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

    def _rounds(
        self, rows: abc.Sequence[Sequence], prompts: list[bool], stopped: OnToken | None, seconds: float
    ) -> list[list[Token]] | None:
        """Take rows through several rounds in one call of the executor, and return what each emitted. None if the
        executor does not take these rows, or if more than a decision is needed between two rounds."""
        watched = (row.params.logprobs is not None or row.params.explain for row in rows)
        if any(prompts) or not self.stretch or any(watched) or not all(map(self.runner.executor.may_round, rows)):
            return None
        before = [len(row.provenance) for row in rows]
        executor, drafting, drafter = self.runner.executor, None, None

        def plan() -> RoundPlan | None:
            nonlocal drafting, drafter
            left, most = [self.left(row) for row in rows], [0] * len(rows)
            if self.strategy is not None:
                if (drafting := self.strategy.continuation(rows)) is None:
                    return None
                most = drafting.most
            k = [min(row.k, n) for row, n in zip(rows, most)]
            drafts = any(min(n, more - 1) for n, more in zip(k, left))
            drafter = drafting.runner if drafting is not None and drafts else None
            spec = DraftSpec() if drafting is None else drafting.spec
            if drafter is not None and not executor.joins(drafter.executor, spec):
                return None
            if (made := self.runner.plan(rows, left, k, drafter, spec.tree)) is None:
                return None
            made.seconds, made.hurry = min(self.stretch, seconds), self._hurry
            if made.drafter is None:
                drafter = None
            if drafting is not None:
                if made.drafter is not None or drafting.runner is None:
                    made.spec = spec
                made.rounds = drafting.rounds
            return made

        def ask(decided: list[Decision], question: Question) -> Answer | None:
            (row,) = rows
            apply(row, decided, self.left(row), stopped)
            if row.finish_reason:
                return None
            draft = Draft.of([question.drafted])
            if question.probs_1KV is not None:
                draft = replace(draft, probs_BKV=question.probs_1KV)
            if question.parents is not None:
                draft = pad_trees([(question.drafted, question.parents)])
            target = self.runner.view(rows, question.logits_1JV, [question.choices])
            (decision,) = self.runner.judge(rows, target, draft, self.strategy)
            apply(row, [decision], self.left(row), stopped)
            return None if row.finish_reason else Answer(decision.path, decision.next_token)

        if (ran := executor.rounds([(row.policy, row.greedy) for row in rows], plan, ask)) is None:
            return None
        self.runner.took(rows, ran, drafter)
        if drafting is not None and drafting.spent is not None:
            drafting.spent[:] = ran.spent
        if ran.error is not None:
            raise ran.error
        for row, decisions in zip(rows, ran.decisions):
            apply(row, decisions, self.left(row), stopped)
        return [row.provenance[start:] for row, start in zip(rows, before)]


def _score_prompt(row: Sequence, scored: range, logits_PV: Tensor) -> None:
    """Note how likely these tokens of the prompt are after those before them."""
    assert row.params.prompt_logprobs is not None
    ids = row.tokens[scored.start : scored.stop]
    row.prompt_logprobs += logprobs(logits_PV.log_softmax(-1), ids, row.params.prompt_logprobs)
