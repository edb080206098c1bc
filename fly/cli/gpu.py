"""``fly bench gpu``: rounds on a CUDA device against what its memory allows, and beside transformers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.markup import escape

from fly.bench.gpu import SHAPES, cuda_device, measure_gpu_rounds, measure_transformers, random_executor
from fly.bench.limits import measure_limits
from fly.bench.shapes import forward_bytes
from fly.cli.options import Device, Json, Rules
from fly.cli.run import alone, rules_of
from fly.cli.show import console, note, progress, table, write_json
from fly.models.loading import resolve_dtype


@alone
def bench_gpu(
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
    """A CUDA device: autoregressive decoding against its bandwidth, the cost of verifying K tokens, what a round
    loses."""
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
        return plain[one.rows, one.policy, one.temperature]  # type: ignore[attr-defined]

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
