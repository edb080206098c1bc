"""Other libraries on the same checkpoints, prompts, draft length, dtype and threads, within one run:
``python -m benchmarks.peers``.

All decode greedily, one request at a time or several together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from benchmarks.contenders import MOST_SURE, SURE, Contender, fly_contender, load_peers
from fly.backends.cpu import chosen
from fly.backends.cpu.library import split
from fly.bench.clock import Timing, clocked
from fly.bench.limits import Limits, dtype_name, measure_limits
from fly.bench.prompts import asked_of, usual_amount
from fly.bench.shapes import forward_bytes, forward_operations, matrix_parameters, random_model, shape_config
from fly.bench.speed import LONGEST, PROMPTS
from fly.bundled import resolve_checkpoint, usual_draft
from fly.bundled.tasks import Problem
from fly.cli.options import DraftLength, Dtype, Json, Kernels, Model, Rules, Turns
from fly.cli.run import alone, rules_of
from fly.cli.show import console, grouped, note, progress, ratio, table, write_json
from fly.cli.speed import NO_SHAPE, best_median
from fly.drafts import SingleDraft
from fly.eval import Setting
from fly.eval.compare import in_turns
from fly.eval.plan import named
from fly.eval.scorers import check_many
from fly.llm import LLM
from fly.models import LlamaConfig, save_model
from fly.models.checkpoint import Checkpoint
from fly.models.loading import resolve_device, resolve_dtype
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import Tokenizer
from fly.policies import AcceptancePolicy


@dataclass
class Match:
    """A contender's result: new ids by prompt, the seconds of each pass over all prompts, and which answers are right
    (empty if they were not checked)."""

    contender: Contender
    outputs: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def tokens_per_second(self) -> Timing:
        generated = sum(map(len, self.outputs))
        return Timing(tuple(generated / seconds for seconds in self.seconds))

    def agreement(self, other: Match) -> tuple[int, float]:
        """Number of prompts with the same output as ``other``'s, and the share of ``other``'s tokens before the first
        difference."""
        pairs = list(zip(self.outputs, other.outputs))
        common = sum(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b))) for a, b in pairs)
        return sum(a == b for a, b in pairs), common / max(1, sum(len(b) for _, b in pairs))

    def as_json(self, reference: Match) -> dict[str, Any]:
        """The result as JSON, with its agreement with ``reference``."""
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
    """Let every contender decode every prompt ``turns`` times, ``rows`` prompts together, in turns of a few prompts
    after a warm-up.

    Turns are short, because each library starts with the processor's caches full of another's weights, and with another
    library's threads still spinning. Outputs are those of the first turn. ``advance(name)`` is called after every
    completion, or every ``rows`` of them."""
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
    """Tokens per second at which each library reads prompts of these lengths (random tokens that are in no cache), from
    the time to the first token. Covers libraries that decode step by step."""
    rng = random.Random(1)
    plain = [contender for contender in contenders if not contender.speculative]
    found: dict[str, dict[int, Timing]] = {contender.library: {} for contender in plain}
    for length in lengths:
        rates: dict[str, list[float]] = {contender.library: [] for contender in plain}
        for turn in range(turns + 1):
            for contender in plain:
                prompt = [rng.randrange(vocabulary) for _ in range(length)]
                _, seconds = clocked(partial(contender.decode, prompt, 1))
                if turn:  # the first turn is a warm-up
                    rates[contender.library].append(length / seconds)
        for library, seen in rates.items():
            found[library][length] = Timing(tuple(seen))
    return found


@dataclass
class Lineup:
    """The contenders on one model, why others are missing, and prompts that all decode up to ``tokens`` tokens."""

    config: LlamaConfig
    dtype: torch.dtype
    narrow: str  # fly's 8-bit kernels, if it uses some
    llm: LLM  # fly on the model, without a draft
    contenders: list[Contender]
    skipped: list[str]
    prompts: list[list[int]]
    tokens: int
    problems: list[Problem] = field(default_factory=list)  # the problems behind the prompts, if any
    rows: int = 1  # prompts decoded together

    @property
    def precision(self) -> str:
        """The dtype in words."""
        return dtype_name(self.dtype) + (f" (fly {self.narrow}, llama.cpp Q8_0)" if self.narrow else "")

    def token_bytes(self) -> int:
        """Bytes that are read for one token, after 128 others."""
        return forward_bytes(self.config, self.dtype, 1, 128, 1 if self.narrow else None)

    def measure(self, turns: int, advance: Callable[[str], None] = lambda name: None) -> tuple[list[Match], bool]:
        """Measure all contenders (``measure_matches``); also return whether answers are cut, and so not checked."""
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
    """Prepare fly's settings and every peer on the checkpoints ``model`` and ``draft``. Prompts are held-out problems
    for a bundled model, else ``PROMPTS``. With a ``shape``, use a random model of that shape instead: autoregressive
    only, with random prompts.

    ``problems`` and ``tokens``: number of prompts, and of tokens for each (None: ``usual_amount``). ``directory`` is
    for files. ``rows``: prompts decoded together. Raises ``ValueError`` for a ``k`` that the model's context cannot
    hold.
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
    narrow = split(chosen(kernels))[1]  # the 8-bit kernels, if any
    contenders = [fly_contender(setting, shape is not None) for setting in settings]
    peers, skipped = load_peers(source, helper, k, number, directory, shape is not None, bool(narrow), rows)
    found = [each for each in contenders + peers if rows == 1 or each.together is not None]
    return Lineup(config, number, narrow, plain, found, skipped, prompts, most, asked, rows)


