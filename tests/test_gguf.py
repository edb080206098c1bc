"""GGUF files: tensors of every family and type to their exact values, settings, tokenizers, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import struct
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer

import fly
from fly.models import CheckpointError, Llama, LlamaConfig, RopeScaling, load_model
from fly.models.bundled import resolve_checkpoint
from fly.models.families import FAMILIES, FULL, SLIDING
from fly.models.generation import read_sampling_defaults
from fly.models.gguf import TYPES
from fly.models.gguf_tokenizer import PRE, make_tokenizer
from fly.models.llama import rotary_frequencies
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import Tokenizer, read_eos_ids
from tests.ggufs import ARCHITECTURES, add_field, write_gguf, write_tokenizer
from tests.toys import build_llama


@st.composite
def configs(draw: st.DrawFn, wide: bool = False) -> LlamaConfig:
    """Every family that GGUF files are read for, in what these can say; ``wide`` rows hold whole blocks of K-quants."""
    family = draw(st.sampled_from(list(ARCHITECTURES)))
    group, kv_heads, layers = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 7))
    head_dim = 256 if wide else draw(st.sampled_from([32, 64]))
    options: dict[str, Any] = {}
    if family == "mistral":
        options = {"sliding_window": 8, "layer_types": (SLIDING,) * layers}
    if family == "gemma3_text":
        kinds = tuple(FULL if number % 6 == 5 else SLIDING for number in range(layers))
        options = {"sliding_window": 8, "layer_types": kinds, "query_pre_attn_scalar": head_dim}
        options |= {"rope_local_base_freq": 10000.0}
    return LlamaConfig(
        family=family,
        vocab_size=draw(st.integers(3, 40)),
        hidden_size=256 if wide else draw(st.sampled_from([32, 96])),
        intermediate_size=256 if wide else draw(st.sampled_from([32, 64])),
        num_hidden_layers=min(layers, 1) if wide and family != "gemma3_text" and family != "mistral" else layers,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope_theta=draw(st.sampled_from([1e4, 5e5, 1e6])),
        tie_word_embeddings=family == "gemma3_text" or draw(st.booleans()),
        **options,
    )


def same(directory: Path, config: LlamaConfig, tensors: dict[str, torch.Tensor], file: Path, dtype: str) -> None:
    """What a directory of the tensors loads to is what the file does."""
    save_file({key: value.contiguous() for key, value in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config.to_hf("float32")))
    wanted, got = load_model(directory, dtype, "cpu"), load_model(file, dtype, "cpu")
    assert got.config == wanted.config
    for (name, theirs), ours in zip(wanted.named_parameters(), got.parameters()):
        assert torch.equal(theirs, ours), name


@settings(max_examples=25)
@given(st.data())
def test_a_file_loads_to_the_values_that_its_blocks_stand_for(data: st.DataObject) -> None:
    kind = Kind[data.draw(st.sampled_from(TYPES))]
    config = data.draw(configs(wide=kind.name.endswith("_K")))
    model = build_llama(config, data.draw(st.integers(0, 9)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        tensors = write_gguf(model, file, kind)
        same(Path(folder), config, tensors, file, data.draw(st.sampled_from(["float32", "bfloat16"])))
        stated = open_checkpoint(file).raw["torch_dtype"]
        assert stated == ("float32" if kind == Kind.F32 else "bfloat16")


def test_long_tensors_are_read_in_several_chunks(tmp_path: Path) -> None:
    """Of heads whose rows are in another order, with a last chunk that is not full."""
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=256,
        intermediate_size=4352,
        num_hidden_layers=1,
        num_attention_heads=160,
        num_key_value_heads=40,
        head_dim=32,
        tie_word_embeddings=True,
    )
    tensors = write_gguf(build_llama(config), tmp_path / "model.gguf", Kind.Q4_K)
    same(tmp_path, config, tensors, tmp_path / "model.gguf", "bfloat16")


@settings(max_examples=20)
@given(
    factor=st.sampled_from([2.0, 8.0, 32.0]),
    low=st.sampled_from([0.5, 1.0]),
    high=st.sampled_from([4.0, 8.0]),  # with less, a head may have one blended frequency, which tells nothing
    original=st.sampled_from([1024, 4096, 8192]),
    theta=st.sampled_from([1e4, 5e5]),
)
def test_scaled_frequencies_are_read_back(factor: float, low: float, high: float, original: int, theta: float) -> None:
    config = build_llama(_tiny(head_dim=64)).config.model_copy(update={"rope_theta": theta})
    scaling = RopeScaling(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=low * high,
        original_max_position_embeddings=original,
    )
    scaled = rotary_frequencies(config.model_copy(update={"rope_scaling": scaling}))
    table = (rotary_frequencies(config) / scaled).numpy()
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Llama(config), file := Path(folder) / "model.gguf", Kind.F32, {"rope_freqs.weight": table})
        found = open_checkpoint(file).config
        assert found.rope_scaling.rope_type == "llama3"
        torch.testing.assert_close(rotary_frequencies(found), scaled, rtol=2e-3, atol=0)


LINEAR = RopeScaling(rope_type="linear", factor=4.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
        ({"scaling.factor": 4.0}, LINEAR),  # as in llama.cpp, scaling is linear if the file has no type,
        ({"scale_linear": 4.0}, LINEAR),  # an older key states the factor,
        ({"scale_linear": 2.0, "scaling.factor": 4.0}, LINEAR),  # but not beside the newer one,
        ({"scale_linear": 4.0, "scaling.type": "none"}, RopeScaling()),  # and nothing is scaled if the type is none
        ({"scaling.factor": 0.0}, RopeScaling()),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32},
            RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
        ),
        (
            {"scaling.type": "yarn", "scale_linear": 4.0, "scaling.yarn_beta_fast": 16.0},
            RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling_is_read(fields: dict[str, Any], expected: RopeScaling, tmp_path: Path) -> None:
    named = {f"llama.rope.{key}": value for key, value in fields.items()}
    write_gguf(Llama(_tiny()), tmp_path / "model.gguf", Kind.F32, named)
    assert open_checkpoint(tmp_path / "model.gguf").config.rope_scaling == expected


def _tiny(head_dim: int = 32) -> LlamaConfig:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=head_dim)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.expert_count": 8}, r"a mixture of experts \(8\) is not supported"),
        ({"llama.logit_scale": 2.0}, r"llama.logit_scale 2.0 is not supported"),
        ({"llama.rope.dimension_count": 16}, r"llama.rope.dimension_count 16 must be 32"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, r"'longrope' is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.attn_factor": 1.2}, r"llama.rope.scaling.attn_factor 1.2\d* is not supported"),
        ({"llama.rope.scaling.factor": "4"}, r"llama.rope.scaling.factor is '4'; it must be one number"),
        ({"llama.rope.scaling.factor": math.nan}, r"llama.rope.scaling.factor is nan; it must be one number"),
        ({"llama.block_count": True}, r"llama.block_count is True; it must be one number"),
        ({"llama.attention.causal": False}, r"llama.attention.causal False is not supported"),
        ({"llama.rope.global.freq_base": 1e6}, r"llama.rope.global.freq_base 1000000.0 is not supported"),
        ({"llama.vocab_size": 9}, r"llama.vocab_size 9 is not supported; choices: \[8\]"),
        ({"xielu.alpha_p": [0.5]}, r"xielu.alpha_p \[0.5\] is not supported"),
        ({"rope_freqs.weight": np.linspace(1, 3, 16, dtype=np.float32)}, r"not llama3 scaling"),
        ({"rope_freqs.weight": np.linspace(0.5, 1, 16, dtype=np.float32)}, r"not llama3 scaling"),
        (
            {"rope_freqs.weight": np.full(16, 2, dtype=np.float32), "llama.rope.scale_linear": 4.0},
            r"rope_freqs.weight and a rope scaling by 4.0 together are not supported",
        ),
        (
            {"blk.0.odd.weight": np.ones(2, dtype=np.float32)},
            r"unexpected tensors .*: blk.0.odd.weight",
        ),
        ({"llama.feed_forward_length": 2**31}, r"intermediate_size: .* got 2147483648"),
        ({"blk.0.odd.weight": np.ones(2, dtype=np.float64)}, r"blk.0.odd.weight is stored as F64, .* choices: \['F32'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_gguf(Llama(_tiny()), tmp_path / "model.gguf", Kind.F32, fields)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "model.gguf", device="cpu")


ARCHITECTURE_KEYS = sorted(
    key.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for key in [*vars(group).values(), *vars(gguf.Keys.Attention.Indexer).values()]
    if isinstance(key, str) and key.startswith("{arch}.") and "{dense}" not in key
)
# Keys without effect, as llama.cpp reads them for none of these architectures, or without YaRN not at all; and values
# that say what is computed anyway.
WITHOUT_EFFECT = {"attention.layer_norm_epsilon", "pooling_type", "rope.scaling.finetuned"}
WITHOUT_EFFECT |= {f"rope.scaling.{key}" for key in ("original_context_length", "yarn_beta_fast", "yarn_beta_slow")}
COMPUTED = [("rope.scaling.type", "linear"), ("attention.causal", True), ("block_count", 3)]
# What errors name instead of a key, if sizes do not fit together.
NAMED = {
    "block_count": "tensors of layer",
    "expert_count": "a mixture of experts",
    "rope.scaling.type": "rope scaling",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim|the width of keys",
    "rope.scaling.factor": "factor",
    "rope.scale_linear": "factor",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
}


@settings(max_examples=150)
@given(
    family=st.sampled_from(list(ARCHITECTURES)),
    key=st.sampled_from([*ARCHITECTURE_KEYS, "rope.scale_linear", "hidden_activation", "unheard_of"]),
    value=st.sampled_from([2, 3, 0.7, 5.0, "linear", "other", [3, 5], [2.0], True, -1]),
)
def test_every_key_of_an_architecture_is_read_or_refused_by_name(family: str, key: str, value: Any) -> None:
    """Of all keys that gguf-py knows: what neither changes the configuration nor is refused would be lost."""
    model, usual = small_model(family)
    with tempfile.TemporaryDirectory() as folder:
        file, name = Path(folder) / "model.gguf", f"{ARCHITECTURES[family]}.{key}"
        write_gguf(model, file, Kind.F32, {name: value})
        try:
            changed = open_checkpoint(file).config != usual
        except CheckpointError as error:
            assert re.search(f"{name}|{NAMED.get(key, name)}", str(error)), error
        else:
            assert changed or key in WITHOUT_EFFECT or (key, value) in COMPUTED


@functools.cache
def small_model(family: str) -> tuple[Llama, LlamaConfig]:
    """A model of three layers, and its configuration as it is read from a file."""
    windows = {"sliding_window": 8, "layer_types": (SLIDING,) * 3} if family in ("mistral", "gemma3_text") else {}
    model = Llama(_tiny().model_copy(update={"family": family, "num_hidden_layers": 3, **windows}))
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(model, file := Path(folder) / "model.gguf", Kind.F32)
        return model, open_checkpoint(file).config


@pytest.mark.parametrize("family", list(ARCHITECTURES))
def test_values_that_are_computed_anyway_are_fine(family: str, tmp_path: Path) -> None:
    """Among them all that converters write for these architectures today."""
    model, expected = small_model(family)
    usual = {
        **dict.fromkeys(("expert_count", "expert_used_count", "logit_scale", "attn_logit_softcapping"), 0),
        "vocab_size": 8,
        "rope.dimension_count": 32,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.head_count": [1] * 3,
        "attention.head_count_kv": [1] * 3,
        "embedding_length_out": 32,
        "attention.causal": True,
        "attention.scale": 32**-0.5,
        "residual_scale": 1.0,
        "embedding_scale": 1.0,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 4.0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.finetuned": False,
        "rope.dimension_sections": [0, 0, 0, 0],
        "use_parallel_residual": False,
        "pooling_type": 3,
        "attention.layer_norm_epsilon": 1e-5,
        "tensor_data_layout": "reference",
    }
    if family in ("qwen2", "qwen3"):
        usual["attention.sliding_window"] = 2048  # not less than the context
    fields = {f"{ARCHITECTURES[family]}.{key}": value for key, value in usual.items()}
    fields |= {"quantize.imatrix.file": "a", "general.tags": ["b"]}
    write_gguf(model, tmp_path / "model.gguf", Kind.F32, fields)
    assert open_checkpoint(tmp_path / "model.gguf").config == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (2, [SLIDING, FULL, SLIDING]),
        (0, [SLIDING] * 3),
        ([True, False, False], [SLIDING, FULL, FULL]),
        ([False] * 3, None),
        (True, "must be a whole number, or true or false for each of 3 layers"),
        ([True], "must be a whole number, or true or false for each of 3 layers"),
        ("all", "must be a whole number, or true or false for each of 3 layers"),
    ],
)
def test_sliding_layers_of_a_gemma_are_read(pattern: Any, expected: Any, tmp_path: Path) -> None:
    model, _ = small_model("gemma3_text")
    write_gguf(model, tmp_path / "model.gguf", Kind.F32, {"gemma3.attention.sliding_window_pattern": pattern})
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=f"gemma3.attention.sliding_window_pattern is .*{expected}"):
            open_checkpoint(tmp_path / "model.gguf").raw  # noqa: B018
    else:
        types = open_checkpoint(tmp_path / "model.gguf").config.layer_types
        assert (types and list(types)) == expected


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    gguf_writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    gguf_writer.write_header_to_file()
    gguf_writer.write_kv_data_to_file()
    gguf_writer.close()
    with pytest.raises(CheckpointError, match=r"model.gguf: architecture 'mamba' is not supported; choices: \['llama'"):
        load_model(tmp_path / "model.gguf")


@settings(max_examples=40)
@given(st.data())
def test_broken_files_are_refused_not_run(data: st.DataObject) -> None:
    """Cut anywhere before the last tensor's end, or with bytes of the header changed: an error of ours, or a model."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(Llama(_tiny()), file, Kind.F32)
        whole = file.read_bytes()
        if data.draw(st.booleans()):
            file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 200))])
            with pytest.raises(CheckpointError, match="not a readable GGUF file"):
                load_model(file, device="cpu")
            return
        changed = bytearray(whole)
        for at in data.draw(st.lists(st.integers(0, 800), min_size=1, max_size=3)):
            changed[at] = data.draw(st.integers(0, 255))
        file.write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            load_model(file, device="cpu")


