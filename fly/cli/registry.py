"""What there is, and whether it is sound: ``fly models``, ``policies``, ``drafts`` and ``check``."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from rich.markup import escape

from fly.bundled import BUNDLED, CHECKPOINTS, resolve_checkpoint
from fly.cli.bench import show_drafts
from fly.cli.comparison import compare_on_bundled
from fly.cli.options import K
from fly.cli.run import alone, command
from fly.cli.show import console, errors, note, print_list, progress, sentences
from fly.drafts import draft_types, parse_draft
from fly.models import LlamaConfig
from fly.models.tokenizer import Tokenizer
from fly.policies import AcceptancePolicy, condition_types, parse_policy, policy_types
from fly.policies.registry import PRESETS


@command
def models() -> None:
    """List the bundled checkpoints."""
    rows = []
    for name in BUNDLED:
        directory = resolve_checkpoint(name)
        config, raw = LlamaConfig.read(directory)
        layers = f"{config.num_hidden_layers} × {config.hidden_size}"
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        numbers = (str(config.max_position_embeddings), str(config.vocab_size), f"{size / 1e6:.1f} MB")
        rows.append((name, layers, *numbers, str(raw.get("torch_dtype"))))
    print_list(rows, "name", "layers × width", "context", "tokens", "size", "dtype")
    console.print(f"[dim]in {escape(str(CHECKPOINTS))}; each has a README.md with its training and accuracy[/]")


@command
def policies() -> None:
    """List the acceptance policies and conditions that ``--policy`` knows, with what each promises."""
    presets, rows = {name: make() for name, make in PRESETS.items()}, []
    for name, rule in policy_types().items():
        instance = rule()
        promise = f"{instance.guarantee.value}\n{instance.bound}" if instance.bound else instance.guarantee.value
        rows.append((_call(name, rule), promise, escape(_summary_of(rule))))
        for preset, made in presets.items():
            if isinstance(made, rule):
                rows.append((preset, made.guarantee.value, f"{made}: {_summary_of(PRESETS[preset])}"))
    print_list(rows, "policy", "guarantee", sentences("what it is"), title="Policies", show_lines=True)
    conditions = ((_call(name, kind), escape(_summary_of(kind))) for name, kind in condition_types().items())
    title = "Conditions: combine with & | ~"
    print_list(conditions, "condition", sentences("when it holds"), title=title)


@command
def drafts() -> None:
    """List the draft strategies that ``--draft`` knows, with their parameters."""
    rows = ((_call(name, kind), escape(_summary_of(kind))) for name, kind in draft_types().items())
    print_list(rows, "strategy", sentences("what it does"), title="Draft strategies", show_lines=True)
    note(
        "a checkpoint's name or directory is model(...) of it; a+b+c is a cascade, cheapest first: each "
        "drafts for the next; 'fly bench drafts' measures them"
    )


@alone
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
    import torch

    from fly.testing import CHECKS, DRAFT_CHECKS, check_draft, check_policy

    if (rule is None) == (draft is None):
        raise ValueError("give either a rule or --draft")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks of a few numbers: more threads only wait for one another
    policy = None if rule is None else parse_policy(rule, trusted=True)
    with progress(len(CHECKS if policy else DRAFT_CHECKS), "checking") as advance:
        if policy is not None:
            report = check_policy(policy, raises=False, advance=advance)
        else:
            report = check_draft(lambda: _strategy(str(draft)), raises=False, advance=advance)
    torch.set_num_threads(threads)
    promise = f": declared {report.promise}" if report.promise else ""
    marks = {True: "[green]ok[/]", False: "[bold red]FAIL[/]"}
    found = ((marks[finding.passed], finding.check, escape(finding.detail)) for finding in report.findings)
    title = f"{report.subject}{promise}"
    print_list(found, "", "check", "what was found", title=title, title_justify="center")
    if problems:
        _measured(report.passed, policy, str(draft), problems, k)
    if not report.passed:
        errors.print(f"[bold red]{escape(report.subject)} breaks the contract[/]", soft_wrap=True)
        raise typer.Exit(1)


def _measured(sound: bool, policy: AcceptancePolicy | None, draft: str, problems: int, k: int) -> None:
    """Speed and accuracy of a policy or else a draft on the bundled models, of one that is not ``sound`` too, as far as
    it gets."""
    directory = resolve_checkpoint("fly-target")
    tokenizer = Tokenizer(directory)
    try:
        if policy is not None:
            policy.bind(tokenizer.vocabulary(LlamaConfig.read(directory)[0].vocab_size))
    except ValueError as error:
        note(f"not measured, since it is not for the bundled models: {escape(str(error))}")
        return
    try:
        if policy is not None:
            compare_on_bundled(policy, problems, k)
        else:
            show_drafts((draft,), parse_policy("exact"), max(1, problems // 3), k)
    except Exception as error:
        if sound:
            raise
        note(f"not measured: on the bundled models it raised {type(error).__name__}: {escape(str(error))}")


def _strategy(text: str) -> Any:
    """A fresh strategy of a text; in float32, since a coarser model rounds otherwise in another batch."""
    if (strategy := parse_draft(text, trusted=True, dtype="float32")) is None:
        raise ValueError("'none' drafts nothing, and there is nothing to check")
    return strategy


def _summary_of(thing: Any) -> str:
    """The first paragraph of a docstring."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split()).replace("``", "")


def _call(name: str, make: Any) -> str:
    """How a rule or strategy is called, with its parameters and their defaults."""
    parameters = [
        p for p in inspect.signature(make).parameters.values() if not callable(p.default) or p.default is p.empty
    ]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    return f"{name}({', '.join(shown)})" if shown else name
