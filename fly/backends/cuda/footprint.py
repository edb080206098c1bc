"""Find how much device memory work takes before it runs, by running the same code on tensors without values.

``measure_round`` and ``measure_prompt`` run the parts of a round, and a chunk of a prompt, on torch's meta device.
``Footprint`` counts the bytes of the tensors that are alive at the same time. So a shape that would not fit is refused
before it runs, and ``LLM`` knows how much memory the caches must leave free. (Fake tensors of a CUDA device would serve
too, but a build of torch without CUDA cannot slice them.)

Memory that no tensor shows is added: the scratch memory of sorting and of attention by splits, the workspaces of
cuBLAS, and the driver's memory for each kernel of a graph.

Shape legend: T packed tokens, R rows with padding, B rows, W pages of a row's table, N places, C hidden width, V
vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fly.backends.cuda.attention import PagedAttention, Slots, takes_flash, takes_pages
from fly.backends.cuda.device_round import DecisionStage, DeviceRound, Group, find_refusal
from fly.backends.cuda.graphs import Shared
from fly.backends.cuda.ops import draw
from fly.backends.cuda.sampling import DeviceDistribution
from fly.backends.cuda.table import Shape
from fly.cache import PagedKVCache
from fly.models.llama import DenseCausal
from fly.policies import Exact
from fly.runner.sampling import BatchSampling

__all__ = ["KERNEL_BYTES", "WORKSPACE", "Footprint", "Needs", "measure_prompt", "measure_round"]

# The driver's memory for each kernel of a graph. PyTorch's page on CUDAGraph Trees says 64 KB up to CUDA 12.4 and
# driver 550. Later versions, which torch 2.11 needs, take less; how much less is not yet measured.
KERNEL_BYTES = 16 << 10
WORKSPACE = 64 << 20  # of cuBLAS, which takes 32 MiB on Hopper, inside of graphs and outside
META = torch.device("meta")
# Operations that launch no kernel although they are no views.
_LOOKS = {f"aten::{name}" for name in ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")}


class Needs(NamedTuple):
    """Bytes of ``Shared`` memory, other bytes that stay allocated, further bytes while work runs, and the number of
    kernels launched."""

    shared: int
    kept: int
    peak: int
    kernels: int

    @property
    def graph(self) -> int:
        """The driver's bytes if the kernels are a graph."""
        return self.kernels * KERNEL_BYTES


class Footprint(TorchDispatchMode):
    """Within this context, tensors have no values, and their bytes are counted: ``live`` bytes now, ``peak`` bytes at
    most. Operations on the host alone run as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.kernels = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(_is_away, tree_leaves((args, kwargs)))):
            return func(*args, **kwargs)
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        args, kwargs = tree_map(_drop_values, (args, kwargs))
        for x in tree_leaves((args, kwargs)):
            self._note(x, new=False)
        result = func(*args, **kwargs)
        new = sum(map(self._note, tree_leaves(result)))
        self.peak = max(self.peak, self.live + _scratch(func._schema.name, args, new))
        self.kernels += func._schema.name not in _LOOKS and not func.is_view
        return result

    def _note(self, x: Any, new: bool = True) -> int:
        """Count the bytes of a tensor's memory if it was just allocated; memory that existed before is not counted."""
        if (
            not isinstance(x, Tensor)
            or not x.is_meta
            or (key := (storage := x.untyped_storage())._cdata) in self._known
        ):
            return 0
        size = storage.nbytes() if new else 0

        def free(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, free)
        self.live += size
        return size


@cache
def _is_made_of_others(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _is_away(x: Any) -> bool:
    """Whether a tensor or a device is not on the host."""
    device = x.device if isinstance(x, Tensor) else x
    return isinstance(device, torch.device) and device.type != "cpu"


def _drop_values(x: Any) -> Any:
    """Replace a tensor by one of the same sizes without values, and a device by torch's meta device. Return anything
    else unchanged."""
    if isinstance(x, torch.device):
        return META
    if not isinstance(x, Tensor) or x.is_meta or (x.device.type == "cpu" and not x.dim()):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=META)


