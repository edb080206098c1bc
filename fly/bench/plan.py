"""What a setting should do before anybody has the machines: memory, step times and gains from a model of costs.

A step reads every weight and every cached key and value once and multiplies them, whichever takes longer (Williams et
al. 2009, the roofline), and adds up the results of the ranks twice a layer. Knows nothing of files or HTTP; what it
predicts is checked against what is measured by ``measure_here``.

Shape legend: T tokens of a step, C hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fly.bundled import resolve_checkpoint
from fly.bundled.tasks import problems
from fly.cache import PagedKVCache
from fly.drafts import SingleDraft
from fly.engine import Runner
from fly.llm import LLM
from fly.models import Llama, LlamaConfig
from fly.models.loading import resolve_dtype
from fly.parallel import Part, Ranks
from fly.parallel.draft import Placement
from fly.policies import AcceptancePolicy, Exact
from fly.types import SamplingParams, Sequence, Stats

__all__ = [
    "DEVICES",
    "MODELS",
    "PAPER",
    "Check",
    "Device",
    "Forecast",
    "Link",
    "Machines",
    "Setting",
    "check_here",
    "forecast",
    "measure_here",
    "memory_here",
]


@dataclass(frozen=True)
class Link:
    """What one all-reduce among neighbours takes: ``latency`` seconds, and bytes at ``bandwidth`` bytes a second each
    way."""

    latency: float
    bandwidth: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds for ``size`` bytes on a ring of n: 2 (n - 1) / n of them pass each link (Patarasuk & Yuan 2009)."""
        return 0.0 if ranks == 1 else self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth


@dataclass(frozen=True)
class Device:
    """One rank's processor: bytes of memory, bytes a second from it, operations a second.

    ``memory`` is what the maker states; ``bandwidth`` and ``flops`` are what is attained. ``layer`` is the time the
    host needs to ask for one layer, ``forward`` that for a forward beside its layers: an accelerator works meanwhile
    (``overlaps``), a CPU does not. ``attention`` and ``cached`` are operations and bytes a second where keys and values
    are read, if they differ from the others.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: Link
    layer: float
    forward: float = 0.0
    overlaps: bool = True
    attention: float | None = None
    cached: float | None = None


_BANDWIDTH, _FLOPS = 0.8, 0.6  # shares of the stated figures that matrix products usually attain
_EAGER = 80e-6  # seconds to launch the dozen kernels of a layer without a graph
_RESERVED = 3e9  # bytes a rank keeps for its context, communication buffers and activations

# Stated by the makers: memory, bandwidth and dense bfloat16; a link's share of what connects a node, one way.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100", 80e9, _BANDWIDTH * 2.04e12, _FLOPS * 312e12, Link(15e-6, 240e9), _EAGER),
        Device("h100", 80e9, _BANDWIDTH * 3.35e12, _FLOPS * 989e12, Link(15e-6, 360e9), _EAGER),
        Device("h200", 141e9, _BANDWIDTH * 4.8e12, _FLOPS * 989e12, Link(15e-6, 360e9), _EAGER),
        Device("mi300x", 192e9, _BANDWIDTH * 5.3e12, _FLOPS * 1307e12, Link(20e-6, 310e9), _EAGER),
    )
}
_NETWORK = Link(30e-6, 40e9)  # one 400 Gbit/s adapter a rank


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )


MODELS = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128),
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

    @property
    def alone(self) -> Machines:
        """One of the ranks."""
        return replace(self, ranks=1)


@dataclass(frozen=True)
class Setting:
    """What is to run: a target, a draft (None: none), lengths and laws.

    Args:
        tau: tokens a round emits, as measured elsewhere.
        draft_tau: tokens the draft emits a forward of its own; above 1 with a cheaper level below it.
        rows, context: sequences in a batch, and tokens each has behind it.
        itemsize: bytes a weight and a cached number.
        decision: seconds a round for all that is no forward.
    """

    target: LlamaConfig
    draft: LlamaConfig | None
    k: int
    tau: float
    draft_tau: float = 1.0
    rows: int = 1
    context: int = 2048
    itemsize: int = 2
    decision: float = 0.5e-3


@dataclass(frozen=True)
class Forecast:
    """Seconds of an autoregressive step, of a verification and of a draft step for each placement; bytes on a rank."""

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

    def round(self, placement: str | None = None) -> float:
        """Seconds of a round of speculation."""
        s = self.setting
        return s.k / s.draft_tau * self.draft[placement or self.placement] + self.verify + s.decision

    def gain(self, placement: str | None = None) -> float:
        """Tokens a second over those without a draft."""
        return self.setting.tau * self.step / self.round(placement)

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """A row's, without and with the draft."""
        return 1 / self.step, self.setting.tau / self.round()