def test_a_split_file_is_read_as_one(tmp_path: Path) -> None:
    tensors = write_gguf(build_llama(_tiny()), tmp_path / "model.gguf", Kind.F32)
    writer = gguf.GGUFWriter(tmp_path / "split.gguf", "llama", split_max_tensors=4)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 1
    same(tmp_path, _tiny().model_copy(update={"max_position_embeddings": 2048}), tensors, parts[0], "float32")
    with pytest.raises(CheckpointError, match="give the first, whose name ends in -00001-of"):
        load_model(parts[1])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=f"other parts are missing: .*{parts[1].name}"):
        load_model(parts[0])


TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="aeht 's12\n\t.,'é漢ÀIDLl", max_size=60),
    st.lists(st.sampled_from(["I'm", " the", "  ", "\n\n", "12345", "don'T", "x=", "<end>", "漢字", "é"])).map("".join),
)
CORPUS = ["the cat sat on the mat, don't they? I'm 12345 years old!\n\n", "def f(x):\n    return x ** 2  # 漢字 é\n"]


def byte_level(pre: str) -> tuple[RawTokenizer, dict[str, Any]]:
    """A small vocabulary, trained with the pre-tokenizer that Hugging Face's files have, and its metadata."""
    made = RawTokenizer(models.BPE())
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + ("{1,3}" if pre == "llama-bpe" else "") + "|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    if pre in ("gpt-2", "smollm"):
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        steps = [pre_tokenizers.Split(Regex(split), "isolated")]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(made.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "[PAD0]", "[PAD1]"],  # as converters pad a vocabulary
        "token_type": [*(3 if token == "<end>" else 1 for token in tokens), 5, 5],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "eos_token_id": 0,
        "add_bos_token": False,
    }
    return made, fields


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_texts_become_the_tokens_of_the_published_tokenizer(pre: str, tmp_path: Path) -> None:
    theirs, fields = byte_level(pre)
    write_tokenizer(tmp_path / "vocabulary.gguf", **fields)
    ours = Tokenizer(tmp_path / "vocabulary.gguf")
    assert ours.control_ids == {0} and read_eos_ids(tmp_path / "vocabulary.gguf", 999) == {0}
    assert ours.raw.get_vocab() == theirs.get_vocab()

    @settings(max_examples=60)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)

    check()


