"""What is trained and how: sizes of a head, settings of its training, and the record of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from fly.models import LlamaConfig

__all__ = ["KINDS", "Plan", "Training"]

# The settings that only some kinds of heads have, with their defaults.
_BLOCK = {"layers": 2, "block_size": 8, "anchors": 32, "gamma": 4.0}
KINDS: dict[str, dict[str, int | float]] = {
    "eagle3": {"test_steps": 5, "decay": 0.8},
    "dflash": _BLOCK,
    "dspark": {**_BLOCK, "markov_rank": 64},
}


@dataclass(frozen=True)
class Plan:
    """Sizes of a head, and how it is trained.

    Attributes:
        kind: eagle3, dflash or dspark.
        width: hidden width. None takes the target's width and shares its embedding; otherwise the head has its own
            embedding. A DFlash or DSpark head of the target's width shares its output matrix too.
        intermediate: width of the feed-forward layer; None takes 8/3 of the width, rounded up to a multiple of 32.
        states: the head reads the target's hidden states after these layers; None takes the usual three.
        draft_vocabulary: how many tokens the head can draft, taking the most frequent ones; None takes at most 32,000.
        steps: optimiser steps.
        batch: rows per step.
        length: tokens per row; longer rows are cut.
        learning_rate: peak learning rate of AdamW, after a warm-up; it then falls to a tenth along a cosine.
        held_out: one answer in this many is kept out of the training, to measure acceptance.
        precision: dtype of matrix products in training, bfloat16 or float32; weights stay float32 until they are saved.
        save_every: steps between two checkpoints.
        seed: seed of the initial weights, of the order of the answers, and of the anchors.

    The others belong to some kinds of heads. None means the default of the kind, if it has the setting.

    Attributes:
        test_steps: of EAGLE-3, steps of the training-time test, each on the head's own features.
        decay: of EAGLE-3, weight of the loss of each of these steps, relative to the step before.
        layers: of DFlash and DSpark, layers of the head.
        block_size: of DFlash and DSpark, places of a block, the anchor included. A DFlash head drafts one token fewer.
        anchors: of DFlash and DSpark, how many blocks of each row a step learns from.
        gamma: of DFlash and DSpark: the loss of the draft after j others has the weight exp(-j / gamma).
        markov_rank: of DSpark, rank of the correction by the token before.
    """

    kind: str = "eagle3"
    width: int | None = None
    intermediate: int | None = None
    states: tuple[int, ...] | None = None
    draft_vocabulary: int | None = None
    steps: int = 1000
    batch: int = 16
    length: int = 512
    test_steps: int | None = None
    decay: float | None = None
    layers: int | None = None
    block_size: int | None = None
    anchors: int | None = None
    gamma: float | None = None
    markov_rank: int | None = None
    learning_rate: float = 1e-3
    held_out: int = 20
    precision: str = "bfloat16"
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is unknown; choices: {[*KINDS]}")
        for name in dict.fromkeys(name for settings in KINDS.values() for name in settings):
            if name in KINDS[self.kind]:
                if getattr(self, name) is None:
                    object.__setattr__(self, name, KINDS[self.kind][name])
            elif getattr(self, name) is not None:
                kinds = [kind for kind, settings in KINDS.items() if name in settings]
                raise ValueError(
                    f"{name} {getattr(self, name)} is a setting of {' and '.join(kinds)} heads, and the kind is "
                    f"{self.kind}"
                )
        least = {"steps": 1, "batch": 1, "length": 8, "test_steps": 1, "held_out": 2, "save_every": 1}
        least |= {"layers": 1, "block_size": 2, "anchors": 1, "markov_rank": 1}
        for name, value in least.items():
            if (stated := getattr(self, name)) is not None and stated < value:
                raise ValueError(f"{name} {stated} must be at least {value}")
        if self.precision not in ("bfloat16", "float32"):
            raise ValueError(f"precision {self.precision!r} is unknown; choices: ['bfloat16', 'float32']")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate {self.learning_rate} must be above 0 and below 1")
        if self.decay is not None and not 0 < self.decay <= 1:
            raise ValueError(f"decay {self.decay} must be above 0 and at most 1")
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"gamma {self.gamma} must be above 0")

    def layer(self, target: LlamaConfig, family: str, layers: int) -> LlamaConfig:
        """Return the configuration of the head's layers for a target. Raises ``ValueError`` for sizes that do not fit
        together."""
        width = self.width or target.hidden_size
        head_dim = next((n for n in (min(target.head_dim, width // 2), 64, 32, 16, 8) if n and width % n == 0), 0)
        if not head_dim or head_dim % 2:
            raise ValueError(f"width {width} has no heads of an even width; take a multiple of 32")
        return LlamaConfig(
            family=family,
            vocab_size=target.vocab_size,
            hidden_size=width,
            intermediate_size=self.intermediate or -(-width * 8 // 3 // 32) * 32,
            num_hidden_layers=layers,
            num_attention_heads=width // head_dim,
            num_key_value_heads=width // head_dim,
            head_dim=head_dim,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
        )

    def states_of(self, layers: int) -> tuple[int, ...]:
        """Return the layers after which the head reads hidden states, for a target of ``layers`` layers."""
        if self.states is not None:
            return self.states
        usual = [2, layers // 2, layers - 3] if layers >= 8 else [1, layers // 2, layers]
        return tuple(sorted(set(usual)))


@dataclass
class Training:
    """The record of a training.

    Attributes:
        losses: the cross-entropy of each optimiser step, in nats: EAGLE-3's of its first own step, a block drafter's
            over all places.
        held_out: for each depth, the share of positions where the head's most likely token is the target's, among
            those where this is so at every smaller depth.
        seconds: how long the training took.
    """

    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def tau(self) -> list[float]:
        """The tokens of a round at temperature 0, the target's own included, if drafts end at each depth."""
        return [1 + accepted for accepted in accumulate(accumulate(self.held_out, mul))]
