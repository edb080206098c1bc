"""The results of a list of checks: one report for both kits, and how checks are run. Knows no kit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fly.errors import origin

__all__ = ["ConformanceError", "Finding", "Report", "require", "run_checks", "seeded", "title"]

T = TypeVar("T")


class ConformanceError(AssertionError):
    """A policy or strategy breaks the contract; the message holds the smallest counterexample that was found."""


@dataclass(frozen=True)
class Finding:
    """What one check found in ``seconds``: ``detail`` is a counterexample if it failed, else what was measured, or
    what holds."""

    check: str
    passed: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Report:
    """All findings about one policy or draft strategy; ``promise`` is what it declares, if anything."""

    subject: str
    promise: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        promise = f", declared {self.promise}" if self.promise else ""
        head = f"{self.subject}: {'passes' if self.passed else 'FAILS'}{promise}"
        rows = (f"  {'ok  ' if f.passed else 'FAIL'} {f.check}: {f.detail}".rstrip(": ") for f in self.findings)
        return "\n".join([head, *rows])

    def settled(self, raises: bool) -> Report:
        """The report itself. Raises ``ConformanceError`` with all of it if a check failed, and it ``raises``."""
        require(self.passed or not raises, str(self))
        return self


def run_checks(
    report: Report, checks: Iterable[Callable[[Any], str | None]], subject: Any, advance: Callable[[], None]
) -> None:
    """Add to ``report`` what each check finds out about ``subject``; what is found twice is said once.

    A check returns what it measured (or None: then what its docstring begins with is said), or raises:
    ``ConformanceError`` with a counterexample, or whatever the subject raises. ``advance`` is called after each. Where
    the first one ends in an error of the subject's, that is all: the others would end in it, or in what follows from
    it.
    """
    seen: dict[str, str] = {}  # what went wrong, and the check in which it was seen first
    for check in checks:
        name, start = title(check), time.perf_counter()
        where = ""
        try:
            passed, detail = True, check(subject) or _promise(check)
        except Exception as error:
            passed, detail = False, str(error)
            if not isinstance(error, ConformanceError):
                detail, where = f"raised {type(error).__name__}: {error}", f" ({origin(error)})"
            first = seen.setdefault(detail, name)
            detail = f"{detail}{where}" if first == name else f"the same as in '{first}'"
        end = not report.findings and bool(where)
        detail += "; nothing else was checked" if end else ""
        report.findings.append(Finding(name, passed, detail, time.perf_counter() - start))
        advance()
        if end:
            return


def title(check: Callable[..., Any]) -> str:
    """The name of a check in reports: ``check_full_caches`` is "full caches"."""
    return check.__name__.removeprefix("check_").replace("_", " ")


def _promise(check: Callable[..., Any]) -> str:
    """The first sentence of a check's docstring, up to a colon."""
    first = " ".join((check.__doc__ or "").split()).partition(". ")[0].partition(":")[0].rstrip(".")
    return first[:1].lower() + first[1:]


def require(condition: bool, message: str) -> None:
    """Raises ``ConformanceError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConformanceError(message)


def seeded(seed: int, run: Callable[[], T]) -> T:
    """What ``run`` returns where the global generators of torch (on the CPU) and Python start at ``seed``; afterwards
    they are as before."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            return run()
        finally:
            random.setstate(state)
