"""What there is, and whether it is sound: ``fly models``, ``policies``, ``drafts`` and ``check``."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fly.bundled import BUNDLED, CHECKPOINTS, resolve_checkpoint
from fly.cli.bench import show_drafts
from fly.cli.comparison import compare_on_bundled
from fly.cli.options import K
from fly.cli.run import alone, command
from fly.cli.show import console, errors, note, progress, sentences
from fly.drafts import draft_types, parse_draft
from fly.models import LlamaConfig
from fly.policies import condition_types, parse_policy, policy_types
from fly.policies.registry import PRESETS


@command
def models() -> None:
    """List the bundled checkpoints."""
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


@command
def policies() -> None:
    """List the acceptance policies and conditions that ``--policy`` knows, with what each promises."""
    table = Table(
        "policy", "guarantee", sentences("what it is"), title="Policies", title_justify="left", show_lines=True
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
    table = Table("condition", sentences("when it holds"), title="Conditions: combine with & | ~", title_justify="left")
    for name, condition in condition_types().items():
        table.add_row(_call(name, condition), escape(_summary_of(condition)))
    console.print(table)


@command
def drafts() -> None:
    """List the draft strategies that ``--draft`` knows, with their parameters."""
    table = Table(
        "strategy", sentences("what it does"), title="Draft strategies", title_justify="left", show_lines=True
    )
    for name, strategy in draft_types().items():
        table.add_row(_call(name, strategy), escape(_summary_of(strategy)))
    console.print(table)
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

    from fly.drafts.check import DRAFT_CHECKS
    from fly.testing import CHECKS, check_draft, check_policy

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
    table = Table("", "check", "what was found", title=f"{report.subject}{promise}")
    for finding in report.findings:
        mark = "[green]ok[/]" if finding.passed else "[bold red]FAIL[/]"
        table.add_row(mark, finding.check, escape(finding.detail))
    console.print(table)
    if not report.passed:
        errors.print(f"[bold red]{escape(report.subject)} breaks the contract[/]", soft_wrap=True)
        raise typer.Exit(1)
    if problems and policy is not None:
        compare_on_bundled(policy, problems, k)
    elif problems:
        show_drafts((str(draft),), parse_policy("exact"), max(1, problems // 3), k)


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
