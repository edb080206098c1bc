"""Check what a draft strategy proposes, and which rules it can draft for. Knows nothing of how strategies work.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

from fly.drafts.base import DraftStrategy
from fly.ops import depths
from fly.policies import AcceptancePolicy
from fly.types import Draft, ListedDraft

__all__ = ["check_draft", "check_rule"]


def check_draft(draft: object, max_len: list[int], vocabulary: int, name: str) -> None:
    """Check a proposal, since a strategy may be a user's code.

    Args:
        draft: what the strategy proposed.
        max_len: for each row, the most tokens that it was asked for, along any path.
        vocabulary: V, the number of the target's token ids.
        name: the strategy's name, for errors.

    Raises ``ValueError`` that names the strategy, what it proposed, and what it should have proposed.
    """
    if not isinstance(draft, Draft):
        raise ValueError(f"{name} proposed {draft!r}, not a Draft, which fly.drafts.pad makes")
    if isinstance(draft, ListedDraft):
        rows, padded = draft.shape
        if rows != len(max_len):
            raise ValueError(f"{name} proposed tokens for {rows} rows, not for {len(max_len)}")
    else:
        if draft.tokens_BK.shape[:-1] != (len(max_len),) or draft.lengths_B.shape != (len(max_len),):
            shapes = tuple(draft.tokens_BK.shape), tuple(draft.lengths_B.shape)
            raise ValueError(f"{name} proposed tokens and lengths of shapes {shapes} for {len(max_len)} rows")
        padded = draft.tokens_BK.shape[1]
        for n in draft.lengths_B.tolist():
            if not 0 <= n <= padded:
                raise ValueError(f"{name} proposed {padded} tokens, with a length of {n}")
    if not padded:
        return
    for values_BKV in (draft.logits_BKV, draft.probs_BKV):
        if values_BKV is not None and values_BKV.shape[:2] != (len(max_len), padded):
            shape = list(values_BKV.shape)
            raise ValueError(f"{name} proposed {padded} tokens for {len(max_len)} rows, with values of shape {shape}")
    if draft.logits_BKV is not None and (width := draft.logits_BKV.shape[-1]) != vocabulary:
        raise ValueError(f"{name} proposed logits over {width} tokens to a target of {vocabulary}")
    if draft.probs_BKV is not None and (width := draft.probs_BKV.shape[-1]) != vocabulary:
        raise ValueError(
            f"{name} proposed distributions over {width} tokens to a target of {vocabulary}: state its vocab_size, so "
            "that it is translated or refused before it drafts"
        )
    for b, (tokens, most) in enumerate(zip(draft.chains, max_len)):
        n = len(tokens)
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            bad = [token for token in tokens if not 0 <= token < vocabulary]
            raise ValueError(f"{name} proposed the ids {bad[:5]}, outside the vocabulary of {vocabulary}")
        tree = None if draft.trees is None else draft.trees[b]
        if tree is not None and len(tree) != n:
            raise ValueError(f"{name} proposed {n} tokens, with a tree of {len(tree)} parents {tree[:5]}")
        if tree is not None and not all(-1 <= parent < node for node, parent in enumerate(tree)):
            raise ValueError(f"{name} proposed a tree of parents {tree}, where each must come before its token")
        longest = n if tree is None else max((depth + 1 for depth in depths(tree)), default=0)
        if longest > most:
            raise ValueError(f"{name} proposed {longest} tokens where at most {most} were asked for")


def check_rule(policy: AcceptancePolicy, strategy: DraftStrategy, name: str = "", greedy: bool | None = None) -> None:
    """Check that a rule can decide on drafts of ``strategy``. Raise ``ValueError`` if ``policy`` fails on a trial block
    (``AcceptancePolicy.refuse_failing``), or reads the draft's logits and the strategy gives none. ``name`` is the one
    that a request chooses."""
    policy.refuse_failing(greedy)
    drafter = strategy.drafter_of(name)
    if policy.reads_logits and not drafter.gives_logits:
        raise ValueError(
            f"the rule '{policy}' reads the draft's logits (draft.logits_BKV), and {type(drafter).__name__} has none; "
            "draft chains with a model or a head, as in model(NAME), eagle3(NAME) or block(NAME)"
        )
