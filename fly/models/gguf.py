"""A checkpoint in llama.cpp's GGUF format, with the names of a Hugging Face directory.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf`` library decodes
quantised blocks. Its reader is not used, because it takes seconds to read a vocabulary."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer as RawTokenizer
from torch import Tensor

from fly.errors import shorten
from fly.models.checkpoint import Checkpoint, Cut, Stored
from fly.models.config import CheckpointError
from fly.models.families import FULL, SLIDING, family_of
from fly.models.gguf_tokenizer import end_ids, has_vocabulary, make_tokenizer, special_ids, special_names

__all__ = ["GGUF", "TYPES"]

# Types of stored values, by the library's names: first those that torch reads, then quantised blocks.
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = (*_PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # and Mistral
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma normalises before and after attention and feed-forward, so these names mean other tensors in its files.
_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
# Keys that state the width of a head in other ways.
_WIDTHS = (
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
)
# Keys of an architecture that are read, in all architectures and in some.
_READ = {
    *(*_SIZES.values(), *_WIDTHS, "expert_count", "attention.key_length", "attention.head_count_kv"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scale_linear", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
_READ_BY = {"llama": {_WINDOW}, "gemma3": {_WINDOW, _PATTERN, "rope.freq_base_swa"}}
# Keys that llama.cpp does not read for these architectures, or that do not change the logits.
_WITHOUT_EFFECT = {"attention.layer_norm_epsilon", "pooling_type", "rope.scaling.finetuned"}
# The values of other keys that change nothing. For keys that are not listed these are zero, false and empty ones.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.alpha"), (0, 1)),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), (0, 1)),
    **{f"rope.scaling.{key}": (1,) for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")},
}
_COMPUTING = ("adapter.", "diffusion.", "xielu.")  # beginnings of other keys that define the computation
# Recommended sampling, by the names of generation_config.json; and settings that matter only beside others.
_RECOMMENDED = "general.sampling."
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SUBORDINATE = {"penalty_last_n", "mirostat_tau", "mirostat_eta", "xtc_threshold"}
# struct's letters for the types of values in the metadata, by their numbers.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_F32 = 0  # the number of the type float32
_ROPE = "rope_freqs.weight"  # the divisors of the rotary frequencies
_CHUNK = 1 << 20  # values to compute at once
_ROW = 1 << 14  # values to pass to the library as one row; it decodes 16 rows at a time


class Listed(NamedTuple):
    """The entry of a tensor in a file's header."""

    file: Path
    shape: tuple[int, ...]
    kind: int  # the number of its type
    offset: int  # where its bytes begin in the file


Header = tuple[dict[str, Any], dict[str, Listed]]  # metadata and tensors, by their names in the file


