"""A CUDA device that is none: its tensors say ``cuda:0`` and are computed on the CPU, so their values are true.

What a GPU would refuse raises: tensors of two devices in one operation, and a wait of the host while a graph is
captured. Waits are noted by line, launches are counted, of a replayed graph one. Capturing leaves memory as it was, and
what was captured has no values until it is replayed. What is copied to the host without a wait is poison until it was
waited for.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import fly

__all__ = ["Gpu", "emulated", "exchanged"]

_COMPILE = torch.compile
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
HERE = os.path.dirname(fly.__file__)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"}
MADE_OF_OTHERS = {"item", "is_nonzero", "nonzero_numpy", "argwhere", "lift_fresh"}
# Takes memory, or looks at it in another way.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}


class OnGpu(Tensor):
    """A tensor on the device; ``value`` is what it holds. To torch itself it is one of the CPU, since a build for the
    CPU alone knows no other; to who asks it is not."""

    value: Tensor
    device = CUDA  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor) -> OnGpu:
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls, value.size(), value.stride(), value.storage_offset(), dtype=value.dtype, device=CPU
            )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor of the emulated device, which is not there any more")


def value_of(x: Any) -> Any:
    """Arguments as the CPU takes them."""
    return x.value if isinstance(x, OnGpu) else CPU if isinstance(x, torch.device) and x.type == "cuda" else x


class Graph:
    """``torch.cuda.CUDAGraph``: operations with their arguments and the memory of their results."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.steps = gpu, list[tuple[Callable[..., Any], Any, Any, list[Tensor]]]()
        self.before: dict[int, tuple[Any, Any]] = {}  # memory that was written while capturing, as it was
        self.fresh: list[Tensor] = []  # memory that was taken while capturing

    def replay(self) -> None:
        self.gpu.launches["graph"] += 1
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for func, args, kwargs, made in self.steps:
                for old, new in zip(made, results(func(*args, **kwargs)), strict=True):
                    if old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def results(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    return [x for x in tree_leaves(made) if isinstance(x, Tensor)]


class Gpu(TorchDispatchMode):
    """The device. ``waits`` are lines of the project where the host waited while the device had nothing to do,
    ``launches`` by operation; ``glances`` are how often the host waited while it had."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.launches = list[str](), Counter[str]()
        self.real: dict[str, Any] = {}  # what of ``torch.cuda`` was there before
        self.compiled = Counter[tuple[str, bool]]()  # calls of compiled functions, and whether a graph was captured
        self.graphs = self.events = self.glances = 0
        self.capturing: Graph | None = None
        self.pinned: set[int] = set()
        self.pending: list[tuple[Tensor, Tensor]] = []  # copies to the host that are under way

    def wait(self, what: str) -> None:
        """The host waits for all that was launched."""
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(HERE):
            frame = frame.f_back  # type: ignore[assignment]
        where = "outside" if frame is None else f"{os.path.relpath(frame.f_code.co_filename, HERE)}:{frame.f_lineno}"
        if self.capturing is not None:
            raise RuntimeError(f"{what} at {where} while a graph is captured")
        self.waits.append(f"{where}: {what}")
        self.arrive()

    def arrive(self) -> None:
        for host, value in self.pending:
            host.copy_(value)
        self.pending.clear()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        here = [x for x in leaves if isinstance(x, OnGpu)]
        to_gpu = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not here and not to_gpu:
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name == "_varlen_attn":
            return self.attend(func, args, kwargs)
        if name in MADE_OF_OTHERS:
            with self:
                return func.decompose(*args, **kwargs)
        if name == "to":
            return self.to(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source, to = (args[0], to_gpu) if name == "_to_copy" else (args[1], isinstance(args[0], OnGpu))
            to = to or ("device" not in kwargs and name == "_to_copy" and bool(here))
            if isinstance(source, OnGpu) != to and not (name == "copy_" and source.dim() == 0):
                return self.cross(func, name, args, kwargs, source, to)
            to_gpu = to
        elif name in WAITS or (name == "repeat_interleave" and "Tensor" in str(func)):
            self.wait(name)
        elif name.removeprefix("_unsafe_").startswith("index") and isinstance(args[1], (list, tuple)):
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype == torch.bool for i in indices):
                self.wait("a mask as an index")
            if up := [i for i in indices if not isinstance(i, OnGpu)]:
                self.wait("an index on the host")
                leaves = [x for x in leaves if not any(x is i for i in up)]
        to_gpu = to_gpu or (bool(here) and kwargs.get("device") is None)
        if strangers := [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, OnGpu) and x.dim()]:
            raise RuntimeError(f"{func} mixes cuda:0 with the CPU: {[tuple(x.shape) for x in strangers]}")
        return self.launch(func, name, args, kwargs, to_gpu)

    def to(self, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to``, whatever it is called with."""
        device = next((x for x in (*args, kwargs.get("device")) if isinstance(x, (torch.device, str))), source.device)
        dtype = next((x for x in (*args, kwargs.get("dtype")) if isinstance(x, torch.dtype)), source.dtype)
        later = kwargs.get("non_blocking", False)
        if dtype == source.dtype and torch.device(device).type == source.device.type:
            return source
        with self:
            made: Tensor = torch.ops.aten._to_copy(source, dtype=dtype, device=device, non_blocking=later)
        return made

    def launch(self, func: Any, name: str, args: Any, kwargs: Any, to_gpu: bool) -> Any:
        """Compute on the values; while capturing, also note how."""
        values = tree_map(value_of, args), tree_map(value_of, {k: v for k, v in kwargs.items() if k != "pin_memory"})
        written = list(func.written) if isinstance(func, _Step) else self.written(func, args, kwargs)
        if self.capturing is not None:
            for x in written:
                storage = x.value.untyped_storage()
                self.capturing.before.setdefault(storage._cdata, (storage, storage.clone()))
        made = func(*values[0], **values[1])
        if self.capturing is not None:
            self.capturing.steps.append((func, *values, results(made)))
            known = {x.untyped_storage()._cdata for x in results(values)}
            self.capturing.fresh += [x for x in results(made) if x.untyped_storage()._cdata not in known]
        elif name not in FREE and not self.looks(func):
            self.launches[name] += 1
        if len(written) == 1 and isinstance(made, Tensor):
            return written[0]
        return tree_map(lambda x: OnGpu(x) if isinstance(x, Tensor) else x, made) if to_gpu else made

    @staticmethod
    def looks(func: Any) -> bool:
        """Whether an operation only looks at memory in another way."""
        if isinstance(func, _Step):
            return func.looks
        return any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)

    def written(self, func: Any, args: Any, kwargs: Any) -> list[OnGpu]:
        """Arguments that an operation writes to."""
        found = []
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = kwargs.get(argument.name, args[number] if number < len(args) else None)
                found += [x for x in tree_leaves(given) if isinstance(x, OnGpu)]
        return found

    def cross(self, func: Any, name: str, args: Any, kwargs: Any, source: Tensor, up: bool) -> Any:
        """A copy between host and device."""
        later = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if later and up and source.untyped_storage()._cdata not in self.pinned:
            later = False  # of usual memory, the host waits all the same
        if not later and source.numel():
            self.wait(f"copy to {'the device' if up else 'the host'}")
        elif self.capturing is not None and (up or args[0].untyped_storage()._cdata not in self.pinned):
            raise RuntimeError("a copy between host and device while a graph is captured")
        elif self.capturing is not None:
            self.capturing.steps.append((self.come, (args[0], args[1].value), {}, []))
            return args[0]
        self.launches[name] += 1
        values, named = tree_map(value_of, args), tree_map(value_of, kwargs)
        if up:
            source = source.clone()  # it may be used again
            if name == "copy_":
                values[0].copy_(source)
                return args[0]
            return OnGpu(func(source, *values[1:], **named))
        made = func(*values, **named) if name == "_to_copy" else args[1].value.to(args[0].dtype).clone()
        host = made.clone() if name == "_to_copy" else args[0]
        if later:
            host.fill_(97)
            self.pending.append((host, made))
        else:
            host.copy_(made)
        return host

    def come(self, host: Tensor, value: Tensor) -> tuple[()]:
        """A copy to the host that is part of a graph."""
        self.pending.append((host, value.to(host.dtype, copy=True)))
        host.fill_(97)
        return ()

    def attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``varlen_attn`` over pages."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args)) | kwargs
        assert given["num_splits"] == 1 and given["cu_seq_k"].shape == given["cu_seq_q"].shape
        assert given["key"].shape[1] % 256 == 0 and given["block_table"].dtype == torch.int32
        tensors = {name: x for name, x in given.items() if isinstance(x, OnGpu)}
        how = {"window": given["window_size"][0], "scale": given["scale"]}
        out = self.launch(_Step(_attend, []), "attention", (), tensors | how, True)
        return out, out, out


