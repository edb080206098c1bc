"""Paged key/value tensors, and the one attention function over them. Knows nothing of models, sampling or policies.

Shape legend: T packed new tokens, N new tokens of one row, S tokens of one row so far, H query heads, G key/value
heads, D head width, L layers, P pages, Z tokens per page.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.cache.allocator import BlockAllocator
from fly.devices import kind_of, on_host
from fly.ops import upload

__all__ = ["DEFAULT_BYTES", "Cacheable", "PagedBatch", "PagedKVCache", "Sizes", "block_size_for"]

_LARGE = 1 << 22  # bytes
DEFAULT_BYTES = 4 << 30  # default bytes of keys and values


def block_size_for(device: torch.device | str) -> int:
    """Return the tokens per page for a kind of device. On the CPU pages are small, so that a short text wastes little.
    Elsewhere a page has 256 tokens, which paged attention kernels on CUDA accept."""
    return kind_of(device).page_tokens


class Sizes(Protocol):
    """The sizes that a cache needs. A ``LlamaConfig`` has them."""

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


class Cacheable(Protocol):
    """What a cache needs from a model."""

    @property
    def config(self) -> Sizes: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class _Row:
    """One sequence's part of a packed forward."""

    new: slice  # its tokens among the packed T
    stored: slice | Tensor  # its slots in the cache: a slice if consecutive, else an index [S]
    mask_NS: Tensor | None  # True where attention is allowed; None without a mask
    causal: bool  # whether nothing was stored before: plain causal attention then needs no mask

    def windowed(self, window: int, device: torch.device) -> _Row:
        """Return the same row with a mask by which each token sees only the last ``window`` tokens of its sequence or
        branch."""
        length, new = _count_slots(self.stored), self.new.stop - self.new.start
        if length <= window:
            return self
        if self.mask_NS is None and not self.causal:  # a single token without a mask sees all slots
            return _Row(self.new, _skip_slots(self.stored, length - window), None, False)
        mask_NS = self.mask_NS
        if mask_NS is None:
            mask_NS = torch.ones(new, length, dtype=torch.bool, device=device).tril()
        after_NS = mask_NS.flip(1).cumsum(1).flip(1)  # number of visible tokens from each slot on
        mask_NS = mask_NS & (after_NS <= window)
        first = int(mask_NS.any(0).nonzero()[0])
        return _Row(self.new, _skip_slots(self.stored, first), mask_NS[:, first:], False)


def _count_slots(stored: slice | Tensor) -> int:
    """Return how many slots ``_Row.stored`` names."""
    return stored.stop - stored.start if isinstance(stored, slice) else len(stored)


def _skip_slots(stored: slice | Tensor, first: int) -> slice | Tensor:
    """Return the slots of ``stored`` from number ``first`` on."""
    return slice(stored.start + first, stored.stop) if isinstance(stored, slice) else stored[first:]