def sentence_piece(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """SentencePiece's merging, one pair at a time: that of the best score, and of those the first."""
    ids = {token: number for number, token in enumerate(tokens)}
    pieces = list(text)
    while True:
        pairs = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_vocabularies_merge_as_sentencepiece_does(prefix: bool, tmp_path: Path) -> None:
    words = ["▁t", "he", "▁the", "▁a", "at", "cat", "▁cat", "in", "▁in", "ca", "an", "ana", "▁▁"]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    letters = sorted({*"▁thecatinsb."})
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *words, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(number) for number in range(len(words))] + [-1000.0 - n for n in range(len(letters))]
    fields: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix}
    write_tokenizer(tmp_path / "vocabulary.gguf", **fields)
    ours = Tokenizer(tmp_path / "vocabulary.gguf")
    assert ours.encode("")[:1] == [1]

    @settings(max_examples=60)
    @given(st.one_of(st.text(alphabet="thecatin sb.", min_size=1, max_size=30), st.text(min_size=1, max_size=8)))
    def check(text: str) -> None:
        assume(not any(piece in text for piece in ("▁", *tokens[:3])))
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
        spelled = ("▁" if prefix else "") + text.replace(" ", "▁")
        expected = []
        for piece in sentence_piece(spelled, tokens, scores):
            known = [tokens.index(piece)] if piece in tokens else [3 + value for value in piece.encode()]
            expected += known
        assert ids == expected

    check()


