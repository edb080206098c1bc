"""DFlash and DSpark heads (arXiv 2602.06036), trained on blocks at random positions of the target's answers, all blocks
of a batch in one forward.

The token at an anchor position begins a block, and mask tokens follow it. A block sees the context before its anchor,
as in drafting, and its own places, but no other block.

Shape legend: B rows of a batch, L tokens of a row, A anchors of a row, K places of a block, D drafts of a block, M
drafts to learn, T packed tokens or places, N positions to learn, F hidden states side by side, C hidden width of the
head, G key/value heads, H query heads, U draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

from collections import abc
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.extras.train.answers import Answer
from fly.extras.train.course import Course
from fly.extras.train.lessons import Lessons, Reader
from fly.extras.train.plan import Plan
from fly.models.dflash import DFlashConfig, DFlashHead, save_dflash_head
from fly.runner.executor import Executor

__all__ = ["BlockCourse", "BlocksAt", "Drafts", "draft_blocks"]

_READ = 2048  # how many positions are read to measure the scale of hidden states


class BlocksAt:
    """The keys and values of a training forward (``fly.models.dflash.BlockKV``): the context of B rows, and blocks at
    the anchors ``start_BA`` of each row. A place sees the context before its anchor, and its own block."""

    def __init__(self, start_BA: Tensor, length: int, config: DFlashConfig) -> None:
        self.start_BA = start_BA
        self.length = length
        self.config = config
        self.context: dict[int, tuple[Tensor, Tensor]] = {}
        self.masks: dict[tuple[int | None, bool], Tensor] = {}

    def store(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> None:
        self.context[layer] = k_TGD, v_TGD

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        def by_row(x: Tensor) -> Tensor:
            return x.unflatten(0, (len(self.start_BA), -1)).transpose(1, 2)

        # The keys of a row: its context, then all its blocks.
        (context_k, context_v), q = self.context[layer], by_row(q_THD)
        k = torch.cat([by_row(context_k), by_row(k_TGD)], 2)
        v = torch.cat([by_row(context_v), by_row(v_TGD)], 2)
        kind = window, self.config.causal[layer]
        if kind not in self.masks:
            self.masks[kind] = self._mask(layer).unsqueeze(1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.masks[kind], scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, layer: int) -> Tensor:
        """Return which keys each place of a row sees in a layer, [B, A * K, L + A * K] bool."""
        anchors, size = self.start_BA.shape[1], self.config.block_size
        at_L, at_K = torch.arange(self.length), torch.arange(size)
        start_BA11 = self.start_BA[..., None, None]
        place_BAK1 = start_BA11 + at_K.unsqueeze(1)
        context_BAKL = self.config.sees(layer, place_BAK1, at_L, start_BA11) & (at_L < start_BA11)
        inside_KK = self.config.sees(layer, at_K.unsqueeze(1), at_K, 0)
        inside = torch.block_diag(*[inside_KK] * anchors).bool()
        return torch.cat([context_BAKL.flatten(1, 2), inside.expand(len(self.start_BA), -1, -1)], -1)


class Drafts(NamedTuple):
    """What a head says of the drafts of each block, given the text's own tokens before them."""

    logits_BADU: Tensor  # float32
    chance_BAD: Tensor | None  # how likely each draft is to be kept; None: there is no confidence head


def draft_blocks(
    head: DFlashHead, tokens_BL: Tensor, states_BLF: Tensor, start_BA: Tensor, matrix_UC: Tensor | None = None
) -> Drafts:
    """Run one forward over blocks that begin at the tokens ``start_BA`` of each row. ``matrix_UC`` is the output matrix
    of a head that has none of its own. Anchors must leave room for their blocks within the positions of the head."""
    config = head.config
    rows, length = tokens_BL.shape
    size = config.block_size
    kv = BlocksAt(start_BA, length, config)
    head.read(head.fuse(states_BLF.flatten(0, 1)), torch.arange(length).repeat(rows), kv)
    anchor_BA = tokens_BL.gather(1, start_BA)
    block_BAK = torch.full((*start_BA.shape, size), config.mask_token_id)
    block_BAK[..., 0] = anchor_BA
    positions_BAK = start_BA.unsqueeze(-1) + torch.arange(size)
    hidden_BAKC = head(block_BAK.flatten(), positions_BAK.flatten(), kv).unflatten(0, block_BAK.shape)
    # Draft j is the token j + 1 after the anchor, and the token before it is the text's.
    first = size - config.drafts
    drafting_BADC = hidden_BAKC[:, :, first:]
    logits_BADU = (head.logits(drafting_BADC) if matrix_UC is None else F.linear(drafting_BADC, matrix_UC)).float()
    if head.markov_head is None and head.confidence_head is None:
        return Drafts(logits_BADU, None)
    before_BAD = _at(tokens_BL, start_BA.unsqueeze(-1) + torch.arange(config.drafts))
    state_MR: Tensor | None = None
    logits, chances = list[Tensor](), list[Tensor]()
    if first:  # the anchor's place predicts nothing, but a recurrent Markov head begins there
        state_MR = head.correct(
            logits_BADU[:, :, 0].flatten(0, 1), hidden_BAKC[:, :, 0].flatten(0, 1), anchor_BA.flatten(), None
        ).state_BR
    for j in range(config.drafts):
        corrected = head.correct(
            logits_BADU[:, :, j].flatten(0, 1),
            drafting_BADC[:, :, j].flatten(0, 1),
            before_BAD[:, :, j].flatten(),
            state_MR,
        )
        state_MR = corrected.state_BR
        logits.append(corrected.logits_BU)
        if corrected.chance_B is not None:
            chances.append(corrected.chance_B)
    shape = start_BA.shape
    logits_BADU = torch.stack(logits, 1).unflatten(0, shape)
    return Drafts(logits_BADU, torch.stack(chances, 1).unflatten(0, shape) if chances else None)


