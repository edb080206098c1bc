"""The plug-in that SGLang calls in each of its processes (entry point group ``sglang.srt.plugins``). It registers hooks
by SGLang's own ``HookRegistry``.

One hook checks requests. ``eagle_sample`` decides on drafts of EAGLE, MTP, standalone draft models and n-grams;
``DFlashWorkerV2._accept_block`` on those of DFlash. After each, the rules decide their rows again. Rows without a rule
keep SGLang's decision.

Shape legend: B rows of one rule, R rows of the batch, D = K + 1 slots of a row (slot 0 is the last token, slot i + 1 is
draft i), J = K + 1 places, V vocabulary, C candidates of a selector.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fly.extras.engines.blocks import Blocks, Row, decide_rows, write_tokens
from fly.extras.engines.sglang.requests import TRIED, Served, check_request, find_rule, read_row
from fly.ops import upload

__all__ = ["accept_block", "keep_batch", "keep_logits", "register", "sample_chains"]

_EAGLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
_DFLASH = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
_PARAMS = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
_log = logging.getLogger("sglang.fly")


def register() -> None:
    """Register the hooks. SGLang applies them after all plug-ins are loaded."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PARAMS, check, HookType.AROUND)
    if sglang.__version__ not in TRIED:
        _log.warning("fly's rules are refused: SGLang %s was not tried; tried: %s", sglang.__version__, TRIED)
        return
    HookRegistry.register(_EAGLE, sample_chains, HookType.AROUND)
    HookRegistry.register(f"{_DFLASH}._accept_block", accept_block, HookType.AROUND)
    HookRegistry.register(f"{_DFLASH}.forward_batch_generation", keep_batch, HookType.AROUND)
    HookRegistry.register(f"{_DFLASH}._can_skip_verify_logits", keep_logits, HookType.AROUND)


