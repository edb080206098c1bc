"""Two CUDA devices that are none: their tensors say ``cuda:0`` or ``cuda:1`` and are computed on the CPU, so their
values are true. One device is the current one.

What a GPU would refuse, or get wrong, raises: tensors of two devices in one operation; a wait of the host while a graph
is captured; an operation there that torch's tags say no graph can hold; an event, a graph or a stream used for work of
another device; work on the stream that a failed capture left current; a graph that is replayed after memory that it
reads was freed; arguments that FlashAttention refuses, or that a version of torch does not know (emulated_flash.py).

Waits are noted by line, launches are counted, of a replayed graph one. Capturing leaves memory as it was, and what was
captured has no values until it is replayed. What is copied to the host without a wait is poison until it was waited
for.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fly
from tests import emulated_flash

__all__ = ["Gpu", "emulated", "exchanged", "only_looks"]

_COMPILE, _MOVE = torch.compile, torch.nn.Module.to
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# What torch's tags say no graph can hold.
UNSAFE = torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
HERE = os.path.dirname(fly.__file__)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"}
MADE_OF_OTHERS = {"item", "is_nonzero", "nonzero_numpy", "argwhere", "lift_fresh"}
# Takes memory, or looks at it in another way.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}


class OnGpu(Tensor):
    """A tensor on the device; ``value`` is what it holds. To torch itself it is one of the CPU, since a build for the
    CPU alone knows no other; to who asks it is not."""

    value: Tensor
    place: torch.device
    device = property(lambda self: self.place)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor, device: torch.device) -> OnGpu:
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls, value.size(), value.stride(), value.storage_offset(), dtype=value.dtype, device=CPU
            )
        made.value, made.place = value, device
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor of the emulated device, which is not there any more")


def value_of(x: Any) -> Any:
    """Arguments as the CPU takes them."""
    return x.value if isinstance(x, OnGpu) else CPU if isinstance(x, torch.device) and x.type == "cuda" else x


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Arguments with ``change`` of each, also of those in lists. (``tree_map`` takes as long as the operations.)"""
    if type(x) in (tuple, list):
        return type(x)([mapped(change, each) for each in x])
    return {name: mapped(change, each) for name, each in x.items()} if type(x) is dict else change(x)


def leaves_of(*arguments: Any) -> list[Any]:
    """All arguments, also those in lists."""
    leaves: list[Any] = []
    mapped(leaves.append, arguments)
    return leaves


class Address:
    """A tensor as a graph knows it: where it is. The graph does not keep it."""

    def __init__(self, x: Tensor) -> None:
        self.memory, self.look = StorageWeakRef(x.untyped_storage()), (x.storage_offset(), x.size(), x.stride())
        self.dtype = x.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            raise RuntimeError(f"a graph reads memory that was freed: {self.dtype}, {tuple(self.look[1])}")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.look)


def tensor_at(x: Any) -> Any:
    return x.tensor() if isinstance(x, Address) else x


