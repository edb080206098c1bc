"""A model of costs: it predicts the memory, step times and gains of a setting on machines that are not available.

A step reads every weight and every cached key and value once, and multiplies them. The longer of the two times counts
(the roofline, Williams et al. 2009). Ranks add up their results twice per layer. Short kernels or calls take extra
time, and so does the engine, once per round. This module knows nothing of files or HTTP.

``benchmarks/calibrate.py``, in a checkout, measures the figures of a machine, and compares predictions with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from fly.cache import PagedKVCache
from fly.extras.bench.shapes import matrix_parameters
from fly.models import LlamaConfig
from fly.parallel import Part

__all__ = [
    "DEVICES",
    "MODELS",
    "PAPER",
    "Device",
    "Forecast",
    "Link",
    "Machines",
    "Setting",
    "Work",
    "forecast",
    "step_seconds",
]


@dataclass(frozen=True)
class Link:
    """A link between ranks. An all-reduce takes ``latency`` seconds, plus the time to send its bytes at ``bandwidth``
    bytes per second each way."""

    latency: float
    bandwidth: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds for ``size`` bytes on a ring of n ranks: each link carries 2 (n - 1) / n of the bytes
        (Patarasuk & Yuan 2009)."""
        return 0.0 if ranks == 1 else self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One rank's processor: its memory, its speed, and its fixed costs, in bytes, operations and seconds.

    Attributes:
        memory: bytes of memory, as the maker states.
        bandwidth: bytes per second that are attained when weights are read.
        flops: operations per second that are attained.
        layer: time of a layer besides its weights, keys and values: short kernels on an accelerator, calls on a CPU.
        forward: time of a forward besides its layers.
        round: time of the engine between two forwards.
        drafted: extra time for each drafted and judged token, without its forward.
        reserved: bytes of memory that hold no weights or caches.
        attention: operations per second of attention, if they differ from ``flops``.
        cached: bytes per second of reading keys and values, if they differ from ``bandwidth``.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: Link
    layer: float
    forward: float
    round: float
    drafted: float
    reserved: float = 0.0
    attention: float | None = None
    cached: float | None = None


_BANDWIDTH, _FLOPS = 0.8, 0.6  # shares of the stated figures that matrix products usually attain
# A forward is a CUDA graph (fly/backends/cuda). A layer has some 17 kernels besides its matrix products, at 2 µs
# each; all that surrounds the layers counts as one more layer. A round has five launches of 4.5 µs and a wait of 20 µs.
# The graph of each further drafted token costs nothing, since it is launched while another runs. The last figure is
# memory for context, buffers and activations.
_LAYER = 34e-6
_BESIDES = (_LAYER, _LAYER, 45e-6, 0.0, 3e9)

# The makers state memory, bandwidth and dense bfloat16 rate. A link's bandwidth is a share of what connects a node, one
# way.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 80e9, _BANDWIDTH * 2.04e12, _FLOPS * 312e12, Link(15e-6, 240e9), *_BESIDES),
        Device("h100", 80e9, _BANDWIDTH * 3.35e12, _FLOPS * 989e12, Link(15e-6, 360e9), *_BESIDES),
        Device("h200", 141e9, _BANDWIDTH * 4.8e12, _FLOPS * 989e12, Link(15e-6, 360e9), *_BESIDES),
        Device("mi300x", 192e9, _BANDWIDTH * 5.3e12, _FLOPS * 1307e12, Link(20e-6, 310e9), *_BESIDES),
    )
}
_NETWORK = Link(30e-6, 40e9)  # one 400 Gbit/s adapter per rank


MODELS = {
    f"llama-3.1-{size}": LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    for size, hidden, intermediate, layers in (
        ("8b", 4096, 14336, 32),
        ("70b", 8192, 28672, 80),
        ("405b", 16384, 53248, 126),
    )
}


