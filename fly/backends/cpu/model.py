"""A Llama whose forward is one call of compiled code over the paged cache. Knows nothing of the engine or policies.

Shape legend: T packed tokens, C hidden width, V vocabulary, B rows, K longest draft, N new tokens of a row, D head
width.

A result does not depend on what else is in the call, on how a text is cut into calls, or on threads: sums run in one
fixed order (src/decoder.h). ``fly.models.Llama`` is the reference; it rounds at other places, no more.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fly.backends.cpu.library import (
    ASK,
    TORCH,
    Ask,
    Batch,
    Clause,
    Going,
    Lookup,
    Rounds,
    Shape,
    Sure,
    chosen,
    load,
    number,
    split,
    usual,
)
from fly.cache import PagedBatch, PagedKVCache
from fly.models import Llama
from fly.models.llama import KV, Layer, rotary_frequencies
from fly.sampling import BatchSampling

__all__ = ["Asked", "CompiledLlama", "Ran", "Round", "Spent", "compiled", "int8_weights"]

_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # src/fly.h: Type
_NARROW = {"int8": 2, "w8a8": 3}
_FLOATS = [torch.float32, torch.bfloat16]
_WIDEST_HEAD = 1024
_ALWAYS = Sure()
_MOST_SCORED, _MOST_ASKS = 1024, 256  # tokens, and mismatches, over the rounds of one call


def refusal(model: Llama) -> str | None:
    """Why there is no compiled code for ``model``; None where there is."""
    if model.device.type != "cpu":
        return f"compiled kernels run on the CPU, not on {model.device}"
    if model.dtype not in _FLOATS:
        return f"compiled kernels take {[str(dtype).removeprefix('torch.') for dtype in _FLOATS]}, not {model.dtype}"
    if model.config.head_dim > _WIDEST_HEAD:
        return f"compiled kernels take heads up to {_WIDEST_HEAD} wide, not {model.config.head_dim}"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "compiled kernels know nothing of hooks, which this model has (fly.parallel.load compiles a rank's part)"
    return None


def compiled(model: Any, kernels: str = "auto", consume: bool = False) -> Any:
    """A ``Llama`` on the kernels that ``kernels`` stands for (see ``chosen``), or itself where that is PyTorch, or what
    ranks share and have compiled as it was loaded. To ``consume`` it takes its matrices away one by one as they are
    packed, so that the weights never lie in memory twice; it is of no use then.

    ``"auto"`` leaves a model alone that there is no compiled code for: another device, another dtype, no ``Llama``.

    Raises ``ValueError`` for kernels that are unknown, not available here, or not for this model.
    """
    variant = chosen(kernels)
    if isinstance(model, CompiledLlama):
        if kernels != "auto" and variant != model.kernels:
            raise ValueError(f"kernels {kernels!r}: this model was compiled for {model.kernels!r} as it was loaded")
        return model
    if variant == TORCH:
        return model
    reason = refusal(model) if isinstance(model, Llama) else f"there is no compiled code for {type(model).__name__}"
    if reason is not None:
        if kernels == "auto":
            return model
        raise ValueError(f"kernels {kernels!r}: {reason}")
    return CompiledLlama(model, variant, consume)


class Round(NamedTuple):
    """One round of ``CompiledLlama.rounds``."""

    drafted: list[int]
    choices: list[int]  # the target's most likely tokens, one more than was drafted
    accepted: int  # drafted tokens that stand
    following: int  # the token behind them
    asks: list[Ask]  # what ``clauses`` said, mismatch by mismatch


class Asked(NamedTuple):
    """A round of which the exact rule does not keep the whole draft. The next one writes over its logits and
    distributions."""

    drafted: list[int]
    choices: list[int]
    logits_1JV: Tensor
    probs_1KV: Tensor | None  # what the drafts were drawn from, where they were


class Spent(NamedTuple):
    """Seconds of some rounds, in all, in the target and in the drafter."""

    rounds: int
    whole: float
    target: float
    draft: float


class Ran(NamedTuple):
    """What ``CompiledLlama.rounds`` came to."""

    rounds: list[list[Round]]  # of each row, those that nobody was told of yet
    texts: list[list[int]]  # what is stored of each row and what was drafted last
    draft_starts: list[int]  # tokens of it that the drafter has stored
    spent: tuple[Spent, Spent]  # in the first round, and in the others
    error: BaseException | None  # of ``decide``, whose round is nobody's then


class CompiledLlama:
    """The function of a loaded ``Llama``, its weights packed for one kind of processor.

    Nothing of ``model`` is kept, save an embedding table that is not the head's as well. With int8 weights every matrix
    is rounded by ``int8_weights``, and the embedding where it is the head's; the rest computes as before, on
    ``avx512bf16`` with activations in bfloat16 even where the model is in float32. With W8A8 each token's activations
    are rounded as well where a matrix takes them, to 127 steps of the largest on either side of 0 (dynamic quantisation
    by token, as in arXiv 2206.01861, section 3.1), on AVX-512 by way of bfloat16: products are then of whole numbers,
    and exact.

    Args:
        model: on the CPU, in float32 or bfloat16.
        variant: the name of a variant that runs here (``fly.backends.cpu.available``), or of one on int8 weights, with
            ``-int8`` behind, or with activations of 8 bits too, ``-w8a8``.
        consume: take the model's matrices away as they are packed.
    """

    layer_subsets = True  # a call may go through some layers only
    batch_invariant = True  # a token's logits depend on the tokens before it alone

    def __init__(self, model: Llama, variant: str, consume: bool = False) -> None:
        if variant == TORCH or (reason := refusal(model)) is not None:
            raise ValueError(reason if variant != TORCH else f"{variant!r} is no compiled variant")
        self.config, self.dtype, self.device = model.config, model.dtype, torch.device("cpu")
        self.kernels = chosen(variant)
        variant, self._narrow = split(self.kernels)
        self.weight_bytes = 1 if self._narrow else self.dtype.itemsize  # of each
        config, self._library = model.config, load()
        self.vocab = model.lm_head.weight.shape[0]  # tokens whose logits it gives: of a part of a model, not all
        angle = torch.outer(torch.arange(config.max_position_embeddings).float(), rotary_frequencies(config))
        tied = model.lm_head.weight is model.embed_tokens.weight
        self._embedding = None if tied else model.embed_tokens.weight.detach().contiguous()
        shape = Shape(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self.vocab,
            config.max_position_embeddings,
            _NARROW[self._narrow] if self._narrow else _TYPES[self.dtype],
            _TYPES[self.dtype],
            config.rms_norm_eps,
        )
        norm, cos, sin = _float(model.norm.weight), angle.cos().contiguous(), angle.sin().contiguous()
        made = self._library.fly_new(
            number(variant),
            ctypes.byref(shape),
            norm.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if self._embedding is None else self._embedding.data_ptr(),
        )
        if not made:
            raise MemoryError("no memory for a packed model")
        self._model = ctypes.c_void_p(made)
        weakref.finalize(self, self._library.fly_free, self._model)
        for i, layer in enumerate(cast(list[Layer], model.layers)):
            norms = _float(layer.input_layernorm.weight), _float(layer.post_attention_layernorm.weight)
            self._done(self._library.fly_set_norms(self._model, i, *(norm.data_ptr() for norm in norms)))
            attention, mlp = layer.self_attn, layer.mlp
            for which, linear in enumerate((attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)):
                self._pack(i, which, linear)
                if consume:
                    linear.register_parameter("weight", None)
            if consume:
                _return_memory()
        self._pack(0, 4, model.lm_head)
        if consume:
            for owner in (model.lm_head, model.embed_tokens) if tied else (model.lm_head,):
                owner.register_parameter("weight", None)
            _return_memory()
        self._every_layer = array("i", range(config.num_hidden_layers))
        # What is the same from one call to the next: the cache last attended over, and what the library is told of it.
        self._cache: weakref.ref[PagedKVCache] | None = None
        self._call, self._calls = Batch(), threading.Lock()

    def _pack(self, layer: int, which: int, linear: nn.Linear) -> None:
        weight_NK, scale = linear.weight.detach().contiguous(), None
        if self._narrow:
            weight_NK, scale_N = int8_weights(weight_NK)
            scale = scale_N.data_ptr()
        bias_N = None if linear.bias is None else _float(linear.bias)
        bias = None if bias_N is None else bias_N.data_ptr()
        n, k = weight_NK.shape
        self._done(self._library.fly_set_matrix(self._model, layer, which, n, k, weight_NK.data_ptr(), bias, scale))

    def _done(self, error: int) -> None:
        if error == 1:
            raise MemoryError("no memory for a packed model, or for the workspace of a call")
        if error == 2:
            raise IndexError(f"a token id is outside the vocabulary of {self.config.vocab_size}")
        if error == 3:
            raise IndexError(f"a position is outside the context of {self.config.max_position_embeddings}")

    @property
    def workspace_bytes(self) -> int:
        """Memory held for the values between two layers; it grows with the longest call so far, up to a bound in the
        tokens of a call, with the rows that are drafted for at once, and with the longest sequence."""
        return int(self._library.fly_workspace(self._model))

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: KV, layers: Sequence[int] | None = None) -> Tensor:
        """Final hidden states [T, C] of packed ``tokens_T`` (int64 [T]) at ``positions_T`` (int64 [T]), through all
        layers or those numbered in ``layers`` only. ``kv`` is a ``PagedKVCache``'s.

        Raises ``IndexError`` for an id outside the vocabulary or a position outside the context.
        """
        tokens_T, positions_T = tokens_T.contiguous(), positions_T.contiguous()
        count = len(tokens_T)
        if count != len(positions_T):
            raise ValueError(f"{count} tokens, {len(positions_T)} positions")
        batch, _kept = self._batch((tokens_T.data_ptr(), positions_T.data_ptr()), count, kv, layers)
        hidden_TC = torch.empty(len(tokens_T), self.config.hidden_size, dtype=self.dtype)
        self._done(self._library.fly_forward(self._model, ctypes.byref(batch), hidden_TC.data_ptr()))
        return hidden_TC

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] in float32 over the full vocabulary (of a part of a model, over its own)."""
        if hidden_TC.dtype != self.dtype:
            raise TypeError(f"hidden states are {hidden_TC.dtype}, this model's are {self.dtype}")
        hidden_TC = hidden_TC.contiguous()
        count = len(hidden_TC)
        logits_TV = torch.empty(count, self.vocab)
        threads = torch.get_num_threads()
        self._done(self._library.fly_logits(self._model, hidden_TC.data_ptr(), count, logits_TV.data_ptr(), threads))
        return logits_TV

    def score(
        self,
        tokens: array[int],
        positions: array[int],
        kv: KV,
        kept: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> tuple[Tensor, list[int]]:
        """A forward and its logits in one call, of lists of the host (arrays of int64): logits [N, V] in float32 behind
        the packed tokens numbered in ``kept`` (None: all), bit for bit those of ``logits``, and the most likely token
        of each, the lowest id among equals. Errors as for a forward."""
        batch, _kept = self._batch(_places(tokens, positions), len(tokens), kv, layers)
        which = None if kept is None else array("i", kept)
        count = len(tokens) if which is None else len(which)
        logits_NV, choices = torch.empty(count, self.vocab), array("i", bytes(4 * count))
        at = None if which is None else _at(which)
        self._done(
            self._library.fly_score(self._model, ctypes.byref(batch), at, count, logits_NV.data_ptr(), _at(choices))
        )
        return logits_NV, choices.tolist()

    def draft(
        self,
        tokens: array[int],
        positions: array[int],
        kv: KV,
        most: Sequence[int],
        stop_ids: Sequence[Collection[int]],
        distribution: BatchSampling | None = None,
        uniform_BK: Tensor | None = None,
        layers: Sequence[int] | None = None,
        lookup: Lookup | None = None,
        texts: Sequence[array[int]] = (),
        sure: Sure = _ALWAYS,
    ) -> tuple[list[list[int]], Tensor | None]:
        """Feed the tokens (arrays of int64), then for each row its next token, again and again, until it has
        ``most[b]`` of them (at least 1) or one of ``stop_ids[b]``: the tokens of each row, and what they were drawn
        from.

        Without a ``distribution`` a token is the most likely one (the lowest id among equals). With one, it is drawn by
        ``uniform_BK`` (float32, K the largest of ``most``) as ``fly.sampling.draw`` would from the distribution that
        ``distribution``
        makes of the logits, which is then given as well: [B, K, V], zeros behind a row's last token.

        With a ``lookup``, whose settings are those of ``NGramDraft``, a forward is also fed what followed the last time
        the text looked like this, and drafting goes on from the first token that is another: the tokens, what they were
        drawn from and what is stored are the same, only sooner. ``texts`` then holds of each row the tokens that are
        stored (an array of int32 each).

        A row ends before a token that it is not ``sure`` of, by the distribution it draws from (at temperature 0, that
        of the logits).

        ``kv`` is a causal batch of the tokens fed, at the positions behind what is stored, and the rows must have room
        for ``most[b]`` - 1 tokens behind them; of what a row drafts, all but the last is stored then (all, where it was
        not ``sure`` of more). Errors as for a forward.
        """
        batch, _kept = self._batch(_places(tokens, positions), len(tokens), kv, layers)
        longest, rows = max(most, default=0), len(most)
        limits, stops, at = array("i", most), array("q"), array("i", [0])
        for ids in stop_ids:
            stops.extend(ids)
            at.append(len(stops))
        drafted, counts = array("q", bytes(8 * rows * longest)), array("i", bytes(4 * rows))
        addresses: list[int | None] = [_at(values) for values in (limits, stops, at, drafted, counts)]
        probs_BKV: Tensor | None = None
        if distribution is None:
            addresses += [None, None, None]
        else:
            assert uniform_BK is not None and uniform_BK.shape == (rows, longest)
            sampling, uniform_BK = distribution.compiled, uniform_BK.contiguous()
            probs_BKV = torch.empty(rows, longest, self.config.vocab_size)
            addresses += [ctypes.addressof(sampling), uniform_BK.data_ptr(), probs_BKV.data_ptr()]
        if lookup is None:
            addresses += [None, None]
        else:
            stored, given = list(cast(PagedBatch, kv).starts), [len(text) for text in texts]
            if given != stored:
                raise ValueError(f"texts of {given} tokens for rows that have {stored} stored")
            told = array("Q", [_at(text) for text in texts])
            addresses += [ctypes.addressof(lookup), _at(told)]
        addresses.append(ctypes.addressof(sure))
        self._done(self._library.fly_draft(self._model, ctypes.byref(batch), longest, *addresses))
        return [drafted[b * longest : b * longest + n].tolist() for b, n in enumerate(counts)], probs_BKV

    def rounds(
        self,
        texts: Sequence[list[int]],
        kv: PagedBatch,
        left: Sequence[int],
        stop_ids: Sequence[Collection[int]],
        drafter: CompiledLlama | None = None,
        draft_kv: PagedBatch | None = None,
        k: Sequence[int] = (),
        context: int = 2**31 - 1,
        lookup: Lookup | None = None,
        sure: Sure = _ALWAYS,
        distribution: BatchSampling | None = None,
        seeds: Sequence[int] = (),
        clauses: Sequence[Sequence[tuple[str, bool, int, float]]] = (),
        control_V: Tensor | None = None,
        decide: Callable[[list[Round], Asked], tuple[int, int] | None] | None = None,
        seconds: float = 0.0,
        rounds: int = 2**31 - 1,
        worth: float = 0.0,
        spare: float = 0.0,
        hurry: array[int] | None = None,
    ) -> Ran:
        """Rounds of speculative decoding of rows, in one call: draft, score, emit what the exact rule keeps and the
        token behind it; again and again, up to one that ends a row or has no room for the next behind it, or until
        ``seconds`` are over, or there were so many ``rounds``; where a token is ``worth`` some seconds, also until
        those after the first have taken ``spare`` seconds more than what they emitted is worth.

        Args:
            texts: the rows' tokens.
            kv: their last tokens, behind all others stored, with room for the tokens of all rounds behind them.
            left: tokens each row may still emit, at least 1; its ``stop_ids`` end it before.
            drafter, draft_kv: who drafts, and the tokens that it has not stored, with the same room. None leaves that
                to a ``lookup``, which copies (``NGramDraft``); or decodes autoregressively.
            k: tokens it drafts a round for each row, at most, until a text of ``context``; empty is none. As for
                ``draft``, with its ``lookup`` and ``sure``.
            distribution, seeds: how each row draws, as ``fly.engine.judge`` and ``SingleDraft`` do; None takes the most
                likely.
            clauses, control_V: of each row, what excuses a mismatch, if there are any and all hold, where nothing is
                drawn: each a kind (``Clause.KINDS``), whether it is negated, a number of tokens, a threshold of entropy
                in nats; and which tokens are control tokens. Empty is nothing for all.
            decide: for a row alone, asked instead of ``clauses`` of a round of which the exact rule does not keep all,
                and told of the rounds before it: how many drafted tokens stand, and what follows them. None ends the
                row there.
            hurry: no further round begins while its first number (int32) is not 0, whoever sets that.

        Errors as for a forward; one of ``decide`` ends the call and is given back. What a signal's handler raises in
        place of the first line of ``decide`` is lost, and comes back as a ``KeyboardInterrupt``.
        """
        count, lengths = len(texts), [len(text) for text in texts]
        rooms = [kv.cache.allocator.length(seq) for seq in kv.seqs]
        most_k = [min(n, more - 1) for n, more in zip(k or [0] * count, left)]
        short = any(room < length + n for room, length, n in zip(rooms, lengths, most_k))
        if min(left) < 1 or short or (drafter is None) != (draft_kv is None) or (decide is not None and count > 1):
            given = f"room for {rooms} tokens, drafter {drafter}, its batch {draft_kv}, who decides {decide}"
            raise ValueError(f"{left} tokens left of rows of {lengths}, {most_k} to be drafted: {given}")
        widest = max(most_k)
        most = min(
            max(map(int.__sub__, rooms, lengths)) + 1, 1 + _MOST_SCORED // (count * (widest + 1)), max(rounds, 1)
        )
        batch, _kept = self._batch((0, 0), count, kv, None)
        draft_batch, draft_starts = None, lengths
        if drafter is not None and draft_kv is not None:
            draft_starts = list(draft_kv.starts)
            draft_batch, _kept_too = drafter._batch((0, 0), sum(draft_kv.counts), draft_kv, None)
        words, copied, going = [], [], (Going * count)()
        for b, (text, room) in enumerate(zip(texts, rooms)):
            own = array("q", text)
            own.frombytes(bytes(8 * (room + 1 - lengths[b])))
            words.append(own)
            going[b].length, going[b].room, going[b].left, going[b].k = lengths[b], room, left[b], most_k[b]
            going[b].context, going[b].draft_start, going[b].text = context, draft_starts[b], _at(own)
            if lookup is not None:
                copied.append(array("i", own))
                going[b].copied = _at(copied[b])
        stops, stop_at = array("q"), array("i", [0])
        for ids in stop_ids:
            stops.extend(ids)
            stop_at.append(len(stops))
        logits_NV = torch.empty(count * (widest + 1), self.vocab)
        size = count * most
        drafted, choices = array("q", bytes(8 * size * widest)), array("i", bytes(4 * size * (widest + 1)))
        counts, accepted, following = (
            array("i", bytes(4 * size)),
            array("i", bytes(4 * size)),
            array("q", bytes(8 * size)),
        )
        call = Rounds(
            ctypes.addressof(going), widest, most, _at(stops), _at(stop_at),
            None if hurry is None else _at(hurry), int(1e9 * seconds), int(1e9 * worth), int(1e9 * spare),
            logits_NV.data_ptr(), _at(drafted), _at(counts), _at(choices), _at(accepted), _at(following), sure=sure,
        )  # fmt: skip
        probs_BKV: Tensor | None = None
        if distribution is not None or clauses:
            call.variant = number(usual())  # that of ``ProcessedDistribution.keeps`` and ``top_at``
        if clauses:
            drawn = [False] * count if distribution is None else (~distribution.greedy_B).tolist()
            if control_V is None or decide is not None or any(own and draws for own, draws in zip(clauses, drawn)):
                raise ValueError("clauses need control_V, rows that draw nothing, and nobody else who decides")
            listed: list[Clause] = []
            for b, own_clauses in enumerate(clauses):
                going[b].clause_at, going[b].clauses = len(listed), len(own_clauses)
                listed += [Clause(Clause.KINDS.index(kind), *rest) for kind, *rest in own_clauses]
            known = (Clause * len(listed))(*listed)
            asks = bytearray(ASK.size * max(_MOST_ASKS, 2 * len(logits_NV)))
            call.clause, call.control = ctypes.addressof(known), control_V.data_ptr()
            call.ask = ctypes.addressof(ctypes.c_char.from_buffer(asks))
            call.most_asks = len(asks) // ASK.size
        if distribution is not None:
            for b, seed in enumerate(seeds):
                going[b].seed = seed
            spread = torch.empty(2, self.vocab + 64)
            call.sampling, call.spread = ctypes.addressof(distribution.compiled), spread.data_ptr()
            if drafter is not None:
                probs_BKV = torch.empty(count, widest, self.vocab)
                call.distributions = probs_BKV.data_ptr()
        told, error = 0, None
        answer = array("i", [0])  # not in ``call``, which would then hold itself by its callback
        call.stands = _at(answer)

        def made(b: int, first: int, end: int) -> list[Round]:
            at, to = b * most + first, b * most + end
            chains, said = (
                drafted[at * widest : to * widest].tolist(),
                choices[at * (widest + 1) : to * (widest + 1)].tolist(),
            )
            found = []
            for i, (n, stands, behind) in enumerate(zip(counts[at:to], accepted[at:to], following[at:to])):
                chain, choice = i * widest, i * (widest + 1)
                found.append(Round(chains[chain : chain + n], said[choice : choice + n + 1], stands, behind, []))
            return found

        def asked(this: int) -> None:
            nonlocal told, error
            try:
                assert decide is not None
                *before, (chain, said, *_) = made(0, told, this + 1)
                told, n = this + 1, len(chain)
                distributions = None if probs_BKV is None else probs_BKV[:, :n]
                stands = decide(before, Asked(chain, said, logits_NV[: n + 1].unsqueeze(0), distributions))
                answer[0], following[this] = (-1, 0) if stands is None else stands
            except BaseException as raised:  # compiled code cannot be left by an error
                error, answer[0] = raised, -1

        if decide is not None:
            call.decide = Rounds.Decide(asked)
        self._done(
            self._library.fly_rounds(
                self._model,
                ctypes.byref(batch),
                None if drafter is None else drafter._model,
                None if draft_batch is None else ctypes.byref(draft_batch),
                None if lookup is None else ctypes.addressof(lookup),
                ctypes.byref(call),
            )
        )
        if answer[0] == Rounds.UNANSWERED:  # a signal came before the first line of ``asked``
            error = KeyboardInterrupt()
        last = call.rounds - 1
        stored = [
            own[: row.length + counts[b * most + last]].tolist() for b, (own, row) in enumerate(zip(words, going))
        ]
        taken = zip((1, last), call.elapsed, call.scoring, call.drafting)
        first, others = (Spent(number, *(ns / 1e9 for ns in each)) for number, *each in taken)
        untold = [made(b, told, call.rounds) for b in range(count)]
        for ask in map(Ask._make, ASK.iter_unpack(asks[: call.asks * ASK.size])) if clauses else ():
            untold[ask.row][ask.round].asks.append(ask)
        return Ran(untold, stored, [row.draft_start for row in going], (first, others), error)

    def _batch(
        self, places: tuple[int, int], count: int, kv: KV, layers: Sequence[int] | None
    ) -> tuple[Batch, tuple[object, ...]]:
        """What the library takes, and what must live as long: ``count`` tokens and positions lie at ``places``."""
        if not isinstance(kv, PagedBatch):
            raise TypeError(f"compiled kernels attend over a PagedKVCache, not over {type(kv).__name__}")
        with self._calls:  # a call is this thread's own
            if self._cache is None or self._cache() is not kv.cache:
                self._attend_over(kv.cache)
            call = Batch.from_buffer_copy(self._call)
        if count != sum(kv.counts):
            raise ValueError(f"{count} tokens, {sum(kv.counts)} slots")
        tables, table_at = array("i"), array("i")
        for table in kv.tables():
            table_at.append(len(tables))
            tables.fromlist(table)
        starts, counts = array("i", kv.starts), array("i", kv.counts)
        masks, kept_masks = None, None
        if kv.masks is not None:
            kept_masks = [None if mask is None else mask.contiguous() for mask in kv.masks]
            masks = array("Q", [0 if mask is None else mask.data_ptr() for mask in kept_masks])
        which = self._every_layer if layers is None else array("i", layers)
        call.rows, call.tokens = len(starts), count
        call.token, call.position = places
        call.start, call.count = _at(starts), _at(counts)
        call.tables, call.table_at = _at(tables), _at(table_at)
        call.masks = None if masks is None else _at(masks)
        call.layer, call.layers = _at(which), len(which)
        call.threads = torch.get_num_threads()
        return call, (starts, counts, tables, table_at, masks, kept_masks, which)

    def _attend_over(self, cache: PagedKVCache) -> None:
        """Go by the keys and values of ``cache`` from now on. Raises ``ValueError`` if they are not this model's."""
        keys, heads = cache.keys, (self.config.num_key_value_heads, self.config.head_dim)
        if keys.dtype not in _FLOATS or keys.shape[2:] != heads or keys.device.type != "cpu":
            raise ValueError(
                f"the cache is {keys.dtype} on {keys.device} with heads of {tuple(keys.shape[2:])}; compiled kernels "
                f"take {_FLOATS} on the CPU, this model heads of {heads}"
            )
        call = self._call
        call.keys, call.values, call.layer_stride = keys.data_ptr(), cache.values.data_ptr(), keys.stride(0)
        call.cache_type, call.page = _TYPES[keys.dtype], cache.allocator.block_size
        self._cache = weakref.ref(cache)


def _return_memory() -> None:
    """Give what was freed back to the system, where the allocator would rather keep it."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _at(values: array[int]) -> int:
    address, _ = values.buffer_info()
    return address


def _places(tokens: array[int], positions: array[int]) -> tuple[int, int]:
    if len(tokens) != len(positions):
        raise ValueError(f"{len(tokens)} tokens, {len(positions)} positions")
    return _at(tokens), _at(positions)


def int8_weights(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of -127 to 127, int8 [N, K], and the scale of each output, float32 [N]: their product is the
    nearest to ``weight_NK`` of that form whose scale takes the largest weight of an output to 127 (symmetric absolute
    maximum quantisation by output channel, as in Dettmers et al., arXiv 2208.07339, section 2.1)."""
    whole_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    scale_N = torch.empty(len(weight_NK), dtype=torch.float32)
    # Some outputs at a time, whose float32 values stay in the processor's caches.
    for weight_nK, whole_nK, scale_n in zip(*(x.split(64) for x in (weight_NK.detach(), whole_NK, scale_N))):
        weight_nK = weight_nK.float()
        torch.div(weight_nK.abs().amax(1), 127, out=scale_n)
        scale_n[scale_n == 0] = 1.0
        whole_nK.copy_((weight_nK / scale_n.unsqueeze(1)).round_())
    return whole_NK, scale_N


def _float(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()
