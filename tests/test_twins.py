"""Cost twins: the same function at another cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fly import LLM, SamplingParams
from fly.bench.shapes import forward_bytes
from fly.bench.twins import save_twin, twin
from fly.bundled import resolve_checkpoint
from fly.models import LlamaConfig, load_model
from tests.toys import build_llama, dense_logits, llama_configs


@given(config=llama_configs(), width=st.integers(1, 5), added=st.integers(0, 3), seed=st.integers(0, 100))
def test_a_twins_logits_are_the_originals(config: LlamaConfig, width: int, added: int, seed: int) -> None:
    model = build_llama(config, seed)
    if config.traits.query_norm:
        with pytest.raises(ValueError, match="has no wider twin"):
            twin(model, 2)
        width = 1
    other = twin(model, width, config.num_hidden_layers + added)
    tokens = torch.randint(0, config.vocab_size, (9,), generator=torch.Generator().manual_seed(seed))
    wanted = dense_logits(model, tokens)
    scale = float(wanted.abs().max()) + 1.0
    torch.testing.assert_close(dense_logits(other, tokens), wanted, atol=2e-4 * scale, rtol=0)
    assert other.config.num_hidden_layers == config.num_hidden_layers + added
    assert other.config.hidden_size == width * config.hidden_size
    if width > 1 or added:
        assert forward_bytes(other.config, torch.float32) > forward_bytes(config, torch.float32)


def test_added_layers_change_no_bit() -> None:
    model = load_model(resolve_checkpoint("fly-draft"))
    tokens = torch.arange(20)
    assert torch.equal(dense_logits(twin(model, 1, 5), tokens), dense_logits(model, tokens))


def test_a_saved_twin_says_what_the_original_says(tmp_path: Path) -> None:
    source = resolve_checkpoint("fly-tiny")
    save_twin(twin(load_model(source, "float32"), 4, 3), source, tmp_path)
    original, other = (LLM(path, kernels="torch", dtype="float32") for path in (source, tmp_path))
    prompt = original.chat_prompt("Reverse the list 4 9 5 7.")
    params = SamplingParams(temperature=0.0, max_tokens=24)
    a, b = (llm.generate([prompt], params)[0] for llm in (original, other))
    assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
    assert other.engine.runner.executor.config.num_hidden_layers == 3


@pytest.mark.parametrize("arguments", [{"width": 0}, {"layers": 1}])
def test_a_twin_is_never_smaller(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"fewer than the model's 2|must be at least 1"):
        twin(load_model(resolve_checkpoint("fly-draft")), **arguments)