def _check_same_tokens(checkpoint: Checkpoint, helper: Path | None) -> None:
    """Raise ``ValueError``, before anything is loaded, if the draft has another tokenizer: only fly can translate."""
    own, other = Tokenizer.load(checkpoint), None if helper is None else Tokenizer.load(helper)
    if own is not None and other is not None and not own.same_as(other):
        raise ValueError(f"draft {helper} has another tokenizer than the model; peers need the same, or 'none'")


def _speculation(
    plain: LLM, draft: Path, rules: Sequence[AcceptancePolicy], k: int, options: dict[str, Any]
) -> list[Setting]:
    """fly's settings with speculation. All share ``plain``'s weights: copies would evict each other from the
    processor's caches."""
    levels, lookup = (LLM(plain, text, **options) for text in (str(draft), "ngram"))
    fast = LLM(plain, SingleDraft(draft, reach=None, **options))
    surely = LLM(plain, SingleDraft(draft, confidence=SURE, **options))
    sure, most = f" (to {SURE})", max(k, MOST_SURE)
    found = [Setting("exact, n-gram", lookup, k)]
    for rule, name in named(rules).items():
        found += [Setting(name, fast, k, rule), Setting(f"{name}, multi-level", levels, k, rule)]
        found.append(Setting(name + sure, surely, most, rule))
    return found


