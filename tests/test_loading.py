"""Checkpoint directories in and out: every tensor accounted for, every error naming its culprit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from fly.models import CheckpointError, Llama, LlamaConfig, load_model, save_model
from fly.models.bundled import resolve_checkpoint
from fly.models.generation import read_sampling_defaults
from fly.models.loading import resolve_device, resolve_dtype
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import read_eos_ids
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


@pytest.mark.parametrize(
    "where",
    ["../elsewhere.safetensors", "/elsewhere.safetensors", "x/../../elsewhere.safetensors", "../model-2/a", "./.."],
)
def test_an_index_cannot_name_files_outside_its_directory(checkpoint: Path, where: str) -> None:
    weight_map = shard(checkpoint)
    shutil.copy(checkpoint / weight_map[QUERY], checkpoint.parent / "elsewhere.safetensors")
    write_index(checkpoint, weight_map | {QUERY: where})
    refused(checkpoint, "index.json", where)


@pytest.mark.parametrize("spelled", ["./{}", "sub/../{}", ".//{}", "../model/{}", "{directory}/{}"])
def test_an_index_may_spell_files_of_its_directory_in_any_way(checkpoint: Path, spelled: str) -> None:
    """Some of its entries, so that a file has two spellings; and a file in a folder of the directory."""
    weight_map = shard(checkpoint)
    other = weight_map[QUERY]
    entries = {key: spelled.format(name, directory=checkpoint) for key, name in weight_map.items() if key < QUERY}
    write_index(checkpoint, weight_map | entries)
    assert_same_weights(random_llama(7), load_model(checkpoint, device="cpu"))
    (checkpoint / "sub").mkdir()
    (checkpoint / other).rename(checkpoint / "sub" / other)
    write_index(checkpoint, {key: f"sub/{name}" if name == other else name for key, name in weight_map.items()})
    assert_same_weights(random_llama(7), load_model(checkpoint, device="cpu"))


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
    assert str(caught.value) == f"device {device!r} is unknown; choices: auto, cpu, cuda, cuda:1, ..."


@pytest.mark.parametrize("device", ["xla", "hpu", "vulkan"])
def test_a_device_that_cannot_compute_here_is_named(checkpoint: Path, device: str) -> None:
    with pytest.raises(ValueError, match=rf"device '{device}' is not available here; choices: auto, cpu, ") as caught:
        load_model(checkpoint, device=device)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("value", [10, -1, [1, 10], "2", 1.0, True, [2, None], {"id": 1}])
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


# --- memory and time ------------------------------------------------------------------------------------


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
