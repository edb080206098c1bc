"""Record the outputs of the package ``speculators`` for a small random EAGLE-3 head, as references for
tests/test_eagle.py: ``python -m tools.record_eagle3 tests/data``, in an environment with speculators (0.9) and
transformers.

Writes a checkpoint in each published layout, and its logits over several of the head's own steps.

Shape legend: T tokens, F hidden states concatenated, U draft vocabulary.
"""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

STEPS, LENGTH = 3, 9


def record(directory: Path, kind: str) -> None:
    """Write a head with one kind of layer, ``llama`` or ``qwen3``, and its logits."""
    sys.modules.setdefault("datasets", types.SimpleNamespace(load_from_disk=None))  # type: ignore[arg-type]
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    layer = (LlamaConfig if kind == "llama" else Qwen3Config)(**sizes)
    layer._attn_implementation = "eager"
    flags = {"norm_before_residual": True, "norm_output": True} if kind == "qwen3" else {}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=24,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config).float().eval()
    ids = sorted(torch.randperm(40)[:24].tolist())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.load_vocab_mappings(
        torch.zeros(40, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True),
        torch.tensor(ids) - torch.arange(24),
    )
    states_TF, tokens_T = torch.randn(LENGTH, 96), torch.randint(0, 40, (LENGTH,))
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()[0].clone()))
    with torch.no_grad():
        model(states_TF[None], tokens_T[None], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    target = directory / f"eagle3-{kind}"
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target)
    for file in target.iterdir():
        if file.suffix not in (".json", ".safetensors"):
            file.unlink()
    save_file(
        {"states_TF": states_TF, "tokens_T": tokens_T, "logits_STU": torch.stack(logits)}, target / "run.safetensors"
    )
    print(
        kind,
        json.loads((target / "config.json").read_text())["speculators_model_type"],
        list(load_file(target / "model.safetensors")),
    )


if __name__ == "__main__":
    for each in ("llama", "qwen3"):
        record(Path(sys.argv[1]), each)
