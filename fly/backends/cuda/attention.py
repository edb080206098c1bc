"""Attention over pages whose numbers are on the device. It is the ``kv`` of a forward that needs nothing from the host.

A forward calls ``PagedAttention.attend`` once a layer. ``attend`` stores the new keys and values in the KV cache, then
computes attention. Our Triton kernels (``ops.attend_pages``) and FlashAttention read the pages in place; otherwise each
row's pages are copied. FlashAttention handles prompts, because it is faster there, and everything if the Triton kernels
are refused.

Shape legend: T packed new tokens, N new tokens of each row, B rows, W pages of a row's table, Z tokens a page, P pages,
S = W·Z, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from fly.backends.cuda.ops import attend_pages, place, refuse_attention
from fly.cache import PagedBatch, PagedKVCache
from fly.ops import sent

__all__ = [
    "PagedAttention",
    "Slots",
    "find_flash",
    "find_trees",
    "place_tokens",
    "reads_pages",
    "takes_flash",
    "takes_pages",
]

_log = logging.getLogger("fly")
_PROMPT = 128  # from so many new tokens of a row on, FlashAttention is preferred


def takes_pages(cache: PagedKVCache) -> bool:
    """Whether our Triton kernels read ``cache`` in place. The first call runs them."""
    width = cache.keys.shape[-1]
    return refuse_attention(cache.device, cache.keys.dtype, width, cache.allocator.block_size) is None


def reads_pages(cache: PagedKVCache) -> bool:
    """Whether attention reads ``cache`` in place, by either kernel. If not, it copies each row's pages."""
    return takes_pages(cache) or takes_flash(cache)


def takes_flash(cache: PagedKVCache) -> bool:
    """Whether FlashAttention's kernel reads ``cache`` in place: 16-bit values, pages of a multiple of 256 tokens, a
    device of compute capability 8.0 (Ampere) or later, and a torch whose kernel takes pages."""
    width, halves = cache.keys.shape[-1], cache.keys.dtype in (torch.bfloat16, torch.float16)
    fits = halves and cache.allocator.block_size % 256 == 0 and width % 8 == 0 and width <= 256
    if not fits or torch.cuda.get_device_capability(cache.device) < (8, 0):
        return False
    return find_flash(cache.device, cache.keys.dtype, width) is not None


@cache
def find_flash(device: torch.device, dtype: torch.dtype, width: int) -> dict[str, int] | None:
    """Return options with which the installed torch's FlashAttention reads pages. The function's signature and a tiny
    call show them.

    The options ask for one split: then sums are the same in every batch, and several splits over pages are reported to
    give wrong results. A version without the option for splits is called without it. Return None, after one warning, if
    the function refuses pages, as in torch 2.11.
    """
    known, error = inspect.signature(varlen.varlen_attn).parameters, ""
    if missing := [name for name in ("seqused_k", "block_table", "enable_gqa") if name not in known]:
        error = f"varlen_attn knows no {missing[0]}"
    else:
        for options in ({"num_splits": 1}, {}) if "num_splits" in known else ({},):
            try:
                if _reads_pages(device, dtype, width, options):
                    return options
                error = "its result over pages is wrong"
            except (RuntimeError, TypeError, ValueError) as refusal:
                error = error or str(refusal).splitlines()[0]
    _log.warning(
        "FlashAttention of torch %s does not read pages in place, so attention copies them: %s",
        torch.__version__,
        error,
    )
    return None


def _reads_pages(device: torch.device, dtype: torch.dtype, width: int, options: dict[str, Any]) -> bool:
    """Whether attention is correct for two new tokens of a text of three tokens, which is cached in the second page."""
    generator = torch.Generator().manual_seed(0)
    q_THD, k_PZGD, v_PZGD = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((2, 2, width), (2, 256, 1, width), (2, 256, 1, width))
    )
    ends, read, used, table = (
        torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0, 2], [0, 3], [3], [[1]])
    )
    out = varlen.varlen_attn(
        q_THD.to(device), k_PZGD.to(device), v_PZGD.to(device), ends, read, 2, 256,
        window_size=(-1, 0), enable_gqa=True, seqused_k=used, block_table=table, **options,
    )  # fmt: skip
    k, v = (x[1, :3].transpose(0, 1).expand(2, -1, -1).float() for x in (k_PZGD, v_PZGD))
    seen = torch.tensor([[True, True, False], [True, True, True]])
    want = F.scaled_dot_product_attention(q_THD.transpose(0, 1).float(), k, v, seen).transpose(0, 1)
    assert isinstance(out, Tensor)
    return torch.allclose(out.cpu().float(), want, atol=0.05, rtol=0.05)