def _read_header(path: Path) -> Header:
    """Read a file's header. Raises ``CheckpointError`` if the file is not a GGUF file, or is broken."""
    try:
        return _Reader(np.memmap(path, dtype=np.uint8, mode="r").data).header(path)
    except (OSError, struct.error, ValueError, TypeError, IndexError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> memoryview:
        if self.at + count > len(self.data):
            raise ValueError("it ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        form = struct.Struct(f"<{count}{kind}")
        return form.unpack(self.take(form.size))

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_SCALARS[kind])
        item_kind, count = self.number("I"), self.number("Q")
        if item_kind in (_TEXT, _LIST):
            return [self.value(item_kind) for _ in range(count)]
        return list(self.numbers(_SCALARS[item_kind], count))

    def header(self, path: Path) -> Header:
        if bytes(self.data[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        tensors = self.number("Q")
        fields = self.number("Q")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported; choices: [2, 3], with the lowest byte first")
        values = {self.text(): self.value(self.number("I")) for _ in range(fields)}
        listed = {}
        for _ in range(tensors):
            name, dimensions = self.text(), self.number("I")
            listed[name] = Listed(path, self.numbers("Q", dimensions)[::-1], self.number("I"), self.number("Q"))
        # Offsets count from the end of the header, rounded up to the alignment.
        align = values.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ValueError(f"general.alignment is {align!r}")
        start = -(-self.at // align) * align
        return values, {name: entry._replace(offset=start + entry.offset) for name, entry in listed.items()}


@dataclass(frozen=True)
class Converted(Stored):
    """A tensor whose values are computed when it is read: they are decoded from blocks, shifted, or their rows are
    reordered."""

    plain: torch.dtype | None = None  # dtype of the values in the file; None: quantised blocks of ``kind``
    head_dim: int = 0  # > 0: reorder each head's rows from llama.cpp's interleaved pairs to two halves
    shift: float = 0.0  # added to the values in the file

    def blocks(self) -> Tensor:
        return self._ordered(super().blocks())

    def read(self, cut: Cut = ()) -> Tensor:
        values = torch.empty(self.shape, dtype=torch.float32)
        self.copy_to(values)
        return values[cut] if cut else values

    def copy_to(self, to: Tensor, cut: Cut = ()) -> None:
        """Convert the tensor in chunks, so that memory never holds a float32 copy of all of it."""
        if cut:
            to.copy_(self.read(cut))
            return
        data, per_row = self.bytes(), self.nbytes // self.shape[0]
        step = 64 * max(self.head_dim, 1)
        step *= max(_CHUNK // (step * math.prod(self.shape[1:])), 1)
        starts = range(0, self.shape[0], step)
        with ThreadPoolExecutor(threads := torch.get_num_threads()) as pool:
            for several in (starts[n : n + threads] for n in range(0, len(starts), threads)):
                parts = pool.map(lambda at: self._values(data[at * per_row : (at + step) * per_row]), several)
                for at, values in zip(several, parts):
                    to[at : at + step].copy_(self._ordered(values.view(-1, *self.shape[1:])))

    def _values(self, data: np.ndarray[Any, Any]) -> Tensor:
        """Decode some bytes to float32 values."""
        if self.plain is not None:
            return torch.from_numpy(data).view(self.plain).to(torch.float32, copy=True).add_(self.shift)
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType[self.kind]
        values, size = GGML_QUANT_SIZES[kind]
        wide = math.gcd(len(data) // size, max(_ROW // values, 1))
        return torch.from_numpy(dequantize(data.reshape(-1, wide * size), kind)).flatten().add_(self.shift)

    def _ordered(self, rows: Tensor) -> Tensor:
        if not self.head_dim:
            return rows
        return rows.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


class GGUF(Checkpoint):
    """A checkpoint in one GGUF file, or split into several."""

    @cached_property
    def _header(self) -> Header:
        """The file's metadata, and the tensors of all files if the checkpoint is split."""
        fields, listed = _read_header(self.path)
        for file in _list_other_parts(self.path, fields.get("split.count", 1)):
            listed |= _read_header(file)[1]
        return fields, listed

    @property
    def fields(self) -> Mapping[str, Any]:
        """The file's metadata, by name."""
        return self._header[0]

    @property
    def _listed(self) -> dict[str, Listed]:
        return self._header[1]

    @cached_property
    def architecture(self) -> str:
        architecture = self.fields.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: architecture {architecture!r} is not supported; choices: {[*_ARCHITECTURES]}"
            )
        return architecture

    @cached_property
    def head_dim(self) -> int:
        width, heads = self._size("embedding_length"), self._size("attention.head_count")
        return self._size("attention.key_length", width // heads)

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        listed = {name: entry for name, entry in self._listed.items() if name != _ROPE}
        return {self._name(name): self._stored(name, entry) for name, entry in listed.items()}

    def _get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.architecture}.{key}", default)

    def _number(self, key: str, default: float | None = None) -> float:
        """Read a number, or the number that a list has for each layer."""
        value = self._get(key, default)
        if isinstance(value, list) and value and value == value[:1] * len(value):
            value = value[0]
        if value is None:
            raise CheckpointError(f"{self.path}: {self.architecture}.{key} is missing")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} is {shorten(value)}; it must be one number for all layers"
            )
        return _short(value) if isinstance(value, float) else int(value)

    def _size(self, key: str, default: int | None = None) -> int:
        """Read a whole number from 1 on. Zero stands for the default."""
        stored = self._number(key, default)
        value = stored or default
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} is {stored!r}; it must be a whole number above 0"
            )
        return value

    @cached_property
    def raw(self) -> dict[str, Any]:
        tensors, architecture = self._listed, self.architecture
        if (experts := self._get("expert_count")) or any("_exps" in name for name in tensors):
            raise CheckpointError(
                f"{self.path}: a mixture of experts ({experts}) is not supported; one dense network is"
            )
        sizes = {name: self._size(key) for name, key in _SIZES.items()}
        layers = sizes["num_hidden_layers"]
        if "token_embd.weight" not in tensors:
            raise CheckpointError(f"{self.path}: tensors are missing: token_embd.weight")
        if f"blk.{layers - 1}.attn_norm.weight" not in tensors:
            raise CheckpointError(
                f"{self.path}: tensors of layer {layers - 1} are missing, but block_count is {layers}"
            )
        # Collect the settings that all architectures have, by Hugging Face's names.
        ids = special_ids(self.fields)
        config = {
            "architectures": [_ARCHITECTURES[architecture]],
            **sizes,
            "num_key_value_heads": self._size("attention.head_count_kv", sizes["num_attention_heads"]),
            "head_dim": self.head_dim,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope(),
            "tie_word_embeddings": "output.weight" not in tensors,
            "torch_dtype": "float32" if {entry.kind for entry in tensors.values()} == {_F32} else "bfloat16",
            "bos_token_id": ids.get("bos"),
            "eos_token_id": ids.get("eos"),
        }
        # Add the settings that only some architectures have. Mistral's files name the architecture llama.
        window = self._number(_WINDOW, 0) or None
        if architecture == "llama" and window:
            config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        elif architecture == "llama":
            config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
        elif architecture == "gemma3":
            # Gemma's 27B model, the only one with 62 layers, scales its queries differently.
            wide = sizes["hidden_size"] / sizes["num_attention_heads"]
            config |= {
                "sliding_window": window,
                "rope_local_base_freq": self._number("rope.freq_base_swa", 10000.0),
                "query_pre_attn_scalar": wide if layers == 62 else self.head_dim,
                **self._pattern(layers),
            }
        self._check_keys(config)
        return config

    def _pattern(self, layers: int) -> dict[str, Any]:
        """Return which layers of a Gemma are sliding: all but each n-th, or those that a list marks."""
        value = self._get(_PATTERN)
        if value is None:
            return {}
        if type(value) is int and value > 0:
            return {"sliding_window_pattern": value}
        if value == 0 and type(value) is int:
            value = [True] * layers
        if not isinstance(value, list) or len(value) != layers or any(mark not in (0, 1) for mark in value):
            must = f"it must be a whole number, or true or false for each of {layers} layers"
            raise CheckpointError(f"{self.path}: gemma3.{_PATTERN} is {shorten(value)}; {must}")
        return {"layer_types": [SLIDING if mark else FULL for mark in value]}

    def _rope(self) -> dict[str, Any] | None:
        """Return the scaling of the rotary frequencies in the form of ``config.json``. As in llama.cpp, it is linear if
        the file has no type, and an older key may state the factor."""
        path, kind = self.path, self._get("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn"):
            raise CheckpointError(
                f"{path}: rope scaling {kind!r} is not supported; choices: ['none', 'linear', 'yarn']"
            )
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 0)) or 1.0
        scaled = kind != "none" and factor != 1.0
        if (listed := self._listed.get(_ROPE)) is not None:
            if scaled:
                raise CheckpointError(f"{path}: {_ROPE} and a rope scaling by {factor} together are not supported")
            divisors = self._stored(_ROPE, listed).read().double().numpy()
            return _llama3(path, divisors, self._number("rope.freq_base", 10000.0), self.head_dim)
        if not scaled:
            return None
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "linear":
            return scaling
        keys = {
            "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        stated = {name: self._number(f"rope.scaling.{key}", 0) for name, key in keys.items()}
        return scaling | {name: value for name, value in stated.items() if value}

    def _check_keys(self, config: Mapping[str, Any]) -> None:
        """Raise ``CheckpointError`` for metadata that would change the computation, but have no effect here."""
        path = self.path
        architecture = self.architecture
        head_dim = self.head_dim
        for key in _WIDTHS:
            if (width := self._number(key, head_dim)) != head_dim:
                raise CheckpointError(f"{path}: {architecture}.{key} {width} must be {head_dim}, the width of keys")
        neutral, read_keys = self._neutral(config), _READ | _WITHOUT_EFFECT | _READ_BY.get(architecture, set())
        for name, value in self.fields.items():
            key = name.removeprefix(f"{architecture}.")
            if not name.startswith((f"{architecture}.", *_COMPUTING)) or key in read_keys:
                continue
            if key not in neutral and any(value if isinstance(value, list) else [value]):
                raise CheckpointError(f"{path}: {name} {shorten(value)} is not supported")
            if key in neutral and not any(_equal(value, other) for other in neutral[key]):
                raise CheckpointError(
                    f"{path}: {name} {shorten(value)} is not supported; choices: {shorten([*neutral[key]])}"
                )

    def _neutral(self, config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Return the values of keys that are not read, and that the model computes anyway."""
        family = family_of(config["architectures"])
        assert family is not None
        neutral = {
            **_NEUTRAL,
            "vocab_size": (config["vocab_size"],),
            "embedding_length_out": (0, config["hidden_size"]),
            "hidden_activation": (family.activation_name,),
            "attention.scale": (0, config.get("query_pre_attn_scalar", self.head_dim) ** -0.5),
            "rope.freq_base_swa": (config["rope_theta"],),
            "tensor_data_layout": ("reference",),
        }
        if self.architecture == "llama":  # Meta's layout is that of all files of this architecture
            neutral["tensor_data_layout"] = ("reference", "Meta AI original pth")
        if "sliding_window" in config:
            neutral[_PATTERN] = (0, [True] * config["num_hidden_layers"])
        elif self._number(_WINDOW, 0) >= config["max_position_embeddings"]:  # it hides nothing
            neutral[_WINDOW] = (self._get(_WINDOW),)
        return neutral

    def _name(self, name: str) -> str:
        """Return Hugging Face's name of a tensor. A tensor that has none keeps its own, and ``check_tensors`` refuses
        it."""
        part, _, leaf = name.rpartition(".")
        if part in _TOP:
            return f"{_TOP[part]}.{leaf}"
        names = {**_LAYER, **_AROUND} if self.architecture == "gemma3" else _LAYER
        if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", part)) and match[2] in names:
            return f"model.layers.{match[1]}.{names[match[2]]}.{leaf}"
        return name

    def _stored(self, name: str, listed: Listed) -> Stored:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        file, shape, number, at = listed
        kind = GGMLQuantizationType(number).name if number in set(GGMLQuantizationType) else str(number)
        if kind not in TYPES:
            raise CheckpointError(f"{file}: {name} is stored as {kind}, which is not supported; choices: {[*TYPES]}")
        values, size = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        if shape[-1] % values:
            raise CheckpointError(f"{file}: {name} has rows of {shape[-1]}, not a multiple of {values} as {kind} needs")
        nbytes = math.prod(shape) // values * size
        if at + nbytes > file.stat().st_size:
            raise CheckpointError(f"{file}: not a readable GGUF file ({name} ends after the file does)")
        plain = _PLAIN.get(kind)
        # llama.cpp rotates interleaved pairs in models of the architecture "llama", and halves in all others.
        paired = self.architecture == "llama" and re.search(r"\.attn_[qk]\.", name)
        shift = -1.0 if self.architecture == "gemma3" and "norm" in name else 0.0  # GGUF stores 1 + weight
        if plain is not None and not paired and not shift:
            return Stored(file, at, nbytes, shape, kind, plain)
        return Converted(file, at, nbytes, shape, kind, None, plain, self.head_dim if paired else 0, shift)

    def settings(self, name: str) -> dict[str, Any]:
        if name == "config.json":
            return self.raw
        if name == "generation_config.json":
            ends = sorted(end_ids(self.fields))
            return {**self._sampling(), **({"eos_token_id": ends} if ends else {})}
        templates = self._templates() if name == "tokenizer_config.json" else {}
        return {"chat_template": templates} if templates else {}

    def _sampling(self) -> dict[str, Any]:
        """Return the recommended sampling. Settings that have no other name keep theirs, and are warned of."""
        stated = {
            key.removeprefix(_RECOMMENDED): value for key, value in self.fields.items() if key.startswith(_RECOMMENDED)
        }
        options = {name: stated.pop(key) for key, name in _SAMPLING.items() if key in stated}
        unsupported = {key: value for key, value in stated.items() if value and key not in _SUBORDINATE}
        if unsupported.get("penalty_repeat") == 1:
            del unsupported["penalty_repeat"]
        banned = self.fields.get("tokenizer.ggml.suppress_tokens")
        return {
            **options,
            **({"do_sample": True} if options else {}),
            **{f"{_RECOMMENDED}{key}": value for key, value in unsupported.items()},
            **({"suppress_tokens": banned} if banned else {}),
        }

    def _templates(self) -> dict[str, str]:
        """Return the chat templates by name."""
        templates = {"default": self.fields.get("tokenizer.chat_template")}
        names = self.fields.get(key := "tokenizer.chat_templates", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.path}: {key} is {shorten(names)}; it must list names of templates")
        for other in names:
            templates[other] = self.fields.get(f"tokenizer.chat_template.{other}")
        return {name: text for name, text in templates.items() if text is not None}

    def place_of(self, name: str) -> str:
        return f"{self.path} ({name})"

    @property
    def has_tokenizer(self) -> bool:
        return has_vocabulary(self.fields)

    def raw_tokenizer(self) -> RawTokenizer:
        return make_tokenizer(self.fields, str(self.path))

    @property
    def special_names(self) -> dict[str, str]:
        return special_names(self.fields)

    def templates(self) -> dict[str, str]:
        return {}


def _list_other_parts(path: Path, count: int) -> list[Path]:
    """List the other files of a checkpoint that is split into ``count`` files, given the first."""
    if count <= 1:
        return []
    first = f"-00001-of-{count:05}.gguf"
    if not path.name.endswith(first):
        raise CheckpointError(f"{path}: one of {count} parts; give the first, whose name ends in {first}")
    stem = path.name.removesuffix(first)
    files = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    if missing := [file.name for file in files if not file.exists()]:
        raise CheckpointError(f"{path}: its other parts are missing: {missing}")
    return files


def _short(value: float) -> float:
    """Convert a float32 value to the float whose shortest decimal form is the same."""
    return float(str(np.float32(value)))


def _equal(value: Any, other: Any) -> bool:
    """Whether a value of the metadata is ``other``, up to the rounding of numbers to float32."""
    if isinstance(value, float) and isinstance(other, (int, float)):
        return math.isclose(value, other, rel_tol=1e-6)
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _llama3(path: Path, divided: np.ndarray[Any, Any], theta: float, head_dim: int) -> dict[str, Any] | None:
    """Find the settings of ``llama3`` scaling (``fly.models.llama.rotary_frequencies``) that divide the frequencies by
    ``divided``.

    Within the blended frequencies, the kept fraction is linear in the frequency. ``low_freq_factor`` can have any value
    if the other settings match it, so it is 1.
    """
    factor = float(divided.max())
    if (divided == 1).all():
        return None
    if divided.min() == factor:
        return {"rope_type": "linear", "factor": factor}
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    keep = (1 / divided - 1 / factor) / ((1 - 1 / factor) or 1.0)
    blended = (keep > 1e-4) & (keep < 1 - 1e-4)
    if factor > 1.0 and len(divided) == len(frequency) and blended.sum() >= 2:
        slope, start = np.polyfit(frequency[blended], keep[blended], 1)
        high = 1 - 1 / start
        original = round(slope * 2 * math.pi * (high - 1))
        fits = np.clip(slope * frequency + start, 0, 1)
        if start < 0 < slope and np.allclose(fits, keep, atol=1e-3):
            factors = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": round(float(high), 4)}
            return {"rope_type": "llama3", **factors, "original_max_position_embeddings": original}
    raise CheckpointError(f"{path}: rope_freqs.weight is not llama3 scaling, the only kind that is supported")
