"""What a block drafter (``fly.drafts.BlockDraft``) should gain with a large target on this machine: τ as others
published it, and costs measured here with random weights.

A target's layers are all alike, so a forward is timed with few of them and extrapolated to all. The drafter is small
enough to be timed whole. Nothing is downloaded, and the target itself is never loaded.

Shape legend: T tokens, F hidden states of the target side by side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fly.backends import executor_of
from fly.backends.choice import load
from fly.cache import PagedKVCache
from fly.extras.bench.clock import take_turns
from fly.extras.bench.shapes import random_model, randomise
from fly.extras.bench.speed import Forwards, Shape
from fly.models import LlamaConfig
from fly.models.dflash import DFlashConfig, DFlashHead, save_dflash_head
from fly.models.eagle import Eagle3Head, HeadConfig, save_head
from fly.models.trimmed import kept_tokens
from fly.params import SamplingParams
from fly.policies import Exact
from fly.runner.executor import Batch, BlockHead, DraftSpec
from fly.runner.request import Row

__all__ = ["DFLASH", "PEAGLE", "QWEN3_8B", "TAUS", "BlockCosts", "measure_costs"]

# https://huggingface.co/Qwen/Qwen3-8B and https://huggingface.co/z-lab/Qwen3-8B-DFlash-b16
QWEN3_8B = LlamaConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1e6,
    max_position_embeddings=40960,
)
DFLASH = DFlashConfig(
    layer=QWEN3_8B.resized(5),
    draft_vocab_size=QWEN3_8B.vocab_size,
    target_hidden_size=QWEN3_8B.hidden_size,
    states=(2, 10, 18, 26, 34),
    block_size=16,
    mask_token_id=151669,
    causal=(False,) * 5,
)
# Four layers (arXiv 2602.01469) for as many tokens, with the draft vocabulary of EAGLE-3 heads for Qwen3-8B.
PEAGLE = HeadConfig(
    layer=QWEN3_8B.resized(4),
    draft_vocab_size=32000,
    target_hidden_size=QWEN3_8B.hidden_size,
    mask_token_id=151669,
    drafts=15,
)
# Tokens that a round emits with these two at temperature 0, without thinking: measured by vLLM's own test.
TAUS = {"GSM8K": 6.06, "HumanEval": 6.17, "MT-Bench": 4.03}

_DEPTHS = (1, 3)  # layers of the timed targets
_CONTEXT = 256  # cached tokens
_READ = 6  # tokens that stand since the block before, whose hidden states the drafter reads


@dataclass(frozen=True)
class BlockCosts:
    """Seconds on this machine.

    Attributes:
        step: of a forward of the target over one token.
        verify: of a forward over a whole draft and the token before it.
        block: of drafting a block.
        kernels: those of the target and of the drafter.
    """

    step: float
    verify: float
    block: float
    kernels: tuple[str, str]

    def gain(self, tau: float) -> float:
        """Return the speed over autoregressive decoding if a round emits ``tau`` tokens and deciding takes no time:
        τ / (drafting + verification), in forwards of the target over one token."""
        return tau * self.step / (self.block + self.verify)


def extrapolate(few: float, many: float, layers: int) -> float:
    """Return the seconds of a forward with this many layers, from those with the numbers of layers in ``_DEPTHS``."""
    low, high = _DEPTHS
    return few + (many - few) / (high - low) * (layers - low)


@torch.inference_mode()
def measure_costs(
    target: LlamaConfig = QWEN3_8B,
    head: DFlashConfig | HeadConfig = DFLASH,
    kernels: str = "w8a8",
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    turns: int = 7,
    head_kernels: str = "auto",
    vocabulary: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> BlockCosts:
    """Measure the costs of drafting blocks with ``head`` for ``target``, both with random weights, one row at a time.
    ``kernels`` and ``head_kernels`` are those of the two, as for ``LLM``, and ``vocabulary`` is how many tokens the
    head keeps, as for ``block`` (None: all). ``advance`` is called ``turns + 1`` times.

    Raises ``ValueError`` for kernels that are unknown or cannot run such a target, and for a ``vocabulary`` below 1 or
    beside a head that is not trimmed.
    """
    models = [
        executor_of(random_model(target.resized(depth, tie_word_embeddings=True), dtype, device), kernels)
        for depth in _DEPTHS
    ]
    drafts = head.drafts
    assert drafts is not None
    tokens = drafts + 1
    forwards = [Forwards("target", model, _CONTEXT + tokens + 16) for model in models]
    runs = [partial(each.seconds, Shape(1, _CONTEXT, count)) for count in (1, tokens) for each in forwards]
    # Load the drafter as a user would, so that it runs on the kernels that it gets.
    with tempfile.TemporaryDirectory(prefix="fly-bench-") as folder:
        _save_random_head(head, folder, dtype)
        drafter = load(folder, kernels=head_kernels, like=models[-1]).executor
    assert isinstance(drafter, BlockHead)
    if vocabulary is not None:
        drafter.trim(kept_tokens(vocabulary, target.vocab_size))
    drafter.share(models[-1])
    timings = take_turns([*runs, _drafting(drafter, head)], turns, models[-1].device, advance)
    # The fastest of several turns was disturbed least.
    few, many, few_verified, many_verified, block = (timing.low for timing in timings)
    layers = target.num_hidden_layers
    return BlockCosts(
        extrapolate(few, many, layers),
        extrapolate(few_verified, many_verified, layers),
        block,
        (models[-1].kernels, drafter.kernels),
    )


def _save_random_head(config: DFlashConfig | HeadConfig, folder: str, dtype: torch.dtype) -> None:
    """Save a head with random weights, which never have memory in another dtype, and the target's embedding."""
    with torch.device("meta"):
        head = DFlashHead(config) if isinstance(config, DFlashConfig) else Eagle3Head(config, embedding=False)
    head.to_target_U = torch.arange(config.draft_vocab_size)
    randomise(head, dtype)
    if isinstance(head, DFlashHead):
        save_dflash_head(head, folder, dtype)
    else:
        save_head(head, folder, dtype)


def _drafting(drafter: BlockHead, head: DFlashConfig | HeadConfig) -> Callable[[], object]:
    """Return a function that drafts one block after a text."""
    drafts = drafter.longest
    assert drafts is not None
    room = drafter.room(drafts, DraftSpec())
    cache = PagedKVCache.for_model(drafter, _CONTEXT + room + 64)
    cache.resize(0, _CONTEXT + room)
    states_TF = torch.randn(_READ, head.inputs * head.target_hidden_size).to(drafter.device, drafter.dtype)
    batch = Batch.of([[1] * _READ], cache.batch([0], [_CONTEXT - _READ], [_READ]))
    row = Row([1] * (_CONTEXT + 1), _CONTEXT, SamplingParams(temperature=0.0), Exact(), seed=0, k=drafts)
    return lambda: drafter.draft(batch, states_TF, DraftSpec(), [row], [drafts])