def test_every_way_to_cut_texts_is_usable() -> None:
    """Their expressions compile, and no text is lost."""
    _, fields = byte_level("gpt-2")
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    for pre in PRE:
        tokenizer = make_tokenizer(named | {"tokenizer.ggml.pre": pre}, "a file")
        assert tokenizer is not None
        for text in (*CORPUS, "Ärger 漢字かな١٢ don'T HTMLParser\r\n  x\t"):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "grok-2"}, r"tokenizer.ggml.pre 'grok-2' is not supported; choices: \['gpt-2'"),
        ({"model": "rwkv"}, r"tokenizer.ggml.model 'rwkv' is not supported; choices: \['gpt2', 'llama'\]"),
        ({"model": "llama"}, r"tokenizer.ggml.scores are missing"),
        ({"token_type": [1]}, r"token_type"),
        ({"tokens": [1, 2]}, r"tokenizer.ggml.tokens are missing, or no texts"),
        ({"merges": [1]}, r"tokenizer.ggml.merges are missing, or no texts"),
        ({"add_bos_token": "false"}, r"tokenizer.ggml.add_bos_token 'false' must be true or false"),
        ({"add_sep_token": True}, r"tokenizer.ggml.add_sep_token True is not supported"),
        ({"remove_extra_whitespaces": True}, r"tokenizer.ggml.remove_extra_whitespaces True is not supported"),
        ({"precompiled_charsmap": [1, 2]}, r"tokenizer.ggml.precompiled_charsmap of 2 entries is not supported"),
        ({"normalizer.lowercase": True}, r"tokenizer.ggml.normalizer.lowercase True is not supported"),
        ({"unheard_of": 1}, r"tokenizer.ggml.unheard_of 1 is not supported"),
    ],
)
def test_unknown_vocabularies_are_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "vocabulary.gguf", **(byte_level("gpt-2")[1] | fields))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(tmp_path / "vocabulary.gguf")