class Graph:
    """``torch.cuda.CUDAGraph``: operations with their arguments and the memory of their results."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.device = gpu, gpu.device
        gpu.alive.add(self)
        self.steps = list[tuple[Callable[..., Any], Any, Any, list[Any]]]()
        self.before: dict[int, tuple[Any, Any]] = {}  # memory that was written while capturing, as it was
        self.fresh: list[Tensor] = []  # memory that was taken while capturing

    def forget_arguments(self) -> None:
        """What was not made in the graph is known by its address from now on."""
        own = {x.untyped_storage()._cdata for x in self.fresh}

        def address(x: Any) -> Any:
            return Address(x) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in own else x

        self.steps = [
            (func, mapped(address, args), mapped(address, kwargs), list(map(address, made)))
            for func, args, kwargs, made in self.steps
        ]

    @property
    def communicates(self) -> bool:
        return any(isinstance(func, _Step) and func.communicates for func, *_ in self.steps)

    def reset(self) -> None:
        self.steps.clear()

    def replay(self) -> None:
        self.gpu.check(self.device, "a graph")
        self.gpu.launches["graph"] += 1
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for func, args, kwargs, made in self.steps:
                new_results = results(func(*mapped(tensor_at, args), **mapped(tensor_at, kwargs)))
                for old, new in zip(made, new_results, strict=True):
                    if (
                        isinstance(old, Tensor) and old.data_ptr() != new.data_ptr()
                    ):  # else it is a look at what is there
                        old.copy_(new)


def results(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    return [x for x in leaves_of(made) if isinstance(x, Tensor)]


class Facts(NamedTuple):
    """What the schema of a torch operation says. Each is read once: reading it takes as long as a small operation."""

    name: str
    looks: bool  # whether it only looks at memory in another way
    writes: list[tuple[int, str]]  # the arguments that it writes to
    unsafe: torch.Tag | None  # why no graph can hold it


@cache
def facts_of(func: Any) -> Facts:
    schema = func._schema
    looks = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
    writes = [
        (number, argument.name)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return Facts(schema.name.split("::")[1], looks, writes, next((tag for tag in UNSAFE if tag in func.tags), None))


class Gpu(TorchDispatchMode):
    """The device. ``waits`` are lines of the project where the host waited while the device had nothing to do,
    ``launches`` by operation; ``glances`` are how often the host waited while it had."""

    def __init__(self, count: int = 2, any_dtype: bool = False, refuses: Collection[str] = ()) -> None:
        super().__init__()
        self.count, self.any_dtype, self.refuses = count, any_dtype, refuses
        self.alive: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.device = self.last = CUDA  # the current one, and the one that something was last launched on
        self.stream: Any = None  # the current one, if it is not the usual one
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

    def check(self, device: torch.device, what: str) -> None:
        """What belongs to a device is used while that is the current one."""
        if device != self.device:
            raise RuntimeError(f"{what} of {device} while {self.device} is the current device")

    def place(self, device: Any) -> torch.device:
        """A device with its number."""
        device = torch.device(device)
        if (device.index or 0) >= self.count:
            raise RuntimeError(f"CUDA error: invalid device ordinal: {device} of {self.count}")
        return self.device if device.index is None else device

    def arrive(self) -> None:
        for host, value in self.pending:
            host.copy_(value)
        self.pending.clear()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(kind not in (Tensor, torch.nn.Parameter, OnGpu) for kind in kinds):
            return NotImplemented  # made of other tensors, which come here one by one
        leaves = leaves_of(args, kwargs)
        here = [x for x in leaves if isinstance(x, OnGpu)]
        given = [self.place(x) for x in leaves if isinstance(x, torch.device) and x.type == "cuda"]
        to_gpu = bool(given)
        if not here and not to_gpu:
            return func(*args, **kwargs)
        name = facts_of(func).name
        if len(there := {x.device for x in here}) > 1 and name not in ("copy_", "_to_copy"):
            raise RuntimeError(f"{func} mixes {sorted(map(str, there))}")
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
        device = here[0].device if here and not given else given[0] if given else self.device
        return self.launch(func, name, args, kwargs, to_gpu, device)

    def to(self, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to``, whatever it is called with."""
        device = next((x for x in (*args, kwargs.get("device")) if isinstance(x, (torch.device, str))), source.device)
        dtype = next((x for x in (*args, kwargs.get("dtype")) if isinstance(x, torch.dtype)), source.dtype)
        later = kwargs.get("non_blocking", False)
        place = self.place(device) if torch.device(device).type == "cuda" else torch.device(device)
        if dtype == source.dtype and place == source.device:
            return source
        with self:
            made: Tensor = torch.ops.aten._to_copy(source, dtype=dtype, device=place, non_blocking=later)
        return made

    def launch(self, func: Any, name: str, args: Any, kwargs: Any, to_gpu: bool, device: torch.device) -> Any:
        """Compute on the values; while capturing, also note how."""
        step = func if isinstance(func, _Step) else None
        looks = name in FREE or only_looks(func)
        if self.capturing is not None and not looks:
            self.check(device, f"{name}, which is to be captured, is an operation")
            unsafe = None if step is not None else facts_of(func).unsafe
            if unsafe and not name.removeprefix("_unsafe_").startswith("index"):  # a mask as an index waits, see above
                raise RuntimeError(f"no graph can hold {name}: {unsafe}")
        elif self.stream is not None and not looks:
            raise RuntimeError(f"{name} is launched on the stream of a capture that is over")
        self.last = self.last if looks else device
        values = mapped(value_of, args), mapped(value_of, {k: v for k, v in kwargs.items() if k != "pin_memory"})
        written = self.written(func, args, kwargs) if step is None else list(step.written)
        if self.capturing is not None:
            for x in written:
                storage = x.value.untyped_storage()
                self.capturing.before.setdefault(storage._cdata, (storage, storage.clone()))
        made = func(*values[0], **values[1])
        if self.capturing is not None:
            self.capturing.steps.append((func, *values, results(made)))
            known = {x.untyped_storage()._cdata for x in results(values)}
            self.capturing.fresh += [x for x in results(made) if x.untyped_storage()._cdata not in known]
        elif not looks:
            self.launches[name] += 1
        if len(written) == 1 and isinstance(made, Tensor):
            return written[0]
        return mapped(lambda x: OnGpu(x, device) if isinstance(x, Tensor) else x, made) if to_gpu else made

    def written(self, func: Any, args: Any, kwargs: Any) -> list[OnGpu]:
        """Arguments that an operation writes to."""
        written = []
        for number, name in facts_of(func).writes:
            argument = kwargs.get(name, args[number] if number < len(args) else None)
            written += [x for x in leaves_of(argument) if isinstance(x, OnGpu)]
        return written

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
        values, named = mapped(value_of, args), mapped(value_of, kwargs)
        if up:
            source = source.clone()  # it may be used again
            if name == "copy_":
                values[0].copy_(source)
                self.last = args[0].device
                return args[0]
            self.last = self.place(kwargs["device"])
            return OnGpu(func(source, *values[1:], **named), self.last)
        self.last = source.device
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
        given = dict.fromkeys(names) | dict(zip(names, args)) | kwargs
        emulated_flash.check(given, self.any_dtype, self.refuses)
        tensors = {name: x for name, x in given.items() if isinstance(x, OnGpu)}
        how = {"window": given["window_size"][0], "scale": given["scale"]}
        out = self.launch(_Step(emulated_flash.attend, []), "attention", (), tensors | how, True, given["query"].device)
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
        return self.gpu.launch(_Step(self._on_values, []), self.name, args, {}, True, self.gpu.device)

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

    def __init__(
        self, run: Callable[..., Tensor], written: Any, looks: bool = False, communicates: bool = False
    ) -> None:
        self.run, self.written, self.looks, self.communicates = run, written, looks, communicates

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(*args, **kwargs)