@cache
def _share(config: LlamaConfig, ranks: int) -> Part:
    """The first rank's."""
    return Part(config, 0, ranks)


def weights(config: LlamaConfig) -> int:
    """Numbers that a step reads: all matrices but the embedding, of which it looks up a row a token."""
    attention = config.head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    return config.hidden_size * (
        config.num_hidden_layers * (attention + 3 * config.intermediate_size) + config.vocab_size
    )


def step_seconds(config: LlamaConfig, machines: Machines, tokens: int, rows: int, context: int, itemsize: int) -> float:
    """One forward over ``tokens`` new tokens of ``rows`` sequences, divided among the ranks."""
    device, ranks = machines.device, machines.ranks
    part = _share(config, ranks)
    dtype = torch.float32 if itemsize == 4 else torch.bfloat16
    cached = PagedKVCache.bytes_per_token(part.sizes, dtype) * rows * context
    products = max(
        weights(config) / ranks * itemsize / device.bandwidth, 2 * tokens * weights(config) / ranks / device.flops
    )
    width = part.sizes.num_attention_heads * config.head_dim
    operations = 4 * tokens * context * width * config.num_hidden_layers
    attention = max(
        cached / (device.cached or device.bandwidth), operations / rows / (device.attention or device.flops)
    )
    layers = config.num_hidden_layers
    exchanged = (2 * layers + 1) * machines.all_reduce(tokens * config.hidden_size * itemsize)
    # Once what is about to be computed is compared; of the logits, the largest, the three largest, and the mass.
    exchanged += 4 * machines.all_reduce(tokens * 8 * ranks)
    working, asking = products + attention + exchanged, layers * device.layer + device.forward
    return max(working, asking) if device.overlaps else working + asking


def forecast(setting: Setting, machines: Machines) -> Forecast:
    """Times and memory of a setting.

    Raises ``PlanError`` if a model does not divide among the ranks.
    """
    s, n = setting, machines.ranks
    size = s.itemsize

    def step(config: LlamaConfig, where: Machines, tokens: int) -> float:
        return step_seconds(config, where, tokens, s.rows, s.context, size)

    def held(config: LlamaConfig, ranks: int) -> float:
        part = _share(config, ranks)
        dtype = torch.float32 if size == 4 else torch.bfloat16
        return part.bytes(size) + PagedKVCache.bytes_per_token(part.sizes, dtype) * s.rows * s.context

    logits = 4 * s.rows * (s.k + 1) * s.target.vocab_size / n
    base = held(s.target, n) + logits + (_RESERVED if machines.device.overlaps else 0.0)
    draft, memory = {"none": 0.0}, {"none": base}
    if s.draft is not None:
        draft = {"replicated": step(s.draft, machines.alone, s.rows), "sharded": step(s.draft, machines, s.rows)}
        memory = {"replicated": base + held(s.draft, 1), "sharded": base + held(s.draft, n)}
    verify = step(s.target, machines, s.rows * (s.k + 1))
    return Forecast(s, machines, step(s.target, machines, s.rows), verify, draft, memory)


@dataclass(frozen=True)
class Published:
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


# What is measured here


def _seconds(run: Callable[[], Any], total: float = 0.3) -> float:
    """Of one call, on average: what else the machine does slows it down as it does all that is measured."""
    for _ in range(3):
        run()
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < total:
        run()
        count += 1
    return elapsed / count


