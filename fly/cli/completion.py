"""``fly generate``, and how completions are shown, in colours that say why each token was kept."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fly.cli.options import MODEL, RANKS, SETUP, option, takes
from fly.cli.run import command, compute_in_words, kernels_of, memory_of, options_of, ranks_of, sampling_of, setup_of
from fly.cli.show import console, errors, note
from fly.cli.terminal import read_bytes
from fly.llm import LLM, Piece
from fly.policies import AcceptancePolicy
from fly.runner.request import Stats
from fly.types import SamplingParams, StructuredOutput

# For each reason to keep a token: its style and its meaning. Relaxed tokens are underlined as well, for readers who
# do not see the colours.
STYLES = {
    "match": ("green", "drafted, and the target's own choice"),
    "relaxed": ("bold yellow underline", "drafted, kept only by the relaxed rule"),
    "correction": ("red", "the target's own, in place of a rejected token"),
    "bonus": ("cyan", "the target's own, after a fully kept draft"),
}


# Options that are fields of ``SamplingParams``, which checks them. None means the checkpoint's value.
_of_form = functools.partial(option, rich_help_panel="Form of the answer")
_SAMPLING = {
    "max_tokens": option(int, "The most tokens of the answer. Default: the checkpoint's, or 256."),
    "min_tokens": option(int, "Do not end before so many tokens."),
    "temperature": option(float, "0 is greedy."),
    "top_k": option(int, "0 is off."),
    "top_p": option(float, "1 is off."),
    "min_p": option(float, "0 is off."),
    "seed": option(int, "Same seed, same output (not with drafts that learn, such as adaptive)."),
    "n": option(int, "Completions of the prompt, at least 1.", "--n"),
    "stop": option(list[str], "End before this text; repeatable."),
    "ignore_eos": option(bool, "Go on after end-of-sequence.", "--ignore-eos"),
    "presence_penalty": option(float, "In [-2, 2]; 0 is off."),
    "frequency_penalty": option(float, "In [-2, 2]; 0 is off."),
    "repetition_penalty": option(float, "Above 0; 1 is off."),
    "bad_words": option(list[str], "A text that never appears; repeatable.", "--bad-word"),
    "logit_bias": option(
        list[str], "Add this, in [-100, 100], to the logit of a token; repeatable.", metavar="ID=BIAS"
    ),
    "json_schema": _of_form(str, "JSON under this schema: a file, or its text.", metavar="FILE_OR_TEXT"),
    "regex": _of_form(str, "A text that this expression matches as a whole."),
    "grammar": _of_form(str, "A text of this grammar (Lark's syntax): a file, or its text.", metavar="FILE_OR_TEXT"),
}


@command
@takes(_SAMPLING, MODEL, SETUP, RANKS)
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with tokens, reasons and counts.")
    ] = False,
    config: Path | None = None,
    **_: Any,
) -> None:
    """Complete a prompt; on a terminal, colours show why each token was kept.

    Options of sampling that are left out have the checkpoint's values.
    """
    with ranks_of(context, config) as ranks:
        sampling_options = _sampling_given(context)
        sampling_of(sampling_options, SamplingParams())  # report errors before anything is loaded
        text = str(prompt)
        if prompt in (None, "-"):
            text = _read_input() if ranks is None else ranks.share(_read_input() if ranks.leads else None)
        llm = LLM.from_config(setup_of(context, config), ranks)
        if ranks is not None:
            memory_of(ranks, quiet=not console.is_terminal)
        params = sampling_of(sampling_options, llm.default_params)
        templated = not raw and llm.tokenizer is not None and llm.tokenizer.template is not None
        ids: Any = llm.chat_prompt(text) if templated else text
        if as_json:
            output = llm.generate([ids], params)[0]
            # Of letters that the terminal lacks, JSON has its own escapes.
            ascii_only = not console.encoding.startswith("utf")
            console.print_json(json.dumps({**output.to_dict(), "kernels": kernels_of(llm)}), ensure_ascii=ascii_only)
            return
        stats, elapsed = show_stream(llm, ids, params) if params.n == 1 else _show_all(llm, ids, params)
        if console.is_terminal:
            show_legend(llm, stats, elapsed)


def _read_input() -> str:
    return read_bytes(sys.stdin.read(), "standard input")


def _sampling_given(context: typer.Context) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` on the command line; None where an option was left out."""
    options = options_of(context, _SAMPLING)
    forms = {
        "json_schema": _text_of("--json-schema", options.pop("json_schema"), r"\A\s*\{", "object"),
        "regex": options.pop("regex"),
        "grammar": _text_of("--grammar", options.pop("grammar"), r"\bstart\b[^:\n]*:", "grammar with a rule start"),
    }
    options["logit_bias"] = _biases(options["logit_bias"] or []) or None
    return options | {"structured": None if set(forms.values()) == {None} else StructuredOutput(**forms)}