def check(original: Callable[..., Any], self: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
    """Around ``SamplingParams.verify``: refuse a request with an error of its own (400 over HTTP)."""
    if find_rule(self) is not None:
        check_request(self, vocab_size, _find_served())
    return original(self, vocab_size, *args, **kwargs)


@functools.lru_cache(1)
def _find_served() -> Served:
    import sglang

    if sglang.__version__ not in TRIED:  # where other versions keep these is not known
        return Served(sglang.__version__)
    from sglang.srt.runtime_context import get_device, get_exec, get_schedule, get_spec

    drafts = get_spec()
    algorithm = drafts.speculative_algorithm
    ngrams = algorithm == "NGRAM"
    branches = drafts.speculative_ngram_max_bfs_breadth if ngrams else drafts.speculative_eagle_topk
    return Served(
        sglang.__version__,
        algorithm,
        branches or 1,
        not get_schedule().disable_overlap_schedule,
        get_device().device,
        bool(get_exec().features.enable_watermark),
    )


def _find_rows(batch: Any, size: int) -> dict[int, Row]:
    """Return the rows that have a rule. A row stays with a request that is retracted and comes back."""
    rows = {}
    for b, request in enumerate(batch.reqs):
        if not hasattr(request, "fly"):
            request.fly = _admit(request, size)
        if request.fly is not None:
            rows[b] = request.fly
    return rows


def _admit(request: Any, size: int) -> Row | None:
    """Return the row of a new request, or None if it names no rule. If its rule is wrong, the request ends with an
    error, and has no row.

    ``check`` has refused it before, unless SGLang reads requests in several processes (``--tokenizer-worker-num``),
    which load no plug-ins.
    """
    if find_rule(request.sampling_params) is None:
        return None
    try:
        check_request(request.sampling_params, size, _find_served())
    except ValueError as error:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        request.to_finish = FINISH_ABORT(str(error), HTTPStatus.BAD_REQUEST, "BadRequestError")
        return None
    return read_row(request.sampling_params, size, request.rid, request.eos_token_ids)


def _read_chains(
    batch: Any, rows: dict[int, Row], logits_RJV: Tensor, chains_RD: Tensor, lengths_R: Tensor, draft_RKV: Tensor | None
) -> Callable[[list[int]], Blocks]:
    """Return what reads the blocks of some rows."""

    def read(numbers: list[int]) -> Blocks:
        index_B = upload(numbers, logits_RJV.device)
        past = rows[numbers[0]].past
        requests = [batch.reqs[b] for b in numbers]
        generated_B, history = None, None
        if "generated" in past:
            generated_B = upload([len(request.output_ids) for request in requests], logits_RJV.device)
        if "history" in past:
            history = [[*request.origin_input_ids, *request.output_ids] for request in requests]
        return Blocks(
            logits_RJV[index_B],
            chains_RD[index_B, 1 : logits_RJV.shape[1]],
            lengths_R[index_B],
            batch.seq_lens[index_B].long(),
            None if draft_RKV is None else draft_RKV[index_B],
            generated_B,
            history,
        )

    return read


def sample_chains(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Around ``eagle_sample``, which returns three tensors that the rules rewrite for their rows: the token that is
    emitted after each slot [R * D], how many [R], and the slots after which they are, [R, depth] with -1."""
    emitted, counts_R, index_RJ = original(verify_input, batch, logits_output, *args, **kwargs)
    if batch.forward_mode.is_idle():
        return emitted, counts_R, index_RJ
    logits = logits_output.next_token_logits  # the original has applied penalties, biases and grammars to it
    rows = _find_rows(batch, logits.shape[-1])
    if not rows:
        return emitted, counts_R, index_RJ
    slots = verify_input.draft_token_num
    places = min(slots, index_RJ.shape[1])
    places_J = torch.arange(places, device=logits.device)
    # A chain goes on as long as each slot is followed by the next one: n-grams may match fewer tokens.
    next_RK = verify_input.retrieve_next_token.view(-1, slots)[:, : places - 1]
    lengths_R = (next_RK == places_J[1:]).long().cumprod(1).sum(1)
    draft_RKV = getattr(verify_input, "draft_probs", None)  # n-grams have none
    read = _read_chains(
        batch,
        rows,
        logits.view(-1, slots, logits.shape[-1])[:, :places],
        verify_input.draft_token.view(-1, slots),
        lengths_R,
        None if draft_RKV is None else draft_RKV[:, : places - 1],
    )

    for numbers, decided in decide_rows(rows, places, logits.shape[-1], read):
        index_B = upload(numbers, logits.device)
        counts_B = decided.counts_B.to(counts_R.dtype)
        slots_BJ = (index_B.unsqueeze(1) * slots + places_J).where(places_J < counts_B.unsqueeze(1), -1)
        # SGLang also reads the slots after the tokens, and drops what they hold: 0 is some token.
        tokens_BD = pad(decided.tokens_BJ.clamp_min(0), (0, slots - places))
        write_tokens(emitted.view(-1, slots), index_B, decided._replace(tokens_BJ=tokens_BD))
        write_tokens(index_RJ, index_B, decided._replace(tokens_BJ=slots_BJ))
        counts_R[index_B] = torch.where(counts_B > 0, counts_B, counts_R[index_B])
    _agree(emitted, counts_R, index_RJ)
    return emitted, counts_R, index_RJ


def keep_batch(original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``DFlashWorkerV2.forward_batch_generation``: ``_accept_block`` is not told the batch."""
    self.fly_batch = batch
    try:
        return original(self, batch, *args, **kwargs)
    finally:
        self.fly_batch = None


def keep_logits(original: Callable[..., bool], self: Any, batch: Any, *args: Any, **kwargs: Any) -> bool:
    """Around ``DFlashWorkerV2._can_skip_verify_logits``: a rule needs the logits, not the argmax alone."""
    has_rule = any(find_rule(request.sampling_params) is not None for request in batch.reqs)
    return not has_rule and original(self, batch, *args, **kwargs)


def accept_block(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """Around ``DFlashWorkerV2._accept_block``, which returns how many drafts are accepted [R], the same with the token
    after them [R], that token [R], all tokens [R, D], and the rows' new lengths or None."""
    result = original(self, **kwargs)
    logits, candidates_RD = kwargs["next_token_logits"], kwargs["candidates"]
    batch = getattr(self, "fly_batch", None)
    if batch is None or logits is None or not (rows := _find_rows(batch, logits.shape[-1])):
        return result
    from sglang.srt.speculative.dflash_worker_v2 import _commit_accept

    accepted_R, _, bonus_R, _, _ = result
    count, slots = candidates_RD.shape
    draft_RKV = None
    if self._selector_sample is not None:  # drafts were drawn from a few candidates at each place
        candidates_RKC, probs_RKC = self._selector_sample
        draft_RKV = logits.new_zeros(count, slots - 1, logits.shape[-1], dtype=torch.float32)
        draft_RKV.scatter_(-1, candidates_RKC, probs_RKC.float())
    lengths_R = torch.full((count,), slots - 1, device=logits.device)
    logits_RJV = logits.view(count, slots, -1)
    read = _read_chains(batch, rows, logits_RJV, candidates_RD, lengths_R, draft_RKV)

    for numbers, decided in decide_rows(rows, slots, logits.shape[-1], read):
        index_B = upload(numbers, logits.device)
        accepted_B = (decided.counts_B - 1).clamp_min(0)
        last_B = decided.tokens_BJ.gather(1, accepted_B.unsqueeze(1)).squeeze(1)
        decided_B = decided.counts_B > 0
        accepted_R[index_B] = torch.where(decided_B, accepted_B.to(accepted_R.dtype), accepted_R[index_B])
        bonus_R[index_B] = torch.where(decided_B, last_B.to(bonus_R.dtype), bonus_R[index_B])
    _agree(accepted_R, bonus_R)
    tokens_RD, counts_R = _commit_accept(candidates_RD, accepted_R, bonus_R)
    return accepted_R, counts_R, bonus_R, tokens_RD, None  # SGLang adds up the lengths itself


def _agree(*tensors: Tensor) -> None:
    """Copy the first rank's decision to the others: their logits may differ in the last bits."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        for tensor in tensors:
            group.broadcast(tensor, src=0)
