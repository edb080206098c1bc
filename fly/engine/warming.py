"""A warm-up: the device captures and compiles what requests need before the first request comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from fly.engine.step import Engine
from fly.runner.executor import WARM_ROWS
from fly.types import SamplingParams

__all__ = ["warm_up"]

_PROMPT_LENGTH, _MAX_PASSES = 40, 4  # tokens of a prompt; the most times that it is decoded


def warm_up(
    engine: Engine,
    max_rows: int,
    k: int,
    default: SamplingParams,
    generate: Callable[[list[list[int]], list[SamplingParams]], object],
    advance: Callable[[str], None],
) -> None:
    """Decode batches of 1 to 32 similar requests (``WARM_ROWS``) with ``generate``, until nothing new is captured. Each
    batch is decoded at temperature 0 and with the sampling of ``default`` (at temperature 1 if that is greedy).

    Args:
        engine: the engine to warm up. Nothing is done if its target captures no work.
        max_rows: the most requests in a step; larger batches are left out.
        k: the most tokens that are drafted in a round.
        generate: decodes prompts (token ids), each with its own parameters.
        advance: called with a text after each kind of batch.
    """
    executors = [engine.runner.executor, *(each.executor for each in engine.setup.drafters)]
    if not executors[0].captures:
        return
    context, vocab_size = executors[0].config.max_position_embeddings, executors[0].config.vocab_size
    sampled = default if default.temperature else SamplingParams(temperature=1.0)
    prompt_length = min(_PROMPT_LENGTH, context // 2)
    # The largest batch comes first, so that smaller ones use its memory again.
    counts = [count for count in reversed(WARM_ROWS) if count <= max_rows]
    kinds = list(itertools.product(counts, (SamplingParams(temperature=0.0), sampled)))
    for number, (count, params) in enumerate(kinds):
        # Rows differ only in the salt, which keeps them from sharing pages, so they grow and end together. A row with
        # one token left has no draft, which is another shape to capture.
        prompt, before = [(7 * number + 3 * place) % vocab_size for place in range(prompt_length)], -1
        for _ in range(_MAX_PASSES):
            if before == (before := sum(executor.prepared for executor in executors)):
                break
            for max_tokens in (min(4 * (k + 1), context - prompt_length), 2):
                common = {"max_tokens": max_tokens, "seed": 0}
                params_of_rows = [params.changed({**common, "cache_salt": f"warm {row}"}) for row in range(count)]
                generate([prompt] * count, params_of_rows)
        advance(f"{count} rows")
