"""The sharding plan: which part of each tensor a rank holds. A plan is data, and is checked against a configuration
before anything is loaded.

Knows nothing of processes, collectives or policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from fly.models.config import LlamaConfig
from fly.models.llama import Llama, skeleton
from fly.models.loading import Piece, layout

__all__ = ["LLAMA", "LLAMA_WHOLE_SUMS", "Part", "PlanError", "Rule", "Style"]

Style = Literal["column", "row", "gather", "vocabulary", "replicate"]


class PlanError(ValueError):
    """A plan does not fit a model or a number of ranks; the message names the tensor, the sizes and the ranks."""


@dataclass(frozen=True)
class Rule:
    """How the tensors with some checkpoint names are divided among ranks.

    - ``column``: each rank computes some of the outputs and keeps them;
    - ``row``: each rank multiplies some of the inputs, and the products are summed over ranks. Only the first rank
      holds a bias, so that it is added once;
    - ``gather``: inputs are gathered, each rank computes some outputs from all of them, and outputs are gathered.
      This communicates more than ``row``, but no sum is split, so the results are rounded as on one rank;
    - ``vocabulary``: each rank has some of the tokens. Embeddings are summed, logits stay divided;
    - ``replicate``: every rank has the whole tensor.

    Args:
        names: patterns of checkpoint names (as in a shell), separated by spaces.
        of: the name of the size that is divided, a field of the configuration. With ``num_attention_heads``, a rank
            holds whole heads.
    """

    names: str
    style: Style
    of: str = ""

    def matches(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.names.split())

    @property
    def divides(self) -> bool:
        return self.style != "replicate"


# Rules match the names in checkpoints, where fused parameters are still separate.
LLAMA: tuple[Rule, ...] = (
    Rule("model.embed_tokens.weight lm_head.weight", "vocabulary", "vocab_size"),
    Rule("model.layers.*.self_attn.q_proj.*", "column", "num_attention_heads"),
    Rule("model.layers.*.self_attn.k_proj.* model.layers.*.self_attn.v_proj.*", "column", "num_key_value_heads"),
    Rule("model.layers.*.self_attn.o_proj.*", "row", "num_attention_heads"),
    Rule("model.layers.*.mlp.gate_proj.* model.layers.*.mlp.up_proj.*", "column", "intermediate_size"),
    Rule("model.layers.*.mlp.down_proj.*", "row", "intermediate_size"),
    Rule("model.layers.*norm.weight model.norm.weight", "replicate"),
)
LLAMA_WHOLE_SUMS: tuple[Rule, ...] = tuple(
    replace(rule, style="gather", of="hidden_size") if rule.style == "row" else rule for rule in LLAMA
)


class Part:
    """The part of a model with ``config`` that rank ``rank`` of ``size`` holds under ``plan``.

    ``sizes`` is the configuration of this part; its ``Llama`` and its cache are made from it. Of the sizes that are
    divided, only the vocabulary is still the whole model's there.

    Raises:
        PlanError: a rule matches no tensor, a tensor is matched by no rule or by several, a size is not divisible by
            the number of ranks, or the parts do not fit together. Nothing has been read then.
    """

    def __init__(self, config: LlamaConfig, rank: int, size: int, plan: Sequence[Rule] = LLAMA) -> None:
        if not 0 <= rank < size:
            raise PlanError(f"rank {rank} is not one of {size} ranks")
        if config.traits.query_norm == "whole":
            raise PlanError("this model normalises queries and keys over all heads, and a rank holds some of them")
        self.config = config
        self.rank = rank
        self.size = size
        self.plan = tuple(plan)
        for rule in self.plan:
            if rule.divides:
                self._check_divides(rule)
        heads = {"num_attention_heads", "num_key_value_heads"}
        divided = {rule.of for rule in self.plan if rule.divides and rule.style != "gather"}
        if len(divided & heads) == 1:
            raise PlanError(f"the plan divides {(divided & heads).pop()}; query and key heads go together")
        names = divided & (heads | {"intermediate_size"})
        local = {name: max(getattr(config, name) // size, 1) for name in names}
        self.sizes = LlamaConfig.model_validate({**config.model_dump(), **local})
        self.pieces = self._cut(layout(config, dict(skeleton(config).named_parameters())))
        self._check_shapes()

    def style(self, parameter: str) -> Style:
        """Return how a parameter is divided. A head tied to the embedding is divided like it."""
        pieces = self.pieces.get(parameter) or self.pieces["embed_tokens.weight"]
        return self._rule(pieces[0].key).style

    def slots(self, of: str) -> slice:
        """Return the range of heads, tokens or other units (``of``) that this rank holds."""
        total = int(getattr(self.config, of))
        start, end = (rank * total // self.size for rank in (self.rank, self.rank + 1))
        return slice(start, max(end, start + 1))  # with fewer heads than ranks, neighbouring ranks share one

    def build(self) -> Llama:
        """Make this rank's module, without memory (on torch's meta device). Its ``config`` is ``sizes``."""
        model = skeleton(self.sizes)
        with torch.device("meta"):
            for name, shape in self.shapes().items():
                owner, _, leaf = name.rpartition(".")
                module = model.get_submodule(owner)
                if tuple(module.get_parameter(leaf).shape) != shape:
                    setattr(module, leaf, nn.Parameter(torch.empty(shape)))
            if self.config.tie_word_embeddings:
                model.lm_head.weight = model.embed_tokens.weight
        return model

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of this part."""
        shapes = {}
        for name, pieces in self.pieces.items():
            rest = [piece.length(dim) for piece in pieces[:1] for dim in range(1, len(piece.shape))]
            shapes[name] = (max(piece.rows.stop for piece in pieces), *rest)
        return shapes

    def _rule(self, key: str) -> Rule:
        rules = [rule for rule in self.plan if rule.matches(key)]
        if len(rules) != 1:
            matches_text = f"by {len(rules)} rules: {[rule.names for rule in rules]}" if rules else "by no rule"
            raise PlanError(f"{key} is matched {matches_text}; the plan's rules: {[rule.names for rule in self.plan]}")
        return rules[0]

    def _check_divides(self, rule: Rule) -> None:
        """Check that a size is a multiple of the number of ranks. For key/value heads the opposite is allowed too:
        then neighbouring ranks hold the same head."""
        if rule.of not in LlamaConfig.model_fields:
            raise PlanError(f"rule {rule.names!r} divides {rule.of!r}, which is no size of a model")
        total = getattr(self.config, rule.of)
        shared = rule.of == "num_key_value_heads" and total < self.size and self.size % total == 0
        if total % self.size and not shared:
            raise PlanError(
                f"{rule.of} {total} is not divisible by {self.size} ranks"
                + (", and the ranks are not divisible by it" if rule.of == "num_key_value_heads" else "")
                + f" (needed for {rule.names})"
            )

    def _cut(self, layout_pieces: Mapping[str, list[Piece]]) -> dict[str, list[Piece]]:
        cut_pieces: dict[str, list[Piece]] = {}
        for name, pieces in layout_pieces.items():
            cut_pieces[name], start = [], 0
            for piece in pieces:
                rule = self._rule(piece.key)
                cut = [slice(0, length) for length in piece.shape]
                once = rule.style == "row" and len(piece.shape) == 1  # a bias
                if rule.divides and not once:
                    dim = int(rule.style == "row")
                    units, slots = int(getattr(self.config, rule.of)), self.slots(rule.of)
                    if piece.shape[dim] % units:
                        raise PlanError(f"{piece.key}: {piece.shape[dim]} is no multiple of {rule.of} {units}")
                    slot_size = piece.shape[dim] // units
                    cut[dim] = slice(slots.start * slot_size, slots.stop * slot_size)
                rows, stored = slice(start, start + cut[0].stop - cut[0].start), self.rank == 0 or not once
                cut_pieces[name].append(replace(piece, rows=rows, cut=tuple(cut), stored=stored))
                start = rows.stop
        keys = [piece.key for pieces in layout_pieces.values() for piece in pieces]
        if unused := [rule for rule in self.plan if not any(map(rule.matches, keys))]:
            raise PlanError(f"rule {unused[0].names!r} ({unused[0].style}) matches no tensor of this model")
        return cut_pieces

    def _check_shapes(self) -> None:
        """Check that the parts have the shapes of a Llama with ``sizes``; else a forward would fail or be wrong."""
        expected = {name: tuple(parameter.shape) for name, parameter in skeleton(self.sizes).named_parameters()}
        for name, shape in self.shapes().items():
            styles = {self._rule(piece.key).style for piece in self.pieces[name]}
            if len(styles) > 1:
                raise PlanError(f"{name} is made of parts that are divided differently: {sorted(styles)}")
            outputs, *inputs = expected[name]
            if styles & {"gather", "vocabulary"}:
                outputs //= self.size
            if "gather" in styles:
                inputs = [width * self.size for width in inputs]
            if shape != (expected_shape := (outputs, *inputs)):
                raise PlanError(
                    f"{name}: the plan leaves {list(shape)} to each of {self.size} ranks, where the other tensors ask "
                    f"for {list(expected_shape)}"
                )

    def bytes(self, itemsize: int) -> int:
        """Return the bytes of this part's parameters."""
        return sum(math.prod(shape) for shape in self.shapes().values()) * itemsize
