"""The KV cache: block tables of plain integers, and the paged tensors that they index."""

from fly.cache.allocator import BlockAllocator, OutOfBlocks
from fly.cache.paged import DEFAULT_BYTES, PagedBatch, PagedKVCache, block_size_for

__all__ = [
    "DEFAULT_BYTES",
    "BlockAllocator",
    "OutOfBlocks",
    "PagedBatch",
    "PagedKVCache",
    "block_size_for",
]
