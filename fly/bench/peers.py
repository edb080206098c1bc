"""Other libraries on the same checkpoints, prompts, draft length, dtype and threads, in the same run.

Peers are optional (the ``peers`` extra); one that is not installed, or cannot run a checkpoint, is skipped by name.
All decode greedily, one request at a time or several together. Knows nothing of how results are shown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fly.bench.clock import Timing, clocked
from fly.bench.limits import dtype_name
from fly.bench.llama_cpp import LlamaCpp, Skipped, import_library, write_gguf
from fly.bench.loaded import narrow_kernels
from fly.bench.prompts import PROMPTS
from fly.bench.shapes import forward_bytes, matrix_parameters, random_model, shape_config
from fly.bundled import BUNDLED, resolve_checkpoint
from fly.bundled.tasks import Problem, check_many
from fly.bundled.tasks import problems as draw_problems
from fly.drafts import SingleDraft
from fly.eval import Setting
from fly.eval.compare import in_turns
from fly.eval.plan import named
from fly.llm import LLM
from fly.models import LlamaConfig, load_model, save_model
from fly.models.checkpoint import Checkpoint
from fly.models.loading import resolve_dtype
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import Tokenizer, read_eos_ids
from fly.policies import AcceptancePolicy
from fly.types import Guarantee, SamplingParams

__all__ = [
    "MOST_SURE",
    "SURE",
    "Checkpoints",
    "Contender",
    "Lineup",
    "Match",
    "asked_of",
    "fly_contender",
    "line_up",
    "load_peers",
    "measure_matches",
    "measure_prompts",
    "usual_amount",
]

Decode = Callable[[list[int], int], list[int]]
DecodeTogether = Callable[[list[list[int]], int], list[list[int]]]

SURE, MOST_SURE = 0.4, 20
"""How transformers drafts by default: least probability, most tokens."""


@dataclass(frozen=True)
class Checkpoints:
    """What every library gets: a target and perhaps a draft, the draft length, and ``ends``, the ids that end an output
    (none: it goes on to the most tokens). ``directory`` takes the files that a library needs the weights in; ``narrow``
    asks for 8 bits where it has them."""

    target: Path
    draft: Path | None
    k: int
    dtype: torch.dtype
    directory: Path
    ends: frozenset[int]
    narrow: bool = False
    rows: int = 1  # prompts that are decoded together


@dataclass(frozen=True)
class Contender:
    """A library that decodes: ``decode(prompt ids, most tokens)`` returns the new ids, end token included, and
    ``together`` (None if it cannot) those of several prompts at once."""

    name: str
    library: str
    speculative: bool
    decode: Decode
    lossy: bool = False
    together: DecodeTogether | None = None


@dataclass
class Match:
    """What a contender did: new ids by prompt, the seconds of each time it decoded all prompts, and which answers are
    right (empty where they were not checked)."""

    contender: Contender
    outputs: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def tokens_per_second(self) -> Timing:
        generated = sum(map(len, self.outputs))
        return Timing(tuple(generated / seconds for seconds in self.seconds))

    def agreement(self, other: Match) -> tuple[int, float]:
        """Prompts with the same output as ``other``'s, and the share of ``other``'s tokens before the first that
        differs."""
        pairs = list(zip(self.outputs, other.outputs))
        common = sum(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b))) for a, b in pairs)
        return sum(a == b for a, b in pairs), common / max(1, sum(len(b) for _, b in pairs))

    def as_json(self, reference: Match) -> dict[str, Any]:
        """With its agreement with ``reference``."""
        same, share = self.agreement(reference)
        return {
            "library": self.contender.library,
            "decoding": self.contender.name,
            "speculative": self.contender.speculative,
            "tokens_per_second": self.tokens_per_second().as_json(),
            "prompts": len(self.outputs),
            "same_outputs": same,
            "agreement": share,
            "right": sum(self.right) if self.right else None,
        }


def measure_matches(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    max_tokens: int,
    turns: int = 3,
    advance: Callable[[str], None] = lambda name: None,
    rows: int = 1,
) -> list[Match]:
    """Let every contender decode every prompt, ``rows`` of them together, ``turns`` times over, in turns of a few
    prompts after a warm-up.

    Turns are short, since a library begins with the processor's caches full of another's weights, and at first beside
    threads of the other that still look for work. Outputs are those of the first turn. ``advance(name)`` is called
    after every completion, or every ``rows`` of them."""
    if not contenders or not prompts or turns < 1:
        raise ValueError(f"need contenders, prompts and turns, got {len(contenders)}, {len(prompts)} and {turns}")

    def run(contender: Contender, some: Sequence[list[int]], most: int) -> list[list[int]]:
        if rows > 1 and contender.together is not None:
            return contender.together([list(prompt) for prompt in some], most)
        return [contender.decode(list(prompt), most) for prompt in some]

    matches = [Match(contender) for contender in contenders]
    parts = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
    for match in matches:
        run(match.contender, parts[0], 16)
    for turn in range(turns):
        for match in matches:
            match.seconds.append(0.0)
        for match, part in in_turns(matches, parts):
            found, seconds = clocked(partial(run, match.contender, part, max_tokens))
            match.seconds[-1] += seconds
            if not turn:
                match.outputs += found
            advance(match.contender.name)
    return matches


def measure_prompts(
    contenders: Sequence[Contender], vocabulary: int, lengths: Sequence[int], turns: int
) -> dict[str, dict[int, Timing]]:
    """Tokens a second that each library reads of prompts of these lengths, of random tokens that no cache has seen: by
    the time to the first token after them, for the libraries that decode step by step."""
    rng = random.Random(1)
    plain = [contender for contender in contenders if not contender.speculative]
    found: dict[str, dict[int, Timing]] = {contender.library: {} for contender in plain}
    for length in lengths:
        rates: dict[str, list[float]] = {contender.library: [] for contender in plain}
        for turn in range(turns + 1):
            for contender in plain:
                prompt = [rng.randrange(vocabulary) for _ in range(length)]
                _, seconds = clocked(partial(contender.decode, prompt, 1))
                if turn:  # the first makes room
                    rates[contender.library].append(length / seconds)
        for library, seen in rates.items():
            found[library][length] = Timing(tuple(seen))
    return found


def usual_amount(parameters: int) -> tuple[int, int]:
    """The default number of prompts, and most tokens of each, for a shape of so many parameters.

    One of 100 million or more gets fewer, and the fewer tokens the larger it is, down to 64: three turns of all peers
    take about four minutes on two cores up to 270 million.
    """
    if parameters < 100e6:
        return 24, 400
    return 8, max(64, round(17.5e9 / parameters))


def asked_of(llm: LLM, model: str, count: int) -> tuple[list[Problem], list[list[int]]]:
    """Held-out problems, with their prompts, for a bundled checkpoint; some of ``PROMPTS`` alone for any other, which
    was not trained on those problems."""
    if model in BUNDLED:
        problems = list(draw_problems(None, "heldout", 0, count))
        return problems, [llm.chat_prompt(problem.prompt) for problem in problems]
    return [], [prompt_of(llm, number) for number in range(count)]


def prompt_of(llm: LLM, number: int) -> list[int]:
    """One of ``PROMPTS``, as a conversation where the model has a template for those."""
    text, tokenizer = PROMPTS[number % len(PROMPTS)], llm.tokenizer
    if tokenizer is None:
        rng = random.Random(number)
        return [rng.randrange(llm.engine.runner.executor.config.vocab_size) for _ in range(32)]
    return llm.chat_prompt(text) if tokenizer.template is not None else tokenizer.encode(text)


@dataclass
class Lineup:
    """Contenders on one model, why others are missing, and the prompts that all decode to at most ``tokens`` tokens."""

    config: LlamaConfig
    dtype: torch.dtype
    narrow: str  # fly's kernels of 8 bits, if it runs on such
    llm: LLM  # fly on the model, without a draft
    contenders: list[Contender]
    skipped: list[str]
    prompts: list[list[int]]
    tokens: int
    problems: list[Problem] = field(default_factory=list)  # those of the prompts, if any
    rows: int = 1  # prompts decoded together

    @property
    def precision(self) -> str:
        """The dtype in words."""
        return dtype_name(self.dtype) + (f" (fly {self.narrow}, llama.cpp Q8_0)" if self.narrow else "")

    def token_bytes(self) -> int:
        """Bytes that one token has to read, after 128 others."""
        return forward_bytes(self.config, self.dtype, 1, 128, 1 if self.narrow else None)

    def measure(self, turns: int, advance: Callable[[str], None] = lambda name: None) -> tuple[list[Match], bool]:
        """The results of all contenders (``measure_matches``), and whether answers are cut: then none is checked."""
        matches = measure_matches(self.contenders, self.prompts, self.tokens, turns, advance, self.rows)
        cut = any(len(ids) == self.tokens for ids in matches[0].outputs)
        if self.problems and self.llm.tokenizer is not None and not cut:
            for match in matches:
                texts = map(self.llm.tokenizer.decode, match.outputs)
                match.right = check_many(list(zip(self.problems, texts)))
        return matches, cut


def line_up(
    model: str,
    draft: str,
    rules: Sequence[AcceptancePolicy],
    k: int,
    directory: Path,
    shape: str | None = None,
    problems: int | None = None,
    tokens: int | None = None,
    dtype: str = "auto",
    kernels: str = "auto",
    rows: int = 1,
) -> Lineup:
    """fly's settings and every peer on the checkpoints ``model`` and ``draft``, with held-out problems where the model
    is a bundled one and ``PROMPTS`` where not; or, if there is a ``shape``, on a random model of that, autoregressive
    only, with random prompts.

    ``problems`` and ``tokens``: how many prompts, and most tokens of each (None: ``usual_amount``). ``directory`` takes
    files. ``rows``: prompts that are decoded together. Raises ``ValueError`` for a ``k`` that the model's context does
    not hold.
    """
    helper: Path | None = None
    if shape is None:
        source, helper = resolve_checkpoint(model), None if draft == "none" else resolve_checkpoint(draft)
        if files := [str(path) for path in (source, helper) if path is not None and path.is_file()]:
            raise ValueError(
                f"{files[0]}: peers are given a directory of safetensors, which transformers reads as well"
            )
        checkpoint = open_checkpoint(source)
        _check_same_tokens(checkpoint, helper)
        config, number = checkpoint.config, resolve_dtype(dtype, checkpoint.raw)
        if k >= config.max_position_embeddings:
            raise ValueError(f"--k {k} must be below {model}'s context of {config.max_position_embeddings}")
    else:
        source, config = directory / "model", shape_config(shape)
        number = resolve_dtype("bfloat16" if dtype == "auto" else dtype, {})
        save_model(random_model(config, number), source, number)
    usual = usual_amount(matrix_parameters(config))
    count, most = usual[0] if problems is None else problems, usual[1] if tokens is None else tokens
    options: dict[str, Any] = {"dtype": number, "device": "cpu", "kernels": kernels}
    plain = LLM(source, **options)
    settings, asked = [Setting("autoregressive", plain, 0)], list[Problem]()
    if shape is not None:
        rng = random.Random(0)
        prompts = [[rng.randrange(config.vocab_size) for _ in range(32)] for _ in range(count)]
    else:
        asked, prompts = asked_of(plain, model, count)
    if helper is not None:
        settings += _speculation(plain, helper, rules, k, options)
    narrow = narrow_kernels(kernels)
    contenders = [fly_contender(setting, shape is not None) for setting in settings]
    peers, skipped = load_peers(source, helper, k, number, directory, shape is not None, bool(narrow), rows)
    found = [each for each in contenders + peers if rows == 1 or each.together is not None]
    return Lineup(config, number, narrow, plain, found, skipped, prompts, most, asked, rows)


def _check_same_tokens(checkpoint: Checkpoint, helper: Path | None) -> None:
    """Raise ``ValueError``, before anything is loaded, for a draft of another tokenizer: only fly could translate."""
    own, other = Tokenizer.load(checkpoint), None if helper is None else Tokenizer.load(helper)
    if own is not None and other is not None and not own.same_as(other):
        raise ValueError(f"draft {helper} has another tokenizer than the model; peers need the same, or 'none'")


def _speculation(
    plain: LLM, draft: Path, rules: Sequence[AcceptancePolicy], k: int, options: dict[str, Any]
) -> list[Setting]:
    """fly's ways to speculate, all of ``plain``'s weights: a copy for each would drive the others from the caches of
    the processor."""
    levels, lookup = (LLM(plain, text, **options) for text in (str(draft), "ngram"))
    fast = LLM(plain, SingleDraft(draft, reach=None, **options))
    surely = LLM(plain, SingleDraft(draft, confidence=SURE, **options))
    sure, most = f" (to {SURE})", max(k, MOST_SURE)
    found = [Setting("exact, n-gram", lookup, k)]
    for rule, name in named(rules).items():
        found += [Setting(name, fast, k, rule), Setting(f"{name}, multi-level", levels, k, rule)]
        found.append(Setting(name + sure, surely, most, rule))
    return found


def fly_contender(setting: Setting, ignore_eos: bool) -> Contender:
    """fly itself. Its cache of earlier requests is emptied before each, since no peer keeps prompts."""

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
    """Every peer on the checkpoints ``target`` and ``draft``, and why those that are missing are.

    ``narrow``: in 8 bits, weights and activations, where a peer has that (llama.cpp's Q8_0). ``directory`` takes the
    files that a peer needs the weights in. Peers run on the CPU, with as many threads as PyTorch uses. ``draft`` None
    leaves out what needs one; ``ignore_eos`` decodes on after an end. ``rows``: prompts that are decoded together.
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
    """transformers' ``generate``: alone, with prompt lookup, and assisted. Raises ``Skipped`` if it is missing."""
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
    """llama.cpp's own decoding, and exact speculation on its calls. Raises ``Skipped`` where it cannot take part."""
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
