"""What a block of a DFlash head costs, or with ``--kind p-eagle`` of a P-EAGLE head, in forwards of its target:
``python -m benchmarks.blocks 4B w8a8 w4``.

Both have random weights, in the published shapes of Qwen3-4B or 8B, of z-lab's heads for them, and of a P-EAGLE head of
four layers. They are timed as by ``fly bench plan --draft dflash``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fly.extras.bench.blocks import DFLASH, PEAGLE, QWEN3_8B, measure_costs

WIDTHS = {"4B": (2560, 9728), "8B": (4096, 12288)}  # of the hidden states, and of the feed-forward layer


class Kind(StrEnum):
    DFLASH = "dflash"
    PEAGLE = "p-eagle"


def main(
    size: Annotated[str, typer.Argument(help="4B or 8B")],
    target_kernels: Annotated[str, typer.Argument(help="of the target, such as w8a8")],
    head_kernels: Annotated[list[str], typer.Argument(help="of the head, such as w8a8 or w4; several one by one")],
    kind: Annotated[Kind, typer.Option(help="of the head")] = Kind.DFLASH,
    vocabulary: Annotated[int | None, typer.Option(help="how many tokens a DFlash head keeps (default: all)")] = None,
) -> None:
    width, inner = WIDTHS[size]
    target = QWEN3_8B.resized(QWEN3_8B.num_hidden_layers, hidden_size=width, intermediate_size=inner)
    published = DFLASH if kind is Kind.DFLASH else PEAGLE
    layer = target.resized(published.layer.num_hidden_layers)
    head = published.model_copy(update={"layer": layer, "target_hidden_size": width})
    tokens = (head.drafts or 0) + 1
    for kernels in head_kernels:
        costs = measure_costs(target, head, target_kernels, head_kernels=kernels, vocabulary=vocabulary)
        print(
            f"Qwen3-{size} {costs.kernels[0]}, {kind} head {costs.kernels[1]}: {1e3 * costs.step:.0f} ms for a token, "
            f"{costs.verify / costs.step:.2f} forwards for {tokens} tokens; a block "
            f"{1e3 * costs.block:.0f} ms, {costs.block / costs.step:.3f} forwards of a token, "
            f"{costs.block / costs.verify:.3f} of {tokens}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
