"""Other libraries on the same checkpoints, prompts, draft length, dtype and threads, in the same run.

Peers are optional (the ``peers`` extra); one that is not installed, or cannot run a checkpoint, is skipped by name.
All decode greedily, one request at a time. Knows nothing of how results are shown.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fly.bench.limits import Timing
from fly.eval import Setting
from fly.eval.compare import in_turns
from fly.models import Llama, LlamaConfig, load_model
from fly.models.config import RopeScaling
from fly.models.llama import rotary_frequencies
from fly.models.loading import checkpoint_tensors
from fly.models.tokenizer import read_eos_ids
from fly.types import Guarantee, SamplingParams

__all__ = [
    "Contender",
    "Match",
    "Skipped",
    "fly_contender",
    "load_peers",
    "measure_matches",
    "usual_amount",
    "write_gguf",
]

Decode = Callable[[list[int], int], list[int]]


class Skipped(Exception):
    """A peer cannot take part; the message says why."""


@dataclass(frozen=True)
class Contender:
    """Somebody who decodes: ``decode(prompt ids, most tokens)`` gives the new ids, with the end they end with."""

    name: str
    library: str
    speculative: bool
    decode: Decode
    lossy: bool = False


@dataclass
class Match:
    """What a contender did: new ids by prompt, and the seconds of each time it decoded all prompts."""

    contender: Contender
    outputs: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def tokens_per_second(self) -> Timing:
        generated = sum(map(len, self.outputs))
        return Timing(tuple(generated / seconds for seconds in self.seconds))

    def agreement(self, other: Match) -> tuple[int, float]:
        """Prompts with the same output as ``other``'s, and the share of ``other``'s tokens before the first that
        differs."""
        pairs = list(zip(self.outputs, other.outputs))
        common = sum(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b))) for a, b in pairs)
        return sum(a == b for a, b in pairs), common / max(1, sum(len(b) for _, b in pairs))


def usual_amount(parameters: int) -> tuple[int, int]:
    """Prompts, and most tokens of each, for a shape of so many parameters where nothing else is asked for.

    One of 100 million or more gets fewer, and the fewer tokens the larger it is, so that three turns of all peers take
    about four minutes on two cores.
    """
    if parameters < 100e6:
        return 24, 400
    return 8, max(16, round(17.5e9 / parameters))


def measure_matches(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    max_tokens: int,
    turns: int = 3,
    advance: Callable[[str], None] = lambda name: None,
) -> list[Match]:
    """Let every contender decode every prompt, ``turns`` times over, in turns of a few prompts after a warm-up.

    A few, since whoever comes next finds the caches of the processor full of another's weights, and for a moment its
    threads still looking out for work. Outputs are those of the first turn. ``advance(name)`` is called after every
    completion.
    """
    if not contenders or not prompts or turns < 1:
        raise ValueError(f"need contenders, prompts and turns, got {len(contenders)}, {len(prompts)} and {turns}")
    matches = [Match(contender) for contender in contenders]
    for match in matches:
        match.contender.decode(list(prompts[0]), 16)
    for turn in range(turns):
        for match in matches:
            match.seconds.append(0.0)
        for match, prompt in in_turns(matches, prompts):
            start = time.perf_counter()
            ids = match.contender.decode(list(prompt), max_tokens)
            match.seconds[-1] += time.perf_counter() - start
            if not turn:
                match.outputs.append(ids)
            advance(match.contender.name)
    return matches


def fly_contender(setting: Setting, ignore_eos: bool) -> Contender:
    """fly itself. What it has of earlier requests is forgotten before each, as no peer keeps prompts between them."""

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        for allocator in setting.llm.scheduler.allocators():
            allocator.forget()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        (output,) = setting.llm.generate([prompt], params, policy=setting.policy, k=setting.k)
        return output.token_ids

    lossy = setting.policy.guarantee is not Guarantee.LOSSLESS
    return Contender(setting.name, "fly", setting.k > 0, decode, lossy)


def load_peers(
    target: Path,
    draft: Path | None,
    k: int,
    dtype: torch.dtype,
    directory: Path,
    ignore_eos: bool,
    narrow: bool = False,
) -> tuple[list[Contender], list[str]]:
    """Every peer on the checkpoints ``target`` and ``draft``, and why those that are missing are.

    ``narrow``: in 8 bits, weights and activations, where a peer has that (llama.cpp's Q8_0). ``directory`` takes the
    files that a peer needs the weights in. Peers run on the CPU, with as many threads as PyTorch uses. ``draft`` None
    leaves out what needs one; ``ignore_eos`` decodes on behind an end.
    """
    config, _ = LlamaConfig.read(target)
    ends = frozenset() if ignore_eos else read_eos_ids(target, config.vocab_size)
    contenders: list[Contender] = []
    reasons = []
    for load in (_transformers, _llama_cpp):
        try:
            contenders += load(target, draft, k, dtype, directory, ends, narrow)
        except Skipped as skipped:
            reasons.append(str(skipped))
    return contenders, reasons


def _import(name: str, library: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"{library} is skipped: {error}; pip install 'flyspec[peers]'") from None


def _transformers(
    target: Path, draft: Path | None, k: int, dtype: torch.dtype, directory: Path, ends: frozenset[int], narrow: bool
) -> list[Contender]:
    library = _import("transformers", "transformers")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()

    def load(path: Path) -> Any:
        model = library.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        model.generation_config.eos_token_id = sorted(ends) or None
        return model.eval()

    model = load(target)
    helper = None if draft is None else load(draft)

    @torch.inference_mode()
    def run(prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
        ids = torch.tensor([prompt])
        least = {} if ends else {"min_new_tokens": max_tokens}
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=min(ends, default=0),
            **least,
            **options,
        )
        new: list[int] = output[0, len(prompt) :].tolist()
        return new

    def assisted(prompt: list[int], max_tokens: int, **settings: Any) -> list[int]:
        assert helper is not None
        for name, value in settings.items():
            setattr(helper.generation_config, name, value)
        return run(prompt, max_tokens, assistant_model=helper)

    found = [
        Contender("generate", "transformers", False, run),
        Contender("prompt lookup", "transformers", True, lambda ids, most: run(ids, most, prompt_lookup_num_tokens=k)),
    ]
    if helper is not None:
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        fixed = dict(zip(names, (k, "constant", 0.0)))
        own = dict(zip(names, (20, "constant", 0.4)))  # what it does when told nothing
        found += [
            Contender("assisted", "transformers", True, lambda ids, most: assisted(ids, most, **fixed)),
            Contender("assisted (own K)", "transformers", True, lambda ids, most: assisted(ids, most, **own)),
        ]
    return found


def write_gguf(model: Llama, path: Path, narrow: bool = False) -> None:
    """Write ``model``'s weights in its dtype (norms in float32), without a tokenizer, in the format of llama.cpp; its
    matrices as Q8_0 if ``narrow``: 8 bits, and a scale for every 32 inputs.

    Raises ``Skipped`` without the ``gguf`` package, and where Q8_0 does not divide a width.
    """
    gguf = _import("gguf", "llama.cpp")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    types = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    stored_as = "Q8_0" if narrow else types[model.dtype]
    raw_type = gguf.GGMLQuantizationType[stored_as]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if stored_as == "F32" else f"MOSTLY_{stored_as}"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("no_vocab")
    if config.rope_scaling.rope_type != "default":
        plain = rotary_frequencies(config.model_copy(update={"rope_scaling": RopeScaling()}))
        writer.add_tensor("rope_freqs.weight", (plain / rotary_frequencies(config)).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for key, tensor in checkpoint_tensors(model):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        if heads is not None:  # its rotary embedding pairs neighbours, ours the halves of a head
            tensor = tensor.unflatten(0, (heads, 2, config.head_dim // 2)).transpose(1, 2).reshape(tensor.shape)
        if narrow and tensor.dim() == 2:
            if tensor.shape[1] % 32:
                raise Skipped(f"llama.cpp is skipped: Q8_0 takes multiples of 32 inputs, {key} has {tensor.shape[1]}")
            writer.add_tensor(name, gguf.quantize(tensor.float().numpy(), raw_type), raw_dtype=raw_type)
        elif tensor.dim() == 1 or model.dtype == torch.float32:
            writer.add_tensor(name, tensor.float().contiguous().numpy())
        else:
            stored = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(name, stored, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_cpp(
    target: Path, draft: Path | None, k: int, dtype: torch.dtype, directory: Path, ends: frozenset[int], narrow: bool
) -> list[Contender]:
    library = _import("llama_cpp", "llama.cpp")
    models = []
    for name, path in (("target", target), ("draft", draft)):
        if path is not None:
            file = directory / f"{name}.gguf"
            write_gguf(load_model(path, dtype, "cpu"), file, narrow)
            models.append(_LlamaCpp(library, file, dtype))
    model, kind = models[0], ", Q8_0" if narrow else ""
    found = [Contender(f"decode{kind}", "llama.cpp", False, lambda ids, most: model.decode(ids, most, ends))]
    if draft is not None:
        found.append(
            Contender(
                f"speculative{kind}",
                "llama.cpp",
                True,
                lambda ids, most: model.speculate(models[1], ids, most, k, ends),
            )
        )
    return found


class _LlamaCpp:
    """A model of llama.cpp on one sequence, through its C interface: as little Python as can be around a call."""

    def __init__(self, library: Any, path: Path, dtype: torch.dtype) -> None:
        self._c = library.llama_cpp if hasattr(library, "llama_cpp") else library
        c = self._c
        with _quiet():
            c.llama_backend_init()
            settings = c.llama_model_default_params()
            settings.n_gpu_layers = 0
            self._model = c.llama_model_load_from_file(str(path).encode(), settings)
            if not self._model:
                raise Skipped(f"llama.cpp is skipped: it does not load {path.name}")
            options = c.llama_context_default_params()
            options.n_ctx = c.llama_model_n_ctx_train(self._model)
            options.n_batch = options.n_ubatch = 512
            options.n_threads = options.n_threads_batch = torch.get_num_threads()
            options.no_perf = True
            if dtype == torch.float32:
                options.type_k = options.type_v = 0  # GGML_TYPE_F32; else its default, float16
            self._context = c.llama_init_from_model(self._model, options)
            if not self._context:
                raise Skipped("llama.cpp is skipped: it makes no context for this model")
        self._memory = c.llama_get_memory(self._context)
        self._vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._greedy = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        c.llama_sampler_chain_add(self._greedy, c.llama_sampler_init_greedy())
        self._batch = c.llama_batch_init(512, 0, 1)
        self.cached: list[int] = []

    def keep(self, count: int) -> None:
        """Roll back to the first ``count`` tokens."""
        if count < len(self.cached):
            self._c.llama_memory_seq_rm(self._memory, 0, count, -1)
            del self.cached[count:]

    def feed(self, ids: list[int], every: bool = False) -> list[int]:
        """Append ``ids``; the most likely token after the last of them, or after every one."""
        choices: list[int] = []
        for first in range(0, len(ids), 512):
            part = ids[first : first + 512]
            batch, last = self._batch, len(part) - 1
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, len(self.cached) + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = every or (i == last and first + 512 >= len(ids))
            if error := self._c.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode failed with {error}")
            self.cached += part
            if every or first + 512 >= len(ids):
                wanted = range(len(part)) if every else [last]
                choices += [self._c.llama_sampler_sample(self._greedy, self._context, i) for i in wanted]
        return choices

    def decode(self, prompt: list[int], most: int, ends: frozenset[int]) -> list[int]:
        """Greedy decoding, a token a call."""
        self.keep(0)
        (token,) = self.feed(prompt)
        new = [token]
        while len(new) < most and token not in ends:
            (token,) = self.feed([token])
            new.append(token)
        return new

    def speculate(self, draft: _LlamaCpp, prompt: list[int], most: int, k: int, ends: frozenset[int]) -> list[int]:
        """Exact speculation, greedy: ``draft`` proposes up to ``k`` tokens, one call verifies them."""
        self.keep(0)
        draft.keep(0)
        new = self.feed(prompt)
        while len(new) < most and new[-1] not in ends:
            text = [*prompt, *new]
            proposed: list[int] = []
            fed = text[len(draft.cached) :]
            while len(proposed) < min(k, most - len(new) - 1) and not (proposed and proposed[-1] in ends):
                proposed += draft.feed(fed)
                fed = proposed[-1:]
            choices = self.feed([new[-1], *proposed], every=True)
            right = 0
            while right < len(proposed) and proposed[right] == choices[right]:
                right += 1
            for token in choices[: right + 1]:
                new.append(token)
                if token in ends:
                    break
            self.keep(len(prompt) + len(new) - 1)
            draft.keep(len(prompt) + len(new) - 1)
        return new


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing that native code writes to standard error is seen while this lasts."""
    libc = ctypes.CDLL(None)
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
