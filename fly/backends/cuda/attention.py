"""Attention over pages whose numbers are on the device: the ``kv`` of a forward that needs nothing from the host.

Shape legend: T packed new tokens, N new tokens of each row, B rows, W pages of a row's table, Z tokens a page, S = W·Z,
M places of a tree, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from fly.cache import PagedKVCache

__all__ = ["Branches", "PagedAttention", "Slots", "flash_takes"]

_HALVES = torch.bfloat16, torch.float16


def flash_takes(cache: PagedKVCache) -> bool:
    """Whether FlashAttention's kernel takes ``cache``: halves, in pages of multiples of 256, on an Ampere or later."""
    width, suits = cache.keys.shape[-1], cache.keys.dtype in _HALVES and cache.allocator.block_size % 256 == 0
    return suits and width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(cache.device) >= (8, 0)


class Branches(NamedTuple):
    """What new tokens see that are part of a tree."""

    first_B: Tensor  # int64, the place from which on a row holds its tree; they see all before it
    sees_BNM: Tensor  # bool, which of the places from there on each of them sees, itself included
    at_BN: Tensor  # int64, their positions


class Slots:
    """Where tokens of a batch are stored and what each row reads, as tensors on the device.

    Args:
        slots_T: int64, where each packed token's keys and values go.
        used_B: int32, stored tokens of each row with its new ones; these are its last, and each sees all before it.
        ends_B1: int32, where each row's tokens end among the packed ones, after a 0.
        table_BW: int32, the pages of each row.
        longest: most new tokens of a row.
        even: whether every row has so many.
        branches: what they see where that is not all before them.
    """

    def __init__(
        self,
        slots_T: Tensor,
        used_B: Tensor,
        ends_B1: Tensor,
        table_BW: Tensor,
        longest: int,
        even: bool,
        branches: Branches | None = None,
    ) -> None:
        self.slots_T, self.used_B, self.ends_B1, self.table_BW = slots_T, used_B, ends_B1, table_BW
        self.longest, self.even, self.branches = longest, even, branches

    @staticmethod
    def even_rows(
        table_BW: Tensor,
        start_B: Tensor,
        stored_BN: Tensor,
        block_size: int,
        nobody: int,
        branches: Branches | None = None,
    ) -> Slots:
        """N new tokens of every row in the places from ``start_B`` on. Where not ``stored_BN`` (bool) they are padding:
        their keys and values go to the page ``nobody``."""
        rows, count = stored_BN.shape
        device = start_B.device
        at_BN = start_B.unsqueeze(1) + torch.arange(count, device=device)
        page_BN = (at_BN // block_size).clamp(0, table_BW.shape[1] - 1)
        page_BN = table_BW.gather(1, page_BN).long().masked_fill(~stored_BN, nobody)
        slots_BN = page_BN * block_size + at_BN % block_size
        used_B = (start_B + count).to(torch.int32)
        ends_B1 = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=device)
        return Slots(slots_BN.flatten(), used_B, ends_B1, table_BW, count, True, branches)


class PagedAttention:
    """The ``kv`` of one forward (``fly.models.llama.KV``) over ``cache``, in the places that ``slots`` names: by
    FlashAttention with block tables if it takes the cache and there are no trees, else over a copy of each row's pages,
    for rows of equal length only."""

    def __init__(self, cache: PagedKVCache, slots: Slots, flash: bool) -> None:
        self.cache, self.slots, self.flash = cache, slots, flash and slots.branches is None
        self.size = cache.allocator.block_size
        if self.flash:
            self.read_B1 = F.pad(slots.used_B.cumsum(0), (1, 0)).to(torch.int32)
        elif slots.even:
            pages = slots.table_BW.shape[1] * self.size
            self.seen: dict[int | None, Tensor] = {None: self._seen(torch.arange(pages, device=slots.used_B.device))}
        else:
            raise ValueError("rows of several lengths need FlashAttention here")

    def _seen(self, at_S: Tensor) -> Tensor:
        """[B, N, S], which stored tokens each new one sees."""
        slots = self.slots
        if slots.branches is None:
            last_BN = (slots.used_B - slots.longest).unsqueeze(1) + at_S[: slots.longest]
            return at_S <= last_BN.unsqueeze(2)
        first_B, sees_BNM, _ = slots.branches
        place_B1S = (at_S - first_B.unsqueeze(1)).unsqueeze(1)
        _, count, most = sees_BNM.shape
        inside_BNS = sees_BNM.gather(2, place_B1S.clamp(0, most - 1).expand(-1, count, -1))
        return (place_B1S < 0) | (inside_BNS & (place_B1S < most))

    def _within(self, window: int | None) -> Tensor:
        """The same of the last ``window`` tokens that it sees."""
        if window is not None and window not in self.seen:
            seen_BNS = self.seen[None]
            # of those it sees, how many come from here on
            after_BNS = seen_BNS.flip(2).cumsum(2, dtype=torch.int32).flip(2)
            self.seen[window] = seen_BNS & (after_BNS <= window)
        return self.seen[window]

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store the new keys and values, then attend: [T, H, D], each token over its row up to itself, or over the last
        ``window`` tokens of that. The output of padding is meaningless."""
        slots, k_SGD, v_SGD = self.slots, self.cache.keys[layer], self.cache.values[layer]
        k_SGD.index_copy_(0, slots.slots_T, k_TGD.to(k_SGD.dtype))
        v_SGD.index_copy_(0, slots.slots_T, v_TGD.to(v_SGD.dtype))
        k_PZGD, v_PZGD = (x.unflatten(0, (-1, self.size)) for x in (k_SGD, v_SGD))
        q, grouped = q_THD.to(k_SGD.dtype), q_THD.shape[1] != k_TGD.shape[1]
        if self.flash:
            seen = (-1, 0) if window is None else (window - 1, 0)
            most = slots.table_BW.shape[1] * self.size
            # Several splits over pages are reported to be wrong; one also adds up alike in every batch.
            out = varlen_attn(
                q, k_PZGD, v_PZGD, slots.ends_B1, self.read_B1, slots.longest, most, scale=scale, window_size=seen,
                enable_gqa=grouped, seqused_k=slots.used_B, block_table=slots.table_BW, num_splits=1,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out.to(q_THD.dtype)
        table_BW = slots.table_BW.long()
        k, v = (x[table_BW].flatten(1, 2).transpose(1, 2) for x in (k_PZGD, v_PZGD))
        q_BHND, mask_B1NS = q.unflatten(0, (-1, slots.longest)).transpose(1, 2), self._within(window).unsqueeze(1)
        out = F.scaled_dot_product_attention(q_BHND, k, v, mask_B1NS, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1).to(q_THD.dtype)


def listed(tables: Sequence[Sequence[int]], width: int, fill: int) -> list[list[int]]:
    """Block tables of one width."""
    return [[*table, *[fill] * (width - len(table))] for table in tables]
