"""Random numbers as data, and drawing tokens with them.

Every random number is a hash of the request's seed, the position where its round starts, a stream and an index. So a
row's output depends only on its own seed and text, never on the batch. A round that is computed again draws the same
numbers.

Shape legend: B rows, V vocabulary, C chunks of the vocabulary, N uniforms or tokens of a chunk.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Stream", "derive", "derived", "draw", "uniforms"]


class Stream(IntEnum):
    """Independent sources of randomness within a round."""

    ACCEPT = 0
    SAMPLE = 1


_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64, as signed 64-bit
_CHUNK = 512  # tokens that ``draw`` sums together
_UNSIGNED = tuple(mix % 2**64 for mix in _MIX)


def _scramble(x: Tensor) -> Tensor:
    """Apply splitmix64's finaliser (Steele, Lea, Flood 2014) to int64 with wrap-around."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX[1]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX[2]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniforms(seed_B: Tensor, round_B: Tensor, stream: int, n: int) -> Tensor:
    """Return ``n`` uniform numbers in [0, 1) for each row's seed and round (int64 [B]): float32 [B, n]."""
    if not (seed_B.dtype == round_B.dtype == torch.int64 and seed_B.shape == round_B.shape and seed_B.ndim == 1):
        columns = [(column.dtype, tuple(column.shape)) for column in (seed_B, round_B)]
        raise ValueError(f"seeds and rounds must be int64 of one shape [B], got {columns}")
    key_B = _scramble(_scramble(seed_B + _MIX[0]) + round_B * _MIX[0] + stream)
    index_N = torch.arange(1, n + 1, device=seed_B.device)
    bits_BN = _scramble(key_B.unsqueeze(1) + index_N * _MIX[0])
    return ((bits_BN >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _scramble_one(x: int) -> int:
    x = ((x ^ (x >> 30)) * _UNSIGNED[1]) % 2**64
    x = ((x ^ (x >> 27)) * _UNSIGNED[2]) % 2**64
    return x ^ (x >> 31)


def derive(seed: int, position: int) -> int:
    """Return the seed of a strategy that drafts after ``position`` tokens. This seed is independent of the row's own
    random numbers, and of the strategy's seeds in other rounds."""
    mixed = _scramble_one((seed % 2**64) ^ _UNSIGNED[2]) + position * _UNSIGNED[0]
    unsigned = _scramble_one(mixed % 2**64)
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def derived(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """Return ``derive`` for each row, int64 [B]."""
    return _scramble(_scramble(seed_B ^ _MIX[2]) + position_B * _MIX[0])


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw one token per row, int64 [B], by inverting the cumulative distribution at ``uniform_B`` in [0, 1).

    ``probs_BV`` need not be normalised. A token of mass zero is never drawn. A row without any mass gives token 0.

    A large vocabulary is summed in chunks. Then only the chunk that contains the token is summed token by token. This
    scans V / 512 + 512 numbers instead of V, and makes no copy of the distribution in float64.
    """
    width = probs_BV.shape[1]
    if width <= _CHUNK:
        cumulative_BV, sought_B1 = probs_BV.double().cumsum(-1), uniform_B.double().unsqueeze(1)
        at_B1 = _find(cumulative_BV, sought_B1 * cumulative_BV[:, -1:])
        return torch.where(cumulative_BV[:, -1:] > 0, at_B1, 0).squeeze(1)
    chunked = width - width % _CHUNK
    mass_BC = probs_BV[:, :chunked].unflatten(1, (-1, _CHUNK)).sum(-1, dtype=torch.float64)
    rest_B1 = probs_BV[:, chunked:].sum(-1, dtype=torch.float64, keepdim=True)
    cumulative_BC = torch.cat([mass_BC, rest_B1], 1).cumsum(-1)
    # Find the chunk, and then the token within it.
    sought_B1 = uniform_B.double().unsqueeze(1) * cumulative_BC[:, -1:]
    chunk_B1 = _find(cumulative_BC, sought_B1)
    before_B1 = cumulative_BC.gather(1, (chunk_B1 - 1).clamp_min(0)).where(chunk_B1 > 0, 0.0)
    token_BN = chunk_B1 * _CHUNK + torch.arange(_CHUNK, device=probs_BV.device)
    probs_BN = probs_BV.gather(1, token_BN.clamp_max(width - 1)).where(token_BN < width, 0.0)
    inside_B1 = _find(probs_BN.double().cumsum(-1), sought_B1 - before_B1)
    return torch.where(cumulative_BC[:, -1:] > 0, chunk_B1 * _CHUNK + inside_B1, 0).squeeze(1)


def _find(cumulative_BN: Tensor, sought_B1: Tensor) -> Tensor:
    """Return the first index whose cumulative mass is above ``sought``, [B, 1]. If rounding put ``sought`` at the end,
    return the last index with any mass."""
    at_B1 = torch.searchsorted(cumulative_BN, sought_B1, right=True)
    last_B1 = torch.searchsorted(cumulative_BN, cumulative_BN[:, -1:].contiguous())
    return torch.minimum(at_B1, last_B1)
