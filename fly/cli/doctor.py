"""``fly doctor``: what is installed and on this machine, what fly uses of it, and what it does not use and why."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from rich.markup import escape

from fly import __version__
from fly.backends.cpu.library import FOR_ALL, TORCH, available, check_target, chosen, unusable, why_not
from fly.backends.cuda.survey import survey
from fly.cache import DEFAULT_BYTES
from fly.cli.options import Json
from fly.cli.run import command
from fly.cli.show import console, print_list, write_json
from fly.runner.memory import free_memory

__all__ = ["Finding", "doctor", "examine"]

# The packages that fly always imports, and those that it imports only if they are installed, with their use.
_NEEDED = [
    "torch", "safetensors", "tokenizers", "pydantic", "llguidance", "gguf", "huggingface-hub", "fastapi", "uvicorn",
]  # fmt: skip
_OPTIONAL = {
    "triton": "kernels on CUDA",
    "torchao": "int8 weights on CUDA",
    "transformers": "the reference in tests and benchmarks",
    "lm-eval": "fly harness",
}
# The instructions that compiled kernels may use, as /proc/cpuinfo names them.
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


class Finding(NamedTuple):
    """One line: what was looked at, what was found, and the reason if fly does not use it."""

    subject: str
    found: str
    unused: str = ""


@command
def doctor(json: Json = None) -> None:
    """Show versions, devices, kernels, attention and memory, and what fly does not use here and why.

    Paste the output into a bug report. It holds no names of files, users or hosts.
    """
    findings = [*examine()]
    used_rows = ((escape(subject), escape(found)) for subject, found, unused in findings if not unused)
    print_list(used_rows, "", "found", title="Used")
    unused_rows = ((escape(subject), escape(found), escape(unused)) for subject, found, unused in findings if unused)
    print_list(unused_rows, "", "found", "why", title="Not used")
    console.print(
        "[dim]'fly bench speed' measures this machine; docs/how-to/install.md says how to get what is missing[/]"
    )
    write_json(json, [finding._asdict() for finding in findings])


def examine() -> Iterator[Finding]:
    """Yield everything that ``fly doctor`` looks at, in the order in which it is shown."""
    yield Finding("fly", __version__)
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _find_packages()
    yield from _find_processor()
    yield from (Finding(*finding) for finding in survey())
    yield from _find_memory()


def _find_packages() -> Iterator[Finding]:
    installed = {name: _version_of(name) for name in (*_NEEDED, *_OPTIONAL)}
    yield Finding("packages", ", ".join(f"{name} {installed[name]}" for name in _NEEDED))
    for name, purpose in _OPTIONAL.items():
        installed_version = installed[name]
        yield Finding(name, installed_version or "not installed", "" if installed_version else f"only for {purpose}")


def _version_of(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _find_processor() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = [name for name in _INSTRUCTIONS if name in facts.get("flags", "").split()]
    yield Finding("processor", f"{facts.get('model name', platform.processor() or platform.machine())}, {cores} cores")
    yield Finding("instructions", " ".join(flags) or "none that compiled kernels use")
    yield Finding("threads", f"{torch.get_num_threads()} of PyTorch")
    # The kernels in use: the best set for this processor, or the one that FLY_KERNELS names.
    try:
        check_target(used := chosen())
        forced = os.environ.get("FLY_KERNELS", "").strip()
        narrow = f"; --kernels {' or '.join(FOR_ALL)} for fewer bits" if available()[0] != TORCH else ""
        yield Finding("CPU kernels", f"{used}{' (named by FLY_KERNELS)' if forced else ''}{narrow}")
    except ValueError as error:
        yield Finding("CPU kernels", os.environ.get("FLY_KERNELS", ""), str(error))
    if reason := why_not():
        yield Finding("compiled kernels", "none", reason)
    for name, reason in unusable().items():
        yield Finding(f"kernels {name}", "compiled", reason)
    if available()[0] != TORCH:
        yield Finding("CPU attention", "compiled, over the pages of the cache in place")
    else:
        yield Finding("CPU attention", "PyTorch's scaled_dot_product_attention")


def _find_memory() -> Iterator[Finding]:
    free = free_memory(torch.device("cpu"))
    caches = min(DEFAULT_BYTES, free // 2)
    yield Finding("memory", f"{free / 1e9:.1f} GB free; caches take at most {caches / 1e9:.1f} GB by default")
