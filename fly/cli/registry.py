"""``fly models``, ``fly policies``, ``fly drafts`` and ``fly check``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape

from fly.backends.choice import max_stored_bytes, uses_blocks
from fly.backends.cpu.blocks import KINDS
from fly.cache import PagedKVCache
from fly.cli.describe import describe_call, describe_compiled, show_draft, show_policy, summarize
from fly.cli.run import alone, command
from fly.cli.show import console, errors, note, print_list, progress
from fly.config import DEFAULT_K, Config
from fly.drafts import draft_types, parse_draft
from fly.models.bundled import BUNDLED, CHECKPOINTS, HEADS, find_checkpoint, open_model, resolve_checkpoint
from fly.models.checkpoint import Checkpoint
from fly.models.config import CheckpointError
from fly.models.hub import HubName
from fly.models.llama import weight_bytes
from fly.models.loading import Loading, resolve_device, resolve_dtype
from fly.models.opening import open_checkpoint
from fly.models.tokenizer import Tokenizer
from fly.policies import AcceptancePolicy, condition_types, parse_policy, policy_types
from fly.policies.registry import PRESETS


@command
def models(
    name: Annotated[
        str | None,
        typer.Argument(help="Show this one: a directory, a GGUF file or a name on the Hugging Face hub."),
    ] = None,
) -> None:
    """List the bundled checkpoints, or show what a checkpoint is and how much memory it takes.

    No weights are downloaded from the hub.
    """
    if name is not None:
        show_model(name)
        return
    rows = []
    for bundled in BUNDLED:
        checkpoint = open_model(bundled)
        config, size = checkpoint.config, sum(stored.nbytes for stored in checkpoint.tensors.values())
        layers = f"{config.num_hidden_layers} × {config.hidden_size}"
        numbers = (str(config.max_position_embeddings), str(config.vocab_size), f"{size / 1e6:.1f} MB")
        rows.append((bundled, layers, *numbers, str(checkpoint.raw.get("torch_dtype"))))
    print_list(rows, "name", "layers × width", "context", "tokens", "size", "dtype")
    console.print(f"[dim]in {escape(str(CHECKPOINTS))}; each has a README.md with its training and accuracy[/]")
    note("also: a Hugging Face directory, a GGUF file, or a name on the hub (owner/name); 'fly models NAME' shows one")


def show_model(name: str) -> None:
    """Print the facts about a checkpoint. Raises ``CheckpointError`` if it is not supported, or if its local weights or
    tokenizer are unusable."""
    checkpoint = open_checkpoint(resolve_checkpoint(name, weights=False))
    if not isinstance(find_checkpoint(name), HubName):
        Loading(checkpoint)
        Tokenizer.load(checkpoint)
    config, dtype = checkpoint.config, resolve_dtype("auto", checkpoint.raw)
    count, itemsize = weight_bytes(config, 1), dtype.itemsize
    dtype_name = str(dtype).removeprefix("torch.")
    sizes = {dtype_name: count * itemsize, "w8a8, or int8 on CUDA": weight_bytes(config, itemsize, True)}
    stored, blocks = _storage(checkpoint)
    computed = dtype_name
    if blocks:
        sizes = {"the file's blocks, at most": max_stored_bytes(checkpoint)} | sizes
        computed = (
            f"{', '.join(blocks)} as stored, times inputs rounded to 8 bits; decoded to {dtype_name} on a GPU, by "
            "several processes, or if --kernels names kernels"
        )
    token_bytes = PagedKVCache.bytes_per_token(config, dtype)
    context = config.max_position_embeddings
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    window = f"; {len([w for w in config.windows if w])} of the layers see the last {config.sliding_window} tokens"
    facts = {
        "at": str(checkpoint.path),
        "family": f"{config.family} ({checkpoint.raw['architectures'][0]})",
        "layers": f"{config.num_hidden_layers} × {config.hidden_size}, feed-forward {config.intermediate_size}",
        "attention": f"{heads} heads of {config.head_dim}, {kv_heads} of keys and values",
        "parameters": f"{count / 1e6:,.1f} million" + (", head and embedding are one" * config.tie_word_embeddings),
        "stored as": stored,
        "computed in": computed,
        "vocabulary": f"{config.vocab_size} tokens" + ("" if checkpoint.has_tokenizer else ", no tokenizer"),
        "context": f"{context} tokens{window if any(config.windows) else ''}",
        "memory": "; ".join(f"{size / 1e9:.2f} GB in {kind}" for kind, size in sizes.items()),
        "cache": f"{token_bytes / 1024:.1f} KiB a token, {token_bytes * context / 1e9:.2f} GB a full context",
    }
    print_list(((key, escape(value)) for key, value in facts.items()), "", "", title=name, show_header=False)


def _storage(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """Return a description of how the tensors are stored, and the types of blocks that are not decoded here by
    default."""
    try:
        tensors = sorted(checkpoint.tensors.values(), key=lambda stored: -stored.nbytes)
    except CheckpointError as error:  # the checkpoint is on the hub, and its weights were not downloaded
        return f"– ({error})" if checkpoint.path.suffix == ".gguf" else "– (the weights are not here)", []
    kinds = dict.fromkeys(stored.kind for stored in tensors)
    keeps_blocks = uses_blocks(checkpoint, resolve_device("auto"))
    description = f"{', '.join(kinds)}; {checkpoint.nbytes / 1e9:.2f} GB"
    return description, [kind for kind in kinds if keeps_blocks and kind in KINDS]


@command
def policies(
    name: Annotated[
        str | None, typer.Argument(help="Show this one: a policy, a condition, a preset, module:Class, an expression.")
    ] = None,
) -> None:
    """List the rules and conditions that --policy knows, what each promises and which are compiled; or show one."""
    if name is not None:
        show_policy(name)
        return
    presets, rows = {name: make() for name, make in PRESETS.items()}, []
    for name, rule in policy_types().items():
        instance = rule()
        promise = f"{instance.guarantee.value}\n{instance.bound}" if instance.bound else instance.guarantee.value
        rows.append((describe_call(name, rule), promise, _mark(instance), escape(summarize(rule))))
        for preset, policy in presets.items():
            if isinstance(policy, rule):
                description = f"{policy}: {summarize(PRESETS[preset])}"
                rows.append((preset, policy.guarantee.value, _mark(policy), description))
    print_list(rows, "policy", "guarantee", "compiled", "what it is", title="Policies", show_lines=True)
    conditions = (
        (describe_call(name, kind), "yes" if kind.compiles() else "–", escape(summarize(kind)))
        for name, kind in condition_types().items()
    )
    title = "Conditions: combine with & | ~"
    print_list(conditions, "condition", "compiled", "when it holds", title=title)
    note("compiled: on a CPU, C++ decides several rounds in one call; Python decides single blocks of other rules")


def _mark(policy: AcceptancePolicy) -> str:
    return "yes" if describe_compiled(policy) == "yes" else "–"


@command
def drafts(
    name: Annotated[str | None, typer.Argument(help="Show this one: a strategy, a checkpoint, module:Class.")] = None,
) -> None:
    """List the draft strategies that --draft knows, with their parameters, or show one."""
    if name is not None:
        show_draft(name)
        return
    rows = ((describe_call(name, kind), escape(summarize(kind))) for name, kind in draft_types().items())
    print_list(rows, "strategy", "what it does", title="Draft strategies", show_lines=True)
    names = (*BUNDLED[1:], *HEADS)
    descriptions = (
        f"a draft head of {BUNDLED[0]} (eagle3)" if name in HEADS else "a draft model (model)" for name in names
    )
    print_list(zip(names, descriptions), "checkpoint", "what it is", title="Bundled drafts")
    note(
        "a checkpoint's name or directory is ngram+model(NAME, reach=None), or eagle3(NAME, reach=None) or "
        "block(NAME, reach=None) of a head; "
        "a+b+c is a cascade, cheapest first: each drafts for the next; 'fly bench drafts' measures them"
    )


@alone
def check(
    rule: Annotated[
        str | None,
        typer.Argument(help="module:Class (with parameters if you like), module:instance, or any policy expression."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A draft strategy to check instead, such as my_drafts:MyDraft.")
    ] = None,
    problems: Annotated[
        int, typer.Option(min=0, help="How many held-out problems show what it gains and breaks; 0 skips that.")
    ] = 24,
    k: Annotated[int, typer.Option(min=0, help=Config.model_fields["k"].description)] = DEFAULT_K,
) -> None:
    """Prove or refute an acceptance rule, or a draft strategy, in a minute.

    First comes the conformance kit, then speed and accuracy on the bundled models.
    """
    import torch

    from fly.testing import CHECKS, DRAFT_CHECKS, check_draft, check_policy

    if (rule is None) == (draft is None):
        raise ValueError("give either a rule or --draft")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the blocks are small, and more threads would only wait for one another
    policy = None if rule is None else parse_policy(rule, trusted=True)
    with progress(len(CHECKS) + 1 if policy else len(DRAFT_CHECKS), "checking") as advance:
        if policy is not None:
            from fly.extras.eval.kit import check_in_a_recording

            report = check_policy(policy, raises=False, advance=advance, more=[check_in_a_recording])
        else:
            report = check_draft(lambda: _strategy(str(draft)), raises=False, advance=advance)
    torch.set_num_threads(threads)
    promise = f": declared {report.promise}" if report.promise else ""
    marks = {True: "[green]ok[/]", False: "[bold red]FAIL[/]"}
    rows = ((marks[finding.passed], finding.check, escape(finding.detail)) for finding in report.findings)
    title = f"{report.subject}{promise}"
    print_list(rows, "", "check", "what was found", title=title)
    if problems:
        _measured(report.passed, rule, str(draft), problems, k)
    if not report.passed:
        errors.print(f"[bold red]{escape(report.subject)} breaks the contract[/]", soft_wrap=True)
        raise typer.Exit(1)


def _measured(sound: bool, rule: str | None, draft: str, problems: int, k: int) -> None:
    """Measure speed and accuracy of a rule, or of a draft, on the bundled models. An error of one that failed the
    checks (is not ``sound``) is a note."""
    checkpoint = open_model("fly-target")
    try:
        if rule is not None:
            parse_policy(rule, trusted=True).bind(Tokenizer(checkpoint).vocabulary(checkpoint.config.vocab_size))
    except ValueError as error:
        note(f"not measured on the bundled models: {escape(str(error))}")
        return
    note("measured on the bundled models, at temperature 0 alone; 'fly eval' takes your models and temperatures")
    try:
        if rule is not None:
            from fly.extras.bench.demo import bundled_plan, show_plan

            show_plan(bundled_plan(rule, problems, k))
        else:
            from fly.extras.bench.command import show_drafts

            show_drafts((draft,), parse_policy("exact"), max(1, problems // 3), k)
    except Exception as error:
        if sound:
            raise
        note(f"not measured: on the bundled models it raised {type(error).__name__}: {escape(str(error))}")


def _strategy(text: str) -> Any:
    """Return a fresh strategy, in float32: in coarser dtypes rounding depends on the batch."""
    if (strategy := parse_draft(text, trusted=True, dtype="float32")) is None:
        raise ValueError("'none' drafts nothing, so there is nothing to check")
    return strategy
