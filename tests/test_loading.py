"""Checkpoint directories in and out: every tensor accounted for, every error naming its culprit; and the tokenizer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from torch.utils._python_dispatch import TorchDispatchMode

import fly.bundled
from fly.bundled import resolve_checkpoint
from fly.models import CheckpointError, Llama, LlamaConfig, load_model, save_model
from fly.models.generation import read_sampling_defaults
from fly.models.loading import resolve_device, resolve_dtype
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import TextStream, Tokenizer, read_eos_ids
from tests.toys import build_llama, dense_logits, llama_configs, random_llama

os.environ.setdefault("HF_HUB_OFFLINE", "1")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EMBED, HEAD, QUERY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"


def assert_same_weights(ours: Llama, theirs: Llama, dtype: torch.dtype = torch.float32) -> None:
    assert ours.config == theirs.config
    expected, found = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == dtype and torch.equal(found[name], value.to(dtype)), name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small untied checkpoint in float32."""
    save_model(random_llama(7), tmp_path / "model", torch.float32)
    return tmp_path / "model"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A small checkpoint whose output matrix is its embedding."""
    save_model(random_llama(7, tied=True), tmp_path / "tied", torch.float32)
    return tmp_path / "tied"


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def shard(directory: Path, n: int = 3) -> dict[str, str]:
    """Spread the single weight file over ``n`` shards with an index, as large checkpoints come. Returns the map."""
    tensors = load_file(directory / "model.safetensors")
    names = [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
    weight_map = {key: names[i % n] for i, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key].clone() for key, at in weight_map.items() if at == name}, directory / name)
    (directory / "model.safetensors").unlink()
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


# --- round trips -----------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(llama_configs(), st.sampled_from(sorted(DTYPES)))
def test_saved_models_load_as_they_were(tmp_path: Path, config: LlamaConfig, dtype: str) -> None:
    model = build_llama(config)
    save_model(model, tmp_path, DTYPES[dtype])
    loaded = load_model(tmp_path, device="cpu")  # dtype "auto" is what was saved
    assert_same_weights(model, loaded, DTYPES[dtype])
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == config.tie_word_embeddings


def test_a_family_that_stores_several_matrices_as_one_is_read_and_written_so(tmp_path: Path) -> None:
    """Phi-3: its files have query, key and value as one tensor, which is cut by rows without reading it."""
    config = LlamaConfig(
        family="phi3",
        vocab_size=20,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
    )
    model = build_llama(config)
    save_model(model, tmp_path, torch.float32)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = {name.removeprefix("model.layers.0.") for name in file.keys() if ".layers.0." in name}  # noqa: SIM118
    assert "self_attn.qkv_proj.weight" in names and "mlp.gate_up_proj.weight" in names and len(names) == 6
    tensors = open_checkpoint(tmp_path).tensors
    whole = model.layers[1].self_attn.qkv_proj.weight
    assert torch.equal(tensors["model.layers.1.self_attn.k_proj.weight"].read(), whole[12:16])
    assert_same_weights(model, load_model(tmp_path, device="cpu"), torch.float32)
    other = config.to_hf("float32") | {"num_attention_heads": 6, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize("saved", sorted(DTYPES))
@pytest.mark.parametrize("wanted", [*sorted(DTYPES), "bf16", "fp16", "half", "fp32", "float", torch.float16])
def test_a_wanted_dtype_overrides_the_saved_one(tmp_path: Path, saved: str, wanted: str | torch.dtype) -> None:
    model = random_llama(1)
    save_model(model, tmp_path, DTYPES[saved])
    loaded = load_model(tmp_path, dtype=wanted, device="cpu")
    full = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    expected = wanted if isinstance(wanted, torch.dtype) else DTYPES[full.get(wanted, wanted)]
    assert_same_weights(model.to(DTYPES[saved]), loaded, expected)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, torch.float32),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"torch_dtype": None, "dtype": "float16"}, torch.float16),
    ],
)
def test_auto_dtype_is_what_the_config_states(raw: dict[str, Any], expected: torch.dtype) -> None:
    assert resolve_dtype("auto", raw) == expected


def test_what_is_saved_beside_the_sizes_stays_in_the_config(tmp_path: Path) -> None:
    save_model(random_llama(0), tmp_path, eos_token_id=[3, 4])
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == [3, 4]
    assert read_eos_ids(tmp_path, 37) == {3, 4}


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_sharded_checkpoints_load(checkpoint: Path, shards: int) -> None:
    shard(checkpoint, shards)
    assert_same_weights(random_llama(7), load_model(checkpoint, device="cpu"))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("rope", [None, {"rope_type": "linear", "factor": 2.0}])
def test_checkpoints_of_transformers_load(
    tmp_path: Path, tie: bool, max_shard_size: str, rope: dict[str, Any] | None
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rope_scaling=rope,
        tie_word_embeddings=tie,
        attention_bias=True,
        initializer_range=0.3,
    )
    torch.manual_seed(1)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    ours = load_model(tmp_path, device="cpu")
    assert ours.dtype == torch.float32 and ours.config.tie_word_embeddings == tie
    tokens = torch.randint(50, (20,))
    with torch.no_grad():
        torch.testing.assert_close(dense_logits(ours, tokens), theirs(tokens[None]).logits[0], atol=1e-4, rtol=0)


# --- tensors that do not fit -----------------------------------------------------------------------------


def refused(directory: Path, *named: str) -> None:
    """Loading must fail with a ``CheckpointError`` whose message holds every one of ``named``."""
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, device="cpu")
    for name in named:
        assert name in str(caught.value)


@pytest.mark.parametrize("key", [EMBED, HEAD, QUERY, "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(checkpoint: Path, key: str) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.pop(key))
    refused(checkpoint, "missing", key)


@pytest.mark.parametrize("key", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"])
def test_a_surplus_tensor_is_named(checkpoint: Path, key: str) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({key: torch.zeros(32)}))
    refused(checkpoint, "unexpected tensors", key)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        (QUERY, (32, 16)),
        (QUERY, (64, 16)),  # as many numbers as the configuration asks, and yet not the same
        (EMBED, (38, 32)),
        ("model.norm.weight", (32, 1)),
        ("model.layers.0.self_attn.v_proj.weight", (32, 32)),  # all heads, where the configuration groups them
    ],
)
def test_a_misshapen_tensor_is_named(checkpoint: Path, key: str, shape: tuple[int, ...]) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({key: torch.zeros(shape)}))
    refused(checkpoint, key, str(list(shape)))


def test_derived_frequency_tables_are_tolerated(checkpoint: Path) -> None:
    key = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    edit_tensors(checkpoint, lambda tensors: tensors.update({key.format(i): torch.ones(4) for i in range(2)}))
    assert_same_weights(random_llama(7), load_model(checkpoint, device="cpu"))


def test_a_tied_checkpoint_may_repeat_its_embedding_but_not_differ_from_it(tied: Path) -> None:
    edit_tensors(tied, lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))
    assert_same_weights(random_llama(7, tied=True), load_model(tied, device="cpu"))
    edit_tensors(tied, lambda tensors: tensors[HEAD][3, 1].add_(1e-3))
    refused(tied, HEAD, "tie_word_embeddings")


def test_a_tensor_stored_twice_is_named(checkpoint: Path) -> None:
    weight_map = shard(checkpoint)
    other = next(name for name in sorted(set(weight_map.values())) if name != weight_map[QUERY])
    save_file(load_file(checkpoint / other) | {QUERY: torch.zeros(32, 32)}, checkpoint / other)
    refused(checkpoint, QUERY, "twice")


# --- files that cannot be read ---------------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere")


def test_a_missing_config_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "config.json", "not found")


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "\x00\x01", "[1]", "null", '"text"'])
def test_a_broken_config_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, "config.json", "JSON")


def test_missing_weights_are_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, "model.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_broken_weight_file_is_named(checkpoint: Path, keep: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(checkpoint, "model.safetensors", "not a readable safetensors file")


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    gone = sorted(shard(checkpoint).values())[0]
    (checkpoint / gone).unlink()
    refused(checkpoint, gone)


@pytest.mark.parametrize("where", ["../elsewhere.safetensors", "/elsewhere.safetensors", "sub/elsewhere.safetensors"])
def test_an_index_cannot_name_files_outside_its_directory(checkpoint: Path, where: str) -> None:
    weight_map = shard(checkpoint)
    shutil.copy(checkpoint / weight_map[QUERY], checkpoint.parent / "elsewhere.safetensors")
    write_index(checkpoint, weight_map | {QUERY: where})
    refused(checkpoint, "index.json", where)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", "null", '{"weight_map": []}', '{"weight_map": null}'])
def test_a_broken_index_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(text)
    refused(checkpoint, "index.json")


@pytest.mark.parametrize("name", [5, None, ["model.safetensors"], "", "..", "."])
def test_an_index_must_name_files(checkpoint: Path, name: object) -> None:
    write_index(checkpoint, shard(checkpoint) | {QUERY: name})
    refused(checkpoint, "index.json")


# --- configurations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"architectures": ["MambaForCausalLM"]}, {"architectures": None}])
def test_an_unknown_architecture_is_named(checkpoint: Path, changes: dict[str, Any]) -> None:
    edit_config(checkpoint, **changes)
    refused(checkpoint, "config.json", str((changes["architectures"] or ["missing"])[0]), "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ("longrope", "llama3")),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, ("proportional", "linear")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("linear", "factor")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("llama3", "original_max_position_embeddings")),
        ({"rope_scaling": {"type": "linear", "factor": "much"}}, ("factor",)),
        ({"rope_scaling": "linear"}, ("rope_scaling", "linear")),
        ({"rope_parameters": [1]}, ("rope_parameters",)),
        ({"num_key_value_heads": 3}, ("num_key_value_heads 3",)),
        ({"head_dim": 7}, ("head_dim 7",)),
        ({"head_dim": None, "hidden_size": 34}, ("hidden_size 34",)),
        ({"vocab_size": None}, ("vocab_size",)),
        ({"vocab_size": "many"}, ("vocab_size",)),
        ({"head_dim": None, "hidden_size": "wide"}, ("hidden_size",)),
        ({"head_dim": None, "hidden_size": None}, ("hidden_size",)),
        ({"head_dim": None, "num_attention_heads": "four"}, ("num_attention_heads",)),
        ({"rms_norm_eps": 0}, ("rms_norm_eps",)),
        ({"rope_theta": "wide"}, ("rope_theta",)),
        ({"torch_dtype": "float8"}, ("float8", "bfloat16")),
    ],
)
def test_what_this_model_does_not_compute_is_named(
    checkpoint: Path, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    edit_config(checkpoint, **changes)
    refused(checkpoint, "config.json", *named)


def test_sizes_that_are_not_stated_are_asked_for(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        path.write_text(json.dumps({key: value for key, value in raw.items() if key != name}))
        refused(checkpoint, "config.json", name)


@pytest.mark.parametrize("dtype", ["float64", "int8", "", torch.float64])
def test_an_unknown_dtype_is_named(checkpoint: Path, dtype: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match="is not supported") as caught:
        load_model(checkpoint, dtype=dtype, device="cpu")
    assert repr(dtype) in str(caught.value) and "bfloat16" in str(caught.value)


@pytest.mark.parametrize("device", ["banana", "cpu:x", ""])
def test_an_unknown_device_is_named(checkpoint: Path, device: str) -> None:
    with pytest.raises(ValueError, match="is unknown") as caught:
        load_model(checkpoint, device=device)
    assert repr(device) in str(caught.value)


def test_auto_device_is_the_accelerator_where_there_is_one() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# --- ends and defaults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, set()),
        (None, {"eos_token_id": 2}, {2}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 5}, {1, 2}),
        ({"eos_token_id": 0}, {}, {0}),
        ({"eos_token_id": None}, {"eos_token_id": [3]}, {3}),
        ({}, {"eos_token_id": []}, set()),
    ],
)
def test_ends_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_eos_ids(tmp_path, 10) == expected


@pytest.mark.parametrize("value", [10, -1, [1, 10], "2", 1.0, {"id": 1}])
def test_an_end_outside_the_vocabulary_is_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*eos_token_id.*10 tokens"):
        read_eos_ids(tmp_path, 10)


def test_sampling_defaults_are_greedy_unless_the_checkpoint_samples(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert read_sampling_defaults(tmp_path).temperature == 0.0
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.7}))
    with pytest.warns(UserWarning, match=r"temperature 0.7 without effect"):
        assert read_sampling_defaults(tmp_path).temperature == 0.0
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": None}))
    defaults = read_sampling_defaults(tmp_path)
    assert (defaults.temperature, defaults.top_p) == (0.7, 0.9)
    path.write_text(json.dumps({"do_sample": True, "temperature": -1}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_sampling_defaults(tmp_path)


# --- tokenizers ------------------------------------------------------------------------------------------

SPECIAL = ("<|begin|>", "<|end|>", "<|user|>")
CORPUS = [
    "the cat sat on the mat.",
    "stop stopping the stop",
    "naïve café 😀😀 👩‍👩‍👧 日本語 こんにちは",
    "a  b\n\nc",
    "😀 😁 😂 🤣",
] * 4


def byte_level() -> RawTokenizer:
    """Llama 3's kind: byte-level BPE, small, with merges that end in the middle of a character."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def byte_fallback() -> RawTokenizer:
    """Llama 2's kind: pieces with a mark for the space, single bytes as tokens for all else."""
    words = ["▁", "▁the", "▁cat", "s", "t", "o", "p", "▁st", "op", "é", "a", "b", "."]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *words])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(parts)
    return raw


