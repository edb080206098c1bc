"""``fly tasks``, ``fly eval`` and ``fly report``: list tasks, run them, show the results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from fly.cli.options import GRID, LOADING, RANKS, Json, Rules, number, option, output, takes
from fly.cli.run import alone, command, grid_of, memory_of, options_of, ranks_of, refuse_idle, typed_in
from fly.cli.show import console, narrow, note, print_list, progress, table, tell, write_json
from fly.errors import suggest
from fly.extras.client import Client
from fly.extras.eval.costs import Costs
from fly.extras.eval.plan import Plan
from fly.extras.eval.records import read_records
from fly.extras.eval.render import as_html, as_json, as_markdown, columns, legend, write_spec_bench
from fly.extras.eval.report import Report, report
from fly.extras.eval.run import check_folder, decode_run, remaining, score_run, write_run
from fly.extras.eval.scorers import Programs
from fly.extras.eval.served import Served
from fly.extras.eval.task import Task, load_task, task_names
from fly.llm import LLM
from fly.models.bundled import BUNDLED


@alone
def harness(context: typer.Context) -> None:
    """Run lm-evaluation-harness's own command, with fly as one of its models: --model fly --model_args model=..."""
    try:
        from fly.extras.eval.harness import main
    except ModuleNotFoundError as error:
        raise ValueError(f"the harness is not installed ({error}): pip install 'flyspec[lm-eval]'") from None
    main(context.args)


@alone
def tasks(
    context: typer.Context,
    task: Annotated[
        str | None, typer.Argument(help="A task, NAME=PATH with its data, or a .yaml file of yours.")
    ] = None,
    problem: Annotated[
        int, typer.Option(min=0, help="Which of its problems to show, from 0, in the order of runs.")
    ] = 0,
    model: Annotated[str | None, typer.Option(help="Show the prompt as this model's template writes it.")] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="How many examples to put before it, if the task has some.")
    ] = None,
    references: Annotated[
        bool, typer.Option("--references", help="Score the solutions that the task's file gives: all should be right.")
    ] = False,
    run_code: Annotated[bool, typer.Option("--run-code", help="Run programs, in the sandbox.")] = False,
) -> None:
    """List the tasks, or show one: its first prompt as a model gets it, and its scorer."""
    if task is None:
        refuse_idle(context, ("problem", "model", "shots", "references", "run_code"), "without a task")
        _list_tasks()
        return
    idle, when = (("problem", "model"), "with") if references else (("run_code",), "without")
    refuse_idle(context, idle, f"{when} --references")
    chosen_task = load_task(task, **({} if shots is None else {"shots": shots}))
    if references:
        _score_references(chosen_task, run_code)
        return
    if problem >= len(chosen_task.problems):
        raise ValueError(
            f"--problem {problem}: task {chosen_task.name!r} has {len(chosen_task.problems)} problems, from 0"
        )
    chosen_problem = chosen_task.problems[problem]
    count = f"{len(chosen_task.problems)} problem{'s' * (len(chosen_task.problems) != 1)}"
    note(escape(f"{chosen_task.name}: {count} · {chosen_task.scorer.kind} · problem {chosen_problem.id}"))
    if model is not None:
        llm = LLM(model)
        ids = chosen_task.prompt_ids(llm, chosen_problem)
        assert llm.tokenizer is not None
        console.print(Text(llm.tokenizer.decode(ids, skip_special_tokens=False)), soft_wrap=True)
        note(f"{len(ids)} tokens")
    elif chosen_task.chat:
        for message in chosen_task.messages(chosen_problem):
            console.print(Text.assemble((f"{message['role']}: ", "bold"), message["content"]), soft_wrap=True)
    else:
        console.print(Text(chosen_task.text(chosen_problem)), soft_wrap=True)
    if chosen_problem.answer:
        note(escape(f"answer: {chosen_problem.answer}"))


def _list_tasks() -> None:
    rows = []
    for name in task_names():
        listed_task = load_task(name)
        origin = "bundled" if listed_task.generated or listed_task.rows else "your file"
        rows.append((name, origin, listed_task.scorer.kind, escape(listed_task.about)))
    print_list(rows, "task", "data", "scorer", "what it is", title="Tasks", show_lines=True)


def _score_references(task: Task, run_code: bool) -> None:
    failures = []
    with Programs(run_code) as programs, progress(len(task.problems), "scoring") as advance:
        for problem in task.problems:
            score = task.score(problem, task.reference(problem), programs)
            failures += [] if score.right else [f"{problem.id}: {score.found}"]
            advance()
    console.print(f"{escape(task.name)}: {len(task.problems) - len(failures)} of {len(task.problems)} references right")
    for line in failures[:20]:
        console.print(Text(f"  {line}"))
    if failures:
        raise typer.Exit(1)