@dataclass(frozen=True)
class Machines:
    """``ranks`` devices, ``per_node`` of them in each node. ``network`` connects nodes, with a link for each rank."""

    device: Device
    ranks: int
    per_node: int = 8
    network: Link = _NETWORK

    def all_reduce(self, size: float) -> float:
        """Return the seconds for ``size`` bytes: first within nodes, then each rank's share between nodes."""
        inside = min(self.ranks, self.per_node)
        nodes = -(-self.ranks // inside)
        return self.device.link.all_reduce(size, inside) + self.network.all_reduce(size / inside, nodes)


@dataclass(frozen=True)
class Setting:
    """What is to run: the models (``draft`` may be None), and how many tokens are drafted, emitted and cached.

    Args:
        k: tokens drafted per round; the mean, if drafts stop by themselves.
        tau: tokens emitted per round, as measured elsewhere.
        draft_tau: tokens proposed per forward of the draft model; above 1 if a cheaper level drafts for it.
        rows: sequences in a batch.
        context: cached tokens of each sequence.
        itemsize: bytes of a weight, and of a cached number.
    """

    target: LlamaConfig
    draft: LlamaConfig | None
    k: float
    tau: float
    draft_tau: float = 1.0
    rows: int = 1
    context: int = 2048
    itemsize: int = 2


@dataclass(frozen=True)
class Forecast:
    """Predicted times and memory. ``step`` is the seconds of an autoregressive forward, and ``verify`` those of a
    verification. For each placement of the draft model, ``draft`` is the seconds of its forward, and ``memory``
    the bytes on a rank."""

    setting: Setting
    machines: Machines
    step: float
    verify: float
    draft: dict[str, float]
    memory: dict[str, float]

    @property
    def placement(self) -> str:
        """The placement with the fastest draft step, among those that fit in memory."""
        fitting = [name for name in self.draft if self.memory[name] <= self.machines.device.memory]
        return min(fitting or self.draft, key=lambda name: self.draft[name])

    @property
    def fits(self) -> bool:
        return self.memory[self.placement] <= self.machines.device.memory

    @property
    def plain(self) -> float:
        """Seconds of a round without a draft."""
        return self.step + self.machines.device.round

    def round(self, placement: str | None = None) -> float:
        """Return the seconds of a round of speculation."""
        s, device = self.setting, self.machines.device
        draft = s.k / s.draft_tau * self.draft[placement or self.placement]
        return draft + self.verify + device.round + s.k * device.drafted

    def gain(self, placement: str | None = None) -> float:
        """Return the tokens per second, relative to decoding without a draft."""
        return self.setting.tau * self.plain / self.round(placement)


JUDGED = 2  # exchanges of a few numbers, for a rule that asks for top logits and mass
_SMALL = 2  # such exchanges in every forward: ranks compare what they will compute, and find the largest logit


@cache
def _share(config: LlamaConfig, ranks: int) -> Part:
    """Return the first rank's part of a model."""
    return Part(config, 0, ranks)


@dataclass(frozen=True)
class Work:
    """The work of one rank in a forward over new tokens of several sequences.

    Attributes:
        layers: number of layers.
        read: bytes of weights that it reads.
        multiplied: operations on the weights.
        cached: bytes of keys and values that it reads.
        attended: operations on the keys and values of one sequence.
        exchanged: what the ranks exchange: pairs of a count and the bytes of each exchange.
    """

    layers: int
    read: float
    multiplied: float
    cached: int
    attended: float
    exchanged: tuple[tuple[int, float], ...]

    @staticmethod
    def of(config: LlamaConfig, ranks: int, tokens: float, rows: int, context: int, itemsize: int) -> Work:
        """Compute the work of one of ``ranks`` ranks for ``tokens`` new tokens of ``rows`` sequences, each after
        ``context`` cached tokens. Raises ``PlanError`` if the model does not divide among the ranks."""
        sizes = _share(config, ranks).sizes
        layers = config.num_hidden_layers
        numbers = matrix_parameters(config)
        dtype = torch.float32 if itemsize == 4 else torch.bfloat16
        return Work(
            layers,
            numbers / ranks * itemsize,
            2 * tokens * numbers / ranks,
            PagedKVCache.bytes_per_token(sizes, dtype) * rows * context,
            4 * tokens * context * sizes.num_attention_heads * config.head_dim * layers / rows,
            ((2 * layers + 1, tokens * config.hidden_size * itemsize), (_SMALL, tokens * 8 * ranks)),
        )


def step_seconds(
    config: LlamaConfig, machines: Machines, tokens: float, rows: int, context: int, itemsize: int
) -> float:
    """Return the seconds of one forward over ``tokens`` new tokens of ``rows`` sequences, divided among the
    ranks."""
    device, work = machines.device, Work.of(config, machines.ranks, tokens, rows, context, itemsize)
    working = (
        max(work.read / device.bandwidth, work.multiplied / device.flops)
        + max(work.cached / (device.cached or device.bandwidth), work.attended / (device.attention or device.flops))
        + sum(count * machines.all_reduce(size) for count, size in work.exchanged)
    )
    return working + work.layers * device.layer + device.forward


def forecast(setting: Setting, machines: Machines, small: Machines | None = None) -> Forecast:
    """Predict times and memory of a setting. ``small`` has the figures for models of the draft's size, if they differ.

    Raises ``PlanError`` if a model does not divide among the ranks.
    """
    s = setting
    n = machines.ranks
    small = machines if small is None else small
    tokens = s.rows * (s.k + 1)

    def step(config: LlamaConfig, where: Machines, tokens: float = s.rows) -> float:
        return step_seconds(config, where, tokens, s.rows, s.context, s.itemsize)

    def held(config: LlamaConfig, ranks: int) -> float:
        return _share(config, ranks).bytes(s.itemsize) + Work.of(config, ranks, 1, s.rows, s.context, s.itemsize).cached

    base = held(s.target, n) + 4 * tokens * s.target.vocab_size / n + machines.device.reserved
    draft, memory = {"none": 0.0}, {"none": base}
    if s.draft is not None:
        draft = {"replicated": step(s.draft, replace(small, ranks=1)), "sharded": step(s.draft, small)}
        memory = {"replicated": base + held(s.draft, 1), "sharded": base + held(s.draft, n)}
    verify = step(s.target, machines, tokens) + JUDGED * machines.all_reduce(tokens * 8 * n)
    return Forecast(s, machines, step(s.target, machines), verify, draft, memory)


class Published(NamedTuple):
    """A setting of the paper (arXiv 2511.22972), at temperature 0. The gain is the mean over the
    paper's two suites."""

    name: str
    target: str
    k: int
    tau: float
    gain: float
    ranks: int
    draft: str = "llama-3.1-8b"


PAPER = (
    Published("70B : 8B", "llama-3.1-70b", 15, 12.41, 2.81, 8),
    Published("405B : 8B", "llama-3.1-405b", 25, 17.13, 5.07, 16),
)
