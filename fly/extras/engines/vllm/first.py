"""vLLM's first model runner: its tokens are decided by ``rejection_sample``, which gets one flat batch.

Three functions are wrapped. The first keeps a request's row beside it, the second hands the rows to the batch's
metadata by their numbers, and the third, the rejection sampler, lets the rules decide. Rows without a rule keep vLLM's
decision. If rules decide all rows, vLLM's decision need not be computed.

Shape legend: B rows of one rule, R rows of the batch, N drafted tokens of the batch, K longest draft, J = K + 1 places,
V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fly.devices import on_host
from fly.extras.engines.blocks import Blocks, Decided, Row, cut, decide_rows, multiply, write_tokens
from fly.extras.engines.vllm.requests import read_row
from fly.ops import upload

__all__ = ["add_row", "attach_rows", "decide_after", "expand_batch_to_tokens"]


def add_row(original: Callable[..., int]) -> Callable[..., int]:
    """Wrap ``InputBatch.add_request``: keep a request's row beside it. A request that is preempted is added again."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any) -> int:
        row = read_row(request.sampling_params, self.vocab_size, request.req_id)
        request.fly = None if row is None else row.resume(getattr(request, "fly", None))
        self.__dict__.setdefault("fly", {})[request.req_id] = request
        return original(self, request)

    return add_request


def attach_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``InputBatch._make_sampling_metadata``: attach the requests that have a rule, by row number."""

    @functools.wraps(original)
    def make_sampling_metadata(self: Any) -> Any:
        metadata, numbers = original(self), self.req_id_to_index
        self.fly = {name: request for name, request in self.__dict__.get("fly", {}).items() if name in numbers}
        metadata.fly = {numbers[name]: request for name, request in self.fly.items() if request.fly is not None}
        return metadata

    return make_sampling_metadata


def decide_after(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``rejection_sample``: each rule decides its rows, and vLLM the others."""

    @functools.wraps(original)
    def rejection_sample(
        draft_token_ids: Tensor,  # [N]
        num_draft_tokens: list[int],  # of each of the R rows
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,  # [N, V]
        target_logits: Tensor,  # [N, V], processed
        bonus_token_ids: Tensor,  # [R, 1]
        sampling_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        batch = (num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids)
        device = target_logits.device
        requests = {
            b: request
            for b, request in getattr(sampling_metadata, "fly", {}).items()
            if b < len(num_draft_tokens) and num_draft_tokens[b]
        }
        starts = [0, *torch.tensor(num_draft_tokens).cumsum(0).tolist()]

        def read(numbers: list[int]) -> Blocks:
            part_requests = [requests[b] for b in numbers]
            longest = max(num_draft_tokens[b] for b in numbers)
            index_B, starts_B, lengths_B, positions_B, generated_B = upload(
                [
                    *numbers,
                    *(starts[b] for b in numbers),
                    *(num_draft_tokens[b] for b in numbers),
                    *(_count_block(request) for request in part_requests),
                    *(len(request.output_token_ids) for request in part_requests),
                ],
                device,
            ).view(5, -1)
            # vLLM has drawn the bonus already, so the distribution after the draft gives it all the probability.
            logits_BJV = multiply(
                cut(target_logits, starts_B, lengths_B, longest + 1), [request.fly for request in part_requests]
            )
            rows_B = torch.arange(len(numbers), device=device)
            logits_BJV[rows_B, lengths_B] = -torch.inf
            logits_BJV[rows_B, lengths_B, bonus_token_ids[index_B, 0].long()] = 0.0
            return Blocks(
                logits_BJV,
                cut(draft_token_ids, starts_B, lengths_B, longest),
                lengths_B,
                positions_B,
                None if draft_probs is None else cut(draft_probs, starts_B, lengths_B, longest),
                generated_B,
                [[*(request.prompt_token_ids or []), *request.output_token_ids] for request in part_requests]
                if "history" in part_requests[0].fly.past
                else None,
            )

        rows: dict[int, Row] = {b: request.fly for b, request in requests.items()}
        decisions = decide_rows(rows, max_spec_len + 1, target_logits.shape[1], read)
        if _replaces_all(decisions, len(num_draft_tokens), device, sampling_metadata):
            output_RJ = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32, device=device)
        else:
            output_RJ = original(draft_token_ids, *batch, sampling_metadata, *args, **kwargs)
        for numbers, decided in decisions:
            write_tokens(output_RJ, upload(numbers, device), decided)
        return output_RJ

    return rejection_sample


def _replaces_all(
    decisions: list[tuple[list[int], Decided]], count: int, device: torch.device, sampling_metadata: Any
) -> bool:
    """Return whether nothing of vLLM's own decision on ``count`` rows would be left, so that it need not be computed.

    On CPUs it may take more than twice as long as the rules'. On other devices the host would have to wait for the
    counts. Beside seeded rows that are not greedy it is computed all the same: it draws from their generators, which
    draw their bonus tokens too, and what a seeded row draws must not depend on its neighbours.
    """
    if not on_host(device) or (sampling_metadata.generators and not sampling_metadata.all_greedy):
        return False
    if sum(len(numbers) for numbers, _ in decisions) < count:
        return False
    return all(bool((decided.counts_B > 0).all()) for _, decided in decisions)


def _count_block(request: Any) -> int:
    """Count the blocks of a request. The sampler is not told the request's length, which on the host may lag."""
    request.fly_blocks = getattr(request, "fly_blocks", 0) + 1
    return int(request.fly_blocks)


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeat each row's value for its drafted tokens: ``x`` [B] becomes [N]. ``cu_num_tokens`` [B] has the running sums
    of the rows' counts.

    It replaces vLLM's function on CPUs without triton-cpu. There vLLM fills a copy of the result and drops it. So in
    every batch that samples, the logits of drafted tokens are divided by temperatures from uninitialized memory.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