def _thin(config: LlamaConfig, layers: int, vocab: int) -> LlamaConfig:
    """A model that computes next to nothing."""
    thin = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 2, "vocab_size": vocab, "num_hidden_layers": layers}
    return LlamaConfig.model_validate({**config.model_dump(), **thin})


def _seconds_of(run: Callable[[], Any], count: int) -> float:
    """The same by number, where ranks must do it as often."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


@torch.inference_mode()
def measure_here(config: LlamaConfig, dtype: torch.dtype, tokens: int, ranks: Ranks | None) -> Machines:
    """This machine's figures for models about as large as ``config``, taken on parts that are no such model: products
    with matrices of as many bytes, all-reduces between them, and models too thin to compute anything.

    Runs on every rank, which all get the first one's figures. ``tokens`` is how many a verification looks at.
    """
    size = 1 if ranks is None else ranks.size
    width, layers = config.hidden_size, config.num_hidden_layers
    rows = max(64, weights(config) // size // width // (4 * layers))
    matrices = [torch.randn(rows, width).to(dtype) for _ in range(4 * layers)]
    held = sum(matrix.numel() for matrix in matrices)

    def products(count: int, exchanged: Tensor | None = None) -> Callable[[], None]:
        x_TC = torch.randn(count, width).to(dtype)

        def run() -> None:
            for number, matrix in enumerate(matrices):
                F.linear(x_TC, matrix)
                if exchanged is not None and ranks is not None and number % 2:
                    ranks.sum_(exchanged)

        return run

    shallow, deep = (_seconds(_thin_step(config, depth, dtype)) for depth in (1, layers + 1))
    layer = (deep - shallow) / layers
    read, multiplied = _seconds(products(1)), _seconds(products(tokens))
    link = Link(0.0, 1e12)
    if ranks is not None and size > 1:
        small, large = (torch.zeros(count, width, dtype=dtype) for count in (1, 64))
        latency, longer = ((_seconds_of(products(1, x), 24) - read) / (2 * layers) for x in (small, large))
        bandwidth = 2 * (size - 1) / size * large.numel() * dtype.itemsize / max(longer - latency, 1e-6)
        link = Link(max(latency, 0.0), bandwidth)
    flops = 2 * tokens * held / multiplied
    figures = (float("inf"), held * dtype.itemsize / read, flops, link, layer)
    part, context = _share(config, size).sizes, 256
    one, many = (_seconds(_attention(part, count, context, dtype)) for count in (1, tokens))
    cached = PagedKVCache.bytes_per_token(part, dtype) / layers * context / one
    operations = 4 * tokens * context * part.num_attention_heads * part.head_dim
    device = Device("here", *figures, max(shallow - layer, 0.0), False, operations / many, cached)
    machines = Machines(device, size, size)
    return machines if ranks is None else ranks.share(machines)


def _attention(config: LlamaConfig, tokens: int, context: int, dtype: torch.dtype) -> Callable[[], Any]:
    """One layer's, of some tokens over a context."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (
        torch.randn(1, count, length, width).to(dtype)
        for count, length in ((heads, tokens), (kv_heads, context), (kv_heads, context))
    )
    mask = None if tokens == 1 else torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != kv_heads)


def _thin_step(config: LlamaConfig, depth: int, dtype: torch.dtype) -> Callable[[], None]:
    """A decode step of a model of ``depth`` layers that computes next to nothing, on a paged cache."""
    thin = _thin(config, depth, 8)
    model = Llama(thin).to(dtype).eval().requires_grad_(False)
    runner = Runner(model, PagedKVCache(thin, 4, 16, dtype))
    row = Sequence([1, 2, 3], 3, SamplingParams(temperature=0.0), Exact(), seed=0, k=0)

    def run() -> None:
        runner.feed([row], [[]])
        runner.commit([row])

    return run


