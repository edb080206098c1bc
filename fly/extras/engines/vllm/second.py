"""vLLM's second model runner: ``RejectionSampler._verify`` decides on a chunk of whole requests, on the device.

Three functions are wrapped. ``Sampler.add_request`` sets or clears the rule of a slot, since slots are used again.
``GPUModelRunner.finish_requests`` forgets the rows of requests that ended. ``_verify`` lets the rules decide after
vLLM. Later stages read the tokens and their number alone, so only these are rewritten. A step in which nobody drafts
does not come here: vLLM draws the token.

Shape legend: B rows of one rule, R rows of the chunk, L logits rows of the chunk, S slots, K most drafted tokens, J =
K + 1 places, V vocabulary, U the draft model's vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fly.extras.engines.blocks import Blocks, Row, cut, decide_rows, multiply, write_tokens
from fly.extras.engines.vllm.requests import read_row
from fly.ops import upload
from fly.runner.sampling import BatchSampling

__all__ = ["decide_after", "forget_rows", "set_row"]


class _Rows:
    """The rows of requests that have a rule. A preempted request comes back in another slot, with its output folded
    into its prompt: so an account belongs to the request's name, not to a slot."""

    def __init__(self) -> None:
        self.by_name: dict[str, Row] = {}
        self.by_slot: dict[int, Row] = {}


def _find_rows(sampler: Any) -> _Rows:
    rows: _Rows = sampler.__dict__.setdefault("fly", _Rows())
    return rows


def set_row(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``Sampler.add_request``: set or clear the rule of a slot."""

    @functools.wraps(original)
    def add_request(self: Any, req_idx: int, sampling_params: Any) -> None:
        original(self, req_idx, sampling_params)
        states, rows = self.sampling_states, _find_rows(self)
        name = self.req_states.index_to_req_id.get(req_idx, "")
        row = read_row(sampling_params, states.vocab_size, name, seed=int(states.seeds.np[req_idx]))
        before = rows.by_name.pop(name, None)
        rows.by_slot.pop(req_idx, None)
        if row is not None:
            rows.by_slot[req_idx] = rows.by_name[name] = row.resume(before)

    return add_request


def forget_rows(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPUModelRunner.finish_requests``: forget the rows of requests that ended, not of those that come back."""

    @functools.wraps(original)
    def finish_requests(self: Any, scheduler_output: Any) -> None:
        original(self, scheduler_output)
        if self.sampler is not None:  # the last rank of a pipeline has one
            for name in scheduler_output.finished_req_ids:
                _find_rows(self.sampler).by_name.pop(name, None)

    return finish_requests


def decide_after(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RejectionSampler._verify``: after it, each rule decides its rows again."""

    @functools.wraps(original)
    def verify(
        self: Any,
        logits: Tensor,
        draft_logits: Tensor | None,  # [S, K, U], not divided by the temperature
        draft_sampled: Tensor,
        pos: Tensor,  # [L]
        cu_num_logits: Tensor,  # [R + 1]
        idx_mapping: Tensor,  # [R], the rows' slots
        idx_mapping_np: Any,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: Tensor,  # [L], the last token and the draft of each row; -1 for what a grammar forbids
    ) -> tuple[Tensor, Tensor, Tensor]:
        processed_LV, sampled_RJ, num_sampled_R = original(
            self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np,
            expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled,
        )  # fmt: skip
        by_slot = _find_rows(self.sampler).by_slot
        rows = {b: by_slot[slot] for b, slot in enumerate(idx_mapping_np.tolist()) if slot in by_slot}
        states = self.sampler.req_states
        device = processed_LV.device
        width = processed_LV.shape[1]
        longest = self.num_speculative_steps

        def read(numbers: list[int]) -> Blocks:
            part_rows = [rows[b] for b in numbers]
            past = part_rows[0].past
            index_B = upload(numbers, device)
            starts_B, slots_B = cu_num_logits[index_B].long(), idx_mapping[index_B].long()
            counts_B = cu_num_logits[index_B + 1].long() - starts_B
            generated_B, history = None, None
            if "generated" in past:
                generated_B = (states.total_len.gpu[slots_B] - states.prompt_len.gpu[slots_B]).long()
            if "history" in past:  # the only wait of the host: the rule reads the text on the host
                lengths = zip(slots_B.tolist(), states.total_len.gpu[slots_B].tolist())
                history = [states.all_token_ids.gpu[slot, :length].tolist() for slot, length in lengths]
            return Blocks(
                multiply(cut(processed_LV, starts_B, counts_B, longest + 1), part_rows),
                cut(verify_draft_sampled, starts_B + 1, counts_B - 1, longest),
                counts_B - 1,
                pos[starts_B],
                None if draft_logits is None else _process(draft_logits, slots_B, part_rows, width),
                generated_B,
                history,
            )

        for numbers, decided in decide_rows(rows, longest + 1, width, read):
            index_B = upload(numbers, device)
            counts_B = decided.counts_B.to(num_sampled_R.dtype)
            write_tokens(sampled_RJ, index_B, decided)
            num_sampled_R[index_B] = torch.where(counts_B > 0, counts_B, num_sampled_R[index_B])
        return processed_LV, sampled_RJ, num_sampled_R

    return verify


def _process(draft_logits_SKU: Tensor, slots_B: Tensor, rows: list[Row], width: int) -> Tensor:
    """Return the distributions that the rows' drafts were drawn from, [B, K, V]. The target's vocabulary may be padded
    beyond the draft's, or the draft's beyond the target's."""
    logits_BKU = draft_logits_SKU[slots_B, :, :width].float()
    sampling = BatchSampling.of([row.params for row in rows], logits_BKU.device)
    probs_BKU = sampling.probs(logits_BKU)
    return pad(probs_BKU, (0, width - probs_BKU.shape[-1]))