TOKENIZER_KEYS = sorted(
    key.removeprefix("tokenizer.ggml.")
    for key in vars(gguf.Keys.Tokenizer).values()
    if isinstance(key, str) and key.startswith("tokenizer.ggml.")
)


@pytest.mark.parametrize("key", TOKENIZER_KEYS)
def test_every_key_of_a_tokenizer_is_read_or_refused(key: str, tmp_path: Path) -> None:
    """Of all keys that gguf-py knows: with a value that makes no sense, each is refused or warned of."""
    write_tokenizer(tmp_path / "vocabulary.gguf", **(byte_level("gpt-2")[1] | {key: 9999}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            Tokenizer(tmp_path / "vocabulary.gguf")
        except CheckpointError as error:
            assert f"tokenizer.ggml.{key} " in str(error)
        else:
            assert told or key in ("token_type_count", "scores")  # for segments, and for SentencePiece


# Texts at which llama.cpp ends an answer (llama_vocab::impl::load in src/llama-vocab.cpp), and others that it takes as
# control tokens. "</s>" is HTML's tag too, and counts only as a control token.
ENDS = [
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<|eom_id|>", "<|return|>", "<|call|>", "<|flush|>"),
    *("<|calls|>", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<PAD>"),
    *("[PAD]", "<|fim_repo|>", "<|repo_name|>", "<REPO>", "<reponame>", "<|file_sep|>"),
]
MARKS = ["<|fim_prefix|>", "<fim_suffix>", "<MID>", "▁<PRE>", "<｜fim▁hole｜>", "<|code_middle|>"]
TYPES_OF_TOKENS = {"NORMAL": 1, "CONTROL": 3, "USER_DEFINED": 4, "UNUSED": 5}


@settings(max_examples=60)
@given(
    pieces=st.lists(
        st.tuples(st.sampled_from([*ENDS, *MARKS, "</s>", "<|x|>"]), st.sampled_from(sorted(TYPES_OF_TOKENS))),
        max_size=6,
        unique_by=lambda piece: piece[0],
    ),
    key=st.sampled_from(["eos", "eot", "eom", "fim_pad"]),
    scored=st.booleans(),
)
def test_ends_are_found_by_their_texts_and_are_control_tokens(
    pieces: list[tuple[str, str]], key: str, scored: bool
) -> None:
    """Whatever type the file gives them: they end answers, do not show, and no message can spell them."""
    fields, named = byte_level("gpt-2")[1], dict(pieces)
    fields["tokens"] = [*fields["tokens"], *named, "<|by key|>"]
    fields["token_type"] = [*fields["token_type"], *(TYPES_OF_TOKENS[kind] for kind in named.values()), 4]
    fields |= {f"{key}_token_id": len(fields["tokens"]) - 1, "eos_token_id": fields["eos_token_id"]}
    if key == "eos":
        fields["eos_token_id"] = len(fields["tokens"]) - 1
    if scored:  # all characters of texts are bytes, so that no two tokens of the pieces are merged
        fields |= {"model": "llama", "scores": [0.0] * len(fields["tokens"])}
    harmony = {"<|return|>"} & set(named) or {"<|flush|>"} & set(named)
    other_ends = {"<|end|>"} if harmony and {"<|call|>", "<|calls|>"} & set(named) else set()
    padding = {"<|fim_pad|>", "<fim-pad>", "<PAD>", "[PAD]"} if key == "fim_pad" else set()
    texts = {text for text in named if text in ENDS} - other_ends - padding
    if named.get("</s>") == "CONTROL" and "<|tool_response>" not in named:
        texts.add("</s>")
    control = texts | {"<|by key|>"} | {text for text in named if text in [*MARKS, "<|end|>"]}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(file := Path(folder) / "vocabulary.gguf", **fields)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tokenizer = Tokenizer(file)
        ends = {tokenizer.raw.id_to_token(number) for number in read_eos_ids(file, 9999)}
        assert ends - {"<end>"} == texts | {"<|by key|>"}
        assert control <= {tokenizer.raw.id_to_token(number) for number in tokenizer.control_ids}
        [warning] = told
        wrong = {text: kind for text, kind in {**named, "<|by key|>": "USER_DEFINED"}.items() if text in control}
        for text, kind in wrong.items():
            assert (f"{text!r} ({kind})" in str(warning.message)) == (kind != "CONTROL")
        assert str(warning.message).startswith(f"{file}: tokenizer.ggml.token_type")
        for text in control:
            number = tokenizer.raw.token_to_id(text)
            assert tokenizer.encode(f"a{text}", add_special_tokens=False)[-1] == number
            assert number not in tokenizer._plain.encode(text).ids
            assert tokenizer.decode([number]) == ""


BAD_IDS = [4294967295, -1, 999, 2.0, True, "2", [1]]


@settings(max_examples=40)
@given(
    keys=st.dictionaries(
        st.sampled_from(
            ["bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls", "fim_pad", "prefix"]
        ),
        st.sampled_from(BAD_IDS),
        min_size=1,
    ),
    scored=st.booleans(),
)
def test_ids_that_no_token_has_give_way_to_defaults_and_are_warned_of(keys: dict[str, Any], scored: bool) -> None:
    """As in llama.cpp ("bad special token: ... using default id"), whose defaults are SentencePiece's."""
    fields = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "aa"]}
    fields |= {"scores": [0.0] * 6} if scored else {"model": "gpt2", "pre": "gpt-2", "merges": ["a a"]}
    fields["token_type"] = [2, 3, 3, 1, 1, 1]
    fields |= {f"{key}_token_id": value for key, value in keys.items()} | {"add_bos_token": True}
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(file := Path(folder) / "vocabulary.gguf", **fields)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tokenizer = Tokenizer(file)
        [warning] = told
        for key, value in keys.items():
            assert f"{key}_token_id {value!r} is no id of the 6 tokens" in str(warning.message)
        assert f"{file}: " in str(warning.message)
        assert tokenizer.special_names == (
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} if scored else {}
        )
        assert tokenizer.encode("a")[:-1] == ([1, 3] if scored else [])
        assert read_eos_ids(file, 6) == {2}
    if not scored:
        assert "add_bos_token is true, but there is no such token" in str(warning.message)


