"""The model card of a trained head says what the head is, what it was trained on, and how well it drafts. This module
knows nothing of training."""

from __future__ import annotations

from textwrap import fill

from fly.extras.train.plan import Plan, Training
from fly.models.dflash import DFlashHead
from fly.models.eagle import Eagle3Head
from fly.models.heads import TrainedHead

__all__ = ["card"]

_NAMES = {"eagle3": "An EAGLE-3 draft head", "dflash": "A DFlash block drafter", "dspark": "A DSpark block drafter"}


def card(name: str, target: str, data: str, tokens: int, head: TrainedHead, plan: Plan, training: Training) -> str:
    """Write the README.md. ``data`` is a sentence about the training data; ``tokens`` is the number of tokens in the
    answers."""
    layer = head.layer
    embedding = None if head.embed_tokens is None else head.embed_tokens.weight
    parameters = sum(p.numel() for p in head.parameters() if not (head.shares and p is embedding))
    depths = " | ".join(str(n + 1) for n in range(len(training.held_out)))
    shares = " | ".join(f"{share:.1%}" for share in training.held_out)
    taus = " | ".join(f"{tau:.2f}" for tau in training.tau)
    rows = "".join(f"| {label} | {value} |\n" for label, value in _sizes(head).items())
    word = "eagle3" if plan.kind == "eagle3" else "block"
    return f"""---
tags:
- {plan.kind}
- speculative-decoding
---

# {name}

{_NAMES[plan.kind]} for `{target}` with {parameters:,} parameters, written by `fly train-head`: `draft="{word}(DIR)"`,
or this directory as the draft. It reads the target's hidden states and drafts for no other model.

| | |
| --- | --- |
| hidden width | {layer.hidden_size}, feed-forward {layer.intermediate_size}, {layer.num_attention_heads} heads of {
        layer.head_dim
    } |
{rows}| drafts | {len(head.to_target_U)} of the target's {layer.vocab_size} tokens |
| embedding | {"the target's" if head.shares else "its own"} |

## Data

{data}
The answers, {tokens:,} tokens, are the target's own.

## Training

{fill(_course(plan, training), 118)}

## Acceptance by depth

Measured on one answer in {plan.held_out}, which was not trained on: how often the head's likeliest token is the
target's, given that all tokens drafted before it were; and the tokens of a round, the target's own included, if drafts
end at this depth.

| depth | {depths} |
| --- |{" --- |" * len(training.held_out)}
| accepted | {shares} |
| τ | {taus} |
"""


def _sizes(head: TrainedHead) -> dict[str, str]:
    """Return what is special about a kind of head."""
    if isinstance(head, Eagle3Head):
        return {"reads": _reads(head.config.target_hidden_size, head.config.states)}
    assert isinstance(head, DFlashHead)
    config = head.config
    first = "predicts the first draft" if config.anchor_first else "predicts nothing"
    rows = {
        "reads": _reads(config.target_hidden_size, config.states),
        "layers": f"{config.layer.num_hidden_layers}",
        "block": f"{config.block_size} places; the anchor's {first}, so it drafts {config.drafts} tokens",
    }
    if config.markov is not None:
        rows["corrections"] = f"by the token before, of rank {config.markov_rank} ({config.markov})"
    return rows


def _reads(width: int, states: tuple[int, ...] | None) -> str:
    return f"the target's {width}-wide hidden states after {list(states or ())} layers"


def _course(plan: Plan, training: Training) -> str:
    """Say what was learned, and how."""
    blocks = f"Blocks at up to {plan.anchors} random anchors of each answer, against"
    weighting = f"The draft after j others has the weight exp(-j / {plan.gamma or 0:g})."
    description = {
        "eagle3": f"The training-time test of EAGLE-3 (arXiv 2503.01840) over {plan.test_steps} of the head's own "
        f"steps, each weighted {plan.decay or 0:g} of the one before, against the target's distribution.",
        "dflash": f"{blocks} the answers' tokens, by cross-entropy. {weighting}",
        "dspark": f"{blocks} the target's distribution: 0.9 of the L1 distance, and 0.1 of the cross-entropy of the "
        f"answers' tokens. The confidence head learns 1 - total variation. {weighting}",
    }[plan.kind]
    first, last = (sum(part) / max(len(part), 1) for part in (training.losses[:20], training.losses[-20:]))
    return (
        f"{description} {training.step:,} steps of {plan.batch} answers of up to {plan.length} tokens, AdamW, learning "
        f"rate {plan.learning_rate:g}, seed {plan.seed}; {training.seconds / 60:.1f} minutes. The cross-entropy fell "
        f"from {first:.3f} to {last:.3f} nats."
    )
