"""The ``fly`` command. Everything it does, the Python interface does too; this file only asks and shows."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from fly.cache.allocator import OutOfBlocks
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT, LONGEST, SHORTEST
from fly.errors import explain

app = typer.Typer(
    help="Pluggable speculative decoding: any draft proposes, any acceptance policy decides what stands.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(help="Speed, as ratios within one run.", no_args_is_help=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fly {version('flyspec')}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


app.add_typer(bench, name="bench")
console = Console()
errors = Console(stderr=True)

# Why a token stands -> how it looks. Underline marks what differs from the target's own text, for eyes without colour.
STYLES = {"match": "green", "relaxed": "bold yellow underline", "correction": "red", "bonus": "cyan"}
LEGEND = {
    "match": "drafted, and the target's own choice",
    "relaxed": "drafted, excused by the policy",
    "correction": "the target's, for a draft it rejected",
    "bonus": "the target's, after a draft that stood",
}


@contextmanager
def _plain_errors(alone: bool = False) -> Iterator[None]:
    """Bad input is one clear line and exit status 2, not a traceback; so is an error of somebody's plug-in, with its
    place. What is left over is ours, and shows all it can. ``alone``: not for the ranks of torchrun, each of which
    would do all of it for itself."""
    if "" not in sys.path:  # modules in the working directory are found, as with python -m
        sys.path.insert(0, "")
    try:
        if alone and "TORCHELASTIC_RUN_ID" in os.environ:
            raise ValueError(
                "this command is for one process; torchrun runs generate, serve, eval, bench batch and plan"
            )
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:  # whoever read has seen enough; nothing more is to be flushed to them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError, OutOfBlocks) as error:
        message = explain(error) if isinstance(error, ValidationError) else str(error)
        errors.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(130) from None
    except Exception as error:
        place, theirs = _origin(error)
        if not theirs:
            raise
        message = f"{type(error).__name__}: {error} ({place})"
        errors.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def _ranks(context: typer.Context, config: Path | None = None, on_fault: Any = None) -> Iterator[Any]:
    """The ranks that torchrun started, of which the first alone reads and prints; None where it did not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield None
        return
    from fly.config import Config
    from fly.parallel import launch

    timeouts = {name: context.params[name] for name in Config.of_ranks}
    with suppress(ValueError):  # what is wrong with the file is said once, when there are ranks
        timeouts = _given(context, config, timeouts)
    with launch(**timeouts, on_fault=on_fault) as ranks:
        if not ranks.leads:
            sys.stdout = errors.file = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
        yield ranks


def _origin(error: Exception) -> tuple[str, bool]:
    """Where an error comes from, the command itself aside."""
    from fly.errors import origin

    place = origin(error)
    return place, not any(part in place for part in ("site-packages", "/bin/fly", "<string>", "/importlib/"))


