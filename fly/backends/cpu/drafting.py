"""A drafter's whole draft in one call of the library: its arguments and its result.

Shape legend: B rows, K longest draft, V vocabulary.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import abc
from typing import Any

import torch
from torch import Tensor

from fly.backends.cpu.host import c_sampling, uniforms
from fly.backends.cpu.library import CLookup, Sampling, Sure, address
from fly.backends.cpu.packed import PackedLlama
from fly.executor import Batch, Drafted, DraftSpec
from fly.ops import Stream
from fly.request import Sequence
from fly.sampling import BatchSampling

__all__ = ["draft_in_one_call"]


def draft_in_one_call(
    packed: PackedLlama,
    batch: Batch,
    spec: DraftSpec,
    rows: abc.Sequence[Sequence],
    most: abc.Sequence[int],
    sampling: BatchSampling | None,
    seeds: abc.Sequence[int],
    lookup: CLookup | None = None,
    given: int | None = None,
) -> Drafted:
    """``Executor.extend``, or of a head that is ``given`` its target's states there."""
    tokens, positions = array("q", batch.tokens), array("q", batch.positions)
    call, _kept = packed.batch((address(tokens), address(positions)), len(tokens), batch.kv)
    longest, count = max(most, default=0), len(most)
    limits, stops, stop_at = array("i", most), array("q"), array("i", [0])
    for row in rows:
        stops.extend(row.stop_ids)
        stop_at.append(len(stops))
    drafted, counts = array("q", bytes(8 * count * longest)), array("i", bytes(4 * count))
    addresses: list[int | None] = [address(values) for values in (limits, stops, stop_at, drafted, counts)]
    probs_BKV: Tensor | None = None
    logits_BKV: Tensor | None = None
    how: Any = None  # held until after the call
    if sampling is None and spec.says:
        logits_BKV = torch.empty(count, longest, packed.config.vocab_size)
        how = (Sampling * count)(*[Sampling(-1.0)] * count)
        addresses += [ctypes.addressof(how), None, logits_BKV.data_ptr()]
    elif sampling is None:
        addresses += [None, None, None]
    else:
        each = [(seed, len(row.tokens) + n) for seed, row in zip(seeds, rows) for n in range(longest)]
        coins = uniforms([seed for seed, _ in each], [at for _, at in each], Stream.SAMPLE, 1)
        probs_BKV = torch.empty(count, longest, packed.config.vocab_size)
        how = c_sampling(sampling)
        addresses += [ctypes.addressof(how), coins.buffer_info()[0], probs_BKV.data_ptr()]
    if lookup is None:
        addresses += [None, None]
    else:
        texts = [array("i", row.tokens[:start]) for row, start in zip(rows, batch.kv.starts)]
        places = array("Q", [address(text) for text in texts])
        addresses += [ctypes.addressof(lookup), address(places)]
    sure = Sure.each(spec, count)
    addresses += [ctypes.addressof(sure), given]
    packed.check(packed.library.fly_draft(packed.handle, ctypes.byref(call), longest, *addresses))
    found = [drafted[b * longest : b * longest + n].tolist() for b, n in enumerate(counts)]
    return Drafted(found, probs_BKV, logits_BKV)
