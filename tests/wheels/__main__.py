"""Say whether versions of vLLM and SGLang fit: first the signatures of what the plug-ins hook and read, then the tests
on the wheels' own code.

    python -m tests.wheels                      the versions that were tried
    python -m tests.wheels --vllm 0.34.0        another one: minutes, most of them for the download
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.wheels.setup import ROOT, STATE, VERSIONS, install, unpack

# What each project must have: a file, the function in it, and its parameters (... if others may follow).
SIGNATURES = {
    "vllm": [
        ("v1/engine/input_processor.py", "InputProcessor._validate_params", "self params ..."),
        ("v1/worker/gpu_input_batch.py", "InputBatch.add_request", "self request"),
        ("v1/worker/gpu_input_batch.py", "InputBatch._make_sampling_metadata", "self"),
        (
            "v1/sample/rejection_sampler.py",
            "rejection_sample",
            "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
            "bonus_token_ids sampling_metadata ...",
        ),
        (
            "v1/sample/rejection_sampler.py",
            "expand_batch_to_tokens",
            "x cu_num_tokens num_tokens replace_from replace_to",
        ),
        ("v1/worker/gpu/sample/sampler.py", "Sampler.add_request", "self req_idx sampling_params"),
        ("v1/worker/gpu/model_runner.py", "GPUModelRunner.finish_requests", "self scheduler_output"),
        (
            "v1/worker/gpu/spec_decode/rejection_sampler.py",
            "RejectionSampler._verify",
            "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np expanded_idx_mapping "
            "expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled",
        ),
    ],
    "sglang": [
        ("srt/plugins/hook_registry.py", "HookRegistry.register", "cls target hook hook_type ..."),
        ("srt/sampling/sampling_params.py", "SamplingParams.verify", "self vocab_size"),
        (
            "srt/speculative/eagle_utils.py",
            "eagle_sample",
            "verify_input batch logits_output grammar_mask ...",
        ),
        ("srt/speculative/dflash_worker_v2.py", "DFlashWorkerV2.forward_batch_generation", "self batch ..."),
        ("srt/speculative/dflash_worker_v2.py", "DFlashWorkerV2._can_skip_verify_logits", "self batch sampling_info"),
        (
            "srt/speculative/dflash_worker_v2.py",
            "DFlashWorkerV2._accept_block",
            "self candidates next_token_logits sampling_info draft_input prefix_lens bs ...",
        ),
        ("srt/speculative/dflash_worker_v2.py", "_commit_accept", "candidates accept_len bonus_tokens"),
    ],
}


def read_parameters(file: Path, name: str) -> list[str] | None:
    """Return the parameters of a function or method in a file that is not imported; None if it is not there."""
    if not file.exists():
        return None
    *classes, function = name.split(".")
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for wanted in classes:
        body = [inner for node in body if isinstance(node, ast.ClassDef) and node.name == wanted for inner in node.body]
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return None


def compare_signatures(project: str, folder: Path) -> list[str]:
    """Return what is missing or different, in words."""
    faults = []
    for path, name, wanted in SIGNATURES[project]:
        parameters = read_parameters(folder / project / path, name)
        *names, last = wanted.split()
        if last != "...":
            names.append(last)
        if parameters is None:
            faults.append(f"{path} has no {name}")
        elif parameters[: len(names)] != names or (last != "..." and len(parameters) > len(names)):
            faults.append(f"{path}: {name} takes ({', '.join(parameters)}), not ({', '.join(wanted.split())})")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wheels", description=__doc__.split("\n\n")[0])
    for project, version in VERSIONS.items():
        parser.add_argument(f"--{project}", default=version, metavar="VERSION", help=f"default: {version}")
    versions = vars(parser.parse_args())
    python = install()
    folders = {project: unpack(project, version) for project, version in versions.items()}
    faults = [
        f"{project} {versions[project]}: {fault}"
        for project, folder in folders.items()
        for fault in compare_signatures(project, folder)
    ]
    print("\n".join(faults) or "The signatures fit.", flush=True)
    wheels = os.pathsep.join(f"{project}={folder}" for project, folder in folders.items())
    # The interpreter replaces a GPU; without visible devices, vLLM takes Triton as it is.
    environment = {**os.environ, STATE: wheels, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    tests = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", Path(__file__).parent)
    code = subprocess.run(tests, cwd=ROOT, env=environment).returncode
    return 1 if faults else code


if __name__ == "__main__":
    sys.exit(main())