def _scratch(name: str, args: Sequence[Any], new: int) -> int:
    """Return the bytes that a kernel allocates for itself and frees."""
    if name in ("aten::sort", "aten::topk"):
        return new  # values and places are sorted from one copy into another
    if name == "fly::attend_pages" and find_spec("triton") is not None:
        from fly.backends.cuda.kernels.attention import _PARTIAL, MOST, count_splits

        tokens, heads, width = args[0].shape
        table_BW = args[6]
        longest = args[7]
        page = args[8]
        splits = count_splits(table_BW.shape[1] * page)
        size = 4 * tokens * heads * splits * (width + 2)  # by each split: its sum, peak and mass
        return 0 if longest > MOST or splits == 1 or size > 1.1 * _PARTIAL else size
    return 0


def measure_round(
    shape: Shape,
    groups: Sequence[Group],
    target: Any,
    drafter: Any,
    block_size: int,
    draft_block_size: int | None = None,
) -> Needs:
    """Return what a round of this shape needs with ``target`` and ``drafter`` (executors; None: no drafter).

    A rule that no graph can hold is counted as the exact rule. Layers are counted as if they were not compiled.
    """
    cache = _empty_cache(target, block_size)
    draft_cache = None if drafter is None else _empty_cache(drafter, draft_block_size or block_size)
    target, drafter = _on_meta(target), _on_meta(drafter)
    held = tuple(group._replace(keyed=Exact().keyed) if find_refusal(group, drafter) else group for group in groups)
    with torch.no_grad(), Footprint() as count:
        shared, plain = Shared(), replace(shape, compiled=False)
        round_ = DeviceRound(plain, target, cache, drafter, draft_cache, target.pool, shared)
        stage = DecisionStage(round_, held, torch.empty(target.config.vocab_size, dtype=torch.bool, device=META))
        # Run the parts one after the other. All further forwards of a draft are alike, so one of them is enough.
        more = 0
        if round_.chain is not None:
            round_.chain.first.run()
            before = count.kernels
            if shape.k > 1:
                round_.chain.next.run()
            if not shape.ends_early:
                more = (count.kernels - before) * max(shape.k - 2, 0)
        elif shape.spec.lookup is not None:
            round_.copy.run()
        round_.scored = round_.score.run()
        if groups:
            stage.part.run()
        kept = count.live
    return Needs(shared.nbytes, kept - shared.nbytes, count.peak - kept, count.kernels + more)


def measure_prompt(target: Any, block_size: int, tokens: int, rows: int, scored: int) -> Needs:
    """Return what a step outside of graphs needs: a forward over ``tokens`` of a prompt, then either one token drawn
    with top-p for each of ``rows``, or log-probabilities of ``scored`` tokens of the prompt."""
    cache = _empty_cache(target, block_size)
    pages, reads = -(-cache.context // block_size), takes_pages(cache) or takes_flash(cache)
    target = _on_meta(target)
    with torch.no_grad(), Footprint() as count:
        numbers_T = torch.empty(tokens, dtype=torch.int64, device=META)
        used_B, ends_B1 = (torch.empty(n, dtype=torch.int32, device=META) for n in (1, 2))
        table_BW = torch.empty(1, pages, dtype=torch.int32, device=META)
        slots = Slots(numbers_T, used_B, ends_B1, table_BW, tokens)
        kv = PagedAttention(cache, slots) if reads else DenseCausal(1, tokens)
        hidden_TC = target.hidden(numbers_T, numbers_T, kv)
        logits_NV = target.logits(hidden_TC[numbers_T[:1].expand(rows)])
        ones_R = torch.ones(rows, device=META)
        sampling = BatchSampling(
            ones_R, ones_R.long(), ones_R, ones_R, ones_R.bool(), some_greedy=False, most_k=0, top_p=True, min_p=False
        )
        draw(DeviceDistribution(sampling, logits_NV.unsqueeze(1)).dense().squeeze(1), ones_R)
        del logits_NV
        target.logits(hidden_TC[numbers_T[:1].expand(scored)]).log_softmax(-1)
    return Needs(0, 0, count.peak, count.kernels)


def _empty_cache(executor: Any, block_size: int) -> PagedKVCache:
    """Return a cache of one page without values. It claims to be on the executor's device, so that attention is chosen
    and tested for that device."""
    cache = PagedKVCache(executor.config, 1, block_size, executor.dtype, META)
    cache.device = executor.device
    takes_pages(cache), takes_flash(cache)
    return cache


def _on_meta(executor: Any) -> Any:
    """Return a copy of the executor whose tensors have no values."""
    if executor is not None:
        executor = copy.copy(executor)
        executor.device = META
    return executor
