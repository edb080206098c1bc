"""llama.cpp: writes weights in its file format, and decodes through its C interface."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fly.models import Llama
from fly.models.config import RopeScaling
from fly.models.llama import rotary_frequencies
from fly.models.loading import checkpoint_tensors

__all__ = ["LlamaCpp", "Skipped", "import_library", "write_gguf"]


# llama.cpp's names of the families.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


class Skipped(Exception):
    """A peer cannot take part; the message says why."""


def import_library(name: str, library: str) -> Any:
    """Import the module ``name``. Raises ``Skipped`` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"{library} is skipped: {error}; pip install 'flyspec[peers]'") from None


def write_gguf(model: Llama, path: Path, narrow: bool = False) -> None:
    """Write ``model``'s weights in llama.cpp's format, without a tokenizer, in the model's dtype (norms in float32).
    With ``narrow`` the matrices are Q8_0: 8 bits, and a scale for every 32 inputs.

    Raises ``Skipped`` without the ``gguf`` package, for a family or options that are not supported, and if a width is
    not a multiple of 32 with Q8_0.
    """
    gguf = import_library("gguf", "llama.cpp")
    config = model.config
    if (architecture := _ARCHITECTURES.get(config.family)) is None or any(config.windows):
        raise Skipped(f"llama.cpp is skipped: nothing writes its file of a model of family {config.family!r} here yet")
    if architecture != "llama" and config.rope_scaling.rope_type not in ("default", "dynamic"):
        raise Skipped(
            f"llama.cpp is skipped: nothing writes {config.rope_scaling.rope_type!r} of {config.family!r} yet"
        )
    writer = gguf.GGUFWriter(path, architecture)
    types = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    stored_as = "Q8_0" if narrow else types[model.dtype]
    raw_type = gguf.GGMLQuantizationType[stored_as]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if stored_as == "F32" else f"MOSTLY_{stored_as}"])
    for name, value in {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim,
        "value_length": config.head_dim,
        "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_theta,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "tokenizer_model": "no_vocab",
    }.items():
        getattr(writer, f"add_{name}")(value)
    if config.rope_scaling.rope_type != "default":
        plain = rotary_frequencies(config.model_copy(update={"rope_scaling": RopeScaling()}))
        writer.add_tensor("rope_freqs.weight", (plain / rotary_frequencies(config)).numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for key, tensor in checkpoint_tensors(model):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
        if heads is not None and architecture == "llama":  # it rotates interleaved pairs, we rotate halves
            tensor = tensor.unflatten(0, (heads, 2, config.head_dim // 2)).transpose(1, 2).reshape(tensor.shape)
        own_type = {"raw_dtype": raw_type}
        if narrow and tensor.dim() == 2:
            if tensor.shape[1] % 32:
                raise Skipped(f"llama.cpp is skipped: Q8_0 takes multiples of 32 inputs, {key} has {tensor.shape[1]}")
            stored = gguf.quantize(tensor.float().numpy(), raw_type)
        elif tensor.dim() == 1 or model.dtype == torch.float32:
            stored, own_type = tensor.float().contiguous().numpy(), {}
        else:
            stored = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, stored, **own_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_CONTEXT = 4096  # most tokens per row


class LlamaCpp:
    """A model in llama.cpp, through its C interface, with as little Python as possible around each call. ``cached`` is
    about the first of ``rows`` sequences."""

    def __init__(self, library: Any, path: Path, dtype: torch.dtype, rows: int = 1) -> None:
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
            options.n_ctx = rows * min(c.llama_model_n_ctx_train(self._model), _CONTEXT)
            options.n_seq_max = rows
            options.n_batch = options.n_ubatch = 512
            options.n_threads = options.n_threads_batch = torch.get_num_threads()
            options.no_perf = True
            if dtype == torch.float32:
                options.type_k = options.type_v = 0  # GGML_TYPE_F32; its default is float16
            self._context = c.llama_init_from_model(self._model, options)
            if not self._context:
                raise Skipped("llama.cpp is skipped: it makes no context for this model")
        self._memory = c.llama_get_memory(self._context)
        self._greedy = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        c.llama_sampler_chain_add(self._greedy, c.llama_sampler_init_greedy())
        self._batch, self._rows = c.llama_batch_init(512, 0, 1), rows
        self.cached: list[int] = []

    def keep(self, count: int) -> None:
        """Roll back to the first ``count`` tokens."""
        if count < len(self.cached):
            self._c.llama_memory_seq_rm(self._memory, 0, count, -1)
            del self.cached[count:]

    def feed(self, ids: list[int], every: bool = False) -> list[int]:
        """Append ``ids``; return the most likely token after the last of them, or after each."""
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
        """Decode greedily, one token per call."""
        self.keep(0)
        (token,) = self.feed(prompt)
        new = [token]
        while len(new) < most and token not in ends:
            (token,) = self.feed([token])
            new.append(token)
        return new

    def decode_together(self, prompts: list[list[int]], most: int, ends: frozenset[int]) -> list[list[int]]:
        """Decode several prompts greedily, one token of each per call."""
        if len(prompts) > self._rows:
            raise ValueError(f"{len(prompts)} prompts, made for {self._rows}")
        self.keep(0)
        for row in range(self._rows):
            self._c.llama_memory_seq_rm(self._memory, row, 0, -1)
        texts, new = [list(prompt) for prompt in prompts], [list[int]() for _ in prompts]
        fed = [(row, at, at == len(text) - 1) for row, text in enumerate(texts) for at in range(len(text))]
        while fed:
            asked = []
            for first in range(0, len(fed), 512):
                part, batch = fed[first : first + 512], self._batch
                batch.n_tokens = len(part)
                for i, (row, at, last) in enumerate(part):
                    batch.token[i], batch.pos[i], batch.logits[i] = texts[row][at], at, last
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
                if error := self._c.llama_decode(self._context, batch):
                    raise RuntimeError(f"llama_decode failed with {error}")
                for i, (row, _, last) in enumerate(part):
                    if last:
                        asked.append((row, self._c.llama_sampler_sample(self._greedy, self._context, i)))
            fed = []
            for row, token in asked:
                new[row].append(token)
                texts[row].append(token)
                if len(new[row]) < most and token not in ends:
                    fed.append((row, len(texts[row]) - 1, True))
        for row in range(self._rows):
            self._c.llama_memory_seq_rm(self._memory, row, 0, -1)
        return new

    def speculate(self, prompt: list[int], most: int, draft: LlamaCpp, k: int, ends: frozenset[int]) -> list[int]:
        """Speculate exactly and greedily: ``draft`` proposes up to ``k`` tokens, and one call verifies them."""
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
            agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(proposed, choices))
            for token in choices[: sum(1 for _ in agreeing) + 1]:
                new.append(token)
                if token in ends:
                    break
            self.keep(len(prompt) + len(new) - 1)
            draft.keep(len(prompt) + len(new) - 1)
        return new


@contextmanager
def _quiet() -> Iterator[None]:
    """While active, hide what native code writes to standard error."""
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
