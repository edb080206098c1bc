"""The setup that an engine gives its draft strategy."""

from __future__ import annotations

from fly import drafts
from fly.drafts.base import DraftSetup, DraftStrategy, Loaded
from fly.models.tokenizer import Tokenizer
from fly.runner.executor import Executor

__all__ = ["TranslatingSetup", "translated"]


class TranslatingSetup(DraftSetup):
    """A setup that translates the drafts of strategies with another vocabulary. A model that it loads never drafts ids
    that the target lacks, if both have the same tokenizer."""

    def fit_to_target(self, loaded: Loaded) -> Executor:
        executor = loaded.executor
        size = self.target.executor.config.vocab_size
        if self.tokenizer is None or loaded.tokenizer is None or executor.config.vocab_size <= size:
            return executor
        return drafts.translate.Restricted(executor, size) if self.tokenizer.same_as(loaded.tokenizer) else executor

    def translate(self, strategy: DraftStrategy) -> DraftStrategy:
        return translated(strategy, self.tokenizer, self.target.executor.config.vocab_size)


def translated(draft: DraftStrategy, tokenizer: Tokenizer | None, vocab_size: int) -> DraftStrategy:
    """Return an attached ``draft`` as it is if it has the target's vocabulary. Otherwise wrap it in a
    ``TranslatedDraft``.

    Two vocabularies of the same size count as the same, unless both models have a tokenizer and the tokenizers differ.

    Raises ``ValueError``, with the reason, if the vocabularies cannot be translated.
    """
    compatible = draft.vocab_size in (None, vocab_size)
    if compatible and draft.vocab_size is not None and tokenizer is not None and isinstance(draft, drafts.SingleDraft):
        compatible = draft.runner.tokenizer is None or tokenizer.same_as(draft.runner.tokenizer)
    return draft if compatible else drafts.TranslatedDraft(draft, tokenizer, vocab_size)
