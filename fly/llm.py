"""The Python interface: load a target and a draft, generate, stream. Knows nothing of HTTP, and of ranks only that a
model may be loaded among several: all of them then make the same calls in the same order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fly.bundled import resolve_checkpoint
from fly.cache import DEFAULT_BYTES, OutOfBlocks, PagedKVCache
from fly.config import Config
from fly.drafts import DraftStrategy, parse_draft
from fly.drafts.translate import translated
from fly.engine import Engine, Model, Runner
from fly.models import load_model
from fly.models.tokenizer import TextStream, Tokenizer, read_eos_ids, read_sampling_defaults
from fly.policies import AcceptancePolicy, Bound, Exact
from fly.types import Guarantee, SamplingParams, Sequence, Stats, Token

if TYPE_CHECKING:
    from fly.parallel import Ranks
    from fly.parallel.draft import Placement

__all__ = ["LLM", "Output", "Piece", "Stream"]

Prompt = str | Rows[int]


@dataclass(frozen=True)
class Output:
    """What became of one request.

    ``token_ids`` include the end-of-sequence token that ended it, ``text`` shows neither that nor a stop string.
    ``finish_reason`` is ``"stop"`` (end-of-sequence, stop id, stop string) or ``"length"`` (``max_tokens`` or the
    model's context). ``provenance`` says of every token why it stands. ``policy`` decided, and promises ``guarantee``
    (with its ``bound`` where that is ``BOUNDED``).
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None
    provenance: list[Token]
    stats: Stats
    policy: AcceptancePolicy
    guarantee: Guarantee
    bound: Bound | None


class Piece(str):
    """A piece of streamed text that knows the tokens it came with."""

    tokens: tuple[Token, ...]

    def __new__(cls, text: str, tokens: tuple[Token, ...]) -> Piece:
        piece = super().__new__(cls, text)
        piece.tokens = tokens
        return piece


class Stream(Iterator[Piece]):
    """A completion being streamed. ``stats`` grows with it; ``close`` ends it and frees what it holds."""

    def __init__(self, row: Sequence, pieces: Generator[Piece, None, None]) -> None:
        self._row, self._pieces = row, pieces

    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def stats(self) -> Stats:
        """Counts so far."""
        return self._row.stats

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, None while it has not."""
        return self._row.finish_reason

    def close(self) -> None:
        """End the request early; its cache is free at once."""
        self._pieces.close()


class LLM:
    """A target model with its tokenizer, a draft strategy and an acceptance policy.

    Args:
        model: path of a Hugging Face Llama directory, a bundled name (``fly-target``), or a loaded model (which
            then takes token ids only).
        draft: any ``DraftStrategy``, its text (a checkpoint's path or bundled name, ``ngram``, a cascade such as
            ``ngram+fly-draft``, cheapest first, or ``module:Class``, which is imported; see ``parse_draft``), or None
            for autoregressive decoding.
        policy: which drafted tokens stand; None is ``Exact()``.
        k: most tokens drafted a round.
        dtype: ``"auto"`` (as the checkpoint states), bfloat16, float16 or float32; holds for a draft path too.
        device: ``"auto"`` or any torch device.
        deterministic: results bit for bit independent of batch and draft length. Not available yet.
        cache_tokens: tokens that the KV caches hold over all requests, the target's and each of the draft's; None is
            eight full contexts, or as much of that as ``cache_bytes`` hold.
        cache_bytes: memory for the keys and values of target and draft together (4 GiB). A draft model that was given
            a size of its own is not counted.
        block_size: tokens a page of the cache.
        ranks: the processes this one shares the models with (``fly.parallel.launch``); None is this one alone. Every
            rank makes the same calls, and gets the same answers.
        draft_placement: where a draft given as text runs among ranks (see ``fly.parallel.place_draft``).
        whole_sums: let no rank add up a part of a sum, so that the number of ranks does not change how it is rounded
            (``fly.parallel.LLAMA_WHOLE_SUMS``). Ranks then exchange more.

    Raises:
        CheckpointError: the checkpoint cannot be used (see ``load_model``).
        ValueError: a bad argument, or a draft whose vocabulary has no translation to the target's.
    """

    def __init__(
        self,
        model: str | Path | Model,
        draft: str | Path | DraftStrategy | None = None,
        policy: AcceptancePolicy | None = None,
        k: int = 15,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        deterministic: bool = False,
        *,
        cache_tokens: int | None = None,
        cache_bytes: int = DEFAULT_BYTES,
        block_size: int = 16,
        ranks: Ranks | None = None,
        draft_placement: Placement = "auto",
        whole_sums: bool = False,
    ) -> None:
        if deterministic:
            raise ValueError("deterministic=True is not available yet; float32 at temperature 0 comes closest")
        self.k, self.policy = _check_k(k), Exact() if policy is None else policy
        _check_policy(self.policy)
        if not (draft is None or isinstance(draft, (str, Path, DraftStrategy))):
            raise ValueError(f"draft {draft!r} is no DraftStrategy, text or path; several make a CascadeDraft([...])")
        self.tokenizer: Tokenizer | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self.default_params = SamplingParams(temperature=0.0)
        load: Any = load_model
        if ranks is not None:
            from fly.parallel import LLAMA, LLAMA_WHOLE_SUMS, place_draft
            from fly.parallel import load as load_any

            load_part = partial(load_any, plan=LLAMA_WHOLE_SUMS if whole_sums else LLAMA)
            load = partial(load_part, ranks=ranks)
        self._random: random.Random = random.SystemRandom() if ranks is None else ranks.random
        if isinstance(model, (str, Path)):
            directory = resolve_checkpoint(model)
            loaded: Model = load(directory, dtype, device)
            self.tokenizer = Tokenizer.load(directory)
            self.eos_ids = read_eos_ids(directory, loaded.config.vocab_size)
            self.default_params = read_sampling_defaults(directory)
        else:
            loaded = model
        config = loaded.config
        if self.tokenizer is not None:
            self.tokenizer.check_fits(config.vocab_size)
        if draft_placement == "sharded" and isinstance(draft, DraftStrategy):
            raise ValueError("draft_placement 'sharded' divides what it loads; give the draft as a text")
        given = draft

        def make_draft(load: Any = load_model) -> DraftStrategy | None:
            made: Any = given
            if isinstance(given, (str, Path)):
                made = parse_draft(str(given), trusted=True, dtype=dtype, device=device, load=load)
            return None if made is None else translated(made, self.tokenizer, config.vocab_size)

        draft = make_draft() if ranks is None else place_draft(make_draft, ranks, draft_placement, load_part)
        if cache_tokens is None:
            each = PagedKVCache.bytes_per_token(config, getattr(loaded, "dtype", torch.float32))
            each += 0 if draft is None else draft.bytes_per_token()
            affordable = cache_bytes // each // block_size * block_size
            if (cache_tokens := min(8 * config.max_position_embeddings, affordable)) < 1:
                raise ValueError(
                    f"cache_bytes {cache_bytes} hold no page of {block_size} tokens at {each} bytes a token, target "
                    "and draft together"
                )
        if draft is not None:
            draft.reserve(cache_tokens)
        cache = PagedKVCache.for_model(loaded, cache_tokens, block_size)
        control = self.eos_ids | (self.tokenizer.control_ids if self.tokenizer else frozenset())
        self._open: dict[int, Sequence] = {}  # rows that hold cache, of this and other unfinished calls
        self.engine = Engine(Runner(loaded, cache, control), draft)

    @classmethod
    def from_config(cls, config: Config | str | Path, ranks: Ranks | None = None) -> LLM:
        """The setup of a configuration, or of a YAML or JSON file of one (see ``fly.config.Config``)."""
        config = config if isinstance(config, Config) else Config.read(config)
        return cls(**{name: getattr(config, name) for name in Config.model_fields}, ranks=ranks)

    @property
    def draft(self) -> DraftStrategy | None:
        """Who proposes."""
        return self.engine.strategy

    def generate(
        self,
        prompts: Prompt | Rows[Prompt],
        params: SamplingParams | Rows[SamplingParams] | None = None,
        *,
        policy: AcceptancePolicy | Rows[AcceptancePolicy] | None = None,
        k: int | Rows[int] | None = None,
    ) -> list[Output]:
        """Complete every prompt; outputs come in the order of the prompts.

        Args:
            prompts: texts or lists of token ids (one text is a list of one).
            params, policy, k: one for all, or one for each prompt; None is the checkpoint's sampling defaults and
                this object's policy and k. k = 0 decodes autoregressively.

        Raises:
            ValueError: an empty or too long prompt, an id outside the vocabulary, a request no cache can hold.
                Nothing has run then.
            OutOfBlocks: other open streams hold the cache.
        """
        rows = self._rows(prompts, params, policy, k)
        streams = {row.id: self._text_stream(row) for row in rows if row.params.stop}
        for _ in self._run(rows, streams):
            pass
        return [self._output(row, streams.get(row.id)) for row in rows]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        policy: AcceptancePolicy | None = None,
        k: int | None = None,
    ) -> Stream:
        """Yield the completion's text as it stands: strings that know their tokens (``piece.tokens``).

        Never half a character, nothing of a stop string; the pieces join to what ``generate`` gives as ``text``.
        ``close`` frees everything the request holds. Arguments and errors as in ``generate``; a model
        without a tokenizer cannot stream text (``ValueError``).
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it has no text to stream; use generate with token ids")
        (row,) = self._rows([prompt], params, policy, k)
        return Stream(row, self._stream(row))

    def chat(self, messages: Rows[dict[str, Any]], params: SamplingParams | None = None, **options: Any) -> Output:
        """Answer a conversation through the checkpoint's chat template. ``options`` as in ``generate``."""
        return self.generate([self.chat_prompt(messages)], params, **options)[0]

    def chat_prompt(self, messages: Rows[dict[str, Any]] | str) -> list[int]:
        """Token ids of a conversation (or of one user message) by the checkpoint's chat template."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it has no chat template; give token ids")
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self.tokenizer.apply_chat_template(conversation)

    def _stream(self, row: Sequence) -> Generator[Piece, None, None]:
        stream = self._text_stream(row)
        held: tuple[Token, ...] = ()
        for settled in self._run([row], {row.id: stream}):
            for token, text in settled[row.id]:
                held += (token,)
                if text:
                    yield Piece(text, held)
                    held = ()
        if (rest := stream.finish()) or held:
            yield Piece(rest, held)

    def _run(
        self, rows: list[Sequence], streams: dict[int, TextStream]
    ) -> Iterator[dict[int, list[tuple[Token, str]]]]:
        """Step until every row has ended. Yields, each step, the tokens of rows that stream with their text.

        Rows wait until all caches can hold them to their end, beside those of other open streams.
        """
        waiting = deque(row for row in rows if not row.finish_reason)
        running: list[Sequence] = []
        texts: dict[int, list[str]] = {}

        def stopped(row: Sequence, token: int) -> bool:
            if (stream := streams.get(row.id)) is None:
                return False
            texts[row.id].append(stream.push(token, stoppable=row.generated >= row.params.min_tokens))
            return stream.stopped

        try:
            while waiting or running:
                while waiting and self._fits([*self._open.values(), waiting[0]]):
                    running.append(row := waiting.popleft())
                    self._open[row.id] = row
                if not running:
                    raise OutOfBlocks(
                        f"{len(self._open)} other open streams hold the KV cache; close one, or give more cache_tokens"
                    )
                texts = {row.id: [] for row in running if row.id in streams}
                emitted = self.engine.step(running, stopped)
                settled = {
                    row.id: list(zip(tokens, texts[row.id]))
                    for row, tokens in zip(running, emitted)
                    if row.id in streams
                }
                for row in running:
                    if row.finish_reason:
                        self._close(row)
                running = [row for row in running if not row.finish_reason]
                yield settled
        finally:
            for row in running:
                self._close(row)

    def _close(self, row: Sequence) -> None:
        self._open.pop(row.id, None)
        self.engine.release(row)

    def _allocators(self) -> list[tuple[Any, int]]:
        """Every allocator, with the most tokens one row takes of it."""
        own = (self.engine.runner.cache.allocator, self.engine.context)
        if self.draft is None:
            return [own]
        most = self.draft.context or self.engine.context
        return [own, *((allocator, most) for allocator in self.draft.allocators())]

    def _fits(self, rows: list[Sequence]) -> bool:
        """Whether all caches hold ``rows`` to their very end, so that no step can run out of blocks."""
        spare = 0 if self.draft is None else self.draft.spare
        return all(
            sum(allocator.blocks_for(min(_most_tokens(row), most) + spare) for row in rows) <= allocator.num_blocks
            for allocator, most in self._allocators()
        )

    def _rows(
        self,
        prompts: Prompt | Rows[Prompt],
        params: SamplingParams | Rows[SamplingParams] | None,
        policy: AcceptancePolicy | Rows[AcceptancePolicy] | None,
        k: int | Rows[int] | None,
    ) -> list[Sequence]:
        listed: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if listed and isinstance(listed[0], int):
            raise ValueError("prompts is one list of token ids; give a list of prompts: [[1, 2, 3]]")
        every_params = _one_each(self.default_params if params is None else params, len(listed), "params")
        every_policy = _one_each(self.policy if policy is None else policy, len(listed), "policy")
        every_k = _one_each(self.k if k is None else k, len(listed), "k")
        rows = [self._row(*request) for request in zip(listed, every_params, every_policy, every_k)]
        for number, row in enumerate(rows):
            if not self._fits([row]):
                raise ValueError(
                    f"prompt {number}: {row.prompt_length} tokens and max_tokens {row.params.max_tokens} do not fit "
                    "the KV cache; give fewer, or a larger cache_tokens"
                )
        return rows

    def _row(self, prompt: Prompt, params: SamplingParams, policy: AcceptancePolicy, k: int) -> Sequence:
        config = self.engine.runner.model.config
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer; give prompts as lists of token ids")
            tokens = self.tokenizer.encode(prompt)
        else:
            ids: Any = prompt
            if not isinstance(ids, Rows) or not all(isinstance(token, Integral) for token in ids):
                raise ValueError(f"prompt {_short(prompt)} is neither a text nor a list of token ids")
            tokens = [int(token) for token in ids]
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params {_short(params)} are no SamplingParams")
        if not tokens:
            raise ValueError("an empty prompt has no token to go on from; give at least one")
        if bad := [token for token in tokens if not 0 <= token < config.vocab_size]:
            raise ValueError(f"prompt has token ids {bad[:5]} outside the vocabulary of {config.vocab_size}")
        if len(tokens) >= config.max_position_embeddings and params.max_tokens:
            raise ValueError(
                f"prompt has {len(tokens)} tokens; the model's context of {config.max_position_embeddings} leaves no "
                "room to answer"
            )
        if bad := [token for token in params.stop_token_ids if not 0 <= token < config.vocab_size]:
            raise ValueError(f"stop_token_ids {bad} are outside the vocabulary of {config.vocab_size}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this model lacks; use stop_token_ids")
        if bad := [token for token in params.logit_bias if not 0 <= token < config.vocab_size]:
            raise ValueError(f"logit_bias names ids {bad[:5]} outside the vocabulary of {config.vocab_size}")
        if params.bad_words and self.tokenizer is None:
            raise ValueError("bad_words need a tokenizer, which this model lacks; use logit_bias")
        eos = frozenset() if params.ignore_eos else self.eos_ids
        row = Sequence(
            tokens=tokens,
            prompt_length=len(tokens),
            params=params,
            policy=self._bound(policy),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            k=_check_k(k),
            stop_ids=eos | set(params.stop_token_ids),
            bad=tuple(ids for word in params.bad_words for ids in self._spellings(word)),
        )
        row.stats.prompt_tokens = len(tokens)
        if not params.max_tokens:
            row.finish_reason = "length"
        return row

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """How the tokenizer spells a word at the start of a text and inside it."""
        assert self.tokenizer is not None
        found = {tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word.lstrip()}")}
        return sorted(ids for ids in found if ids)

    def _bound(self, policy: AcceptancePolicy) -> AcceptancePolicy:
        _check_policy(policy)
        return policy.bind(self._token_id)

    def _token_id(self, text: str) -> int:
        if self.tokenizer is None:
            raise ValueError(f"marker {text!r} is text, and this model has no tokenizer; use a token id")
        return self.tokenizer.token_id(text)

    def _text_stream(self, row: Sequence) -> TextStream:
        assert self.tokenizer is not None
        return TextStream(self.tokenizer, row.params.stop)

    def _output(self, row: Sequence, stream: TextStream | None) -> Output:
        ids = row.tokens[row.prompt_length :]
        if stream is not None:
            stream.finish()
            text = stream.text
        else:
            text = self.tokenizer.decode(ids) if self.tokenizer else ""
        return Output(
            prompt_token_ids=row.tokens[: row.prompt_length],
            text=text,
            token_ids=ids,
            finish_reason=row.finish_reason or "length",
            logprobs=row.logprobs if row.params.logprobs is not None else None,
            provenance=row.provenance,
            stats=row.stats,
            policy=row.policy,
            guarantee=row.policy.guarantee,
            bound=row.policy.bound,
        )


def _most_tokens(row: Sequence) -> int:
    """Tokens ``row`` ever has cached at once, its drafts included."""
    return row.prompt_length + row.params.max_tokens


def _check_k(k: int) -> int:
    if not isinstance(k, int) or isinstance(k, bool) or k < 0:
        raise ValueError(f"k {k!r} must be an integer of at least 0")
    return k


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_policy(policy: object) -> None:
    if not isinstance(policy, AcceptancePolicy):
        raise ValueError(f"policy {_short(policy)} is no AcceptancePolicy; fly.policies.parse_policy reads texts")


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
        return list(value)
    return [value] * count