Model = Annotated[str, typer.Option(help="Target: a checkpoint directory or a bundled name.")]
DraftOption = Annotated[
    str,
    typer.Option(help="Who proposes: 'none', a checkpoint, a strategy ('fly drafts'), or a cascade 'ngram+fly-draft'."),
]
Policy = Annotated[str, typer.Option(help="Acceptance policy: 'exact', 'fly', 'fly(theta=0.3, window=6)', ...")]
K = Annotated[int, typer.Option(min=0, help="Most tokens drafted a round; 0 decodes autoregressively.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]


def _number(least: float, most: float = math.inf, *, help: str) -> Any:
    """An option that is a finite number in a range. What is not is named, which ``min`` and ``max`` of typer do not."""
    within = f"of at least {least:g}" if most == math.inf else f"in [{least:g}, {most:g}]"

    def check(value: float | None) -> float | None:
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise typer.BadParameter(f"{value:g} must be a finite number {within}")
        return value

    shown = f"x>={least:g}" if most == math.inf else f"{least:g}<=x<={most:g}"
    return typer.Option(callback=check, metavar=f"<float range> [{shown}]", help=help)


HeartbeatTimeout = Annotated[
    float, _number(SHORTEST, LONGEST, help="With torchrun: seconds without a sign of life after which a rank is lost.")
]
CollectiveTimeout = Annotated[
    float, _number(SHORTEST, LONGEST, help="With torchrun: seconds a rank waits in a collective for the others.")
]


def to_be_written(path: Path | None) -> Path | None:
    """Whatever is measured first would be lost where there is no place for it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no directory {str(path.parent)!r}")
    return path


Json = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.", callback=to_be_written)]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        help="YAML or JSON with model, draft, policy, k; options given here win. What neither says: exact, no draft."
    ),
]
Kernels = Annotated[
    str,
    typer.Option(
        help="What runs on the CPU: auto, torch, avx512bf16, avx512, avx2; int8: weights of 8 bits; w8a8: "
        "weights and activations."
    ),
]


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")] = None,
    model: Model = "fly-target",
    draft: DraftOption = "fly-draft",
    policy: Policy = "fly",
    k: K = 15,
    max_tokens: Annotated[int, typer.Option(min=0)] = 256,
    min_tokens: Annotated[int, typer.Option(min=0)] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same output (not with drafts that learn, such as adaptive).")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    presence_penalty: Annotated[float, typer.Option(help="In [-2, 2]; 0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="In [-2, 2]; 0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 0; 1 is off.")] = 1.0,
    bad_word: Annotated[list[str] | None, typer.Option(help="Never say this; may be given several times.")] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            help="Add this, in [-100, 100], to the logit of a token; may be given several times.", metavar="ID=BIAS"
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Completions of the prompt, at least 1.")] = 1,
    json_schema: Annotated[
        str | None,
        typer.Option(help="Answer with JSON under this schema: a file, or its text.", metavar="FILE_OR_TEXT"),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Answer with a text that this matches as a whole.")] = None,
    grammar: Annotated[
        str | None,
        typer.Option(
            help="Answer with a text of this grammar (Lark's syntax): a file, or its text.", metavar="FILE_OR_TEXT"
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with tokens, reasons and counts.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Results that do not depend on what is fed together, to the bit.")
    ] = False,
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
    config: ConfigFile = None,
) -> None:
    """Complete a prompt; on a terminal, colours show why each token stands."""
    with _plain_errors(), _ranks(context, config) as ranks:
        from fly.llm import LLM
        from fly.types import SamplingParams, StructuredOutput

        forms: dict[str, Any] = {
            "json_schema": _text_of("--json-schema", json_schema, r"\A\s*\{", "object"),
            "regex": regex,
            "grammar": _text_of("--grammar", grammar, r"\bstart\b[^:\n]*:", "grammar with a rule start"),
        }
        structured = None if set(forms.values()) == {None} else StructuredOutput(**forms)
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            bad_words=tuple(bad_word or ()),
            logit_bias=_biases(logit_bias or []),
            n=n,
            structured=structured,
        )
        text = str(prompt)
        if prompt in (None, "-"):
            text = sys.stdin.read() if ranks is None else ranks.share(sys.stdin.read() if ranks.leads else None)
        setup = _setup(
            *(context, config),
            model=model,
            draft=draft,
            policy=policy,
            k=k,
            dtype=dtype,
            device=device,
            kernels=kernels,
            deterministic=deterministic,
        )
        llm = LLM.from_config(setup, ranks)
        if ranks is not None:
            _loaded(ranks, quiet=not console.is_terminal)
        templated = not raw and llm.tokenizer is not None and llm.tokenizer.template is not None
        ids: Any = llm.chat_prompt(text) if templated else text
        if as_json:
            output = llm.generate([ids], params)[0]
            console.print_json(json.dumps({**_as_json(output), "kernels": kernels_of(llm)}))
            return
        stats, elapsed = _show_stream(llm, ids, params) if n == 1 else _show_all(llm, ids, params)
        if console.is_terminal:
            _legend()
            console.print(f"[dim]{_summary(stats, elapsed)} · kernels {kernels_of(llm)}[/]", highlight=False)


def _text_of(option: str, given: str | None, pattern: str, what: str) -> str | None:
    """What an option gives that takes a text, told by its ``pattern``, or else a file of it (``@`` before its name is
    allowed)."""
    if given is None or re.search(pattern, given):
        return given
    try:
        return Path(given.removeprefix("@")).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{option} {given!r} is no {what}, and no file: {reason}") from None


def _biases(given: list[str]) -> dict[int, float]:
    """What ``--logit-bias`` says: the bias of each token id."""
    found: dict[int, float] = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            number, value = int(token), float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {text!r} must be TOKEN_ID=BIAS, as 42=-100") from None
        if number in found:
            raise ValueError(f"--logit-bias {text!r}: token {number} has a bias already, {found[number]:g}")
        found[number] = value
    return found


def kernels_of(llm: Any) -> str:
    """The kernels that run the target, and why it is PyTorch where compiled ones were to be had."""
    from fly.backends.cpu import why_not

    model = llm.engine.runner.model
    if (name := getattr(model, "kernels", None)) is not None:
        return str(name)
    reason = why_not() if model.device.type == "cpu" else ""
    return f"torch ({reason})" if reason else "torch"


def _setup(context: typer.Context, path: Path | None, **options: Any) -> Any:
    """The configuration of the file, with the options that were given on the command line; else of the options."""
    from fly.config import Config

    if path is not None:
        mine = Config.model_fields.keys() - Config.of_ranks  # those of the ranks have been used by now
        every = {name: options.get(name) for name in mine}
        options = _given(context, path, every)
    return Config.model_validate(options, context={"trusted": True})


def _given(context: typer.Context, path: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """Options as they were given on the command line, or else in the file, if there is one."""
    from fly.config import Config

    if path is None:
        return options
    sources = {name: context.get_parameter_source(name) for name in options}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    read = Config.read(path)
    return {name: value if name in given else getattr(read, name) for name, value in options.items()}


def _show_stream(llm: Any, prompt: Any, params: Any, policy: Any = None) -> tuple[Any, float]:
    """Print a completion as it stands, in colours on a terminal. Its stats, and the seconds it took."""
    request = llm.stream(prompt, params, policy=policy)
    start = time.perf_counter()
    _show(request)
    elapsed = time.perf_counter() - start
    console.print()
    return request.stats, elapsed


def _show_all(llm: Any, prompt: Any, params: Any) -> tuple[Any, float]:
    """Print the several completions of a prompt, a line before each. Their stats, and the seconds they took."""
    from fly.request import Stats

    start = time.perf_counter()
    first = llm.generate([prompt], params)[0]
    elapsed = time.perf_counter() - start
    for number, output in enumerate(every := (first, *first.others), start=1):
        console.print(f"[dim]--- {number} of {len(every)} ---[/]", highlight=False)
        _show(_pieces(output, llm.tokenizer))
        console.print()
    return sum((output.stats for output in every), Stats()), elapsed


def _pieces(output: Any, tokenizer: Any) -> Iterator[Any]:
    """The text of an output as a stream of it would have come."""
    from fly.llm import Piece
    from fly.models.tokenizer import TextStream

    text, left, held = TextStream(tokenizer), len(output.text), []
    for number, token in enumerate(output.provenance, start=1):
        held.append(token)
        piece = text.push(token.id) + (text.finish() if number == len(output.provenance) else "")
        if piece := piece[:left]:  # nothing of a stop string
            yield Piece(piece, tuple(held))
            left, held = left - len(piece), []


def _show(pieces: Iterable[Any]) -> None:
    """Print pieces of text as they come, on a terminal each in the colour of why it stands."""
    from fly.types import Why

    for piece in pieces:
        why = max((token.why for token in piece.tokens), key=lambda why: why == Why.RELAXED, default=Why.MATCH)
        if console.is_terminal:
            console.print(Text(str(piece), STYLES[why.name.lower()]), end="", soft_wrap=True)
        else:  # to the letter
            console.file.write(str(piece))


def _legend() -> None:
    for why, style in STYLES.items():
        console.print(Text.assemble(("  " + why.ljust(11), style), (LEGEND[why], "dim")))


def _summary(stats: Any, elapsed: float) -> str:
    parts = [f"{stats.generated} tokens in {elapsed:.2f} s ({stats.generated / max(elapsed, 1e-9):,.0f} a second)"]
    if stats.drafted:
        parts.append(f"τ {stats.tau:.2f}")
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} drafted tokens stand")
        parts.append(f"{stats.relaxed} relaxed")
    parts += [
        f"{name} held {gate.passed}/{gate.asked}{f', alone refused {gate.refused}' if gate.refused else ''}"
        for name, gate in stats.gates.items()
    ]
    parts += [f"{name} never held, so nothing is relaxed" for name in stats.silent_gates]
    return " · ".join(parts)


def _as_json(output: Any) -> dict[str, Any]:
    stats = output.stats
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "policy": str(output.policy),
        "guarantee": output.guarantee.value,
        "bound": output.bound and str(output.bound),
        "provenance": [
            {
                "id": token.id,
                "why": token.why.name.lower(),
                "clause": token.clause,
                "target_choice": token.target_choice,
            }
            for token in output.provenance
        ],
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "generated": stats.generated,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "relaxed": stats.relaxed,
            "tau": stats.tau,
            "gates": {name: asdict(gate) for name, gate in stats.gates.items()},
        },
        "others": [_as_json(other) for other in output.others],
    }


@app.command()
def serve(
    context: typer.Context,
    model: Model = "fly-target",
    draft: DraftOption = "fly-draft",
    policy: Annotated[str, typer.Option(help="What requests get that say nothing.")] = "exact",
    k: K = 15,
    host: Annotated[str, typer.Option(help="0.0.0.0 to be reached from elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; its path otherwise.")] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="What requests may name: rules ('fly', with any parameters) or whole policies ('fly & after(2)'); may "
            "be given several times. All installed rules otherwise.",
        ),
    ] = None,
    require_lossless: Annotated[bool, typer.Option("--require-lossless", help="Refuse any other policy.")] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="FLY_API_KEY", help="Requests must bear one of these; may be given several times."),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="Completions that may wait; more get a 429.")] = 256,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of a completion.")] = None,
    max_k: Annotated[int, typer.Option(min=0, help="Most tokens a request may have drafted a round.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, its wait included.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish what runs when told to end.")] = 600.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
    config: ConfigFile = None,
) -> None:
    """Serve the model over HTTP as OpenAI does, with a playground at /."""
    services: list[Any] = []

    def lost(message: str) -> None:
        """A rank is gone: whoever waits for an answer is told before this process ends."""
        for service in services:
            service.llm.worker.fail(RuntimeError(message))
            time.sleep(0.5)

    with _plain_errors(), _ranks(context, config, lost) as ranks:
        from fly.llm import LLM
        from fly.serve import Server, Service, Settings

        settings = Settings(
            host=host,
            port=port,
            name=name,
            policies=None if policies is None else tuple(policies),
            require_lossless=require_lossless,
            api_keys=tuple(api_key or ()),
            max_waiting=max_waiting,
            max_tokens=max_tokens,
            max_k=max_k,
            timeout=timeout,
            # torchrun kills its processes 30 seconds after it told them to end
            drain_timeout=drain_timeout if ranks is None else min(drain_timeout, 22.0),
        )
        setup = _setup(
            context, config, model=model, draft=draft, policy=policy, k=k, dtype=dtype, device=device, kernels=kernels
        )
        llm = LLM.from_config(setup, ranks)
        memory = _loaded(ranks)
        if ranks is not None:
            if not ranks.leads:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)  # it ends when the first rank has finished what it has
                llm.follow()
                return
            llm.lead()
        services.append(Service(llm, settings, draft=setup.draft, name=setup.model))
        services[0].metrics.loaded([of_rank["peak"] for of_rank in memory])
        try:
            Server(services[0]).run()
        finally:
            llm.close()


@app.command()
def models() -> None:
    """List the bundled checkpoints."""
    with _plain_errors():
        from fly.bundled import BUNDLED, CHECKPOINTS, resolve_checkpoint
        from fly.models import LlamaConfig

        table = Table("name", "layers × width", "context", "tokens", "size", "dtype")
        for name in BUNDLED:
            directory = resolve_checkpoint(name)
            config, raw = LlamaConfig.read(directory)
            size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
            table.add_row(
                name,
                f"{config.num_hidden_layers} × {config.hidden_size}",
                str(config.max_position_embeddings),
                str(config.vocab_size),
                f"{size / 1e6:.1f} MB",
                str(raw.get("torch_dtype")),
            )
        console.print(table)
        console.print(f"[dim]in {escape(str(CHECKPOINTS))}; each has a README.md with its training and accuracy[/]")


@app.command()
def policies() -> None:
    """List the acceptance policies and conditions that ``--policy`` knows, with what each promises."""
    with _plain_errors():
        from fly.policies import condition_types, policy_types
        from fly.policies.registry import PRESETS

        table = Table(
            "policy", "guarantee", _folded("what it is"), title="Policies", title_justify="left", show_lines=True
        )
        presets = {name: make() for name, make in PRESETS.items()}
        for name, rule in policy_types().items():
            instance = rule()
            promise = f"{instance.guarantee.value}\n{instance.bound}" if instance.bound else instance.guarantee.value
            table.add_row(_call(name, rule), promise, escape(_summary_of(rule)))
            for preset, made in presets.items():
                if isinstance(made, rule):
                    table.add_row(preset, made.guarantee.value, f"{made}: {_summary_of(PRESETS[preset])}")
        console.print(table)
        table = Table(
            "condition", _folded("when it holds"), title="Conditions: combine with & | ~", title_justify="left"
        )
        for name, condition in condition_types().items():
            table.add_row(_call(name, condition), escape(_summary_of(condition)))
        console.print(table)


def _folded(heading: str) -> Column:
    """A column of sentences: a word too long for it goes on in the next line."""
    return Column(heading, overflow="fold")


@app.command()
def drafts() -> None:
    """List the draft strategies that ``--draft`` knows, with their parameters."""
    with _plain_errors():
        from fly.drafts import draft_types

        table = Table(
            "strategy", _folded("what it does"), title="Draft strategies", title_justify="left", show_lines=True
        )
        for name, strategy in draft_types().items():
            table.add_row(_call(name, strategy), escape(_summary_of(strategy)))
        console.print(table)
        console.print(
            "[dim]a checkpoint's name or directory is model(...) of it; a+b+c is a cascade, cheapest first: each "
            "drafts for the next; 'fly bench drafts' measures them[/]",
            highlight=False,
        )


@app.command()
def check(
    rule: Annotated[
        str | None,
        typer.Argument(help="module:Class (with parameters if you like), module:instance, or any policy expression."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Check a draft strategy instead, such as my_drafts:MyDraft.")
    ] = None,
    problems: Annotated[
        int, typer.Option(min=0, help="Held-out problems to show what it gains and breaks; 0 skips that.")
    ] = 24,
    k: K = 15,
) -> None:
    """Prove or refute an acceptance rule in a minute: the conformance kit, then speed and accuracy on real models.

    With --draft the same for a draft strategy.
    """
    with _plain_errors(alone=True):
        import torch

        from fly.policies import parse_policy
        from fly.testing import CHECKS, DRAFT_CHECKS, check_draft, check_policy

        if (rule is None) == (draft is None):
            raise ValueError("give either a rule or --draft")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # blocks of a few numbers: more threads only wait for one another
        policy = None if rule is None else parse_policy(rule, trusted=True)
        with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as progress:
            task = progress.add_task("checking", total=len(CHECKS if policy else DRAFT_CHECKS))
            if policy is not None:
                report = check_policy(policy, raises=False, advance=lambda: progress.advance(task))
            else:
                report = check_draft(
                    lambda: _strategy(str(draft)), raises=False, advance=lambda: progress.advance(task)
                )
        torch.set_num_threads(threads)
        promise = f": declared {report.promise}" if report.promise else ""
        table = Table("", "check", "what was found", title=f"{report.subject}{promise}")
        for finding in report.findings:
            mark = "[green]ok[/]" if finding.passed else "[bold red]FAIL[/]"
            table.add_row(mark, finding.check, escape(finding.detail))
        console.print(table)
        if not report.passed:
            errors.print(f"[bold red]{escape(report.subject)} breaks the contract[/]", soft_wrap=True)
            raise typer.Exit(1)
        if problems and policy is not None:
            _compare_on_bundled(policy, problems, k, "heldout", 0, "auto", multi_level=False)
        elif problems:
            _show_drafts((str(draft),), "exact", max(1, problems // 3), k, "fly-target", "auto", "auto")


def _strategy(text: str) -> Any:
    """A fresh strategy of a text; in float32, since a coarser model rounds otherwise in another batch."""
    from fly.drafts import parse_draft

    if (strategy := parse_draft(text, trusted=True, dtype="float32")) is None:
        raise ValueError("'none' drafts nothing, and there is nothing to check")
    return strategy


def _summary_of(thing: Any) -> str:
    """The first paragraph of a docstring."""
    import inspect

    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("``", "")


def _call(name: str, make: Any) -> str:
    """How a rule or strategy is called, with its parameters and their defaults."""
    import inspect

    parameters = [
        p for p in inspect.signature(make).parameters.values() if not callable(p.default) or p.default is p.empty
    ]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    return f"{name}({', '.join(shown)})" if shown else name


@bench.command("policy")
def bench_policy(
    policy: Annotated[list[str] | None, typer.Option(help="Policies; may be given several times.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes B.")] = None,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Draft lengths K.")] = None,
    vocab: Annotated[list[int] | None, typer.Option(min=16, help="Vocabulary sizes V.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
) -> None:
    """What a decision costs, for B × K × V, beside the verification forward it follows (12 layers of width 768)."""
    with _plain_errors(alone=True):
        from fly.bench.policy import measure_decisions
        from fly.models.loading import resolve_device, resolve_dtype
        from fly.policies import parse_policy

        rules = [parse_policy(text, trusted=True) for text in policy or ["exact", "fly"]]
        shapes = [(b, n, v) for v in vocab or [32_000, 128_256, 262_144] for b in rows or [1, 8] for n in k or [15]]
        table = Table("policy", "B", "K", "V", "forward", "greedy", "share", "sampled", "share")
        total = len(rules) * len(shapes)
        with Progress(
            TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
        ) as bar:
            task = bar.add_task("", total=total)
            for rule in rules:
                for cost in measure_decisions(
                    rule, shapes, dtype=resolve_dtype(dtype, {}), device=resolve_device(device)
                ):
                    shape = (str(rule), f"{cost.rows}", f"{cost.k}", f"{cost.vocab:,}", f"{cost.forward * 1e3:,.1f} ms")
                    decisions = [
                        text
                        for seconds in (cost.greedy, cost.sampled)
                        for text in (f"{seconds * 1e3:,.2f} ms", f"{seconds / cost.forward:.1%}")
                    ]
                    table.add_row(*shape, *decisions)
                    bar.advance(task)
        console.print(table)
        console.print(
            "[dim]share: the decision's time over the forward's, medians of 9; sampled: temperature 0.8, top-p 0.95[/]"
        )


@bench.command("drafts")
def bench_drafts(
    draft: Annotated[list[str] | None, typer.Option(help="Strategies; may be given several times.")] = None,
    policy: Policy = "exact",
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems a kind, and unpredictable texts.")] = 8,
    repeats: Annotated[
        int,
        typer.Option(
            min=0, help="Times an unpredictable text is decoded, for each adaptive(...) draft; 0 leaves it out."
        ),
    ] = 3,
    k: K = 15,
    model: Model = "fly-target",
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Every draft strategy on every kind of task; and adaptive ones where nothing can be predicted."""
    with _plain_errors(alone=True):
        from fly.bench.drafts import STRATEGIES

        names = tuple(draft or STRATEGIES)
        _show_drafts(names, policy, problems, k, model, dtype, device, kernels)
        inner = [name[len("adaptive(") : -1] for name in names if re.fullmatch(r"adaptive\(.*\)", name)]
        if inner and repeats:
            _show_promise(inner, policy, problems, repeats, k, model, dtype, device, kernels)


@bench.command("plan")
def bench_plan(
    typed: typer.Context,
    target: Annotated[
        str | None, typer.Option(help="llama-3.1-8b, -70b, -405b, or a checkpoint; none shows the paper's settings.")
    ] = None,
    draft: Annotated[str, typer.Option(help="Likewise, or 'none'.")] = "llama-3.1-8b",
    tau: Annotated[float | None, _number(1, help="Tokens a round emits; needed with --target.")] = None,
    draft_tau: Annotated[float, _number(1, help="Tokens a forward of the draft gives (multi-level).")] = 1.0,
    k: K = 15,
    device: Annotated[str, typer.Option(help="a100, h100, h200 or mi300x.")] = "h100",
    ranks: Annotated[int, typer.Option(min=1, help="Devices in all.")] = 8,
    per_node: Annotated[int, typer.Option(min=1, help="Devices of one node.")] = 8,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens each has behind it.")] = 2048,
    check: Annotated[
        bool, typer.Option("--check", help="Predict the bundled pair (or --target, --draft) here, and run it.")
    ] = False,
    policy: Policy = "fly",
    dtype: Annotated[str, typer.Option(help="With --check: auto, bfloat16, float16 or float32.")] = "auto",
    draft_placement: Annotated[str, typer.Option(help="With --check: auto, replicated or sharded.")] = "auto",
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
) -> None:
    """Whether a setting fits on machines, and what speculation should gain there, by a model of costs.

    --check compares the model with this machine, on as many ranks as torchrun starts.
    """
    with _plain_errors(), _ranks(typed) as here:
        from fly.bench.calibrate import check_here
        from fly.bench.plan import DEVICES, MODELS, PAPER, Machines, Setting, forecast
        from fly.bundled import resolve_checkpoint
        from fly.models import LlamaConfig
        from fly.policies import parse_policy

        if check:
            pair = (target or "fly-target", "fly-draft" if draft in MODELS else draft)
            rule: Any = parse_policy(policy, trusted=True)
            _show_check(check_here(*pair, rule, k, dtype, here, draft_placement), *pair)  # type: ignore[arg-type]
            return
        if device not in DEVICES:
            raise ValueError(f"device {device!r} is unknown; choices: {list(DEVICES)}")

        def sizes(name: str) -> LlamaConfig:
            return MODELS[name] if name in MODELS else LlamaConfig.read(resolve_checkpoint(name))[0]

        common: dict[str, Any] = {"draft_tau": draft_tau, "rows": rows, "context": context}
        small = None if draft == "none" else sizes(draft)
        plans: list[tuple[str, Setting, int, float | None]] = []
        if target is None:
            plans += [(p.name, Setting(MODELS[p.target], small, p.k, p.tau, **common), p.ranks, p.gain) for p in PAPER]
        elif tau is None:
            raise ValueError("--tau is needed with --target: how many tokens a round emits is nothing a plan can tell")
        else:
            plans.append((f"{target} : {draft}", Setting(sizes(target), small, k, tau, **common), ranks, None))
        table = Table(title=f"{device}, {per_node} a node, {rows} × {context} tokens", title_justify="left")
        table.add_column("")
        cells: list[list[str]] = [[] for _ in range(12)]
        for name, setting, count, published in plans:
            found = forecast(setting, Machines(DEVICES[device], count, per_node))
            for placement in found.draft:
                table.add_column(escape(name), justify="right")
                memory = found.memory[placement]
                fits = "" if memory <= DEVICES[device].memory else "\n[bold red]does not fit[/]"
                column = (
                    f"{count}",
                    f"{setting.k}",
                    f"{setting.tau:g}",
                    placement,
                    f"{memory / 1e9:,.0f} of {DEVICES[device].memory / 1e9:,.0f} GB{fits}",
                    f"{found.step * 1e3:.1f} ms",
                    f"{found.verify * 1e3:.1f} ms",
                    f"{found.draft[placement] * 1e3:.1f} ms",
                    f"{1 / found.step:,.0f}",
                    f"{setting.tau / found.round(placement):,.0f}",
                    f"{found.gain(placement):.2f}×",
                    "–" if published is None else f"{published:.2f}×",
                )
                for row, cell in zip(cells, column):
                    row.append(cell)
        names = ("ranks", "K", "τ", "draft", "a rank holds", "plain step", "verification", "draft step")
        for heading, row in zip((*names, "tokens/s plain", "with draft", "gain", "published"), cells):
            table.add_row(heading, *row)
        console.print(table)
        console.print(
            "[dim]published: arXiv 2511.22972, on hardware and an engine of its own · gain: over no draft "
            "· a step without graphs, which on 8 ranks costs a small draft most of its time[/]",
            highlight=False,
        )


def _show_check(found: Any, target: str, draft: str) -> None:
    here, beside = found.target.device, found.draft.device
    table = Table(title=f"{target} : {draft} on {found.target.ranks} ranks, here", title_justify="left")
    for heading in ("", "predicted", "measured", "predicted / measured"):
        table.add_column(heading, justify="right")
    for name, predicted, measured in zip(("plain", f"draft, {found.placement}"), found.predicted, found.measured):
        table.add_row(name, f"{predicted:,.0f} tokens/s", f"{measured:,.0f} tokens/s", f"{predicted / measured:.2f}")
    gains = [speeds[1] / speeds[0] for speeds in (found.predicted, found.measured)]
    table.add_row("gain", f"{gains[0]:.2f}×", f"{gains[1]:.2f}×", f"{gains[0] / gains[1]:.2f}")
    console.print(table)
    table = Table(title="figures, of stand-ins for", title_justify="left")
    for heading in ("", target, draft):
        table.add_column(escape(heading), justify="right")
    rows: dict[str, Any] = {
        "weights read": lambda d: f"{d.bandwidth / 1e9:.1f} GB/s",
        f"multiplied, {found.tokens} tokens": lambda d: f"{d.flops / 1e9:,.0f} GFLOP/s",
        "keys and values read": lambda d: f"{d.cached / 1e9:.1f} GB/s",
        "a layer's calls": lambda d: f"{d.layer * 1e6:,.0f} µs",
        "a forward's calls": lambda d: f"{d.forward * 1e6:,.0f} µs",
    }
    for name, show in rows.items():
        table.add_row(name, show(here), show(beside))
    console.print(table)
    exchange = f" · all-reduce {here.link.latency * 1e6:,.0f} µs" if found.target.ranks > 1 else ""
    console.print(
        f"τ {found.tau:.2f} · engine: a round {here.round * 1e6:,.0f} µs, a drafted token {here.drafted * 1e6:,.0f} µs"
        f"{exchange}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_memory_of(found.memory), highlight=False, soft_wrap=True)


def _loaded(ranks: Any, quiet: bool = False) -> list[dict[str, int]]:
    """What every rank took of memory when it had loaded; said where there are several. All ranks must ask."""
    from fly.parallel import memory_here

    memory = [memory_here()] if ranks is None else ranks.collect(memory_here())
    if ranks is not None and not quiet:
        errors.print(f"fly: {len(memory)} ranks; {_memory_of(memory)}", highlight=False, soft_wrap=True)
    return memory


def _memory_of(memory: list[dict[str, int]]) -> str:
    """The same in words."""

    def each(name: str) -> str:
        return ", ".join(f"{of_rank[name] / 1e6:,.0f}" for of_rank in memory)

    device = f", of their devices {each('device')} MB" if any(of_rank["device"] for of_rank in memory) else ""
    return f"memory by rank, loaded: at most {each('peak')} MB{device}; of their own {each('own')} MB"


def _show_drafts(
    names: tuple[str, ...],
    policy: str,
    problems: int,
    k: int,
    model: str,
    dtype: str,
    device: str,
    kernels: str = "auto",
) -> None:
    """Measure strategies, the single draft first, and print the table."""
    from fly.bench.drafts import STRATEGIES, measure_drafts
    from fly.bundled.tasks import KINDS
    from fly.policies import parse_policy

    names = tuple(dict.fromkeys((STRATEGIES[0], *names)))
    rule = parse_policy(policy, trusted=True)
    total = (len(names) + 1) * len(KINDS) * problems
    columns = (TextColumn("drafting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        rows = measure_drafts(names, rule, problems, k, model, dtype, device, kernels, lambda: progress.advance(task))
    title = f"{rule}, {problems} held-out problems a kind, temperature 0, k {k}, batch 1"
    _print_named(("none", *names), lambda called: drafts_table(rows, title, called))
    console.print(
        f"[dim]τ: tokens a target forward emits · tok/s: prompt included · × AR, × single: speed over autoregressive "
        f"decoding and over {names[0]} · right: answers[/]",
        highlight=False,
    )


@bench.command("batch")
def bench_batch(
    context: typer.Context,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at a time; may be given several times.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all, held-out problems of all kinds.")] = 64,
    policy: Policy = "fly",
    draft: Annotated[str, typer.Option(help="Who proposes, as for fly generate.")] = "fly-draft",
    k: K = 15,
    model: Model = "fly-target",
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a plot of tokens/s to this file (png, svg or pdf).", callback=to_be_written),
    ] = None,
    json_: Json = None,
) -> None:
    """Throughput, latency and memory for 1 to 64 requests at a time: autoregressive, exact and relaxed speculation."""
    with _plain_errors(), _ranks(context) as ranks:
        from fly.bench.batch import measure_load
        from fly.bench.plot import check_plot, save_lines
        from fly.bundled.tasks import KINDS, problems
        from fly.eval import Setting
        from fly.llm import LLM
        from fly.policies import Exact, parse_policy
        from fly.types import SamplingParams

        check_plot(plot)
        sizes, rule = size or [1, 2, 4, 8, 16, 32, 64], parse_policy(policy, trusted=True)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels}
        options |= {"cache_tokens": max(sizes) * 1024, "ranks": ranks}
        plain = LLM(model, **options)
        fast = LLM(plain, draft, **options)
        if ranks is not None:
            _loaded(ranks)
        settings = [Setting("autoregressive", plain, 0), Setting("exact", fast, k, Exact())]
        if rule != Exact():
            settings.append(Setting(rule_name(rule), fast, k, rule))
        each = [list(problems(kind, "heldout", 0, -(-requests // len(KINDS)))) for kind in KINDS]
        asked = [problem for turn in zip(*each) for problem in turn][:requests]
        columns = (TextColumn("batching"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(sizes) * len(settings) * len(asked))
            loads = measure_load(
                settings, sizes, asked, SamplingParams(temperature=0.0, max_tokens=400), lambda: progress.advance(task)
            )
        title = f"{model}, {draft}, temperature 0, k {k}, {len(asked)} held-out problems, kernels {kernels_of(plain)}"
        console.print(load_table(loads, title))
        console.print(
            "[dim]first: ms to a request's first token · each: ms a token after it (medians / 95 of 100)\n"
            "unused: share of the pages in use in which no token stands[/]",
            highlight=False,
        )
        leads = ranks is None or ranks.leads
        if plot is not None and leads:
            lines = {
                setting.name: [(load.size, load.tokens_per_second) for load in loads if load.setting is setting]
                for setting in settings
            }
            save_lines(plot, title, "requests at a time", "tokens/s", lines, log_x=True)
        if json_ is not None and leads:
            json_.write_text(json.dumps([_load_as_json(load) for load in loads], indent=2), encoding="utf-8")


def load_table(loads: list[Any], title: str) -> Table:
    """Throughput, latency and memory by size; the first setting of each size is autoregressive, the second exact."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("size", "decoding", "tok/s", "× AR", "× exact", "first", "each", "unused", "right"):
        table.add_column(heading, justify="left" if heading == "decoding" else "right", no_wrap=heading != "decoding")
    for load in loads:
        same = [other for other in loads if other.size == load.size]
        plain, exact = same[:2]

        def two(values: list[float], digits: int) -> str:
            middle, high = _percentiles(values)
            return f"{middle * 1e3:,.{digits}f}/{high * 1e3:,.{digits}f}"

        table.add_row(
            f"{load.size}" if load is plain else "",
            "AR" if load is plain else escape(load.setting.name),
            f"{load.tokens_per_second:,.0f}",
            f"{load.tokens_per_second / plain.tokens_per_second:.2f}×",
            f"{load.tokens_per_second / exact.tokens_per_second:.2f}×",
            two(load.first, 0),
            two(load.each, 1),
            f"{load.waste:.1%}",
            f"{sum(load.right)}/{len(load.right)}",
            end_section=load is same[-1],
        )
    return table


def _percentiles(values: list[float]) -> tuple[float, float]:
    """The median and the 95th of 100."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _load_as_json(load: Any) -> dict[str, Any]:
    latencies = {name: _percentiles(getattr(load, name)) for name in ("first", "each", "whole")}
    return {
        "size": load.size,
        "decoding": load.setting.name,
        "policy": str(load.setting.policy),
        "k": load.setting.k,
        "tokens_per_second": load.tokens_per_second,
        "tau": load.stats.tau,
        "requests": len(load.right),
        "accuracy": load.accuracy,
        "unused": load.waste,
        "preempted": load.stats.preempted,
        **{f"{name}_{which}": times[n] for name, times in latencies.items() for n, which in enumerate(("p50", "p95"))},
    }


def drafts_table(rows: list[Any], title: str, names: Mapping[str, str]) -> Table:
    """τ and speed by kind; the first row is autoregressive, the second what the others are held to. ``names`` are what
    to call those whose own name is too long."""
    plain, single = rows[0], rows[1]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("draft", no_wrap=True)
    digits = max(len(f"{r.tokens_per_second:.0f}") for row in rows for r in row.kinds.values())
    for kind in plain.kinds:
        table.add_column(f"{kind}\nτ tok/s", justify="right", no_wrap=True)
    for heading in ("all\ntok/s", "×\nAR", "×\nsingle", "\nright"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        right = [answer for r in row.kinds.values() for answer in r.right]
        table.add_row(
            escape(names.get(row.name, row.name)),
            *(f"{r.stats.tau:5.2f} {r.tokens_per_second:{digits}.0f}" for r in row.kinds.values()),
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second / plain.tokens_per_second:.2f}",
            f"{row.tokens_per_second / single.tokens_per_second:.2f}",
            f"{sum(right)}/{len(right)}",
        )
    return table


def _print_named(names: Iterable[str], build: Callable[[Mapping[str, str]], Table]) -> None:
    """Print a table with ``names`` in a column. Those too long for the console's width are cut and numbered, and told
    in full below it. ``build`` makes the table, given what to call such ones."""
    table, longest = build({}), max(map(len, names := list(dict.fromkeys(names))))
    cut: dict[str, str] = {}
    if (over := Measurement.get(console, console.options.update_width(9999), table).maximum - console.width) > 0:
        for name in names:
            if len(name) > (room := max(longest - over, 5)):
                mark = str(len(cut) + 1).translate(_RAISED)
                cut[name] = f"{name[: room - len(mark) - 1]}…{mark}"
        table = build(cut)
    console.print(table)
    for name, short in cut.items():
        console.print(
            f"{short[short.index('…') + 1 :]} {name}", style="dim", markup=False, highlight=False, soft_wrap=True
        )


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def _show_promise(
    names: list[str],
    policy: str,
    problems: int,
    repeats: int,
    k: int,
    model: str,
    dtype: str,
    device: str,
    kernels: str,
) -> None:
    """Measure strategies and their adaptive twins where nothing can be predicted, and say whether the promise holds."""
    from fly.bench.drafts import PROMISE, measure_promise
    from fly.policies import parse_policy

    columns = (TextColumn("where nothing can be predicted"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=2 * len(names) * problems * repeats)
        rule = parse_policy(policy, trusted=True)
        found = measure_promise(
            names, rule, problems, repeats, k, model, dtype, device, kernels, lambda: progress.advance(task)
        )
    title = f"speed over autoregressive decoding, {problems} texts of 256 tokens, {repeats} times each"
    _print_named(names, lambda called: promise_table(found, title, called))
    said = {True: "kept by", False: "broken by", None: "not decided (too few or too uneven runs) for"}
    verdicts = [
        f"{said[kept]} {', '.join(which)}"
        for kept in (False, None, True)
        if (which := [f"{row.name} ({row.text})" for row in found if row.kept is kept])
    ]
    promise = f"Promise, at most {1 - PROMISE:.0%} slower where nothing can be predicted: {'; '.join(verdicts)}"
    console.print(promise, markup=False, highlight=False)
    pairs = problems * repeats
    spread = ", with 95 % intervals" if pairs >= 6 else ", with the least and the most" if pairs >= 3 else ""
    console.print(
        f"[dim]medians over {pairs} pairs of runs{spread} · τ: of the draft as it is · always wrong: a drafter "
        "that costs as much · AR again: what such a ratio is worth here[/]",
        highlight=False,
    )


def promise_table(found: list[Any], title: str, names: Mapping[str, str]) -> Table:
    """Strategies where nothing can be predicted. ``names`` are what to call those whose own name is too long."""

    def shown(ratio: Any) -> str:  # two runs have no spread
        return f"{ratio.median:.3f}" + (f" ({ratio.low:.3f}–{ratio.high:.3f})" if ratio.pairs >= 3 else "")

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("draft", no_wrap=True)
    table.add_column("text", no_wrap=True)
    for heading in ("τ", "as it is", "adaptive", "AR again"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        name = escape(names.get(row.name, row.name))
        ratios = (shown(row.adaptive), shown(row.again))
        table.add_row(name, row.text, f"{row.tau:.2f}", f"{row.fixed.median:.2f}", *ratios)
    return table


@app.command()
def demo(
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems, of all kinds in turn.")] = 48,
    k: Annotated[int, typer.Option(min=1, help="Most tokens drafted a round.")] = 15,
    policy: Policy = "fly",
    split: Annotated[str, typer.Option(help="heldout (in domain) or ood (out of domain).")] = "heldout",
    seed: Annotated[int, typer.Option(help="Which problems are drawn.")] = 0,
    dtype: Dtype = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Show what speculation gains: one completion in colours, then a table over held-out problems."""
    with _plain_errors(alone=True):
        from fly.bundled.tasks import problems as draw_problems
        from fly.llm import LLM
        from fly.policies import parse_policy
        from fly.types import SamplingParams

        rule = parse_policy(policy, trusted=True)
        (question,) = list(draw_problems(None, split, seed, 1))
        llm = LLM("fly-target", "fly-draft", k=k, dtype=dtype, kernels=kernels)
        params = SamplingParams(temperature=0.0, max_tokens=400)

        console.print(f"[bold]fly-target[/] verifies drafts of [bold]fly-draft[/] by [bold]{escape(str(rule))}[/]\n")
        console.print(Text(question.prompt, "italic"))
        console.print()
        stats, elapsed = _show_stream(llm, llm.chat_prompt(question.prompt), params, rule)
        console.print()
        _legend()
        console.print(f"[dim]{_summary(stats, elapsed)} · kernels {kernels_of(llm)}[/]\n", highlight=False)

        _compare_on_bundled(rule, problems, k, split, seed, dtype, multi_level=True, kernels=kernels)


def _compare_on_bundled(
    rule: Any, count: int, k: int, split: str, seed: int, dtype: str, multi_level: bool, kernels: str = "auto"
) -> None:
    """Run held-out problems through the bundled models by each setting, and print the table."""
    from fly.eval import Setting
    from fly.llm import LLM

    llm = LLM("fly-target", "fly-draft", k=k, dtype=dtype, kernels=kernels)
    settings = _settings(llm, k, [rule])
    if multi_level:
        levels = LLM(llm, "ngram+fly-draft", k=k, dtype=dtype, kernels=kernels)  # of the same weights in memory
        settings.append(Setting(f"{rule_name(rule)}, multi-level", levels, k, rule))
    _compare(settings, None, split, seed, count)


def _settings(llm: Any, k: int, rules: list[Any]) -> list[Any]:
    """Autoregressive decoding, exact speculation, and each rule that is another."""
    from fly.eval import Setting
    from fly.policies import Exact

    different = [rule for number, rule in enumerate(rules) if rule not in rules[:number]]
    named = [Setting(rule_name(rule), llm, k, rule) for rule in different if rule != Exact()]
    names = [setting.name for setting in named]
    named = [replace(each, name=str(each.policy)) if names.count(each.name) > 1 else each for each in named]
    return [Setting("autoregressive", llm, 0), Setting("exact", llm, k, Exact()), *named]


def _compare(settings: list[Any], kind: str | None, split: str, seed: int, count: int) -> list[Any]:
    """Run the bundled problems through settings that take turns, and print the table."""
    from fly.bundled.tasks import problems as draw_problems
    from fly.eval import compare
    from fly.types import SamplingParams

    questions = list(draw_problems(kind, split, seed, count))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {setting.name: progress.add_task(escape(setting.name), total=count) for setting in settings}
        params = SamplingParams(temperature=0.0, max_tokens=400)
        results = compare(settings, questions, params, lambda name: progress.advance(tasks[name]))
    what = f"{count} {split} {kind or ''} problems".replace("  ", " ")
    kernels = kernels_of(settings[0].llm)
    console.print(comparison_table(results, f"{what}, temperature 0, k {settings[1].k}, batch 1, kernels {kernels}"))
    console.print(
        "\n[dim]AR: autoregressive decoding · τ: tokens a target forward emits · drafts kept: share of drafted tokens "
        "emitted · gate open: share of mismatches at which the target was undecided · recovery: accuracy over AR's[/]",
        highlight=False,
    )
    composed = {rule_name(setting.policy): setting.policy for setting in settings if "…" in setting.name}
    for name, rule in composed.items():
        console.print(f"[dim]{escape(name)}: {escape(str(rule))}[/]", highlight=False)
    for result in results:
        for gate in result.stats.silent_gates:
            asked = result.stats.gates[gate].asked
            name = escape(result.setting.name)
            console.print(f"[yellow]{escape(gate)} never held ({asked} mismatches): {name} relaxes nothing[/]")
    return results


@app.command("eval")
def evaluate(
    context: typer.Context,
    policy: Annotated[list[str] | None, typer.Option(help="Rules to compare; may be given several times.")] = None,
    model: Model = "fly-target",
    draft: DraftOption = "fly-draft",
    k: K = 15,
    problems: Annotated[int, typer.Option(min=1, help="How many problems.")] = 48,
    kind: Annotated[str | None, typer.Option(help="arithmetic, text or code; all in turn if not given.")] = None,
    split: Annotated[str, typer.Option(help="heldout (in domain) or ood (out of domain).")] = "heldout",
    seed: Annotated[int, typer.Option(help="Which problems are drawn.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
    json_: Json = None,
) -> None:
    """Accuracy and speed of rules on the bundled tasks, beside autoregressive decoding and exact speculation."""
    with _plain_errors(), _ranks(context) as ranks:
        from fly.llm import LLM
        from fly.policies import parse_policy

        if draft == "none":
            raise ValueError("rules judge what is drafted; --draft none leaves nothing to compare")
        rules: list[Any] = [parse_policy(text, trusted=True) for text in policy or ["fly"]]
        llm = LLM(model, draft, k=k, dtype=dtype, device=device, kernels=kernels, ranks=ranks)
        if ranks is not None:
            _loaded(ranks)
        results = _compare(_settings(llm, k, rules), kind, split, seed, problems)
        if json_ is not None and (ranks is None or ranks.leads):
            json_.write_text(json.dumps([_result_as_json(result) for result in results], indent=2), encoding="utf-8")


def _result_as_json(result: Any) -> dict[str, Any]:
    return {
        "decoding": result.setting.name,
        "policy": str(result.setting.policy),
        "k": result.setting.k,
        "problems": len(result.right),
        "accuracy": result.accuracy,
        "tokens_per_second": result.tokens_per_second,
        "tau": result.stats.tau,
        "acceptance_rate": result.stats.acceptance_rate,
        "relaxed": result.stats.relaxed,
        "generated": result.stats.generated,
    }


def rule_name(rule: Any) -> str:
    """A short name for a table: without parameters, and of what is composed only that there is more."""
    from fly.policies.base import Relaxed

    return f"{rule.base.name} | …" if isinstance(rule, Relaxed) else rule.name


def comparison_table(results: list[Any], title: str) -> Table:
    """Speed, acceptance and accuracy, a row a setting; the first is autoregressive, the second exact speculation."""
    plain, exact = results[0], results[1]

    def gate(stats: Any) -> str:
        counts = [held for name, held in stats.gates.items() if name.startswith("entropy")]
        asked, passed = sum(c.asked for c in counts), sum(c.passed for c in counts)
        return f"{passed / asked:.0%}" if asked else "–"

    columns: dict[str, Any] = {
        "tok/s": lambda r: f"{r.tokens_per_second:,.0f}",
        "over AR": lambda r: f"{r.tokens_per_second / plain.tokens_per_second:.2f}×",
        "over exact": lambda r: f"{r.tokens_per_second / exact.tokens_per_second:.2f}×",
        "τ": lambda r: f"{r.stats.tau:.2f}",
        "drafts kept": lambda r: f"{r.stats.acceptance_rate:.0%}" if r.stats.drafted else "–",
        "gate open": lambda r: gate(r.stats),
        "relaxed": lambda r: f"{r.stats.relaxed / r.stats.generated:.1%}" if r.stats.drafted else "–",
        "accuracy": lambda r: f"{r.accuracy:.1%}",
        "recovery": lambda r: f"{r.accuracy / plain.accuracy:.1%}" if plain.accuracy else "–",
    }
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("decoding", overflow="fold")
    for heading in columns:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for result in results:
        table.add_row(escape(result.setting.name), *(show(result) for show in columns.values()))
    return table


# Registers more commands of ``fly bench``; last, since they use what is above.
from fly.bench import commands as _commands  # noqa: E402, F401