@alone
def main(
    model: Model = "fly-target",
    draft: Annotated[
        str | None,
        typer.Option(
            help="The draft checkpoint for all libraries that take one, or 'none'. Default: fly-draft for fly-target."
        ),
    ] = None,
    policy: Rules = None,
    k: DraftLength = 15,
    shape: Annotated[
        str | None,
        typer.Option(help=f"A random model of WIDTHxLAYERSxVOCABULARY instead, autoregressive only; or '{NO_SHAPE}'."),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(min=1, help="How many prompts. Default: 24, or 8 for a model of 100M parameters or more."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="The most tokens of an answer. Default: 400, fewer for such a model (110M: 160, from 270M on: 64).",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Prompts decoded together, by the libraries that can.")] = 1,
    skip_prompts: Annotated[
        bool, typer.Option("--skip-prompts", help="Do not time the reading of long prompts.")
    ] = False,
    turns: Turns = 3,
    dtype: Dtype = "auto",
    kernels: Kernels = "auto",
    json_: Json = None,
) -> None:
    """transformers and llama.cpp on the same checkpoints, prompts, draft length, dtype and threads, side by side.

    On kernels of 8 bits (--kernels w8a8), llama.cpp gets its own of 8 bits, Q8_0.
    """

    rules, cpu = rules_of(policy), resolve_device("cpu")
    shape = None if shape == NO_SHAPE else shape
    with TemporaryDirectory() as temporary:
        draft = draft or usual_draft(model)
        lineup = line_up(model, draft, rules, k, Path(temporary), shape, problems, tokens, dtype, kernels, rows)
        limits = measure_limits(cpu)
        with progress(turns * -(-len(lineup.prompts) // rows) * len(lineup.contenders), "peers") as advance:
            matches, cut = lineup.measure(turns, advance)
        limits = limits.best(measure_limits(cpu))
        title = f"{shape or f'{model}, {draft}, k {k}'}, {lineup.precision}, {limits.threads} threads"
        title += f", {len(lineup.prompts)} prompts, at most {lineup.tokens} tokens each, temperature 0, batch {rows}"
        console.print(peers_table(matches, title))
        longest = min(lineup.config.max_position_embeddings, LONGEST)
        lengths = [length for length in PROMPTS if length < longest and not skip_prompts]
        reading: dict[str, dict[int, Timing]] = {}
        if lengths:
            with progress(1, "long prompts") as advance:
                reading = measure_prompts(lineup.contenders, lineup.config.vocab_size, lengths, min(turns, 3))
                advance()
            console.print(prompts_table(reading, limits, lineup))
    limit = limits.seconds(lineup.token_bytes())
    note(
        f"tokens/s: best/median of {turns} turns; ratios of the best · alike: fly over this,\n"
        "autoregressive beside autoregressive, its fastest lossless speculation beside\n"
        "speculation · fastest: fly's fastest decoding of all over this · same: outputs\n"
        "like fly's autoregressive ones · agree: tokens before the first that differs ·\n"
        f"(to {SURE}): up to {max(k, MOST_SURE)} tokens, while one has at least {SURE}, as in (own K) ·\n"
        f"limit of one token's bytes, read again and again: {1 / limit:,.0f} tokens/s"
    )
    if shape is None and cut:
        console.print()
        note(f"answers are not checked, as {lineup.tokens} tokens are too few for them")
    for reason in lineup.skipped:
        console.print(f"[yellow]{escape(reason)}[/]", highlight=False)
    record = {"limits": limits.as_json(), "skipped": lineup.skipped, "title": title}
    record["prompts"] = {name: {n: rate.as_json() for n, rate in rates.items()} for name, rates in reading.items()}
    write_json(json_, {**record, "contenders": [match.as_json(matches[0]) for match in matches]})


def peers_table(matches: Sequence[Match], title: str) -> Table:
    """The speed of all libraries, what they answer, and fly's speed over each peer's of the same kind."""
    by_library = grouped(matches, lambda match: match.contender.library)
    own = by_library["fly"]

    def over(match: Match, rivals: Sequence[Match]) -> str:
        """fly's fastest ``rivals`` over a peer."""
        if match in own:
            return ""
        fastest = max((rival.tokens_per_second().high for rival in rivals), default=None)
        return ratio(fastest, match.tokens_per_second().high)

    def alike(match: Match) -> list[Match]:
        kind = match.contender.speculative
        return [each for each in own if each.contender.speculative == kind and not each.contender.lossy]

    return table(
        title,
        matches,
        {
            "library": lambda m: m.contender.library if m is by_library[m.contender.library][0] else "",
            "decoding": lambda m: escape(m.contender.name),
            "tokens/s": lambda m: best_median(m.tokens_per_second()),
            "alike": lambda m: over(m, alike(m)),
            "fastest": lambda m: over(m, own),
            "same": lambda m: f"{m.agreement(matches[0])[0]}/{len(m.outputs)}",
            "agree": lambda m: f"{m.agreement(matches[0])[1]:.0%}",
            "right": lambda m: f"{sum(m.right)}/{len(m.right)}" if m.right else "–",
        },
        text=("library", "decoding"),
        ends=lambda m: m is by_library[m.contender.library][-1],
    )


def prompts_table(reading: dict[str, dict[int, Timing]], limits: Limits, lineup: Lineup) -> Table:
    """A table of how fast each library reads long prompts, also relative to the machine's rate of multiplications."""
    config, products = lineup.config, torch.int8 if lineup.narrow == "w8a8" else None
    columns: dict[str, Callable[[str], str]] = {"library": lambda name: name}
    for length in next(iter(reading.values())):
        operations = forward_operations(config, lineup.dtype, tokens=length, products=products)
        # The head runs for the last token only.
        operations[products or lineup.dtype] -= 2 * config.hidden_size * config.vocab_size * (length - 1)
        least = limits.seconds(0, operations)

        def shown(name: str, length: int = length) -> str:
            return best_median(reading[name][length])

        def over(name: str, length: int = length) -> str:
            own = reading["fly"][length].high
            return "" if name == "fly" else ratio(own, reading[name][length].high)

        def share(name: str, length: int = length, least: float = least) -> str:
            return f"{reading[name][length].high * least / length:.0%}"

        columns |= {f"{length}\ntokens/s": shown, f"{length}\nfly over": over}
        columns[f"{length}\nof matmul"] = share
    return table(
        "Reading a prompt of random tokens, to the first token after it", list(reading), columns, text=("library",)
    )


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
