"""The shared library of compiled kernels: loading it, and which variant of it this processor runs. Knows nothing of
models, caches or torch."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from array import array
from ctypes import c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

from fly.executor import DraftSpec

__all__ = [
    "CBatch",
    "CGrowth",
    "CLookup",
    "CRounds",
    "Clause",
    "Going",
    "Sampling",
    "Shape",
    "Sure",
    "address",
    "available",
    "chosen",
    "load",
    "why_not",
]

_ABI = 30  # as in src/library.cpp: a library built from other sources is not used
_VARIABLE = "FLY_KERNELS"
TORCH = "torch"
NARROW = "int8", "w8a8"


class Shape(ctypes.Structure):
    """src/interface.h: Shape."""

    _fields_ = [
        *((name, c_int32) for name in ("width", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int32) for name in ("positions", "weights", "hidden", "gelu", "ropes", "features", "normed")),
        *((name, c_float) for name in ("eps", "scale", "embedding")),
    ]


class CBatch(ctypes.Structure):
    """src/interface.h: Batch. Pointers are addresses; the caller keeps alive what they point to."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "tokens")),
        *((name, c_void_p) for name in ("token", "position", "start", "count", "tables", "table_at", "masks")),
        *((name, c_void_p) for name in ("keys", "values")),
        ("layer_stride", c_int64),
        *((name, c_int32) for name in ("cache_type", "page", "threads")),
    ]


class Sampling(ctypes.Structure):
    """src/interface.h: Sampling."""

    _fields_ = [*((name, c_float) for name in ("temperature", "top_p", "floor")), ("top_k", c_int32)]


class Sure(ctypes.Structure):
    """src/interface.h: Sure, where a drafter stops."""

    _fields_ = [(name, c_float) for name in ("confidence", "entropy", "reach")]

    @classmethod
    def each(cls, spec: DraftSpec, rows: int) -> ctypes.Array[Sure]:
        """Of each of so many rows."""
        reach = spec.reach or (0.0,) * rows
        return (cls * rows)(*(cls(spec.confidence, spec.entropy, chance) for chance in reach))


class CGrowth(ctypes.Structure):
    """src/interface.h: Growth."""

    _fields_ = [*((name, c_int32) for name in ("nodes", "follow", "depth")), ("width", c_void_p)]


class CLookup(ctypes.Structure):
    """src/interface.h: Lookup, of a drafter that has seen nothing yet and thinks well of what was said before."""

    _fields_ = [
        *((name, c_int32) for name in ("longest", "shortest", "most", "forwards")),
        ("share", c_float * 16),
        ("time", c_float * 64),
    ]

    def __init__(self, longest: int, shortest: int, most: int) -> None:
        super().__init__(longest, shortest, most, 0, (c_float * 16)(*[0.8] * 16))


class Clause(ctypes.Structure):
    """src/interface.h: Clause."""

    KINDS = ("entropy", "window", "room", "control")

    _fields_ = [*((name, c_int32) for name in ("kind", "negated", "count")), ("theta", c_double)]


class Ask(NamedTuple):
    """src/interface.h: Ask."""

    row: int
    round: int
    position: int
    held: int
    excused: int
    nats: float


ASK = struct.Struct("3iIid")  # as the compiler lays it out


class Going(ctypes.Structure):
    """src/interface.h: Going. Pointers are addresses, as in ``Batch``."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in ("length", "room", "left", "k", "context", "draft_start", "clause_at", "clauses")
        ),
        ("seed", c_int64),
        *((name, c_void_p) for name in ("text", "copied")),
        ("first", c_int32),
    ]


class CRounds(ctypes.Structure):
    """src/interface.h: Rounds. Pointers are addresses, as in ``Batch``."""

    Decide = ctypes.CFUNCTYPE(None, c_int32)
    UNANSWERED = -2

    _fields_ = [
        ("going", c_void_p),
        *((name, c_int32) for name in ("k", "most")),
        *((name, c_void_p) for name in ("stop", "stop_at", "hurry")),
        ("nanoseconds", c_int64),
        *((name, c_void_p) for name in ("logits", "drafted", "drafted_count", "choice", "accepted", "following")),
        *((name, c_void_p) for name in ("sampling", "distributions", "spread")),
        ("variant", c_int32),
        *((name, c_void_p) for name in ("clause", "control", "ask")),
        *((name, c_int32) for name in ("most_asks", "asks")),
        ("decide", Decide),
        ("stands", c_void_p),
        ("rounds", c_int32),
        *((name, c_int64 * 2) for name in ("elapsed", "scoring", "drafting")),
        *((name, c_void_p) for name in ("sure", "state")),
        *((name, c_int32) for name in ("states", "read_before")),
        *((name, c_void_p) for name in ("given", "read", "growth", "parent", "path")),
        ("spare", c_int32),
    ]


_FUNCTIONS = {
    "fly_variant": (c_char_p, [c_int, c_void_p]),
    "fly_sum": (c_uint64, [c_void_p, c_int64, c_int]),
    "fly_new": (c_void_p, [c_int] + [c_void_p] * 5),
    "fly_free": (None, [c_void_p]),
    "fly_share": (None, [c_void_p, c_void_p, c_int, c_int]),
    "fly_set_layer": (c_int, [c_void_p, c_int, c_void_p, c_int, c_int]),
    "fly_set_matrix": (c_int, [c_void_p, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p]),
    "fly_workspace": (c_int64, [c_void_p]),
    "fly_forward": (c_int, [c_void_p, c_void_p, c_void_p]),
    "fly_embedding": (c_int, [c_void_p, c_void_p, c_int]),
    "fly_logits": (c_int, [c_void_p, c_void_p, c_int, c_void_p, c_int]),
    "fly_score": (c_int, [c_void_p] * 3 + [c_int] + [c_void_p] * 3 + [c_int, c_void_p]),
    "fly_draft": (c_int, [c_void_p, c_void_p, c_int] + [c_void_p] * 12),
    "fly_draft_for": (None, [c_void_p, c_int, c_void_p]),
    "fly_step": (c_int, [c_void_p] * 5 + [c_int] + [c_void_p] * 2),
    "fly_rounds": (c_int, [c_void_p] * 6),
}


def address(values: array[int]) -> int:
    """The address of an array's values; the caller keeps the array alive."""
    return values.buffer_info()[0]


@cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    here = Path(__file__)
    files = [file for suffix in EXTENSION_SUFFIXES if (file := here.with_name(f"_library{suffix}")).exists()]
    if not files:
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return None, f"there are none for {platform.machine() or 'this processor'} yet"
        note = here.with_name("not_built.txt")
        reason = note.read_text(encoding="utf-8").strip() if note.exists() else "the library was never built"
        return None, f"{reason} (from a checkout: pip install -e .)"
    try:
        library = ctypes.CDLL(str(files[0]))
        abi = library.fly_abi()
    except (OSError, AttributeError) as error:
        return None, f"{files[0].name} cannot be loaded ({error})"
    if abi != _ABI:
        return None, f"{files[0].name} was built from other sources (interface {abi}, not {_ABI}); build it again"
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, ""


def load() -> ctypes.CDLL:
    """The library, its functions declared. Raises ``ValueError`` where there is none, with the reason."""
    library, reason = _open()
    if library is None:
        raise ValueError(f"there are no compiled kernels: {reason}")
    return library


_SHORT: dict[str, tuple[Any, list[Any]]] = {
    "fly_top": (None, [c_int, c_void_p, c_int, c_int, c_void_p]),
    "fly_kept": (c_int, [c_int, c_void_p, c_int, c_int, c_int] + [c_void_p] * 4),
    "fly_accepts": (c_int, [c_int, c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p]),
    "fly_follow": (c_int64, [c_int, c_void_p, c_int, c_void_p, c_int64, c_void_p, c_float]),
    "fly_uniforms": (None, [c_void_p, c_void_p, c_int, c_int, c_int, c_void_p]),
}


def usual() -> str:
    """The variant for what belongs to no model (each has chosen its own): the one that FLY_KERNELS names, if it is
    compiled and to be had here, or the best."""
    try:
        variant = split(chosen())[0]
    except ValueError:
        variant = TORCH
    return available()[0] if variant == TORCH else variant


@cache
def short(name: str, lets_go: bool = False) -> Any:
    """One of the calls that are over soon, for the ``usual`` variant; it keeps the interpreter meanwhile, which another
    thread would hold for longer, unless it ``lets_go``."""
    kind = ctypes.CDLL if lets_go else ctypes.PyDLL
    function = getattr(kind(None, handle=load()._handle), name)
    function.restype, function.argtypes = _SHORT[name]
    return partial(function, number(usual())) if _SHORT[name][1][0] is c_int else function


@cache
def _built() -> dict[str, bool]:
    """Whether this processor runs each variant that was built, best first, in the library's order."""
    library, _ = _open()
    found: dict[str, bool] = {}
    runs = c_int32()
    while library is not None and (name := library.fly_variant(len(found), ctypes.byref(runs))):
        found[name.decode()] = bool(runs.value)
    return found


def _variants() -> list[str]:
    """Those that this processor runs."""
    return [variant for variant, runs in _built().items() if runs]


def number(variant: str) -> int:
    """What the library calls ``variant``."""
    return list(_built()).index(variant)


def available() -> list[str]:
    """The variants that run here, best first; the last is ``"torch"``."""
    return [*_variants(), TORCH]


def why_not() -> str:
    """Why there are no compiled kernels here; empty where there are."""
    if _variants():
        return ""
    return _open()[1] or "this processor has no AVX2 with FMA"


def split(kernels: str) -> tuple[str, str]:
    """The variant that ``chosen`` kernels name, and which of ``NARROW`` it is to run on; empty for the model's own."""
    for narrow in NARROW:
        if kernels.endswith(f"-{narrow}"):
            return kernels.removesuffix(f"-{narrow}"), narrow
    return kernels, ""


def chosen(kernels: str = "auto") -> str:
    """The kernels that ``kernels`` stands for here: ``"auto"`` is what the environment variable FLY_KERNELS says, or
    the best available where it says nothing. Each compiled one is also there with int8 weights, by its name with
    ``-int8`` after it, and with ``-w8a8`` for activations of 8 bits too; ``"int8"`` and ``"w8a8"`` are the best
    of those.

    Raises ``ValueError`` for one that is unknown or not available here, naming the choices.
    """
    source, wanted = f"kernels {kernels!r}", kernels
    if wanted == "auto" and (variable := os.environ.get(_VARIABLE, "").strip()):
        source, wanted = f"{_VARIABLE}={variable}", variable
    choices = available()
    narrow = [f"{name}-{kind}" for kind in NARROW for name in choices[:-1]]
    if wanted == "auto":
        return choices[0]
    if wanted in NARROW and narrow:
        return f"{choices[0]}-{wanted}"
    if wanted not in (*choices, *narrow):
        lacking = split(wanted)[0] in _built() and "this processor has not all of its instructions"
        reason = why_not() or lacking
        known = ["auto", *choices[:-1], *(NARROW if narrow else []), *narrow, TORCH]
        problem = f"is not available here; choices: {known} ({reason})" if reason else f"is unknown; choices: {known}"
        raise ValueError(f"{source} {problem}")
    return wanted