class Compiled:
    """``torch.compile``: traced for real, so that a graph break is an error, and one operation from then on."""

    def __init__(self, gpu: Gpu, function: Callable[..., Any], options: dict[str, Any]) -> None:
        assert options["fullgraph"] and options["dynamic"] is False
        self.gpu, self.name = gpu, function.__name__
        self.run = _COMPILE(function, backend="eager", **options)
        self.twins: dict[int, torch.nn.Parameter] = {}

    def __call__(self, *args: Any) -> Any:
        self.gpu.compiled[self.name, self.gpu.capturing is not None] += 1
        return self.gpu.launch(_Step(self._on_values, []), self.name, args, {}, True)

    def _on_values(self, *args: Any) -> Any:
        parts = [part for x in args if isinstance(x, torch.nn.Module) for part in x.modules()]
        there = [dict(part._parameters) for part in parts]
        real = mock.patch.multiple(torch.cuda, **self.gpu.real)  # there is no device to what is traced
        with torch._C.DisableTorchFunction(), _disable_current_modes(), real:
            for part, own in zip(parts, there):
                for name, weight in own.items():
                    if isinstance(weight, OnGpu):
                        twin = torch.nn.Parameter(weight.value, requires_grad=False)
                        part._parameters[name] = self.twins.setdefault(id(weight), twin)
            try:
                return self.run(*args)
            finally:
                for part, own in zip(parts, there):
                    part._parameters.update(own)