class PagedBatch:
    """The ``kv`` of one forward: the slots that it writes the packed tokens to, and the slots that each row reads."""

    def __init__(
        self,
        cache: PagedKVCache,
        seqs: Sequence[Hashable],
        starts: Sequence[int],
        counts: Sequence[int],
        masks: Sequence[Tensor | None] | None,
    ) -> None:
        self.cache = cache
        self.seqs = seqs
        self.starts = starts
        self.counts = counts
        self.masks = masks
        self._windowed: dict[int, list[_Row]] = {}  # rows for layers with a window, by window

    def tables(self) -> list[list[int]]:
        """Return each row's pages in order (the allocator's own lists), for kernels that read block tables."""
        return [self.cache.allocator.table(seq) for seq in self.seqs]

    @cached_property
    def _packed(self) -> tuple[Tensor, list[_Row]]:
        """The slots [T] for the packed tokens, and what each row reads."""
        cache, device = self.cache, self.cache.device
        rows = []
        written = []
        at = 0
        masks = self.masks or [None] * len(self.seqs)
        for seq, start, count, mask_NS in zip(self.seqs, self.starts, self.counts, masks):
            length = start + count
            # The row reads all of its slots, and writes to the last ``count`` of them.
            stored: slice | list[int] | Tensor = cache.slots(seq, 0, length)
            if isinstance(stored, slice):
                written.append(torch.arange(stored.start + start, stored.stop, device=device))
            else:
                stored = torch.tensor(stored, device=device)
                written.append(stored[start:])
            mask_NS = None if mask_NS is None else mask_NS.to(device)
            # Several new tokens need a causal mask, unless nothing was stored before them.
            fresh = mask_NS is None and count > 1 and start == 0
            if mask_NS is None and count > 1 and not fresh:
                mask_NS = torch.ones(count, length, dtype=torch.bool, device=device).tril_(start)
            rows.append(_Row(slice(at, at + count), stored, mask_NS, fresh))
            at += count
        return written[0] if len(written) == 1 else torch.cat(written), rows

    def _within(self, window: int) -> list[_Row]:
        """Return what each row reads in layers whose tokens see only the last ``window`` tokens."""
        if window not in self._windowed:
            self._windowed[window] = [row.windowed(window, self.cache.device) for row in self._packed[1]]
        return self._windowed[window]

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Store the new keys and values, and return the attention [T, H, D]. Each token attends to its sequence up to
        itself, or to the last ``window`` tokens of it. Products of queries and keys are multiplied by ``scale``; None
        is D ** -0.5.

        Consecutive pages are read in place; scattered pages are gathered (a copy).
        """
        k_SGD, v_SGD = self.store(layer, k_TGD, v_TGD)
        q = q_THD.to(k_SGD.dtype).transpose(0, 1).unsqueeze(0)
        grouped = q_THD.shape[1] != k_TGD.shape[1]
        outs = [
            F.scaled_dot_product_attention(
                q[:, :, row.new],
                k_SGD[row.stored].transpose(0, 1).unsqueeze(0),
                v_SGD[row.stored].transpose(0, 1).unsqueeze(0),
                attn_mask=row.mask_NS,
                is_causal=row.causal,
                scale=scale,
                enable_gqa=grouped,
            )
            for row in (self._packed[1] if window is None else self._within(window))
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        return out.squeeze(0).transpose(0, 1).to(q_THD.dtype)

    def store(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values. Return all keys and all values of the layer, [S, G, D] each, by slot."""
        slots_T = self._packed[0]
        k_SGD, v_SGD = self.cache.keys[layer], self.cache.values[layer]
        k_SGD.index_copy_(0, slots_T, k_TGD.to(k_SGD.dtype))
        v_SGD.index_copy_(0, slots_T, v_TGD.to(v_SGD.dtype))
        return k_SGD, v_SGD

    def tokens(self) -> Iterator[PagedBatch]:
        """Yield the batch token by token, row after row. Attention copies the keys and values that a token sees."""
        slots_T, rows = self._packed
        slots_S = torch.arange(self.cache.keys.shape[1], device=self.cache.device)
        for seq, start, count, row in zip(self.seqs, self.starts, self.counts, rows):
            stored_S = slots_S[row.stored]
            for n in range(count):
                visible_S = stored_S[: start + n + 1] if row.causal or row.mask_NS is None else stored_S[row.mask_NS[n]]
                # for kernels that read tables: what a token of a tree sees
                mask_1S = None if row.mask_NS is None else row.mask_NS[n : n + 1, : start + n + 1]
                single = PagedBatch(self.cache, [seq], [start + n], [1], [mask_1S])
                at = row.new.start + n
                single._packed = slots_T[at : at + 1], [_Row(slice(0, 1), visible_S, None, False)]
                yield single


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros. On the CPU, memory is used only when it is first written. It has huge pages if the system offers
    them: a text is spread over many small pages of the cache, and with ordinary memory pages address translation would
    take longer than reading them."""
    size = math.prod(shape) * dtype.itemsize
    if not on_host(device) or size < _LARGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    # Private memory: shared memory gets huge pages only if the whole system is configured for it.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class PagedKVCache:
    """Keys and values of every layer in pages, with the allocator of the pages.

    Args:
        config: sizes of the model whose keys and values are stored.
        num_blocks: number of pages; one page holds ``block_size`` tokens of all layers.
        block_size: tokens per page; None chooses by the device (``block_size_for``).
        dtype, device: dtype and device of the stored tensors.

    ``keys`` and ``values`` are [L, P·Z, G, D]; page p is the slots p·Z to (p+1)·Z. Devices that run forwards of fixed
    shapes get one more page, ``nobody``, which no sequence gets; results for padding are written there. ``context`` is
    the length of the model's longest text.
    """

    def __init__(
        self,
        config: Sizes,
        num_blocks: int,
        block_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        block_size = block_size or block_size_for(device)
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.device = torch.device(device)
        self.context = config.max_position_embeddings
        self.nobody = num_blocks
        self._fixed = not on_host(self.device)  # whether forwards have fixed shapes, and read whole pages
        pages = num_blocks + self._fixed
        shape = config.num_hidden_layers, pages * block_size, config.num_key_value_heads, config.head_dim
        self.keys, self.values = (zeros(shape, dtype, self.device) for _ in range(2))

    @classmethod
    def for_model(cls, model: Cacheable, tokens: int | None = None, block_size: int | None = None) -> PagedKVCache:
        """Build a cache with the model's dtype and device, for at least ``tokens`` tokens over all sequences.

        If ``tokens`` is None, the cache holds eight full contexts, or fewer if those take more than 4 GiB.
        """
        dtype, block_size = model.dtype, block_size or block_size_for(model.device)
        if tokens is None:
            affordable = DEFAULT_BYTES // cls.bytes_per_token(model.config, dtype)
            tokens = min(8 * model.config.max_position_embeddings, max(affordable, block_size))
        return cls(model.config, -(-tokens // block_size), block_size, dtype, model.device)

    @staticmethod
    def bytes_per_token(config: Sizes, dtype: torch.dtype) -> int:
        """Return the bytes that one cached token takes over all layers, keys and values together."""
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize

    def resize(self, seq: Hashable, n_tokens: int) -> None:
        """Grow or roll back ``seq``, and make the page copies that sharing requires. Raises ``OutOfBlocks``.

        On devices other than the CPU, new pages are zeroed: forwards of fixed shapes read whole pages and mask what
        they do not need, but a NaN that another sequence left would pass the mask, since 0 · NaN is NaN.
        """
        had = len(self.allocator.table(seq))
        copies = self.allocator.resize(seq, n_tokens)
        if self._fixed:
            for page in self.allocator.table(seq)[had:]:
                for stored in (self.keys, self.values):
                    self._page(stored, page).zero_()
        for source, destination in copies:
            for stored in (self.keys, self.values):
                self._page(stored, destination).copy_(self._page(stored, source))

    def _page(self, stored: Tensor, number: int) -> Tensor:
        """Return a page [L, Z, G, D] of the stored keys or values."""
        size = self.allocator.block_size
        return stored[:, number * size : (number + 1) * size]

    def slots(self, seq: Hashable, start: int, stop: int) -> slice | list[int]:
        """Return the slots of the tokens ``start`` to ``stop`` of ``seq``: a slice if consecutive, else a list."""
        size, table = self.allocator.block_size, self.allocator.table(seq)
        pages = table[start // size : -(-stop // size)]
        if pages and pages == list(range(pages[0], pages[0] + len(pages))):
            first = pages[0] * size + start % size
            return slice(first, first + stop - start)
        return [table[at // size] * size + at % size for at in range(start, stop)]

    def keep(self, seq: Hashable, start: int, kept: Sequence[int]) -> None:
        """Roll ``seq`` back to its first ``start`` tokens and the accepted path of the tree after them. The path's keys
        and values move together. ``kept`` has the path's token numbers in the tree, ascending; 0 is the token at
        ``start``."""
        if list(kept) != list(range(len(kept))):
            slots = self.slots(seq, start, start + max(kept) + 1)
            at = list(range(slots.start, slots.stop)) if isinstance(slots, slice) else slots
            from_N, to_N = upload([*(at[number] for number in kept), *at[: len(kept)]], self.device).chunk(2)
            for stored in (self.keys, self.values):
                stored.index_copy_(1, to_N, stored.index_select(1, from_N))
        self.resize(seq, start + len(kept))

    def batch(
        self,
        seqs: Sequence[Hashable],
        starts: Sequence[int],
        counts: Sequence[int],
        masks: Sequence[Tensor | None] | None = None,
    ) -> PagedBatch:
        """Make the ``kv`` of a forward that adds ``counts[b]`` tokens at position ``starts[b]`` of each sequence.

        ``masks[b]``, bool [N, S], is True where each of the N = counts[b] new tokens sees each of the S = starts[b] +
        counts[b] stored ones; None is causal. Every count is at least 1.

        Raises ``ValueError`` if ``resize`` has not reserved room for the tokens: the slots after a sequence's last page
        may belong to another sequence.
        """
        for seq, start, count in zip(seqs, starts, counts, strict=True):
            if (length := start + count) > (room := self.allocator.length(seq)):
                raise ValueError(f"sequence {seq!r} has room for {room} tokens, not for {length}: resize it first")
        return PagedBatch(self, seqs, starts, counts, masks)