@pytest.mark.parametrize("types", [None, [1] * 6, [2, 4, 4, 1, 1, 1]])
def test_default_ids_need_no_types(types: list[int] | None, tmp_path: Path) -> None:
    """llama.cpp takes ids 1 and 2 of SentencePiece vocabularies as begin and end, whatever their types are."""
    fields = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "aa"], "scores": [0.0] * 6}
    write_tokenizer(tmp_path / "vocabulary.gguf", **fields, **({} if types is None else {"token_type": types}))
    with pytest.warns(UserWarning, match=r"'</s>' \((NORMAL|USER_DEFINED)\)"):
        tokenizer = Tokenizer(tmp_path / "vocabulary.gguf")
    assert tokenizer.special_names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.encode("a") == [1, 3, 4]
    assert read_eos_ids(tmp_path / "vocabulary.gguf", 6) == {2}


def test_a_file_is_run_by_its_path(tmp_path: Path) -> None:
    """As target and as draft, capped, on token ids: what its directory gives."""
    source = load_model(resolve_checkpoint("fly-tiny"), "float32", "cpu")
    file = tmp_path / "tiny.gguf"
    write_gguf(source, file, Kind.F32)
    params, prompt = fly.SamplingParams(temperature=0.0, max_tokens=12), [[1, 2, 3]]
    llm = fly.LLM(str(file), draft=str(file), device="cpu", max_context=64)
    wanted = fly.LLM("fly-tiny", dtype="float32", device="cpu")
    assert llm.generate(prompt, params)[0].token_ids[:4] == wanted.generate(prompt, params)[0].token_ids[:4]
    assert llm.engine.runner.executor.config.max_position_embeddings == 64
    assert llm.draft is not None and llm.draft.context is not None and llm.draft.context <= 64
    assert read_sampling_defaults(file).temperature == 0.0
    with pytest.raises(ValueError, match=r"max_context 9999999 is more than the \d+ tokens"):
        fly.LLM(str(file), max_context=9999999)


