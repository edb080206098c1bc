"""The model card of a trained head says what the head is, what it was trained on, and how well it drafts. This module
knows nothing of training."""

from __future__ import annotations

from fly.extras.train.head import Plan, Training
from fly.models.eagle import Eagle3Head

__all__ = ["card"]


def card(name: str, target: str, data: str, tokens: int, head: Eagle3Head, plan: Plan, training: Training) -> str:
    """Write the README.md. ``data`` is a sentence about the training data; ``tokens`` is the number of tokens in the
    answers."""
    config = head.config
    layer = config.layer
    parameters = sum(p.numel() for p in head.parameters() if not (head.shares and p is _embedding(head)))
    depths = " | ".join(str(n + 1) for n in range(len(training.held_out)))
    shares = " | ".join(f"{share:.1%}" for share in training.held_out)
    ends = training.losses[:20], training.losses[-20:]
    first, last = (f"{sum(part) / max(len(part), 1):.3f}" for part in ends)
    embedding = "the target's" if head.shares else "its own"
    sizes = f"{layer.hidden_size}, feed-forward {layer.intermediate_size}"
    heads = f"{layer.num_attention_heads} heads of {layer.head_dim}"
    return f"""---
tags:
- eagle3
- speculative-decoding
---

# {name}

An EAGLE-3 draft head for `{target}` with {parameters:,} parameters, written by `fly train-head`: `draft="eagle3(DIR)"`,
or this directory as the draft. It reads the target's hidden states and drafts for no other model.

| | |
| --- | --- |
| hidden width | {sizes}, {heads} |
| reads | the target's {config.target_hidden_size}-wide hidden states after {list(config.states or ())} layers |
| drafts | {config.draft_vocab_size} of the target's {layer.vocab_size} tokens |
| embedding | {embedding} |

## Data

{data}
The answers, {tokens:,} tokens, are the target's own.

## Training

The training-time test of EAGLE-3 (arXiv 2503.01840) over {plan.test_steps} of the head's own steps, each weighted
{plan.decay:g} of the one before, against the target's distribution: {training.step:,} steps of {plan.batch} answers of
up to {plan.length} tokens, AdamW, learning rate {plan.learning_rate:g}, seed {plan.seed};
{training.seconds / 60:.1f} minutes. The loss of the first step fell from {first} to {last} nats.

## Acceptance by depth

Measured on one answer in {plan.held_out}, which was not trained on: how often the head's likeliest token is the
target's, given that all tokens drafted before it were.

| depth | {depths} |
| --- |{" --- |" * len(training.held_out)}
| accepted | {shares} |
"""


def _embedding(head: Eagle3Head) -> object:
    return None if head.embed_tokens is None else head.embed_tokens.weight