class _Step:
    """An operation of our own."""

    def __init__(self, run: Callable[..., Tensor], written: Any, looks: bool = False) -> None:
        self.run, self.written, self.looks = run, written, looks

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(*args, **kwargs)


def _attend(
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


class Python(TorchFunctionMode):
    """What Python asks of a tensor beside the dispatcher. Memory is pinned in name only."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, gpu = dict(kwargs or {}), getattr(func, "__name__", ""), self.gpu
        here = bool(args) and isinstance(args[0], OnGpu)
        if here and name == "tolist":
            with gpu:
                return torch.ops.aten._to_copy(args[0], device=CPU).tolist()
        if here and name == "cpu":
            return gpu.to(args[0], CPU)
        if name == "to" and (here or "cuda" in str((args[1:], kwargs))):
            return gpu.to(*args, **kwargs)
        pin = kwargs.pop("pin_memory", False) or name == "pin_memory"
        made = args[0] if name == "pin_memory" else func(*args, **kwargs)
        if pin:
            gpu.pinned.add(made.untyped_storage()._cdata)
        return made


class Stream:
    """``torch.cuda.Stream``, which has done nothing until somebody waits."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def query(self) -> bool:
        return not self.gpu.pending

    def synchronize(self) -> None:
        self.gpu.wait("stream")


@contextmanager
def exchanged(gpu: Gpu) -> Iterator[None]:
    """While it lasts, processes of one group exchange what is on their emulated devices, inside of graphs too."""
    from fly.parallel import ranks

    def collective(module: Any, name: str) -> Any:
        real = getattr(module, name)

        def run(*tensors: Any, **options: Any) -> None:
            def exchange(*values: Tensor) -> Tensor:
                with torch._C.DisableTorchFunction(), _disable_current_modes():
                    real(*values, **options)
                return values[0]

            if isinstance(tensors[0], OnGpu):
                gpu.launch(_Step(exchange, [tensors[0]]), name, tensors, {}, True)
            else:
                real(*tensors, **options)

        return mock.patch.object(module, name, run)

    with collective(dist, "all_reduce"), collective(dist, "broadcast"), collective(ranks, "_all_gather"):
        yield


@contextmanager
def emulated() -> Iterator[Gpu]:
    """While it lasts there is a CUDA device."""
    gpu = Gpu()

    @contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        gpu.capturing = graph
        try:
            yield
            gpu.graphs += 1
        finally:
            gpu.capturing = None
            for storage, before in graph.before.values():
                storage.copy_(before)
            for fresh in graph.fresh:
                fresh.fill_(97)

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self) -> None:
            gpu.events += 1
            self.at, self.launched = gpu.events, gpu.launches.total()

        def query(self) -> bool:
            """Who asks until it is over, as the host does, waits; but the device does not, if it has more to do."""
            if gpu.launches.total() == self.launched:
                gpu.wait("a look with nothing else to do")
            gpu.glances += 1
            gpu.arrive()
            return True

        def synchronize(self) -> None:
            gpu.wait("event")

        def elapsed_time(self, end: Event) -> float:
            return float(end.at - self.at)

    there = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1, "graph": capture,
        "get_device_capability": lambda *_: (9, 0), "mem_get_info": lambda *_: (80 << 30, 80 << 30),
        "CUDAGraph": lambda: Graph(gpu), "Event": Event, "graph_pool_handle": lambda: (0, 0),
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: gpu.capturing is not None, "current_stream": lambda *_: Stream(gpu),
        "is_initialized": lambda: True, "set_device": lambda *_: None,
        "synchronize": lambda *_: gpu.wait("synchronize"),
    }  # fmt: skip
    lifts = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        gpu.real = {name: getattr(torch.cuda, name) for name in there}
        for name, stub in there.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        stack.enter_context(mock.patch.object(torch, "compile", lambda function, **how: Compiled(gpu, function, how)))
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        stack.enter_context(gpu)
        stack.enter_context(Python(gpu))
        yield gpu
