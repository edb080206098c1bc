"""What a block of a DFlash head costs, in forwards of its target: ``python -m benchmarks.blocks 4B w8a8 w4``.

Both have random weights, in the published shapes of Qwen3-4B or 8B and of z-lab's heads for them. They are timed as by
``fly bench plan --draft dflash``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fly.extras.bench.blocks import DFLASH, QWEN3_8B, measure_costs

WIDTHS = {"4B": (2560, 9728), "8B": (4096, 12288)}  # of the hidden states, and of the feed-forward layer


def main(
    size: Annotated[str, typer.Argument(help="4B or 8B")],
    target_kernels: Annotated[str, typer.Argument(help="of the target, such as w8a8")],
    head_kernels: Annotated[list[str], typer.Argument(help="of the head, such as w8a8 or w4; several one by one")],
) -> None:
    width, inner = WIDTHS[size]
    target = QWEN3_8B.resized(QWEN3_8B.num_hidden_layers, hidden_size=width, intermediate_size=inner)
    head = DFLASH.model_copy(update={"layer": target.resized(5), "target_hidden_size": width})
    for kernels in head_kernels:
        costs = measure_costs(target, head, target_kernels, head_kernels=kernels)
        print(
            f"Qwen3-{size} {costs.kernels[0]}, head {costs.kernels[1]}: {1e3 * costs.step:.0f} ms for a token, "
            f"{costs.verify / costs.step:.2f} forwards for {head.drafts + 1} tokens; a block "
            f"{1e3 * costs.block:.0f} ms, {costs.block / costs.step:.3f} forwards of a token, "
            f"{costs.block / costs.verify:.3f} of {head.drafts + 1}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