# Options that are fields of ``Plan``, which checks them. None means the plan's value.
_PLANNED = {
    "tasks": option(
        list[str], "A task ('fly tasks'), NAME=PATH with its data, or your .yaml file; repeatable. Default: "
        "bundled-middle.", "--task",
    ),
    "server": option(
        str, "Ask this OpenAI-compatible server, which takes a rule by request, and load no model: "
        "http://127.0.0.1:8000. Its key is read from $OPENAI_API_KEY.", metavar="URL",
    ),
    "rule_field": option(
        str, "Where its requests name the rule: speculation.policy (fly), vllm_xargs.fly, custom_params.fly (SGLang). "
        "Default: as the server's list of models tells.",
    ),
    "policies": (Rules, None),
    "drafts": option(list[str], "A draft; repeatable. Default: fly-draft, or ngram for other models.", "--draft"),
    "k": option(list[int], "The most tokens drafted in a round; repeatable. Default: 15.", min=1),
    "temperatures": option(list[float], "Temperature; repeatable. Default: 0.", "--temperature", min=0),
    "seeds": option(list[int], "Seed of sampling, above temperature 0; repeatable. Default: 0.", "--seed"),
    "max_tokens": option(int, "The most tokens of an answer. Default: the task's own limit.", min=1),
    "together": option(int, "Problems decoded at a time, by a server too. Default: 1.", min=1),
    "run_code": option(bool, "Run programs that models wrote, in the sandbox.", "--run-code"),
    "record": option(bool, "Keep the blocks of exact speculation, for 'fly replay'.", "--record"),
}  # fmt: skip


# Options of how a server is asked.
_ASKED = {
    "timeout": (Annotated[float, number(1, help="The most seconds for one answer of the server.")], 600.0),
    "no_probe": option(bool, "Do not test that the server refuses an invalid rule.", "--no-probe", default=False),
}


@command
@takes(_PLANNED, _ASKED, LOADING, GRID, RANKS)
def evaluate(
    context: typer.Context,
    plan: Annotated[
        Path | None,
        typer.Argument(
            help="A YAML or JSON file of settings, or the folder of a run to continue; options override it."
        ),
    ] = None,
    problems: Annotated[
        list[str] | None,
        typer.Option(
            help="How many problems of each task, or of one, TASK=N; repeatable. Default: 48; with a plan all.",
            metavar="[TASK=]N",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; a run in it is continued. Without it nothing is kept.")
    ] = None,
    json_: Json = None,
    **_: Any,
) -> None:
    """Measure accuracy and speed of rules on tasks, beside autoregressive decoding and exact speculation."""
    # The plan: the file's fields, then those of options.
    limit, limits = _limits(problems or [])
    fields = None if plan is None else Plan.read(plan)
    settings = {name: value for name, value in options_of(context, _PLANNED).items() if value}
    settings |= options_of(context, [name for name in LOADING if typed_in(context, name)])
    if limit or plan is None:
        settings["limit"] = limit or 48

    def where(place: tuple[str | int, ...]) -> str:
        return "" if fields is None or (place and place[0] in settings) else fields.where(place)

    full_plan = _limited(Plan.of({**(fields or {}), **settings}, where), limits, where)
    if full_plan.server is None:
        refuse_idle(context, _ASKED, "without --server")
    else:
        refuse_idle(context, (*GRID, *RANKS), "with --server")
    # The run.
    if out is None and plan is not None and plan.is_dir():
        out = plan
    if context.params["ray"] is not None:
        refuse_idle(context, ("ranks_",), "with --ray")
    with ranks_of(context) as ranks, _folder(out, ranks) as folder, _server_of(context, full_plan.server) as server:
        grid = grid_of(**options_of(context, GRID), ranks=ranks)
        if server is not None:
            full_plan = server.settle(full_plan)
        results = run_plan(full_plan, folder, ranks, grid, server)
        if ranks is None or ranks.leads:
            show_report(results)
            write_json(json_, as_json(results))
            if out is not None:
                note(escape(f"for a page with plots and the texts side by side: fly report {out} --html report.html"))


def _limits(problems: list[str]) -> tuple[int | None, dict[str, int]]:
    """Read ``--problems``: the number for every task, and the numbers for tasks that are named."""
    limit, limits = None, {}
    for text in problems:
        name, _, count = text.rpartition("=")
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"--problems {text!r} must be a number of at least 1, or TASK=NUMBER")
        if name:
            limits[name] = int(count)
        else:
            limit = int(count)
    return limit, limits


def _limited(plan: Plan, limits: dict[str, int], where: Callable[[tuple[str | int, ...]], str]) -> Plan:
    """Return the plan with the numbers of problems for named tasks. Raises ``ValueError`` for a task that it lacks, and
    for one that cannot be loaded; ``where`` tells where the latter is named."""
    names = []
    for at, planned in enumerate(plan.tasks):
        try:
            names.append(planned.load().name)
        except ValueError as error:
            place = "tasks", at, *getattr(error, "place", ())
            raise ValueError(f"{where(place)}{error}") from error
    if unknown := next((name for name in limits if name not in names), None):
        raise ValueError(f"--problems {unknown}={limits[unknown]}: there is no such task{suggest(unknown, names)}")
    named_tasks = zip(names, plan.tasks)
    tasks = [planned.model_copy(update={"limit": limits.get(name, planned.limit)}) for name, planned in named_tasks]
    return plan.model_copy(update={"tasks": tuple(tasks)})


