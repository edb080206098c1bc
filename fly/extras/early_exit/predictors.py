"""Predictors of an early exit (SpecEE, arXiv 2504.08850). They are small networks after some of a target's layers. Each
looks at a few candidates for the next token, and predicts whether more layers would change the target's choice. Knows
nothing of caches or forwards.

Shape legend: N positions, E candidates per position, F features per position (3·E), U tokens that may be candidates, L
looks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fly.errors import explain
from fly.models.config import CheckpointError, LlamaConfig, read_json

__all__ = ["ExitConfig", "Exits", "load_exits", "save_exits"]

_ARCHITECTURE = "EarlyExits"


class ExitConfig(BaseModel):
    """The sizes of the target, the layers after which predictors look, and how sure the predictors must be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=1)
    vocab_size: int = Field(gt=1)
    layers: tuple[int, ...] = Field(min_length=1)  # numbers of layers after which a predictor looks, ascending
    candidates: int = Field(default=4, gt=1)
    looked_through: int = Field(gt=1)  # number of frequent tokens that may be candidates
    width: int = Field(default=64, gt=0)  # hidden width of a predictor
    thresholds: tuple[float, ...]  # for each look, the least chance that counts as settled; above 1 never exits

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if list(self.layers) != sorted(set(self.layers)) or not 0 < self.layers[0] <= self.layers[-1]:
            raise ValueError(f"layers {list(self.layers)} must ascend from 1 on")
        if self.layers[-1] >= self.num_hidden_layers:
            raise ValueError(f"layers {list(self.layers)} must be fewer than the target's {self.num_hidden_layers}")
        if len(self.thresholds) != len(self.layers):
            raise ValueError(f"thresholds {list(self.thresholds)} must be one for each of layers {list(self.layers)}")
        if not self.candidates <= self.looked_through <= self.vocab_size:
            raise ValueError(
                f"looked_through {self.looked_through} must be from the {self.candidates} candidates to the vocabulary "
                f"of {self.vocab_size}"
            )
        return self


class Exits(nn.Module):
    """A network of two layers for each look. ``ids_U`` are the tokens that may be candidates."""

    ids_U: Tensor
    mean_LF: Tensor
    scale_LF: Tensor

    def __init__(self, config: ExitConfig) -> None:
        super().__init__()
        self.config, features = config, 3 * config.candidates
        self.looks = nn.ModuleList(
            nn.Sequential(nn.Linear(features, config.width), nn.ReLU(), nn.Linear(config.width, 1))
            for _ in config.layers
        )
        self.register_buffer("ids_U", torch.arange(config.looked_through))
        # Normalise features by their mean and scale in training, so that logits and probabilities start with equal
        # weight.
        self.register_buffer("mean_LF", torch.zeros(len(config.layers), features))
        self.register_buffer("scale_LF", torch.ones(len(config.layers), features))

    @staticmethod
    def features(logits_NE: Tensor, earlier_NE: Tensor | None) -> Tensor:
        """Return the features [N, F] of a look: the candidates' logits, likeliest first; their softmax; and the change
        of the softmax since the last look. ``earlier_NE`` are the logits at that look (None at the first look)."""
        probs_NE = logits_NE.softmax(-1)
        before_NE = probs_NE if earlier_NE is None else earlier_NE.softmax(-1)
        return torch.cat([logits_NE, probs_NE, probs_NE - before_NE], -1)

    def chance(self, look: int, features_NF: Tensor) -> Tensor:
        """Return the probability [N] that the target's choice is settled."""
        scaled_NF = (features_NF - self.mean_LF[look]) / self.scale_LF[look]
        logit_N1: Tensor = self.looks[look](scaled_NF)
        return logit_N1.squeeze(-1).sigmoid()

    def check(self, target: LlamaConfig) -> None:
        """Raise ``ValueError`` if the predictors were trained for a target of other sizes."""
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            if (trained_size := getattr(self.config, name)) != (target_size := getattr(target, name)):
                raise ValueError(
                    f"these exits are for another target: its {name} is {trained_size}, this one's {target_size}"
                )


def save_exits(exits: Exits, directory: Path) -> None:
    """Write the predictors as ``config.json`` and ``model.safetensors``."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {"architectures": [_ARCHITECTURE], **exits.config.model_dump(mode="json")}
    (directory / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in exits.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")


def load_exits(directory: str | Path) -> Exits:
    """Read predictors that ``save_exits`` wrote. Raises ``CheckpointError`` naming what cannot be used."""
    directory = Path(directory)
    document = read_json(directory / "config.json")
    if document.pop("architectures", None) != [_ARCHITECTURE]:
        raise CheckpointError(f"{directory} holds no early exits, which `fly train-exit` writes")
    try:
        exits = Exits(ExitConfig.model_validate(document))
        exits.load_state_dict(load_file(directory / "model.safetensors"))
    except ValidationError as error:
        raise CheckpointError(f"{directory}/config.json: {explain(error)}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"early exits {str(directory)!r} cannot be read: {error}") from error
    if not 0 <= int(exits.ids_U.min()) <= int(exits.ids_U.max()) < exits.config.vocab_size:
        raise CheckpointError(f"{directory}: ids_U has ids outside of {exits.config.vocab_size} tokens")
    return exits.eval().requires_grad_(False)
