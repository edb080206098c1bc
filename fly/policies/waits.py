"""Find out whether a rule's decision can be captured as a graph of its device. This works on any machine, by
tensors without values.

A graph cannot hold anything that makes the host wait for the device: reading a tensor's value in Python (``.item()``,
``bool(t)``, ``.tolist()``), a shape that depends on values (a mask as an index, ``nonzero``), or an upload
(``torch.tensor(list, device=...)``). ``fly check`` calls ``find_wait``, and so does a ``DeviceRound`` before it
captures a decision.

Shape legend: B rows, K longest draft, J positions of a row, V vocabulary.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fly.devices import on_host
from fly.policies.base import AcceptancePolicy
from fly.policies.reads import supply_logits
from fly.policies.verification import verify
from fly.types import Draft, Noise, Target

__all__ = ["HostWait", "TextOnHost", "find_wait", "see_on_device"]

_ACCOUNT = "it keeps account of what relaxed tokens cost, which is on the host"
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class HostWait(RuntimeError):
    """The host would have to wait for the device."""


class TextOnHost(list[list[int]]):
    """Stands inside a graph, which has no texts, for the texts so far (``Target.history``), and for the places of
    relaxed tokens in them (``Target.relaxed_at``)."""

    def _refuse(self, *_: Any) -> Any:
        raise HostWait("it looks at the text before the block, which is on the host")

    __iter__ = __getitem__ = __len__ = __reversed__ = __contains__ = __eq__ = __bool__ = _refuse
    __hash__ = None


def see_on_device(target: Target, inside: bool) -> Target:
    """Return the same output of the target as a rule sees it on a CUDA device: ``inside`` a graph, there is no text."""
    view = copy(target)
    if inside:
        view.history = TextOnHost()
        vars(view)["relaxed_at"] = TextOnHost()
    return view


def _on_host(label: str) -> Tensor:
    raise HostWait(_ACCOUNT)


class _RefuseUploads(TorchFunctionMode):
    """Raises ``HostWait`` where a tensor is made from values on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and not on_host(torch.device(device)):
            raise HostWait("values of the host become a tensor")
        return func(*args, **(kwargs or {}))


class _RefuseWaits(TorchDispatchMode):
    """Raises ``HostWait`` at an operation that would make the host wait, by torch's own tags of its operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        with self:  # the parts of a composite operation are checked instead
            if (decomposed := func.decompose(*args, **kwargs)) is not NotImplemented:
                return decomposed
        if torch.Tag.data_dependent_output in func.tags:
            raise HostWait("Python looks at a tensor's value")
        if name in _INDEXING:  # an index of numbers gives a known shape
            if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                raise HostWait("a mask as an index gives a shape that depends on values")
        elif torch.Tag.dynamic_output_shape in func.tags:
            raise HostWait(f"the shape of what {name} gives depends on values")
        source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
        if isinstance(source, Tensor):
            to = args[0].device if name == "copy_" else kwargs.get("device") or source.device
            fills = name == "copy_" and source.dim() == 0
            if on_host(torch.device(to)) != on_host(source) and not fills:
                raise HostWait("a tensor is copied between host and device")
        if any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_drop_values, (args, kwargs))  # e.g. a rule's own tensors over the vocabulary
        return func(*args, **kwargs)


def _drop_values(x: Any) -> Any:
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) and x.dim() and not x.is_meta else x


def find_wait(policy: AcceptancePolicy, drawn: bool = False, sampled: bool = False) -> str | None:
    """Return why a graph cannot hold the decision of ``policy`` on chains, and at which line, or None if it can.

    Args:
        drawn: whether rows are above temperature 0.
        sampled: whether drafts were drawn from a distribution.
    """
    if policy.budgets:
        return _ACCOUNT
    rows = 2
    longest = 9
    width = 32
    device = torch.device("meta")  # not the CPU, and without values
    with torch.inference_mode():
        logits_BJV = torch.empty(rows, longest + 1, width, device=device)
        tokens_BK = torch.empty(rows, longest, dtype=torch.int64, device=device)
        count_B = torch.empty(rows, dtype=torch.int64, device=device)
        target = Target(
            logits_BJV,
            torch.empty_like(logits_BJV) if drawn else None,
            control_V=torch.empty(width, dtype=torch.bool, device=device),
            generated_B=torch.empty_like(count_B),
            relaxed_B=torch.empty_like(count_B),
            nats_B=torch.empty(rows, device=device),
            spent=_on_host,
            relaxed_at=TextOnHost(),
            history=TextOnHost(),
        )
        values_BKV = torch.empty(rows, longest, width, device=device)
        draft = Draft(tokens_BK, count_B, values_BKV if sampled else None, logits_BKV=values_BKV)
        noise = Noise(torch.empty(rows, longest, device=device), torch.empty(rows, device=device))
        try:
            with _RefuseWaits(), _RefuseUploads():
                verify(policy, target, supply_logits(policy, draft, width), noise)
        except Exception as error:
            reason = str(error) if isinstance(error, HostWait) else f"{type(error).__name__}: {error}".split("\n")[0]
            return f"{reason} ({_find_line(traceback.extract_tb(error.__traceback__))})"
    return None


def _find_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line that is neither in torch nor in this file."""
    skipped = os.path.dirname(torch.__file__), __file__
    rule_frames = [frame for frame in frames if not frame.filename.startswith(skipped)]
    frame = rule_frames[-1] if rule_frames else frames[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"
