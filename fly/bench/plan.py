"""A model of costs: the memory, step times and gains of a setting on machines that are not here.

A step reads every weight and every cached key and value once, and multiplies them; the longer of the two times counts
(the roofline, Williams et al. 2009). Ranks add up their results twice a layer. Short kernels or calls take further
time, and so does the engine once a round. Knows nothing of files or HTTP.

``benchmarks/calibrate.py``, in a checkout, measures the figures of a machine, and compares predictions with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from fly.bench.shapes import matrix_parameters
from fly.cache import PagedKVCache
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
    """A link between ranks: an all-reduce takes ``latency`` seconds, and sends bytes at ``bandwidth`` bytes a second
    each way."""

    latency: float
    bandwidth: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds for ``size`` bytes on a ring of n: 2 (n - 1) / n of them pass each link (Patarasuk & Yuan 2009)."""
        return 0.0 if ranks == 1 else self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One rank's processor: its bytes of memory, bytes read per second, and operations per second.

    ``memory`` is what the maker states; ``bandwidth`` and ``flops`` are what is attained. ``layer`` is what a layer
    takes besides its weights, keys and values, ``forward`` what a forward takes besides its layers: short kernels on an
    accelerator, calls on a CPU. ``round`` is the engine's time between two forwards, ``drafted`` the extra time for
    each drafted and judged token, without its forward. Bytes of ``reserved`` memory hold no weights or caches.
    ``attention`` and ``cached`` are operations and bytes a second where keys and values are read, if they differ from
    the others."""

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
# Forwards are CUDA graphs (fly/backends/cuda): a layer has some 17 kernels besides its matrix products, at 2 µs each;
# what surrounds the layers counts as one more. A round is five launches of 4.5 µs and a wait of 20 µs; a further graph
# for each drafted token is launched while another runs. The last is kept for context, buffers and activations.
_LAYER = 34e-6
_BESIDES = (_LAYER, _LAYER, 45e-6, 0.0, 3e9)

# Stated by the makers: memory, bandwidth and dense bfloat16; a link's share of what connects a node, one way.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 80e9, _BANDWIDTH * 2.04e12, _FLOPS * 312e12, Link(15e-6, 240e9), *_BESIDES),
        Device("h100", 80e9, _BANDWIDTH * 3.35e12, _FLOPS * 989e12, Link(15e-6, 360e9), *_BESIDES),
        Device("h200", 141e9, _BANDWIDTH * 4.8e12, _FLOPS * 989e12, Link(15e-6, 360e9), *_BESIDES),
        Device("mi300x", 192e9, _BANDWIDTH * 5.3e12, _FLOPS * 1307e12, Link(20e-6, 310e9), *_BESIDES),
    )
}
_NETWORK = Link(30e-6, 40e9)  # one 400 Gbit/s adapter a rank


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
    """``ranks`` devices, ``per_node`` of them to a node; ``network`` connects nodes, a link for each rank."""

    device: Device
    ranks: int
    per_node: int = 8
    network: Link = _NETWORK

    def all_reduce(self, size: float) -> float:
        """Seconds for ``size`` bytes: within nodes, then each rank's share between them."""
        inside = min(self.ranks, self.per_node)
        nodes = -(-self.ranks // inside)
        return self.device.link.all_reduce(size, inside) + self.network.all_reduce(size / inside, nodes)


@dataclass(frozen=True)
class Setting:
    """What is to run: a target, a draft (None: none), lengths and distributions.

    Args:
        k: tokens drafted per round; the mean, if drafts stop by themselves.
        tau: tokens emitted per round, as measured elsewhere.
        draft_tau: tokens proposed per forward of the draft; above 1 if a cheaper level drafts for it.
        rows, context: sequences in a batch, and cached tokens of each.
        itemsize: bytes per weight and per cached number.
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
    """Seconds of an autoregressive forward, of a verification and of a draft's forward for each placement; bytes on a
    rank."""

    setting: Setting
    machines: Machines
    step: float
    verify: float
    draft: dict[str, float]
    memory: dict[str, float]

    @property
    def placement(self) -> str:
        """Where a draft step is soonest done, of those that fit."""
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
        """Seconds of a round of speculation."""
        s, device = self.setting, self.machines.device
        draft = s.k / s.draft_tau * self.draft[placement or self.placement]
        return draft + self.verify + device.round + s.k * device.drafted

    def gain(self, placement: str | None = None) -> float:
        """Tokens a second over those without a draft."""
        return self.setting.tau * self.plain / self.round(placement)


JUDGED = 2  # exchanges of a few numbers, for a rule that asks for top logits and mass
_SMALL = 2  # such exchanges of every forward: what is about to be computed is compared, and the largest logit found


@cache
def _share(config: LlamaConfig, ranks: int) -> Part:
    """The first rank's."""
    return Part(config, 0, ranks)


@dataclass(frozen=True)
class Work:
    """What one rank of ``ranks`` does in a forward over ``tokens`` new tokens of ``rows`` sequences, each after
    ``context`` others: bytes of weights it reads, operations on them, bytes of keys and values it reads, operations on
    them (of one sequence), and what the ranks exchange: how often so many bytes."""

    layers: int
    read: float
    multiplied: float
    cached: int
    attended: float
    exchanged: tuple[tuple[int, float], ...]

    @staticmethod
    def of(config: LlamaConfig, ranks: int, tokens: float, rows: int, context: int, itemsize: int) -> Work:
        """Raises ``PlanError`` if the model does not divide among the ranks."""
        sizes, layers, numbers = _share(config, ranks).sizes, config.num_hidden_layers, matrix_parameters(config)
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
    """One forward over ``tokens`` new tokens of ``rows`` sequences, divided among the ranks."""
    device, work = machines.device, Work.of(config, machines.ranks, tokens, rows, context, itemsize)
    working = (
        max(work.read / device.bandwidth, work.multiplied / device.flops)
        + max(work.cached / (device.cached or device.bandwidth), work.attended / (device.attention or device.flops))
        + sum(count * machines.all_reduce(size) for count, size in work.exchanged)
    )
    return working + work.layers * device.layer + device.forward


def forecast(setting: Setting, machines: Machines, small: Machines | None = None) -> Forecast:
    """Times and memory of a setting; ``small`` are the figures for models of the draft's size, where they differ.

    Raises ``PlanError`` if a model does not divide among the ranks.
    """
    s, n, small = setting, machines.ranks, machines if small is None else small
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
    """A setting of the paper (arXiv 2511.22972): drafter 8B, temperature 0; the gain is the mean of its two suites'."""

    name: str
    target: str
    k: int
    tau: float
    gain: float
    ranks: int


PAPER = (
    Published("70B : 8B", "llama-3.1-70b", 15, 12.41, 2.81, 8),
    Published("405B : 8B", "llama-3.1-405b", 25, 17.13, 5.07, 16),
)
