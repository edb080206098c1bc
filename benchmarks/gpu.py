"""Rounds on a CUDA device: the time of target, draft and host, compared with the memory bandwidth's limit and with
transformers: ``python -m benchmarks.gpu``.

Models have published shapes and random weights, which take as long to read as trained ones.
"""

from __future__ import annotations

import importlib.util
from collections import abc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from fly.backends import executor_of
from fly.bench.clock import clocked
from fly.bench.limits import measure_limits
from fly.bench.plan import MODELS
from fly.bench.shapes import forward_bytes, random_model
from fly.cache import PagedKVCache
from fly.cli.options import Device, Json, Rules
from fly.cli.run import alone, rules_of
from fly.cli.show import console, note, progress, table, write_json
from fly.drafts import DraftStrategy, SingleDraft
from fly.drafts.base import Continuation, Wrapper
from fly.engine import Engine
from fly.models import LlamaConfig
from fly.models.loading import resolve_dtype
from fly.policies import AcceptancePolicy
from fly.runtime.executor import Executor, Spent
from fly.runtime.request import Sequence
from fly.runtime.runner import Runner
from fly.types import Draft, SamplingParams

SHAPES = {
    "1b": MODELS["llama-3.1-8b"].model_copy(
        update={"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                "tie_word_embeddings": True},
    ),
    "8b": MODELS["llama-3.1-8b"],
}  # fmt: skip
"""Llama 3.2 1B and 3.1 8B."""
_PROMPT, _WARM, _ROUNDS, _POSITIONS = 512, 4, 40, 4096


def cuda_device(name: str) -> torch.device:
    """Return the device. Raises ``ValueError`` if there is no such CUDA device."""
    device = torch.device("cuda" if name == "auto" else name)
    if device.type != "cuda" or not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ValueError(
            f"device {name!r}: this measures a CUDA device, and PyTorch {torch.__version__}, {built}, sees "
            f"{torch.cuda.device_count()} here; 'fly bench speed' measures any device"
        )
    return device


@dataclass(frozen=True)
class Round:
    """Seconds of a typical round: in all, and on the device for the target (with the decision) and the draft. ``limit``
    is the least time for reading all weights and the prompts' keys and values. ``compiled``: whether the target's
    layers were compiled."""

    rows: int
    k: int
    policy: str
    temperature: float
    whole: float
    target: float
    draft: float
    limit: float
    compiled: bool

    @property
    def lost(self) -> float:
        """Share of the round in which the device ran neither target nor draft."""
        return 1 - (self.target + self.draft) / self.whole


class _Watched(Wrapper):
    """A draft model whose rounds record their times."""

    def __init__(self, inner: DraftStrategy) -> None:
        super().__init__([inner])
        self.spent: list[Spent] = []

    def propose(self, rows: abc.Sequence[Sequence], max_len: abc.Sequence[int]) -> Draft:
        return self.members[0].propose(rows, max_len)

    def continuation(self, rows: abc.Sequence[Sequence]) -> Continuation | None:
        found = self.members[0].continuation(rows)
        return None if found is None else found._replace(report=self.spent.extend)


def random_executor(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> Executor:
    """Build a random model of these sizes, ready to run."""
    return executor_of(random_model(config.model_copy(update={"max_position_embeddings": _POSITIONS}), dtype, device))


def measure_gpu_rounds(
    target: Executor,
    drafter: Executor,
    rows: abc.Sequence[int],
    lengths: abc.Sequence[int],
    policies: abc.Sequence[AcceptancePolicy],
    temperatures: abc.Sequence[float],
    bandwidth: float,
    advance: Callable[[], None] = lambda: None,
) -> list[Round]:
    """Time rounds for every number of rows and every draft length (0 is autoregressive decoding), after layers are
    compiled (which usually waits until a shape is frequent) and graphs are captured.

    ``bandwidth`` is in bytes per second.
    """
    target.often = drafter.often = 1
    found = []
    for count in rows:
        tokens = count * (_PROMPT + 16 * _ROUNDS + 512)
        for temperature in temperatures:
            for policy in policies:
                for k in lengths:
                    strategy = _Watched(SingleDraft(drafter, cache_tokens=tokens))
                    engine = Engine(Runner(target, PagedKVCache.for_model(target, tokens)), strategy)
                    params = SamplingParams(temperature=temperature, max_tokens=_POSITIONS)
                    text = [7 * at % min(1000, target.config.vocab_size) for at in range(_PROMPT)]
                    batch = [Sequence([*text, b], _PROMPT + 1, params, policy, seed=b, k=k) for b in range(count)]
                    found.append(_rounds_of(engine, strategy, batch, k, str(policy), temperature, bandwidth))
                    advance()
    return found


def _rounds_of(
    engine: Engine, strategy: _Watched, rows: list[Sequence], k: int, rule: str, temperature: float, bandwidth: float
) -> Round:
    sums = [0, 0.0, 0.0, 0.0]
    stretch, engine.stretch = engine.stretch, 1e-9  # one round per step: the second compiles, the third is captured
    while rows[0].stats.rounds < _WARM:
        engine.step(rows)
    engine.stretch = stretch
    while sums[0] < _ROUNDS and not any(row.finish_reason for row in rows):
        strategy.spent.clear()
        engine.step(rows)
        for part in strategy.spent:
            sums = [before + more for before, more in zip(sums, part)]
    for row in rows:
        engine.release(row)
    count, context = len(rows), len(rows[0].tokens)
    target, drafter = engine.runner.executor, engine.setup.drafters[0].executor
    assert drafter is not None
    read = forward_bytes(target.config, target.dtype, count, context)
    read += k * forward_bytes(drafter.config, drafter.dtype, count, context)
    whole, scoring, drafting = (total / max(sums[0], 1) for total in sums[1:])
    return Round(count, k, rule, temperature, whole, scoring, drafting, read / bandwidth, target.compiles)


def measure_transformers(
    config: LlamaConfig, dtype: torch.dtype, device: torch.device, tokens: int = 64
) -> float | None:
    """Seconds per token of ``transformers``' greedy decoding of one row with the same shape; None if it is not
    installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    )  # fmt: skip
    theirs = TheirConfig(**{name: getattr(config, name) for name in names}, max_position_embeddings=_POSITIONS)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: Any = LlamaForCausalLM(theirs).eval()
    finally:
        torch.set_default_dtype(before)
    prompt = torch.arange(1, _PROMPT + 1, device=device).unsqueeze(0)
    how = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}

    def run(count: int) -> float:
        return clocked(lambda: model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **how), device)[1]

    with torch.inference_mode():
        run(8)
        return (run(tokens + 1) - run(1)) / tokens


@alone
def main(
    target: Annotated[str, typer.Option(help=f"Shape of the target, of random weights: {', '.join(SHAPES)}.")] = "8b",
    draft: Annotated[str, typer.Option(help="Shape of the draft model, likewise.")] = "1b",
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of a batch; repeatable.")] = None,
    k: Annotated[list[int] | None, typer.Option(min=0, help="Draft length; repeatable.")] = None,
    policy: Rules = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="Temperature; repeatable.")] = None,
    peers: Annotated[bool, typer.Option(help="Decode with transformers too, if it is installed.")] = True,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
    json_: Json = None,
) -> None:
    """A CUDA device: autoregressive decoding against its bandwidth, the cost of verifying K tokens, the time that a
    round loses."""
    for name in (target, draft):
        if name not in SHAPES:
            raise ValueError(f"shape {name!r} is unknown; choices: {list(SHAPES)}")
    rules = rules_of(policy)
    where, kind = cuda_device(device), resolve_dtype(dtype, {})
    limits = measure_limits(where)
    console.print(
        f"{torch.cuda.get_device_name(where)}, PyTorch {torch.__version__}, {dtype}: reads "
        f"{limits.bandwidth / 1e12:.2f} TB/s",
        highlight=False,
    )
    counts, lengths, heats = rows or [1, 4, 8], sorted({0, *(k or [1, 2, 4, 8, 15])}), temperature or [0.0, 0.8]
    pair = random_executor(SHAPES[target], kind, where), random_executor(SHAPES[draft], kind, where)
    with progress(len(counts) * len(lengths) * len(rules) * len(heats), "rounds") as advance:
        found = measure_gpu_rounds(*pair, counts, lengths, rules, heats, limits.bandwidth, advance)
    plain = {(r.rows, r.policy, r.temperature): r.target for r in found if r.k == 0}

    def base(one: object) -> float:
        return plain[one.rows, one.policy, one.temperature]

    console.print(
        table(
            f"a round of {target} : {draft}, prompts of 512 tokens, "
            f"layers {'' if all(one.compiled for one in found) else 'not '}compiled",
            found,
            {
                "policy": lambda r: escape(r.policy),
                "T": lambda r: f"{r.temperature:g}",
                "rows": lambda r: f"{r.rows}",
                "K": lambda r: f"{r.k}",
                "round ms": lambda r: f"{1e3 * r.whole:.2f}",
                "target": lambda r: f"{1e3 * r.target:.2f}",
                "v(K)": lambda r: f"{r.target / base(r):.2f}",
                "draft": lambda r: f"{1e3 * r.draft:.2f}",
                "c": lambda r: f"{r.draft / r.k / base(r):.3f}" if r.k else "–",
                "lost": lambda r: f"{r.lost:.1%}",
                "of limit": lambda r: f"{r.limit / r.whole:.0%}",
            },
        )
    )
    note(
        "v(K): the target's time for K + 1 tokens over that for one · c: a drafted token's time over the target's for "
        "one\nlost: share of the round in which the device did neither · of limit: time to read weights and cache "
        "over the round"
    )
    theirs: dict[str, float | None] = {}
    if peers:
        del pair
        for name in (target, draft):
            torch.cuda.empty_cache()
            theirs[name] = measure_transformers(SHAPES[name], kind, where)
            if (seconds := theirs[name]) is None:
                note("transformers is not installed, and left out")
                break
            share = forward_bytes(SHAPES[name], kind, 1, 512) / limits.bandwidth / seconds
            console.print(f"transformers, {name}, one row: {1e3 * seconds:.2f} ms a token, {share:.0%} of limit")
    record = {"limits": limits.as_json(), "rounds": [asdict(one) for one in found], "transformers": theirs}
    write_json(json_, record)


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