def only_looks(func: Any) -> bool:
    """Whether an operation only looks at memory in another way."""
    return func.looks if isinstance(func, _Step) else facts_of(func).looks


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


class Generator(torch.Generator):
    """The device's random numbers are those of the CPU."""

    def __new__(cls, device: Any = CPU) -> Generator:
        return super().__new__(cls, device=value_of(torch.device(device)))


def move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """``torch.nn.Module.to``: a parameter that goes to the device becomes another object."""
    future = torch.__future__
    before = future.get_overwrite_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion("cuda" in str((args, kwargs)))
    try:
        return _MOVE(module, *args, **kwargs)
    finally:
        future.set_overwrite_module_params_on_conversion(before)


class Stream:
    """``torch.cuda.Stream``, which has done nothing until somebody waits. It belongs to a device."""

    def __init__(self, gpu: Gpu, device: Any = None) -> None:
        self.gpu, self.device = gpu, gpu.device if device is None else gpu.place(device)

    def query(self) -> bool:
        return not self.gpu.pending

    def synchronize(self) -> None:
        self.gpu.wait("stream")


class Event:
    """``torch.cuda.Event``: it belongs to the device on whose stream it is recorded first."""

    device: torch.device | None = None

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        gpu = self.gpu
        gpu.check(gpu.last, "what an event is to await was launched on a stream")
        if gpu.stream is not None:
            raise RuntimeError("an event is recorded on the stream of a capture that is over")
        self.device = self.device or gpu.device
        gpu.check(self.device, "an event")
        gpu.events += 1
        self.at, self.launched = gpu.events, gpu.launches.total()

    def query(self) -> bool:
        """Who asks until it is over, as the host does, waits; but the device does not, if it has more to do."""
        if self.gpu.launches.total() == self.launched:
            self.gpu.wait("a look with nothing else to do")
        self.gpu.glances += 1
        self.gpu.arrive()
        return True

    def synchronize(self) -> None:
        self.gpu.wait("event")

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


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
                step = _Step(exchange, [tensors[0]], communicates=True)
                gpu.launch(step, name, tensors, {}, True, tensors[0].device)
            else:
                real(*tensors, **options)

        return mock.patch.object(module, name, run)

    real_end = dist.destroy_process_group

    def end() -> None:
        real_end()
        if any(graph.communicates for graph in gpu.alive):
            raise SystemExit("NCCL hangs: a graph that holds its collectives is alive")

    exchange = collective(dist, "all_reduce"), collective(dist, "broadcast"), collective(ranks, "_all_gather")
    with ExitStack() as stack:
        for patch in (*exchange, mock.patch.object(dist, "destroy_process_group", end)):
            stack.enter_context(patch)
        yield


