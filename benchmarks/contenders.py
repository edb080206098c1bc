"""The libraries that ``peers.py`` compares (fly, transformers and llama.cpp), each as a function from a prompt to new
token ids.

transformers and llama.cpp are optional (the ``peers`` extra). One that is missing, or cannot run a checkpoint, is
skipped with a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.llama_cpp import LlamaCpp, Skipped, import_library, write_gguf
from fly.eval import Setting
from fly.models import load_model
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import read_eos_ids
from fly.types import Guarantee, SamplingParams

Decode = Callable[[list[int], int], list[int]]
DecodeTogether = Callable[[list[list[int]], int], list[list[int]]]

SURE, MOST_SURE = 0.4, 20
"""transformers' defaults for drafting: least probability, most tokens."""


@dataclass(frozen=True)
class Checkpoints:
    """The input of every library: a target and perhaps a draft, the draft length, and ``ends``, the ids that end an
    output (empty: it continues to the token limit). ``directory`` is for files with weights that a library needs;
    ``narrow`` asks for 8 bits if the library has them."""

    target: Path
    draft: Path | None
    k: int
    dtype: torch.dtype
    directory: Path
    ends: frozenset[int]
    narrow: bool = False
    rows: int = 1  # prompts decoded together


@dataclass(frozen=True)
class Contender:
    """A library that decodes. ``decode(prompt ids, most tokens)`` returns the new ids, end token included; ``together``
    does so for several prompts at once, or is None if the library cannot."""

    name: str
    library: str
    speculative: bool
    decode: Decode
    lossy: bool = False
    together: DecodeTogether | None = None


def fly_contender(setting: Setting, ignore_eos: bool) -> Contender:
    """fly itself. Its prefix cache is emptied before each request, since no peer keeps prompts."""

    def together(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        for allocator in setting.llm.scheduler.allocators():
            allocator.forget()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        outputs = setting.llm.generate(prompts, params, policy=setting.policy, k=setting.k)
        return [output.token_ids for output in outputs]

    def decode(prompt: list[int], max_tokens: int) -> list[int]:
        return together([prompt], max_tokens)[0]

    lossy = setting.policy.guarantee is not Guarantee.LOSSLESS
    return Contender(setting.name, "fly", setting.k > 0, decode, lossy, together)


def load_peers(
    target: Path,
    draft: Path | None,
    k: int,
    dtype: torch.dtype,
    directory: Path,
    ignore_eos: bool,
    narrow: bool = False,
    rows: int = 1,
) -> tuple[list[Contender], list[str]]:
    """Load every peer on the checkpoints ``target`` and ``draft``; also return why others are missing.

    ``narrow`` asks for 8-bit weights and activations where a peer has them (llama.cpp's Q8_0). ``directory`` is for
    files with weights that a peer needs. Peers run on the CPU, with as many threads as PyTorch. ``draft`` None leaves
    out decoding with a draft; ``ignore_eos`` decodes on after an end; ``rows``: prompts decoded together.
    """
    ends = frozenset() if ignore_eos else read_eos_ids(target, open_checkpoint(target).config.vocab_size)
    given = Checkpoints(target, draft, k, dtype, directory, ends, narrow, rows)
    contenders: list[Contender] = []
    reasons = []
    for load in (transformers, llama_cpp):
        try:
            contenders += load(given)
        except Skipped as skipped:
            reasons.append(str(skipped))
    return contenders, reasons


def transformers(given: Checkpoints) -> list[Contender]:
    """transformers' ``generate``: plain, with prompt lookup, and assisted. Raises ``Skipped`` if it is missing."""
    library = import_library("transformers", "transformers")
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()

    def load(path: Path) -> Any:
        model = library.AutoModelForCausalLM.from_pretrained(path, dtype=given.dtype)
        model.generation_config.eos_token_id = sorted(given.ends) or None
        return model.eval()

    model = load(given.target)

    @torch.inference_mode()
    def together(prompts: list[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
        longest, pad = max(map(len, prompts)), min(given.ends, default=0)
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=pad,
            **({} if given.ends else {"min_new_tokens": max_tokens}),
            **options,
        )
        new = output[:, longest:].tolist()
        ends = [next((at + 1 for at, token in enumerate(row) if token in given.ends), len(row)) for row in new]
        return [row[:end] for row, end in zip(new, ends)]

    def run(prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
        return together([prompt], max_tokens, **options)[0]

    found = [
        Contender("generate", "transformers", False, run, together=together),
        Contender("prompt lookup", "transformers", True, partial(run, prompt_lookup_num_tokens=given.k)),
    ]
    if given.draft is not None:
        helper = load(given.draft)

        def assisted(name: str, most: int, sure: float) -> Contender:
            def decode(prompt: list[int], max_tokens: int) -> list[int]:
                settings = helper.generation_config
                settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = most, "constant"
                settings.assistant_confidence_threshold = sure
                return run(prompt, max_tokens, assistant_model=helper)

            return Contender(name, "transformers", True, decode)

        found += [assisted("assisted", given.k, 0.0), assisted("assisted (own K)", MOST_SURE, SURE)]
    return found


def llama_cpp(given: Checkpoints) -> list[Contender]:
    """llama.cpp's own decoding, and exact speculation built on its calls. Raises ``Skipped`` if it cannot run."""
    library = import_library("llama_cpp", "llama.cpp")

    def load(name: str, checkpoint: Path) -> LlamaCpp:
        file = given.directory / f"{name}.gguf"
        write_gguf(load_model(checkpoint, given.dtype, "cpu"), file, given.narrow)
        return LlamaCpp(library, file, given.dtype, given.rows)

    model, kind = load("target", given.target), ", Q8_0" if given.narrow else ""
    together = partial(model.decode_together, ends=given.ends)
    found = [Contender(f"decode{kind}", "llama.cpp", False, partial(model.decode, ends=given.ends), together=together)]
    if given.draft is not None:
        speculate = partial(model.speculate, draft=load("draft", given.draft), k=given.k, ends=given.ends)
        found.append(Contender(f"speculative{kind}", "llama.cpp", True, speculate))
    return found