@dataclass(frozen=True)
class Slots:
    """Where a forward stores its tokens, and what each row reads, as tensors on the device."""

    slots_T: Tensor  # int64, where each packed token's keys and values go
    used_B: Tensor  # int32, cached tokens of each row, the new ones included
    ends_B1: Tensor  # int32, where each row's tokens end among the packed ones, after a 0
    table_BW: Tensor  # int32, the pages of each row
    longest: int  # new tokens of a row, at most
    last_T: Tensor | None = None  # int32, each token sees only cached tokens before this number; None: up to itself
    place_T: Tensor | None = None  # int32, each token's number among its row's cached ones; None: not known


@dataclass(frozen=True)
class Trees:
    """Which new tokens of its row each token of a tree sees. It also sees all tokens before the new ones."""

    seen_TN: Tensor  # uint8
    place_T: Tensor  # int32, each token's position in its row


class PagedAttention:
    """The ``kv`` of one forward (``fly.models.llama.KV``) over ``cache``. ``slots`` says where its tokens go. If pages
    are copied, all rows must have the same number of new tokens. ``trees`` need our own kernels."""

    def __init__(self, cache: PagedKVCache, slots: Slots, trees: Trees | None = None) -> None:
        self.cache = cache
        self.slots = slots
        self.trees = trees
        self.block_size = cache.allocator.block_size
        self.flash = takes_flash(cache)
        self.own = takes_pages(cache) and (trees is not None or slots.longest <= _PROMPT or not self.flash)
        self._seen: dict[int, Tensor] = {}  # what the tree's tokens see, by window
        if self.own:
            place_T = slots.place_T
            if place_T is None:
                count_T = torch.arange(len(slots.slots_T), dtype=torch.int32, device=slots.used_B.device)
                row_T = torch.bucketize(count_T, slots.ends_B1[1:], right=True)
                place_T = (slots.used_B - slots.ends_B1[1:])[row_T] + count_T
            self.last_T = place_T + 1 if slots.last_T is None else slots.last_T
            self.place_T = place_T if trees is None else trees.place_T
            if trees is not None:
                self.start_B = slots.used_B - slots.ends_B1.diff()
        elif self.flash:
            self.read_B1 = F.pad(slots.used_B.cumsum(0), (1, 0)).to(torch.int32)
        else:
            # Each row's new tokens are its last ones, and each sees the tokens up to itself.
            at_S = torch.arange(slots.table_BW.shape[1] * self.block_size, device=slots.used_B.device)
            last_BN = (slots.used_B - slots.longest).unsqueeze(1) + at_S[: slots.longest]
            self.behind_BNS = last_BN.unsqueeze(2) - at_S

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store the new keys and values, then compute attention [T, H, D]. Each token sees its row up to itself, or the
        last ``window`` tokens up to itself. The output of padding is meaningless."""
        slots = self.slots
        k_SGD = self.cache.keys[layer]
        v_SGD = self.cache.values[layer]
        k_SGD.index_copy_(0, slots.slots_T, k_TGD.to(k_SGD.dtype))
        v_SGD.index_copy_(0, slots.slots_T, v_TGD.to(v_SGD.dtype))
        return self.attend_stored(layer, q_THD, window, scale)

    def attend_stored(self, layer: int, q_THD: Tensor, window: int | None, scale: float | None) -> Tensor:
        """Compute attention once the new keys and values are stored."""
        slots = self.slots
        k_SGD = self.cache.keys[layer]
        v_SGD = self.cache.values[layer]
        for stored_SGD in () if self.own else (k_SGD, v_SGD):
            # Clear what padding stored: masked rows still read it, and a NaN times a weight of 0 is a NaN.
            stored_SGD[-self.block_size :].zero_()
        k_PZGD, v_PZGD = (x.unflatten(0, (-1, self.block_size)) for x in (k_SGD, v_SGD))
        q, grouped = q_THD.to(k_SGD.dtype), q_THD.shape[1] != k_SGD.shape[1]
        if self.own:
            out = attend_pages(
                q, k_SGD, v_SGD, slots.ends_B1, self.last_T, self.place_T, slots.table_BW, slots.longest,
                self.block_size, window or 0, q.shape[-1] ** -0.5 if scale is None else scale,
                *(() if self.trees is None else (self.start_B, self._see(self.trees.seen_TN, window))),
            )  # fmt: skip
            return out.to(q_THD.dtype)
        if self.flash:
            options: dict[str, Any] = find_flash(self.cache.device, k_SGD.dtype, k_SGD.shape[-1]) or {}
            out = varlen.varlen_attn(
                q, k_PZGD, v_PZGD, slots.ends_B1, self.read_B1, slots.longest,
                slots.table_BW.shape[1] * self.block_size, scale=scale, enable_gqa=grouped,
                window_size=(-1, 0) if window is None else (window - 1, 0),
                seqused_k=slots.used_B, block_table=slots.table_BW, **options,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out.to(q_THD.dtype)
        seen_BNS = self.behind_BNS >= 0
        if window is not None:
            seen_BNS = seen_BNS & (self.behind_BNS < window)
        table_BW = slots.table_BW.long()
        k, v = (x[table_BW].flatten(1, 2).transpose(1, 2) for x in (k_PZGD, v_PZGD))
        q_BHND, seen_B1NS = q.unflatten(0, (-1, slots.longest)).transpose(1, 2), seen_BNS.unsqueeze(1)
        out = F.scaled_dot_product_attention(q_BHND, k, v, seen_B1NS, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1).to(q_THD.dtype)

    def _see(self, seen_TN: Tensor, window: int | None) -> Tensor:
        """Find which of the last ``window`` tokens of its branch each token of a tree sees."""
        if window is None:
            return seen_TN
        if window not in self._seen:
            after_TN = seen_TN.long().flip(1).cumsum(1).flip(1)  # seen tokens, counted from each one to the end
            self._seen[window] = seen_TN * (after_TN <= window)
        return self._seen[window]


def place_tokens(
    cache: PagedKVCache, table_BW: Tensor, start_B: Tensor, stored_BN: Tensor
) -> tuple[Tensor, PagedAttention]:
    """Place N new tokens of every row from ``start_B`` on. Return their positions [T] and the ``kv`` of their forward.

    Tokens that are not ``stored_BN`` (bool) are padding: their keys and values go to a page that no row owns.
    """
    size = cache.allocator.block_size
    positions_T, slots_T, used_B, ends_B1, last_T, place_T = place(
        table_BW, start_B, stored_BN, size, cache.nobody, cache.context
    )
    slots = Slots(slots_T, used_B, ends_B1, table_BW, stored_BN.shape[1], last_T, place_T)
    return positions_T, PagedAttention(cache, slots)


def find_trees(kv: PagedBatch) -> Trees | None:
    """Return the trees of a batch, uploaded; None if all rows are chains."""
    if kv.masks is None or all(mask is None for mask in kv.masks):
        return None
    seen_TN = torch.zeros(sum(kv.counts), max(kv.counts), dtype=torch.uint8)
    place_T, begin = torch.zeros(len(seen_TN), dtype=torch.int32), 0
    for start, count, mask_NS in zip(kv.starts, kv.counts, kv.masks):
        rows = slice(begin, begin := begin + count)
        own_NN = torch.ones(count, count, dtype=torch.bool).tril() if mask_NS is None else mask_NS[:, start:]
        seen_TN[rows, :count] = own_NN
        place_T[rows] = start + own_NN.sum(1, dtype=torch.int32) - 1
    return Trees(sent(seen_TN, kv.cache.device), sent(place_T, kv.cache.device))