@contextmanager
def emulated(
    devices: int = 2, version: str = "2.13", refuses: Collection[str] = (), any_dtype: bool = False
) -> Iterator[Gpu]:
    """While it lasts there are CUDA devices.

    Args:
        version: of torch, whose ``varlen_attn`` is there.
        refuses: arguments of it that FlashAttention does not take.
        any_dtype: whether FlashAttention takes float32 too, so that values can be compared.
    """
    from fly.backends.cuda import attention

    gpu = Gpu(devices, any_dtype, refuses)
    streams: list[Stream] = []

    @contextmanager
    def capture(graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        # Without a stream, torch takes the one that it made on whichever device was current at its first capture.
        streams.append(stream or (streams or [Stream(gpu)])[0])
        before, gpu.device = gpu.device, streams[-1].device
        gpu.capturing, gpu.stream, graph.device = graph, streams[-1], gpu.device
        failed: RuntimeError | None = None
        try:
            yield
            gpu.graphs += 1
        except RuntimeError as error:
            failed = error
        finally:
            gpu.capturing = None
            for storage, there in graph.before.values():
                storage.copy_(there)
            for fresh in graph.fresh:
                fresh.fill_(97)
            graph.forget_arguments()
        if failed is not None:  # the error of ``capture_end`` keeps torch from going back to the stream before
            raise RuntimeError("operation failed due to a previous error during capture") from failed
        gpu.stream, gpu.device = None, before

    class Current:
        """``torch.cuda.device``"""

        def __init__(self, device: Any) -> None:
            self.to, self.before = gpu.place(device), list[torch.device]()

        def __enter__(self) -> None:
            self.before.append(gpu.device)
            gpu.device = self.to

        def __exit__(self, *_: Any) -> None:
            gpu.device = self.before.pop()

    def set_device(device: Any) -> None:
        gpu.device = gpu.place(torch.device("cuda", device) if isinstance(device, int) else device)

    def set_stream(stream: Stream) -> None:
        gpu.stream, gpu.device = stream if stream in streams else None, stream.device

    def memory(device: Any = None) -> tuple[int, int]:
        return 80 << 30, 80 << 30

    there = {
        "is_available": lambda: devices > 0, "current_device": lambda: gpu.device.index,
        "device_count": lambda: devices, "graph": capture, "device": Current, "set_device": set_device,
        "get_device_capability": lambda *_: (9, 0), "mem_get_info": memory,
        "get_device_name": lambda *_: "an emulated GPU", "empty_cache": lambda: None,
        "max_memory_allocated": lambda *_: 0, "memory_allocated": lambda *_: 0, "memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "CUDAGraph": lambda: Graph(gpu), "Event": lambda **_: Event(gpu), "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device=None: Stream(gpu, device), "set_stream": set_stream,
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
        "current_stream": lambda device=None: gpu.stream or Stream(gpu, device),
        "is_initialized": lambda: True,
        "synchronize": lambda *_: gpu.wait("synchronize"),
    }  # fmt: skip
    lifts = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        gpu.real = {name: getattr(torch.cuda, name) for name in there}
        for name, stub in there.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        stack.enter_context(mock.patch.object(torch, "compile", lambda function, **how: Compiled(gpu, function, how)))
        stack.enter_context(mock.patch.object(varlen, "varlen_attn", emulated_flash.known_arguments(version)))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", move))
        attention.find_flash.cache_clear()
        stack.callback(attention.find_flash.cache_clear)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        stack.enter_context(gpu)
        stack.enter_context(Python(gpu))
        yield gpu