@pytest.fixture(scope="module", params=[byte_level, byte_fallback], ids=["byte-level", "byte-fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp(request.param.__name__)
    request.param().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("level")
    byte_level().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with a byte-level tokenizer and no template."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def settings_file(directory: Path, **values: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def test_no_tokenizer_file_is_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None
    settings_file(tmp_path, chat_template="x")
    assert Tokenizer.load(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 3}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"chat_template": 5}',
        '{"chat_template": [{"name": "default"}]}',
        '{"chat_template": ["x"]}',
        '{"bos_token": {}}',
    ],
)
def test_a_broken_tokenizer_config_is_named(home: Path, text: str) -> None:
    (home / "tokenizer_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.load(home)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@example("naïve 😀 日本語\n\t")
def test_byte_level_text_survives_the_round_trip(level: Tokenizer, text: str) -> None:
    assert level.decode(level.encode(text), skip_special_tokens=False) == text


def test_control_ids_are_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.control_ids == {tokenizer.raw.token_to_id(token) for token in SPECIAL}
    begin = tokenizer.raw.token_to_id("<|begin|>")
    text = [begin, *tokenizer.encode("the cat")]
    assert tokenizer.decode(text) == "the cat" and "<|begin|>" in tokenizer.decode(text, skip_special_tokens=False)


def test_a_tokenizer_larger_than_the_model_is_named(level: Tokenizer) -> None:
    size = level.raw.get_vocab_size()
    level.check_fits(size)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json.*{size - 1}"):
        level.check_fits(size - 1)


def test_tokenizers_are_the_same_if_every_token_has_the_same_id(level: Tokenizer, home: Path) -> None:
    assert level.same_as(Tokenizer(home))
    other = byte_level()
    other.add_tokens(["more"])
    other.save(str(home / "tokenizer.json"))
    assert not level.same_as(Tokenizer(home))


# --- chat templates --------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def rendered(directory: Path, messages: Iterable[dict[str, Any]] = tuple(HELLO), **variables: Any) -> str:
    tokenizer = Tokenizer(directory)
    ids = tokenizer.apply_chat_template(messages, **variables)
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("bos", ["<|begin|>", {"content": "<|begin|>", "special": True}])
@pytest.mark.parametrize("named", [False, True])
def test_the_template_of_the_tokenizer_config_is_rendered(home: Path, bos: object, named: bool) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    settings_file(home, chat_template=templates if named else TEMPLATE, bos_token=bos, eos_token=None)
    assert rendered(home) == "<|begin|>[user]hello[assistant]"
    assert rendered(home, add_generation_prompt=False) == "<|begin|>[user]hello"
    # special tokens of the template are one id each, and the tokenizer adds none of its own
    assert Tokenizer(home).apply_chat_template(HELLO)[0] == Tokenizer(home).raw.token_to_id("<|begin|>")


@given(parts=st.lists(st.sampled_from(["<|begin|>", "<|", "begin|>", "<", "|>", "a", " ", "é"]), max_size=8))
def test_control_tokens_are_the_templates_alone(home: Path, parts: list[str]) -> None:
    """Whatever spells one in a message, in a key or in a tool is plain text, to the letter."""
    settings_file(home, chat_template="{{ bos_token }}[" + TEMPLATE + "{{ tools | tojson }}", bos_token="<|begin|>")
    tokenizer, text = Tokenizer(home), "".join(parts)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": text}] * 2, tools=[{text: text}])
    begin = tokenizer.raw.token_to_id("<|begin|>")
    assert [at for at, token in enumerate(ids) if token == begin] == [0, 2]
    told = json.dumps([{text: text}], ensure_ascii=False)
    assert tokenizer.decode(ids, False) == f"<|begin|>[<|begin|>[user]{text}[user]{text}[assistant]{told}"


def test_other_spellings_of_a_control_token_are_plain_text_too(tmp_path: Path) -> None:
    """Where a tokenizer looks for special tokens in a text that it has changed."""
    raw = RawTokenizer(models.BPE())
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = AddedToken("<|end|>", special=True, normalized=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[special], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_special_tokens([special])
    raw.save(str(tmp_path / "tokenizer.json"))
    settings_file(tmp_path, chat_template="{% for message in messages %}{{ message.content }}<|end|>{% endfor %}")
    tokenizer = Tokenizer(tmp_path)
    end = tokenizer.raw.token_to_id("<|end|>")
    assert end in tokenizer.encode("<|END|>")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a <|END|> b"}])
    assert [at for at, token in enumerate(ids) if token == end] == [len(ids) - 1]


def test_a_template_file_comes_before_the_tokenizer_config(home: Path) -> None:
    settings_file(home, chat_template="old")
    (home / "chat_template.jinja").write_text("new 日本 {{ tools }}", encoding="utf-8")
    assert rendered(home, tools="hammer") == "new 日本 hammer"


def test_templates_may_break_out_of_loops_and_write_json(home: Path) -> None:
    template = (
        "{% for m in messages %}\n    {% if loop.index == 2 %}\n{% break %}\n    {% endif %}\n"
        "{{ m | tojson }}\n{% endfor %}{{ {'b': '<é>'} | tojson(indent=1) }}"
    )
    settings_file(home, chat_template=template)
    assert rendered(home, HELLO * 3) == '{"role": "user", "content": "hello"}\n{\n "b": "<é>"\n}'


def test_a_checkpoint_without_a_template_says_so(home: Path) -> None:
    for values in ({}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "x"}]}):
        settings_file(home, **values)
        with pytest.raises(ValueError, match="no chat template"):
            Tokenizer(home).apply_chat_template(HELLO)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "Expected"),
        ("{{ messages[7].content }}", "messages|element|undefined"),
        ("{{ 'text: ' + messages[0].parts }}", "parts"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].content / 0 }}", ""),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"),
        ("{{ unknown_function() }}", "unknown_function"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(home: Path, template: str, named: str) -> None:
    settings_file(home, chat_template=template)
    with pytest.raises(ValueError, match=f"refused the messages.*({named})"):
        Tokenizer(home).apply_chat_template(HELLO)


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "''.__class__.__mro__[1].__subclasses__()",
        "raise_exception.__globals__",
        "messages.append({'role': 'x', 'content': 'y'})",
        "messages[0].update(content='changed')",
        "messages[0]['__class__'].__name__.x",
        "'{0.__class__}'.format(messages)",
        "cycler.__init__.__globals__.os",
    ],
)
def test_templates_are_sandboxed(home: Path, expression: str) -> None:
    settings_file(home, chat_template="{{ " + expression + " }}")
    messages = [dict(HELLO[0])]
    try:
        text = rendered(home, messages)
    except ValueError as error:
        assert "refused the messages" in str(error)
    else:
        assert text == ""  # an attribute that is withheld is undefined
    assert messages == HELLO