def test_recommended_sampling_and_templates_are_read(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    fields = byte_level("gpt-2")[1]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    sampling = {
        "temp": 0.5,
        "top_k": 7,
        "penalty_repeat": 1.0,
        "penalty_last_n": 64,
        "mirostat": 2,
        "mirostat_tau": 5.0,
    }
    for key, value in sampling.items():
        add_field(writer, f"general.sampling.{key}", value)
    for key, value in {**fields, "suppress_tokens": [5, 6]}.items():
        add_field(writer, f"tokenizer.ggml.{key}", value)
    writer.add_string("tokenizer.chat_template", template)
    writer.add_array("tokenizer.chat_templates", ["tool_use"])
    writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.warns(UserWarning, match=r"general.sampling.mirostat 2 not supported, and ignored$"):
        params = read_sampling_defaults(tmp_path / "model.gguf")
    assert (params.temperature, params.top_k, params.bad_words_ids) == (0.5, 7, ((5,), (6,)))
    tokenizer = Tokenizer(tmp_path / "model.gguf")
    assert tokenizer.template == template and set(tokenizer.templates) == {"default", "tool_use"}
    spoken = tokenizer.apply_chat_template([{"role": "user", "content": "the <end> cat"}], False)
    assert list(spoken).count(0) == 1 and spoken[-1] == 0  # the end of the template's, not the text's


@pytest.mark.parametrize("names", [1, "tool_use", [1], [True]])
def test_names_of_templates_are_texts(names: Any, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    fields = {f"tokenizer.ggml.{key}": value for key, value in byte_level("gpt-2")[1].items()}
    for key, value in {**fields, "tokenizer.chat_templates": names}.items():
        add_field(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"tokenizer.chat_templates .* must list names of templates"):
        assert Tokenizer(tmp_path / "model.gguf").templates


def test_struct_is_little_endian(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(CheckpointError, match="version 50331648 is not supported"):
        load_model(tmp_path / "model.gguf")


assert set(ARCHITECTURES) <= set(FAMILIES)
