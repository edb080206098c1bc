"""``fly eval`` and ``fly demo``: decoding settings side by side on the bundled tasks."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fly.bench.loaded import rule_name, settings_of
from fly.bundled.tasks import problems as draw_problems
from fly.cli.completion import legend, show_stream
from fly.cli.options import (
    CollectiveTimeout,
    Device,
    DraftLength,
    DraftOption,
    Dtype,
    HeartbeatTimeout,
    Json,
    K,
    Kernels,
    Model,
    Policy,
    Seed,
    Split,
)
from fly.cli.run import alone, command, kernels_of, loaded, ranks_of
from fly.cli.show import console, note, progress, ratio, table, write_json
from fly.config import COLLECTIVE_TIMEOUT, HEARTBEAT_TIMEOUT
from fly.eval import Result, Setting, compare
from fly.llm import LLM
from fly.policies import AcceptancePolicy, parse_policy
from fly.request import Stats
from fly.types import SamplingParams


@alone
def demo(
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems, of all kinds in turn.")] = 48,
    k: DraftLength = 15,
    policy: Policy = "fly",
    split: Split = "heldout",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    kernels: Kernels = "auto",
) -> None:
    """Show what speculation gains: one completion in colours, then a table over held-out problems."""

    rule = parse_policy(policy, trusted=True)
    (question,) = draw_problems(None, split, seed, 1)
    llm = LLM("fly-target", "fly-draft", k=k, dtype=dtype, kernels=kernels)

    console.print(f"[bold]fly-target[/] verifies drafts of [bold]fly-draft[/] by [bold]{escape(str(rule))}[/]\n")
    console.print(Text(question.prompt, "italic"))
    console.print()
    prompt = llm.chat_prompt(question.prompt)
    stats, elapsed = show_stream(llm, prompt, SamplingParams(temperature=0.0, max_tokens=400), rule)
    console.print()
    legend(llm, stats, elapsed)
    console.print()
    compare_on_bundled(rule, problems, k, split, seed, True, dtype=dtype, kernels=kernels)


@command
def evaluate(
    context: typer.Context,
    policy: Annotated[list[str] | None, typer.Option(help="Rules to compare; may be given several times.")] = None,
    model: Model = "fly-target",
    draft: DraftOption = "fly-draft",
    k: K = 15,
    problems: Annotated[int, typer.Option(min=1, help="How many problems.")] = 48,
    kind: Annotated[str | None, typer.Option(help="arithmetic, text or code; all in turn if not given.")] = None,
    split: Split = "heldout",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    heartbeat_timeout: HeartbeatTimeout = HEARTBEAT_TIMEOUT,
    collective_timeout: CollectiveTimeout = COLLECTIVE_TIMEOUT,
    json_: Json = None,
) -> None:
    """Accuracy and speed of rules on the bundled tasks, beside autoregressive decoding and exact speculation."""
    with ranks_of(context) as ranks:
        if draft == "none":
            raise ValueError("rules judge what is drafted; --draft none leaves nothing to compare")
        rules = [parse_policy(text, trusted=True) for text in policy or ["fly"]]
        llm = LLM(model, draft, k=k, dtype=dtype, device=device, kernels=kernels, ranks=ranks)
        if ranks is not None:
            loaded(ranks)
        results = _compare(settings_of(llm, llm, k, rules), kind, split, seed, problems)
        write_json(json_, [_result_as_json(result) for result in results], ranks)


def compare_on_bundled(
    rule: AcceptancePolicy,
    count: int,
    k: int,
    split: str = "heldout",
    seed: int = 0,
    multi_level: bool = False,
    **options: Any,
) -> None:
    """Run held-out problems through the bundled models by each setting, and print the table."""

    llm = LLM("fly-target", "fly-draft", k=k, **options)
    settings = settings_of(llm, llm, k, [rule])
    if multi_level:
        levels = LLM(llm, "ngram+fly-draft", k=k, **options)  # of the same weights in memory
        settings.append(Setting(f"{rule_name(rule)}, multi-level", levels, k, rule))
    _compare(settings, None, split, seed, count)


def _compare(settings: list[Setting], kind: str | None, split: str, seed: int, count: int) -> list[Result]:
    """Run the bundled problems through settings that take turns, and print the table."""

    questions = list(draw_problems(kind, split, seed, count))
    with progress(count, *(setting.name for setting in settings)) as advance:
        results = compare(settings, questions, SamplingParams(temperature=0.0, max_tokens=400), advance)
    what = f"{count} {split} {kind or ''} problems".replace("  ", " ")
    kernels = kernels_of(settings[0].llm)
    console.print(comparison_table(results, f"{what}, temperature 0, k {settings[1].k}, batch 1, kernels {kernels}"))
    console.print()
    note(
        "AR: autoregressive decoding · τ: tokens a target forward emits · drafts kept: share of drafted tokens "
        "emitted · gate open: share of mismatches at which the target was undecided · recovery: accuracy over AR's"
    )
    composed = {rule_name(setting.policy): setting.policy for setting in settings if "…" in setting.name}
    for name, rule in composed.items():
        note(f"{escape(name)}: {escape(str(rule))}")
    for result in results:
        for gate in result.stats.silent_gates:
            asked = result.stats.gates[gate].asked
            name = escape(result.setting.name)
            console.print(f"[yellow]{escape(gate)} never held ({asked} mismatches): {name} relaxes nothing[/]")
    return results


def _result_as_json(result: Result) -> dict[str, Any]:
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


def comparison_table(results: list[Result], title: str) -> Table:
    """Speed, acceptance and accuracy, a row a setting; the first is autoregressive, the second exact speculation."""
    plain, exact = results[0], results[1]

    def gate(stats: Stats) -> str:
        counts = [held for name, held in stats.gates.items() if name.startswith("entropy")]
        asked, passed = sum(c.asked for c in counts), sum(c.passed for c in counts)
        return f"{passed / asked:.0%}" if asked else "–"

    return table(
        title,
        results,
        {
            "decoding": lambda r: escape(r.setting.name),
            "tok/s": lambda r: f"{r.tokens_per_second:,.0f}",
            "over\nAR": lambda r: ratio(r.tokens_per_second, plain.tokens_per_second),
            "over\nexact": lambda r: ratio(r.tokens_per_second, exact.tokens_per_second),
            "τ": lambda r: f"{r.stats.tau:.2f}",
            "drafts\nkept": lambda r: f"{r.stats.acceptance_rate:.0%}" if r.stats.drafted else "–",
            "gate\nopen": lambda r: gate(r.stats),
            "relaxed": lambda r: f"{r.stats.relaxed / r.stats.generated:.1%}" if r.stats.drafted else "–",
            "accuracy": lambda r: f"{r.accuracy:.1%}",
            "recovery": lambda r: f"{r.accuracy / plain.accuracy:.1%}" if plain.accuracy else "–",
        },
        wrapped=("decoding",),
        show_edge=False,
    )
