"""Run an audit: one check after another, even after errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from typing import Any

from fly.errors import did_you_mean
from fly.extras.audit import ends, greedy, repeats, sampling, speculation  # noqa: F401  (they add their checks)
from fly.extras.audit.client import Budget, Failed, OutOfBudget, Refused, Server, Unreachable
from fly.extras.audit.context import CHECKS, Check, Context
from fly.extras.audit.prompts import PROMPTS
from fly.extras.audit.report import Finding, Report, Verdict

__all__ = ["audit", "check_names"]

_BESIDE = ("identity", "reference")  # checks that need a second server


def check_names() -> dict[str, str]:
    """Return the names of all checks, each with a sentence about what it tests."""
    return {name: each.tests for name, each in CHECKS.items()}


def audit(
    url: str,
    *,
    name: str | None = None,
    key: str | None = None,
    endpoint: str = "auto",
    beside: str | AbstractContextManager[str] | None = None,
    beside_name: str | None = None,
    beside_key: str | None = None,
    prompts: Sequence[str] = PROMPTS,
    samples: int = 4000,
    parallel: int = 8,
    alpha: float = 0.001,
    seconds: float | None = None,
    requests: int | None = None,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    timeout: float = 600.0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Report:
    """Audit an OpenAI-compatible server.

    Args:
        url: the server's address. ``name`` is the model's name (by default the first that the server lists), ``key`` a
            bearer token, and ``endpoint`` is ``completions``, ``chat`` or ``auto``.
        beside: the address of a second server with the same model, the reference, which is taken to be right; or a
            context manager that yields it, entered once the server has answered. ``beside_name`` and ``beside_key`` are
            its ``name`` and ``key``.
        prompts: at least four texts to ask about.
        samples: answers drawn for the first tokens. Other sampling checks draw a tenth or a twentieth, but longer ones.
        parallel: the most requests at the same time.
        alpha: the largest probability that an honest server fails any of the checks that draw.
        seconds, requests: the most that may be spent. A check that is cut short is undecided.
        only, skip: names of checks (``check_names``).
        timeout: the most seconds for one answer.
        progress: called with a text about progress, the number of finished checks, and the number of all checks.

    Raises ``Unreachable`` if a server does not answer at all or the reference ends, ``ValueError`` for unknown checks
    or too few prompts.
    """
    checks = _chosen(only, skip, beside is not None)
    if len(prompts) < 4:
        raise ValueError(f"{len(prompts)} prompts are too few: give at least 4")
    if samples < 16:
        raise ValueError(f"{samples} samples are too few: take at least 16")
    budget = Budget(seconds, requests)
    with ExitStack() as stack:
        server = stack.enter_context(closing(Server(url, name, key, endpoint, parallel, timeout, budget)))
        reference = None
        if beside is not None:
            progress("the reference", 0, len(checks))
            address = beside if isinstance(beside, str) else stack.enter_context(beside)
            budget.started = time.monotonic()  # starting the reference takes none of the seconds
            same_endpoint = "chat" if server.chat else "completions"
            reference = Server(address, beside_name, beside_key, same_endpoint, parallel, timeout, budget)
            stack.enter_context(closing(reference))
        context = Context(server, reference, tuple(prompts), samples, alpha / len(checks))
        findings: list[Finding] = []
        for done, each in enumerate(checks):
            context.step = lambda text, name=each.name, done=done: progress(f"{name}: {text}", done, len(checks))  # type: ignore[misc]
            progress(each.name, done, len(checks))
            findings.append(_run(each, context))
        progress("", len(checks), len(checks))
        about: dict[str, Any] = {"url": server.root, "model": server.name, "beside": reference and reference.root}
        about |= {"endpoint": "chat" if server.chat else "completions", "requests": budget.spent}
        return Report.of(findings, alpha, seconds=budget.elapsed, **about)


def _chosen(only: Iterable[str], skip: Iterable[str], beside: bool) -> list[Check]:
    all_names = list(CHECKS)
    for name in (only := [*only], skip := [*skip]):
        for each in name:
            if each not in all_names:
                raise ValueError(f"{each!r} is no check{did_you_mean(each, all_names)}; choices: {all_names}")
    if not beside and (lacking := [each for each in only if each in _BESIDE]):
        raise ValueError(f"{lacking[0]!r} needs a reference: a second server, or a model for fly to run")
    checks = [CHECKS[each] for each in all_names if (not only or each in only) and each not in skip]
    checks = [each for each in checks if beside or each.name not in _BESIDE]
    if not checks:
        raise ValueError("no check is left to run")
    return checks


def _run(each: Check, context: Context) -> Finding:
    """Run one check. An error becomes a finding too."""
    begun, spent = time.monotonic(), context.server.budget.spent
    try:
        if context.gone:
            raise OutOfBudget("the server does not answer any more")
        finding = each.run(context)
    except Refused as error:
        finding = Finding(each.name, "", Verdict.UNSUPPORTED, detail=f"refused: {error}")
    except OutOfBudget as error:
        finding = Finding(each.name, "", Verdict.UNDECIDED, detail=str(error))
    except Failed as error:
        if context.reference is not None and not context.reference.alive():
            raise Unreachable(f"the reference does not answer any more, in the check {each.name!r}: {error}") from None
        context.gone = not context.server.alive()
        prefix = "the server does not answer any more after this check: " * context.gone
        finding = Finding(each.name, "", Verdict.FAIL, detail=f"{prefix}{error}")
    figures = {**finding.figures, "seconds": time.monotonic() - begun, "requests": context.server.budget.spent - spent}
    return replace(finding, tests=each.tests, figures=figures)
