"""FlashAttention of the emulated devices: what each version of torch knows, what the kernel refuses, and its values."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

__all__ = ["VERSIONS", "attend", "check", "known_arguments"]

VERSIONS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "varlen.json").read_text())
"""The keywords of ``varlen_attn`` in each version's wheel."""


def known_arguments(version: str) -> Callable[..., Any]:
    """``varlen_attn`` as that version of torch has it."""
    real, names = varlen.varlen_attn, VERSIONS[version]

    def varlen_attn(*tensors: Any, **options: Any) -> Any:
        if strange := [name for name in options if name not in names]:
            raise TypeError(f"varlen_attn() got an unexpected keyword argument {strange[0]!r}")
        return real(*tensors, **options)

    own = [x for x in inspect.signature(real).parameters.values() if x.kind is not x.KEYWORD_ONLY or x.name in names]
    varlen_attn.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return varlen_attn


def check(given: dict[str, Any], any_dtype: bool, refuses: Collection[str]) -> None:
    """What ``mha_varlen_fwd`` of torch checks (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp),
    and what a build ``refuses``."""
    query, key, table, used = (given[name] for name in ("query", "key", "block_table", "seqused_k"))
    ends, read = given["cu_seq_q"], given["cu_seq_k"]
    if found := [name for name in refuses if given[name] is not None]:
        raise RuntimeError(f"FlashAttention of this build does not take {found[0]}")
    rows, width = len(ends) - 1, query.shape[2]
    checks = {
        "only support fp16 and bf16": any_dtype or query.dtype in (torch.float16, torch.bfloat16),
        "query and key must have the same dtype": query.dtype == key.dtype == given["value"].dtype,
        "cu_seqlens_k is needed": read is not None,
        "cu_seqlens must have dtype int32": read is not None and ends.dtype == read.dtype == torch.int32,
        "cu_seqlens must be contiguous": ends.is_contiguous() and read is not None and read.is_contiguous(),
        "cu_seqlens_k must have shape (batch_size + 1)": read is not None and read.shape == ends.shape,
        "block_table must have dtype torch.int32": table is None or table.dtype == torch.int32,
        "block_table must have contiguous last dimension": table is None or table.stride(-1) == 1,
        "block_table must have a row for each sequence": table is None or table.shape[0] == rows,
        "Paged KV cache block size must be divisible by 256": table is None or key.shape[1] % 256 == 0,
        "Input tensor must have contiguous last dimension": query.stride(-1) == key.stride(-1) == 1,
        "head dimension at most 256, a multiple of 8": any_dtype or (width <= 256 and width % 8 == 0),
        "seqused_k must be contiguous int32 (batch_size)": used is None
        or (used.dtype == torch.int32 and used.is_contiguous() and used.shape == (rows,)),
    }
    if failed := [text for text, holds in checks.items() if not holds]:
        raise RuntimeError(f"FlashAttention: {failed[0]}")


def attend(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, seqused_k: Tensor,
    block_table: Tensor, window: int, scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention over pages: one row after the other; of each, the pages that it uses."""
    out, ends = torch.zeros_like(query), cu_seq_q.tolist()
    for begin, end, used, table in zip(ends, ends[1:], seqused_k.tolist(), block_table.long()):
        k, v = (x[table[: -(-used // x.shape[1])]].flatten(0, 1)[:used].transpose(0, 1) for x in (key, value))
        behind = torch.arange(used - (end - begin), used).unsqueeze(1) - torch.arange(used)
        mask = (behind >= 0) & (behind <= window) if window >= 0 else behind >= 0
        q = query[begin:end].transpose(0, 1)
        row = F.scaled_dot_product_attention(
            q[None], k[None], v[None], mask, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )
        out[begin:end] = row[0].transpose(0, 1)
    return out
