"""Drafting whole blocks in one forward: DFlash, DSpark and P-EAGLE heads as strategies.

Shape legend: T tokens, F hidden states of the target side by side, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fly.backends.cpu import available
from fly.backends.torch import TorchBlockHead, TorchParallelHead
from fly.drafts import BlockDraft
from fly.models.dflash import BlockConfig, DFlashHead
from fly.models.eagle import Eagle3Head, HeadConfig
from fly.runner.executor import BlockHead
from fly.testing import check_draft
from tests.test_eagle import TARGET, randomise, target_on

COMPILED = available()[0]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "anchor-first": {"anchor_first": True, "draft_vocab_size": 12},
    "dspark": {"anchor_first": True, "markov": "vanilla", "markov_rank": 4, "confidence": True,
               "confidence_with_markov": True},
    "rnn": {"markov": "rnn", "markov_rank": 4, "confidence": True, "draft_vocab_size": 12},
}  # fmt: skip


def make_block_head(kind: str = "dflash", seed: int = 1, own: bool = False, **options: Any) -> DFlashHead:
    """A random head for ``TARGET``, whose embedding and output matrix it shares unless it has its ``own``."""
    layer = TARGET.resized(2, family="qwen3")
    config = BlockConfig(
        layer=layer,
        **{"draft_vocab_size": 24, "target_hidden_size": 32, "states": (0, 2, 3), "block_size": 5, "mask_token_id": 23,
           "causal": (False, False), **KINDS[kind], **options},
    )  # fmt: skip
    head = DFlashHead(config, embedding=own, output=own or config.draft_vocab_size != 24)
    randomise(head, seed)
    head.to_target_U.copy_(torch.arange(24)[:: 24 // config.draft_vocab_size])
    return head.eval().requires_grad_(False)


def make_parallel_head(seed: int = 1, layers: int = 2, **options: Any) -> Eagle3Head:
    """A random P-EAGLE head for ``TARGET``."""
    config = HeadConfig(
        layer=TARGET.resized(layers), draft_vocab_size=12, target_hidden_size=32, states=(0, 2, 3), mask_token_id=23,
        drafts=5, **options,
    )  # fmt: skip
    head = Eagle3Head(config)
    randomise(head, seed)
    head.to_target_U.copy_(torch.arange(24)[::2])
    return head.eval().requires_grad_(False)


def runs(kind: str, seed: int = 1) -> BlockHead:
    """The executor of a random head."""
    if kind == "p-eagle":
        return TorchParallelHead(make_parallel_head(seed))
    return TorchBlockHead(make_block_head(kind, seed))


@pytest.mark.parametrize("kind", [*KINDS, "p-eagle"])
def test_the_kit_finds_nothing(kind: str) -> None:
    """Among others: sums over all tokens, and joints of several tokens, are the target's under lossless rules."""
    check_draft(lambda: BlockDraft(runs(kind)), target=target_on("torch"))