@contextmanager
def _folder(out: Path | None, ranks: Any) -> Iterator[Path]:
    """Yield the folder of a run. Without ``out`` it is temporary, and all ranks share it."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="fly-eval-") as folder:
        yield Path(folder if ranks is None else ranks.share(folder if ranks.leads else None))


@contextmanager
def _server_of(context: typer.Context, url: str | None) -> Iterator[Served | None]:
    """Yield the server of a run; None for a run that loads its models."""
    if url is None:
        yield None
        return
    client = Client(url, os.environ.get("OPENAI_API_KEY") or None, context.params["timeout"])
    try:
        yield Served(client, probe=not context.params["no_probe"])
    finally:
        client.close()


def run_plan(plan: Plan, folder: Path, ranks: Any = None, grid: Any = None, server: Served | None = None) -> Report:
    """Decode the rest of a run, score it, and make the report. ``grid``: the actors that decode, and ``server``: the
    server that does; None for none."""
    leads = ranks is None or ranks.leads
    if leads:
        check_folder(plan, folder)
    records = read_records(folder) if leads else None
    if ranks is not None:
        records = ranks.share(records)
    assert records is not None
    todo, decoded = remaining(plan, records), len(records.completions)
    if leads and decoded:
        outlook = "decoding the rest" if todo else "nothing to decode"
        tell(f"{folder} has {decoded} of {decoded + len(todo)} answers: {outlook}")
    if todo:
        if ranks is not None:
            memory_of(ranks)
        loads = leads and server is None and plan.model not in BUNDLED
        if loads and not console.is_terminal:  # loading may take a minute
            tell(f"loading {plan.model}")
        with progress(decoded + len(todo), "decoding", decoded) as step:

            def advance(record: dict[str, Any]) -> None:
                suffix = f" · {grid.status}" if grid else ""
                step(f"{record['task']} {record['problem']}, {record['way']}: {record['generated']} tokens{suffix}")

            if (source := grid or server) is None:
                decode_run(plan, folder, todo, records, advance, ranks)
            else:
                write_run(folder, records, source.decode(plan, todo, records.texts), advance)
        if grid is not None and grid.lost:
            tell(f"Ray: {grid.status}; others went on with what they left")
    if leads:
        with progress(len(records.completions), "scoring") as scored:
            score_run(plan, folder, scored)
        return report([folder])
    return Report([], [], [])


def show_report(report: Report) -> None:
    """Print a report's tables and notes."""
    several = len({each.run for each in report.tables}) > 1
    for each in report.tables:
        title = f"{each.run}: {each.title}" if several else each.title
        console.print(f"[bold]{escape(title)}[/]")
        for cells in columns(each).values():
            console.print(table("", each.rows, narrow(cells), show_edge=False))
    note(escape(legend(report.tables)))
    for line in report.notes:
        console.print(f"[yellow]{escape(line)}[/]", highlight=False)


# Options of ``fly report`` and ``fly replay``.
DraftCost = Annotated[
    float | None,
    typer.Option("--draft-cost", min=0, help="Cost of a drafted token in target forwards. Default: measured."),
]
VerifyCost = Annotated[
    float | None,
    typer.Option("--verify-cost", min=1, help="Cost of a verification in target forwards. Default: measured."),
]


def costs_of(c: float | None, v: float | None) -> Costs | None:
    """Return the costs that a command line gives; None if it gives none. Raises ``ValueError`` for one without the
    other."""
    if (c is None) != (v is None):
        raise ValueError("--draft-cost and --verify-cost belong together")
    return None if c is None or v is None else Costs(c, v)


@alone
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN...")],
    markdown: Annotated[Path | None, output("--markdown", help="Write the tables as Markdown to this file.")] = None,
    html: Annotated[
        Path | None, output("--html", help="Write one page with tables, plots and the texts side by side to this file.")
    ] = None,
    json_: Json = None,
    spec_bench: Annotated[
        Path | None, typer.Option(help="Write the answers as Spec-Bench's scripts read them into this folder.")
    ] = None,
    by_group: Annotated[
        bool, typer.Option("--by-group", help="Add a table for each group of a task's problems.")
    ] = False,
    cases: Annotated[
        int, typer.Option(min=0, help="How many problems of each task the page shows with their texts.")
    ] = 12,
    c: DraftCost = None,
    v: VerifyCost = None,
) -> None:
    """Compare runs: speed, accuracy with intervals, recovery with a paired test, where the texts differ.

    If files are written, only their names are printed.
    """
    comparison = report(runs, by_group, cases, costs_of(c, v))
    write_json(json_, as_json(comparison))
    if markdown is not None:
        markdown.write_text(as_markdown(comparison), encoding="utf-8")
    if html is not None:
        html.write_text(as_html(comparison, f"fly report: {', '.join(run.name for run in runs)}"), encoding="utf-8")
    answers = [] if spec_bench is None else [path for run in runs for path in write_spec_bench(run, spec_bench)]
    paths = [path for path in (json_, markdown, html, *answers) if path is not None]
    for path in paths:
        console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    if not paths:
        show_report(comparison)