class _Blocks(NamedTuple):
    """Where the blocks of a batch begin, and of which of their drafts there is something to learn."""

    start_BA: Tensor
    after_BAD: Tensor  # the position of the token before each draft
    learned_BAD: Tensor  # bool: the draft is a token of the answer


class BlockCourse(Course):
    """Trains a DFlash head (fill-in: a block of K places drafts K - 1 tokens) or a DSpark head (anchor-first: K tokens,
    with a Markov head and a confidence head)."""

    head: DFlashHead

    def __init__(self, executor: Executor, plan: Plan, ids_U: Tensor, taught: abc.Sequence[Answer]) -> None:
        assert plan.layers and plan.block_size and plan.anchors and plan.gamma
        self.anchors = plan.anchors
        self.gamma = plan.gamma
        target = executor.config
        self.states = plan.states_of(target.num_hidden_layers)
        spark = plan.kind == "dspark"
        config = DFlashConfig(
            layer=plan.layer(target, "qwen3", plan.layers),
            draft_vocab_size=len(ids_U),
            target_hidden_size=target.hidden_size,
            target_layers=target.num_hidden_layers,
            states=self.states,
            block_size=plan.block_size,
            mask_token_id=_unused_token(taught, target.vocab_size),
            anchor_first=spark,
            causal=(False,) * plan.layers,
            markov="vanilla" if spark else None,
            markov_rank=plan.markov_rank or 0,
            confidence=spark,
            confidence_with_markov=spark,
        )
        shares, full_vocabulary = config.layer.hidden_size == target.hidden_size, len(ids_U) == target.vocab_size
        self.head = DFlashHead(config, embedding=not shares, output=not (shares and full_vocabulary))
        self.depths = config.drafts
        self.matrix_UC: Tensor | None = None
        self.number_V = torch.full((target.vocab_size,), -1).scatter(0, ids_U, torch.arange(len(ids_U)))
        if shares:
            with torch.no_grad():
                matrix_UC = executor.output().cpu()[ids_U].float()
            if self.head.lm_head is None:
                self.matrix_UC = matrix_UC
            else:
                self.head.lm_head.weight = torch.nn.Parameter(matrix_UC, requires_grad=False)

    def begin(self, reader: Reader, taught: abc.Sequence[Answer]) -> None:
        """See ``Course``. The heads of DSpark begin with no effect."""
        for _ in reader.survey(taught, _READ):
            pass
        if self.head.markov_head is not None:
            torch.nn.init.zeros_(self.head.markov_head.markov_w2.weight)
        if self.head.confidence_head is not None:
            torch.nn.init.zeros_(self.head.confidence_head.proj.weight)
            torch.nn.init.zeros_(self.head.confidence_head.proj.bias)

    def learn(self, lessons: Lessons, seed: str) -> tuple[Tensor, Tensor]:
        """See ``Course``. A DFlash head learns the answer's tokens, by cross-entropy. A DSpark head learns above all
        the target's distribution, by the L1 distance. Half of this distance is the total variation, the chance that a
        drawn token is rejected, and the confidence head learns the opposite chance. Late drafts count less (arXiv
        2602.06036)."""
        blocks = self._place_blocks(lessons, seed)
        drafts = self._draft(lessons, blocks)
        row_M, anchor_M, draft_M = blocks.learned_BAD.nonzero(as_tuple=True)
        logits_MU = drafts.logits_BADU[row_M, anchor_M, draft_M]
        after_M = blocks.after_BAD[row_M, anchor_M, draft_M]
        token_M = lessons.tokens_BL[row_M, after_M + 1]
        weight_M = torch.exp(-draft_M / self.gamma)
        label_M = self.number_V[token_M]
        inside_M = label_M >= 0  # the head can draft the token
        cross_M = F.cross_entropy(logits_MU, label_M.clamp_min(0), reduction="none")
        cross = _mean(cross_M, weight_M * inside_M)
        if drafts.chance_BAD is None:
            return cross, cross
        truth_MU = lessons.truth_NU[lessons.number_BL[row_M, after_M]]
        # The target's tokens that the head cannot draft count too.
        varied_M = (logits_MU.softmax(-1) - truth_MU).abs().sum(-1) + 1 - truth_MU.sum(-1)
        chance_M = drafts.chance_BAD[row_M, anchor_M, draft_M].clamp(1e-6, 1 - 1e-6)
        accept_M = (1 - varied_M.detach() / 2).clamp(0, 1)
        judged_M = -(accept_M * chance_M.log() + (1 - accept_M) * (1 - chance_M).log())
        return 0.1 * cross + _mean(0.9 * varied_M + judged_M, weight_M), cross

    @torch.no_grad()
    def measure(self, lessons: Lessons, seed: str) -> tuple[Tensor, Tensor]:
        blocks = self._place_blocks(lessons, seed)
        drafts = self._draft(lessons, blocks)
        drafted_BAD = self.head.to_target_U[drafts.logits_BADU.argmax(-1)]
        number_M = _at(lessons.number_BL, blocks.after_BAD)[blocks.learned_BAD]
        choice_BAD = torch.full_like(drafted_BAD, -1).masked_scatter(blocks.learned_BAD, lessons.choice_N[number_M])
        text_BAD = _at(lessons.tokens_BL, blocks.after_BAD + 1)
        hit_BAD = drafted_BAD == choice_BAD
        # Acceptance counts only where the head is given the tokens that it has just drafted.
        going_BAD = (hit_BAD & (choice_BAD == text_BAD)).cumprod(-1).bool()
        standing_BAD = torch.cat([torch.ones_like(going_BAD[..., :1]), going_BAD[..., :-1]], -1) & blocks.learned_BAD
        return (hit_BAD & standing_BAD).sum((0, 1)).float(), standing_BAD.sum((0, 1)).float()

    def save(self, directory: Path) -> None:
        save_dflash_head(self.head, directory)

    def _draft(self, lessons: Lessons, blocks: _Blocks) -> Drafts:
        return draft_blocks(self.head, lessons.tokens_BL, lessons.states_BLF, blocks.start_BA, self.matrix_UC)

    def _place_blocks(self, lessons: Lessons, seed: str) -> _Blocks:
        """Draw the anchors of a batch: different positions to learn of each row, from which a block fits."""
        number_BL, config = lessons.number_BL, self.head.config
        rows, length = number_BL.shape
        random = Random(seed)
        fits = config.layer.max_position_embeddings - config.block_size
        # A row with fewer positions has blocks at its first token too, of which nothing is learned.
        start_BA, real_BA = torch.zeros(2, rows, self.anchors, dtype=torch.int64)
        for b, number_L in enumerate(number_BL):
            places = [place for place in (number_L >= 0).nonzero().flatten().tolist() if place <= fits]
            starts = random.sample(places, min(self.anchors, len(places)))
            start_BA[b, : len(starts)] = torch.tensor(starts, dtype=torch.int64)
            real_BA[b, : len(starts)] = 1
        after_BAD = start_BA.unsqueeze(-1) + torch.arange(config.drafts)
        inside_BAD = (after_BAD < length - 1) & (real_BA.unsqueeze(-1) > 0)
        return _Blocks(start_BA, after_BAD, inside_BAD & (_at(number_BL, after_BAD) >= 0))


def _at(values_BL: Tensor, at_BAD: Tensor) -> Tensor:
    """Return the values [B, A, D] of rows at these positions, or at their last one for positions beyond it."""
    return values_BL.gather(1, at_BAD.flatten(1).clamp_max(values_BL.shape[1] - 1)).view_as(at_BAD)


def _mean(values_M: Tensor, weight_M: Tensor) -> Tensor:
    return (values_M * weight_M).sum() / weight_M.sum().clamp_min(1e-6)


def _unused_token(answers: abc.Sequence[Answer], vocab: int) -> int:
    """Return the highest id that no answer has, or the highest of all."""
    tokens = {token for answer in answers for token in (*answer.prompt, *answer.answer)}
    return next((token for token in reversed(range(vocab)) if token not in tokens), vocab - 1)