# --- streamed text ---------------------------------------------------------------------------------------


def pieces(tokenizer: Tokenizer, ids: Iterable[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """What a stream gives for each token until it stops, and at last what ``finish`` gives."""
    stream, given_out = TextStream(tokenizer, stop), []
    for token in ids:
        given_out.append(stream.push(token))
        if stream.stopped:
            break
    given_out.append(stream.finish())
    assert stream.text == "".join(given_out)
    assert stream.finish() == ""
    return given_out, stream


def all_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of any kind, special ones and some the tokenizer has no token for included."""
    return st.lists(st.integers(0, tokenizer.raw.get_vocab_size() + 3), max_size=24)


def valid_texts() -> st.SearchStrategy[str]:
    common = st.sampled_from(["the", " cat", "stop", "😀", "👩‍👩‍👧", "日本", "é", " ", "\n", "s", "to"])
    anything = st.characters(exclude_categories=["Cs"], exclude_characters="�")
    return st.lists(st.one_of(common, anything), max_size=12).map("".join)


@settings(max_examples=300)
@given(st.data())
def test_byte_level_pieces_join_to_the_decoded_text(level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(all_ids(level))
    given_out, stream = pieces(level, ids)
    assert "".join(given_out) == level.decode(ids) and not stream.stopped


@settings(max_examples=200)
@given(valid_texts())
@example("👩‍👩‍👧 日本語")
def test_valid_text_streams_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    given_out, _ = pieces(tokenizer, ids)
    assert "".join(given_out) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(given_out)
    assert not given_out[-1]  # nothing is left for the end


@settings(max_examples=300)
@given(st.data())
def test_broken_bytes_never_break_a_stream(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Single bytes as tokens may take settled characters back; the stream goes on, and keeps what it gave."""
    broken = data.draw(all_ids(tokenizer))
    whole = tokenizer.encode("the cat", add_special_tokens=False)
    given_out, _ = pieces(tokenizer, [*broken, *whole])
    assert "".join(given_out).endswith("cat")


@pytest.mark.parametrize("text", ["😀", "日本", "👩‍👩‍👧"])
def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("t" + text, add_special_tokens=False)
    for n, token in enumerate(ids, 1):
        stream.push(token)
        assert ("t" + text).startswith(stream.text)
        if "\ufffd" not in (whole := tokenizer.decode(ids[:n])):
            assert stream.text == whole


def visible(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The naive twin of the decoder: after each token, the text up to the last whole character's token; then all."""
    texts = [""]
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n])
        texts.append(texts[-1] if text.endswith("\ufffd") else text)
    return [*texts, tokenizer.decode(ids)]


@settings(max_examples=400)
@given(st.data())
def test_text_is_cut_exactly_before_the_first_stop_string(level: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.one_of(st.text("ab ", max_size=20), valid_texts()))
    ids = data.draw(st.one_of(st.just(level.encode(text)), all_ids(level)))
    letters = st.sampled_from(sorted(set(level.decode(ids)) | set("ab")))
    stop = tuple(data.draw(st.lists(st.lists(letters, min_size=1, max_size=4).map("".join), min_size=1, max_size=3)))
    expected, stopped = level.decode(ids), False
    for seen in visible(level, ids):
        if at := [seen.index(s) for s in stop if s in seen]:
            expected, stopped = seen[: min(at)], True
            break
    given_out, stream = pieces(level, ids, stop)
    assert "".join(given_out) == expected and stream.stopped == stopped
    assert not any(s in expected for s in stop)


def test_the_beginning_of_a_stop_string_is_held_back_no_longer_than_needed(level: Tokenizer) -> None:
    letter = {c: level.raw.token_to_id(c) for c in "abcx"}
    stream = TextStream(level, ("abc",))
    assert [stream.push(letter[c]) for c in "xabab"] == ["x", "", "", "ab", ""]
    assert [stream.push(letter[c]) for c in "xa"] == ["abx", ""]
    assert stream.finish() == "a" and stream.text == "xababxa"


def test_before_the_least_length_stop_strings_are_plain_text(level: Tokenizer) -> None:
    a, b = level.raw.token_to_id("a"), level.raw.token_to_id("b")
    stream = TextStream(level, ("ab",))
    assert [stream.push(token, stoppable=False) for token in (a, b)] == ["a", "b"]
    assert not stream.stopped
    assert stream.push(a) == "" and stream.push(b) == "" and stream.stopped
    assert stream.text == "ab" and stream.finish() == ""


def test_a_stop_string_before_an_unfinished_character_still_stops(tmp_path: Path) -> None:
    vocab = {"a": 0, ".ð": 1}  # a full stop and the first byte of an emoji in one token
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    given_out, stream = pieces(Tokenizer(tmp_path), [0, 1], (".",))
    assert given_out == ["a", "", ""] and stream.stopped


def test_the_bundled_tokenizer_streams_like_any_other() -> None:
    directory = Path(fly.bundled.__file__).parent / "checkpoints" / "fly-draft"
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None and tokenizer.template is not None
    ids = tokenizer.apply_chat_template(HELLO)
    assert set(ids) & tokenizer.control_ids and "hello" in tokenizer.decode(ids)
    assert "".join(pieces(tokenizer, ids)[0]) == tokenizer.decode(ids)


class _Allocated(TorchDispatchMode):
    """Counts the bytes of what is made new on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided", "_to_copy", "clone"):
            self.bytes += made.nbytes if made.device.type == "cpu" else 0
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_takes_no_more_memory_than_the_weights(dtype: torch.dtype) -> None:
    with _Allocated() as allocated:
        model = load_model(resolve_checkpoint("fly-draft"), dtype, "cpu")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert weights <= allocated.bytes <= 1.01 * weights


def test_the_first_token_comes_without_torch_s_compiler() -> None:
    """Which takes a second to import, and is imported by some operations on the meta device."""
    code = """
import sys, torch
before = set(sys.modules)
import fly
fly.LLM("fly-draft", draft="ngram").generate(["a"], fly.SamplingParams(max_tokens=3))
print(sorted({"sympy", "torch._dynamo", "torch._inductor"} & (set(sys.modules) - before)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