@dataclass(frozen=True)
class Check:
    """Tokens a second, predicted and measured, without and with a draft; what a rank took of memory, in bytes."""

    predicted: tuple[float, float]
    measured: tuple[float, float]
    tau: float
    memory: list[dict[str, int]]
    machines: Machines
    placement: str
    decision: float
    figures: Forecast


def check_here(
    target: str, draft: str, policy: AcceptancePolicy, k: int, dtype: str, ranks: Ranks | None, placement: Placement
) -> Check:
    """Predict a setting on this machine from figures that are none of its own, run it, and compare.

    ``draft`` is one checkpoint. Rounds emit as many tokens as they do (``tau`` is measured); every time is predicted.
    """
    config, raw = LlamaConfig.read(resolve_checkpoint(target))
    small, _ = LlamaConfig.read(resolve_checkpoint(draft))
    kind = resolve_dtype(dtype, raw)
    here = measure_here(config, kind, k + 1, ranks)
    llm = LLM(
        *(target, draft, policy, k, dtype, "cpu"),
        cache_tokens=4096,
        kernels="torch",  # whose costs these are
        ranks=ranks,
        draft_placement=placement,
    )
    prompts = [llm.chat_prompt(problem.prompt) for problem in problems(None, "heldout", 0, 4)]
    params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
    measured, rounds = [], []
    for most in (0, k):
        llm.generate(prompts[:1], params, k=most)
        start = time.perf_counter()
        outputs = [llm.generate([prompt], params, k=most)[0] for prompt in prompts]
        seconds = time.perf_counter() - start
        stats = sum((output.stats for output in outputs), Stats())
        measured.append(stats.generated / seconds)
        rounds.append(stats.rounds)
    tau, length = stats.tau, round(stats.prompt_tokens / len(prompts))
    setting = Setting(config, small, round(stats.drafted / stats.rounds), tau, context=length + 48)
    setting = replace(setting, decision=_engine_seconds(config, policy, setting.k), itemsize=kind.itemsize)
    found = forecast(setting, here)
    where = "sharded" if _is_sharded(llm) else "replicated"
    # Prompts are read once; the draft reads them too.
    prompt = step_seconds(config, here, length, 1, length, kind.itemsize)
    own = step_seconds(small, here if where == "sharded" else here.alone, length, 1, length, kind.itemsize)
    plain = len(prompts) * prompt + rounds[0] * (found.step + _engine_seconds(config, policy, 0))
    drafted = len(prompts) * (prompt + own) + rounds[1] * found.round(where)
    return Check(
        (stats.generated / plain, stats.generated / drafted),
        (measured[0], measured[1]),
        tau,
        [memory_here()] if ranks is None else ranks.collect(memory_here()),
        here,
        where,
        setting.decision,
        found,
    )


def _is_sharded(llm: LLM) -> bool:
    model = llm.draft.runner.model if isinstance(llm.draft, SingleDraft) else None
    return isinstance(model, Llama) and model.lm_head.weight.shape[0] < model.config.vocab_size


def _engine_seconds(config: LlamaConfig, policy: AcceptancePolicy, k: int) -> float:
    """What a round takes beside its forwards: one of models that compute next to nothing, less their forwards."""
    model = Llama(_thin(config, 1, config.vocab_size)).eval().requires_grad_(False)
    llm = LLM(model, SingleDraft(model, cache_tokens=512), policy, k, cache_tokens=512)
    forward = _seconds(_thin_step(config, 1, torch.float32))
    forwards = rounds = 0

    def run() -> None:
        nonlocal forwards, rounds
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=96))
        rounds += output.stats.rounds + 1
        forwards += output.stats.rounds + 1 + output.stats.drafted

    for _ in range(3):
        run()
    forwards = rounds = 0
    total = _seconds_of(run, 4) * 4
    return max(total - forwards * forward, 0.0) / rounds


def memory_here() -> dict[str, int]:
    """Bytes this process has of its own now, and the most it ever had resident (mapped files included)."""
    own = 0
    with contextlib.suppress(OSError):
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
        own = int(found[1]) * 1024 if found else 0
    return {"own": own, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