def _text_of(name: str, argument: str | None, pattern: str, what: str) -> str | None:
    """Read an option: a text, which matches ``pattern``, or the name of a file, which may begin with ``@``."""
    if argument is None or re.search(pattern, argument):
        return argument
    try:
        return Path(argument.removeprefix("@")).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{name} {argument!r} is no {what}, and no file: {reason}") from None


def _biases(entries: list[str]) -> dict[int, float]:
    """Read ``--logit-bias``: the bias by token id."""
    biases: dict[int, float] = {}
    for text in entries:
        token, _, bias = text.partition("=")
        try:
            number, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {text!r} must be TOKEN_ID=BIAS, as 42=-100") from None
        if number in biases:
            raise ValueError(f"--logit-bias {text!r}: token {number} has a bias already, {biases[number]:g}")
        biases[number] = value
    return biases


def show_stream(
    llm: LLM, prompt: Any, params: SamplingParams, policy: AcceptancePolicy | None = None
) -> tuple[Stats, float]:
    """Print a completion while it is generated. Returns its stats and the seconds it took."""
    request = llm.stream(prompt, params, policy=policy)
    start = time.perf_counter()
    try:
        show(request)
        elapsed = time.perf_counter() - start
    finally:
        console.print()  # so that an error gets a line of its own
    return request.stats, elapsed


def _show_all(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[Stats, float]:
    """Print several completions of a prompt, with a line before each. Returns their stats and the seconds they took."""
    start = time.perf_counter()
    first = llm.generate([prompt], params)[0]
    elapsed = time.perf_counter() - start
    for number, output in enumerate(outputs := (first, *first.others), start=1):
        note(f"--- {number} of {len(outputs)} ---")
        show(output.pieces)
        console.print()
    return sum((output.stats for output in outputs), Stats()), elapsed


def show(texts: Iterable[Piece]) -> None:
    """Print pieces of text as they come. On a terminal the colour says why each was kept, and reasoning is dimmed.
    Elsewhere only the text of the answer is printed, unchanged."""
    thinking = ""
    for piece in texts:
        if piece.kind == "reasoning":
            thinking += piece
        elif thinking and console.is_terminal:
            console.print("\n")
            thinking = ""
        if console.is_terminal:
            style = STYLES[piece.why.name.lower()][0] + (" dim" if piece.kind == "reasoning" else "")
            console.print(Text(str(piece), style), end="", soft_wrap=True)
        elif piece.kind == "text":
            console.file.write(str(piece))
            console.file.flush()
    if thinking and not console.is_terminal:
        errors.print(f"[dim]({len(thinking)} characters of thinking are not shown here)[/]", highlight=False)


def show_colours() -> None:
    """Print what the colours mean."""
    for why, (style, meaning) in STYLES.items():
        console.print(Text.assemble(("  " + why.ljust(11), style), (meaning, "dim")))


def show_legend(llm: LLM, stats: Stats, elapsed: float) -> None:
    """Print the meaning of the colours, and the figures of the completion."""
    show_colours()
    parts = [f"{stats.generated} tokens in {elapsed:.2f} s ({stats.generated / max(elapsed, 1e-9):,.0f} a second)"]
    if stats.drafted:
        parts.append(f"τ {stats.tau:.2f}")
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens kept")
        parts.append(f"{stats.relaxed} relaxed")
    parts += [
        f"{name} held {gate.passed}/{gate.asked}{f', alone refused {gate.refused}' if gate.refused else ''}"
        for name, gate in stats.gates.items()
    ]
    parts += [f"{name} never held, so nothing is relaxed" for name in stats.silent_gates]
    note(" · ".join([*parts, compute_in_words(llm)]))
