"""Load the shared library of compiled kernels, and choose the variant that this processor runs. Knows nothing of
models, caches or torch."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
from array import array
from collections import abc
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

from fly.runner.executor import DraftSpec

__all__ = [
    "MISMATCH", "CBatch", "CBlocks", "CClause", "CLookup", "CMismatch", "CRoundRow", "CRounds", "CRule",
    "CRules", "CStops", "CStored", "Sampling", "Shape", "Span", "available", "check_target", "chosen", "clause_kinds",
    "default_number", "default_variant", "fast_call", "is_for_drafts", "load", "spans", "split", "unusable",
    "variant_number", "why_not",
]  # fmt: skip

_ABI = 48  # the number in src/library.cpp; a library with another number is refused
_VARIABLE = "FLY_KERNELS"
_LACKS = "this processor lacks some of its instructions"  # src/fly.h: LACKS
TORCH = "torch"
# Endings of kernels that round any model's weights: those for every model, and those for drafts only.
FOR_ALL = "w8a8", "w4a8"
FOR_DRAFTS = ("w4",)
ROUNDINGS = *FOR_ALL, *FOR_DRAFTS
NARROW = *ROUNDINGS, "stored"
_INSTEAD = {"int8": "w8a8", "int4": "w4a8"}  # of kernels that no CPU has, those with as many bits


class Span(ctypes.Structure):
    """src/interface.h: Span. An address and a size in bytes, which the library checks. ctypes makes a ``Span`` from
    each argument that is an array, a tensor, a ctypes object, or None."""

    _fields_ = [("at", c_void_p), ("bytes", c_int64)]

    @classmethod
    def from_param(cls, values: Any) -> Span:
        if values is None:
            return _NOTHING
        at, size = _extent(values)
        return cls(at, size)


_NOTHING = Span(0, -1)


def _extent(values: Any) -> tuple[int, int]:
    """Return the address of the values' memory, and its size in bytes (-1 for None).

    Raises ``ValueError`` for a tensor that is not contiguous, or not on the CPU.
    """
    if isinstance(values, array):
        at, count = values.buffer_info()
        return at, count * values.itemsize
    if values is None:
        return 0, -1
    if isinstance(values, (ctypes.Array, ctypes.Structure)):
        return ctypes.addressof(values), ctypes.sizeof(values)
    if not values.is_contiguous() or not values.is_cpu:
        raise ValueError(
            f"compiled code reads contiguous memory of the CPU, not strides {values.stride()} on {values.device}"
        )
    return values.data_ptr(), values.nbytes


def spans(values: abc.Iterable[Any]) -> array[int]:
    """Return an array with one span for each value."""
    return array("q", [number for each in values for number in _extent(each)])


def _span(*names: str) -> list[tuple[str, type]]:
    """Return the fields of spans: an address and a size in bytes for each name. Setting two numbers is faster than
    setting a structure."""
    return [field for name in names for field in ((name, c_void_p), (f"{name}_bytes", c_int64))]


class _WithSpans(ctypes.Structure):
    """A structure with spans among its fields."""

    def hand(self, **values: Any) -> None:
        """Set spans to the memory of these values, which the structure keeps alive."""
        vars(self).update(values)
        for name, value in values.items():
            at, size = _extent(value)
            setattr(self, name, at)
            setattr(self, f"{name}_bytes", size)


class Shape(ctypes.Structure):
    """src/interface.h: Shape."""

    _fields_ = [
        *((name, c_int32) for name in ("width", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int32) for name in ("positions", "weights", "hidden", "gelu", "ropes", "features", "normed")),
        *((name, c_int32) for name in ("parallel", "block", "first", "mask", "markov", "rank", "confidence")),
        *((name, c_float) for name in ("eps", "scale", "embedding")),
    ]


class CStored(_WithSpans):
    """src/interface.h: Stored."""

    _fields_ = [*((name, c_int32) for name in ("kind", "rows")), *_span("data")]


class CBatch(_WithSpans):
    """src/interface.h: Batch."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "tokens")),
        *_span("token", "position", "start", "count", "tables", "masks", "keys", "values"),
        ("layer_stride", c_int64),
        *((name, c_int32) for name in ("cache_type", "page", "threads")),
    ]


class Sampling(ctypes.Structure):
    """src/interface.h: Sampling."""

    _fields_ = [*((name, c_float) for name in ("temperature", "top_p", "floor")), ("top_k", c_int32)]


class CStops(ctypes.Structure):
    """src/interface.h: Stops."""

    _fields_ = [(name, c_float) for name in ("confidence", "reach")]

    @classmethod
    def of_rows(cls, spec: DraftSpec, rows: int) -> ctypes.Array[CStops]:
        """Return where the drafter stops, for each of ``rows`` rows."""
        reach = spec.reach or (0.0,) * rows
        return (cls * rows)(*(cls(spec.confidence, chance) for chance in reach))


class CLookup(ctypes.Structure):
    """src/interface.h: Lookup. A new one expects that 80% of the copied tokens are right."""

    _fields_ = [
        *((name, c_int32) for name in ("longest", "shortest", "most", "forwards")),
        ("share", c_float * 16),
        ("time", c_float * 64),
    ]

    def __init__(self, longest: int, shortest: int, most: int) -> None:
        super().__init__(longest, shortest, most, 0, (c_float * 16)(*[0.8] * 16))


class CClause(ctypes.Structure):
    """src/interface.h: Clause."""

    _fields_ = [("kind", c_int32), ("value", c_double * 4)]


class CMismatch(NamedTuple):
    """src/interface.h: Mismatch."""

    row: int
    round: int
    node: int
    held: int
    excused: int
    nats: float
    regret: float


MISMATCH = struct.Struct("3iIidd")  # the layout of a ``CMismatch`` in memory


class CRule(ctypes.Structure):
    """src/interface.h: Rule."""

    _fields_ = [
        ("seed", c_int64),
        ("table", c_uint64),
        *((name, c_int32) for name in ("clause_at", "clauses", "in_python", "unknown", "is_gate")),
    ]


class CRules(_WithSpans):
    """src/interface.h: Rules."""

    _fields_ = [
        *((name, c_int32) for name in ("variant", "vocab")),
        *_span("rule", "sampling", "clause", "control", "mask"),
    ]


class CBlocks(_WithSpans):
    """src/interface.h: Blocks."""

    _fields_ = [
        *((name, c_int32) for name in ("k", "most")),
        *_span("drafted", "drafted_count", "choice", "accepted", "following", "mismatch"),
        ("mismatches", c_int32),
    ]


class CRoundRow(_WithSpans):
    """src/interface.h: RoundRow."""

    _fields_ = [
        *((name, c_int32) for name in ("length", "room", "left", "k", "context", "draft_start", "first")),
        *_span("text", "copied", "stop"),
    ]


class CRounds(_WithSpans):
    """src/interface.h: Rounds."""

    _fields_ = [
        *_span("row"),
        ("rules", POINTER(CRules)),
        ("blocks", POINTER(CBlocks)),
        *_span("hurry"),
        ("nanoseconds", c_int64),
        *_span("logits", "distributions", "draft_logits"),
        *((name, c_int32) for name in ("longest", "rounds")),
        *((name, c_int64 * 2) for name in ("elapsed", "scoring", "drafting")),
        *_span("stops", "state"),
        *((name, c_int32) for name in ("read_before", "head_drafts")),
        *_span("head_states", "read"),
    ]


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "fly_refusal": (c_char_p, [c_int64 * 3]),
    "fly_variant": (c_char_p, [c_int, c_void_p]),
    "fly_clause": (c_char_p, [c_int]),
    "fly_loops": (c_int, [c_int]),
    "fly_sum": (c_uint64, [Span, c_int]),
    "fly_new": (c_int, [c_void_p, c_int, c_void_p] + [Span] * 4),
    "fly_free": (None, [c_void_p]),
    "fly_share": (c_int, [c_void_p, c_void_p, c_int, c_int]),
    "fly_set_layer": (c_int, [c_void_p, c_int, Span, c_int, c_int, c_int, c_int]),
    "fly_set_masked": (c_int, [c_void_p, Span]),
    "fly_set_markov": (c_int, [c_void_p, Span, Span]),
    "fly_set_matrix": (c_int, [c_void_p, c_int, c_int] + [Span] * 3),
    "fly_set_stored": (c_int, [c_void_p, c_int, c_int] + [Span] * 2 + [c_int]),
    "fly_set_embedding": (c_int, [c_void_p, c_int, Span]),
    "fly_round": (c_int, [c_int, c_int, Span, c_int, c_int, Span]),
    "fly_weight_bytes": (c_int64, [c_void_p]),
    "fly_workspace": (c_int64, [c_void_p]),
    "fly_forward": (c_int, [c_void_p, c_void_p, Span]),
    "fly_embedding": (c_int, [c_void_p, Span, c_int]),
    "fly_head_rows": (c_int, [c_void_p, Span, c_int]),
    "fly_logits": (c_int, [c_void_p, Span, c_int, Span, c_int]),
    "fly_score": (c_int, [c_void_p] * 2 + [Span] * 5),
    "fly_draft": (c_int, [c_void_p, c_void_p, c_int] + [Span] * 8 + [c_void_p] + [Span] * 3),
    "fly_draft_for": (c_int, [c_void_p, c_int, Span]),
    "fly_step": (c_int, [c_void_p] * 2 + [Span] * 5),
    "fly_read": (c_int, [c_void_p] * 2 + [Span]),
    "fly_block": (c_int, [c_void_p] * 2 + [c_int] + [Span] * 3),
    "fly_rounds": (c_int, [c_void_p] * 6),
}
_SHORT: dict[str, tuple[Any, list[Any]]] = {
    "fly_kept": (c_int, [c_int, Span, c_int, c_int, Span, Span]),
    "fly_decide": (c_int, [c_void_p, c_void_p, Span, Span, Span]),
    "fly_uniforms": (c_int, [Span, Span, c_int, c_int, Span]),
}
_NO_MEMORY, _OUTSIDE, _REFUSED = -11, -12, -13  # src/library.h: Error


def _checked(result: int, function: object, arguments: object) -> int:
    """Return the result of a call, or raise the error that the library reported."""
    if result not in (_NO_MEMORY, _OUTSIDE, _REFUSED):
        return result
    numbers = (c_int64 * 3)()
    what = load().fly_refusal(numbers).decode()
    has, least, most = numbers
    if result == _NO_MEMORY:
        raise MemoryError(f"no memory for {what}: {least} bytes")
    if most > 2**61:
        raise ValueError(f"compiled code was given {max(has, 0)} bytes of {what!r}, and needs {least}")
    raise (IndexError if result == _OUTSIDE else ValueError)(f"{what} is {has}, not {least} to {most}")


def _declare(function: Any, declared: tuple[Any, list[Any]]) -> Any:
    """Set the types of a function's result and arguments. Return the function, whose errors become exceptions."""
    function.restype, function.argtypes = declared
    if declared[0] in (c_int, c_int64):
        function.errcheck = _checked
    return function


def _file() -> Path | None:
    """Return the library's file, if it was built."""
    files = [Path(__file__).with_name(f"_library{suffix}") for suffix in EXTENSION_SUFFIXES]
    return next(filter(Path.exists, files), None)


@cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None and the reason why there is none."""
    if (file := _file()) is None:
        if platform.machine().lower() not in ("x86_64", "amd64"):
            return None, f"there are none for {platform.machine() or 'this processor'} yet"
        note = Path(__file__).with_name("not_built.txt")
        reason = note.read_text(encoding="utf-8").strip() if note.exists() else "the library was never built"
        return None, f"{reason} (from a checkout: pip install -e .)"
    try:
        library = ctypes.CDLL(str(file))
        abi = library.fly_abi()
    except (OSError, AttributeError) as error:
        return None, f"{file.name} cannot be loaded ({error})"
    if abi != _ABI:
        return None, f"{file.name} was built from other sources (interface {abi}, not {_ABI}); build it again"
    for name, declared in _FUNCTIONS.items():
        _declare(getattr(library, name), declared)
    return library, ""


def load() -> ctypes.CDLL:
    """Return the library. Raises ``ValueError`` with the reason if there is none."""
    library, reason = _open()
    if library is None:
        raise ValueError(f"there are no compiled kernels: {reason}")
    return library


def leaves_kernels_open(kernels: str) -> bool:
    """Whether neither ``kernels`` nor the environment variable FLY_KERNELS names kernels."""
    return kernels == "auto" and not os.environ.get(_VARIABLE, "").strip()


def default_variant() -> str:
    """Return the variant for calls that belong to no model: the one that FLY_KERNELS names if it runs here, else the
    best."""
    try:
        variant = split(chosen())[0]
    except ValueError:
        variant = TORCH
    return available()[0] if variant == TORCH else variant


@cache
def default_number() -> int:
    """Return the library's number for the ``default_variant``, which is chosen once."""
    return variant_number(default_variant())


@cache
def fast_call(name: str, releases_lock: bool = False) -> Any:
    """Return a fast function of the library, for the ``default_variant``. A call holds Python's interpreter lock,
    because taking the lock back from another thread would cost more than the call. With ``releases_lock`` it releases
    the lock."""
    kind = ctypes.CDLL if releases_lock else ctypes.PyDLL
    function = _declare(getattr(kind(None, handle=load()._handle), name), _SHORT[name])
    return partial(function, default_number()) if _SHORT[name][1][0] is c_int else function


@cache
def _built() -> dict[str, str]:
    """Return the variants that were built, best first (the library's order), and why each does not run here (empty if
    it does). If a processor has a variant's instructions and the variant still cannot run, log this once."""
    library, _ = _open()
    reasons: dict[str, str] = {}
    why = c_char_p()
    while library is not None and (name := library.fly_variant(len(reasons), ctypes.byref(why))):
        reason = reasons[name.decode()] = (why.value or b"").decode()
        if reason not in ("", _LACKS):
            logging.getLogger("fly").warning("kernels %r are not used: %s", name.decode(), reason)
    return reasons


@cache
def clause_kinds() -> dict[str, tuple[int, list[str]]]:
    """Return the kinds of clauses that the library evaluates (src/clauses.h): for each name its number, and the names
    of its values in order."""
    kinds = dict[str, tuple[int, list[str]]]()
    library, _ = _open()
    while library is not None and (text := library.fly_clause(len(kinds))):
        name, *values = (word.strip() for word in text.decode().split(","))
        kinds[name] = len(kinds), [value for value in values if value]
    return kinds


def variant_number(variant: str) -> int:
    """Return the library's number for ``variant``."""
    return list(_built()).index(variant)


def available() -> list[str]:
    """Return the variants that run here, best first; the last is ``"torch"``."""
    return [*(variant for variant, reason in _built().items() if not reason), TORCH]


def unusable() -> dict[str, str]:
    """Return the variants that were built but do not run here, and why."""
    return {variant: reason for variant, reason in _built().items() if reason}


def why_not() -> str:
    """Return why there are no compiled kernels here; empty if there are some."""
    if available() != [TORCH]:
        return ""
    return _open()[1] or "this processor has no AVX2 with FMA and F16C"


def split(kernels: str) -> tuple[str, str]:
    """Split the name of ``chosen`` kernels into the variant and its ending in ``NARROW``. The ending is empty if
    weights stay as they are."""
    for narrow in NARROW:
        if kernels.endswith(f"-{narrow}"):
            return kernels.removesuffix(f"-{narrow}"), narrow
    return kernels, ""


def chosen(kernels: str = "auto") -> str:
    """Return the kernels that ``kernels`` means on this machine. ``"auto"`` means the value of the environment variable
    FLY_KERNELS or, without one, the best kernels available. A compiled variant may have one of these endings, which say
    how weights are stored. An ending alone means the best variant with that ending.

    - ``-w8a8``: weights and activations of 8 bits;
    - ``-w4a8``: weights of 4 bits in groups of 32; the head's weights have 8 bits;
    - ``-w4``: the head's weights have 4 bits too; for drafts, as a large head has logits for likely tokens only;
    - ``-stored``: weights as a GGUF file stores them.

    Raises ``ValueError``, which lists the choices, if the kernels are unknown or not available here.
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
        reason = why_not() or unusable().get(split(wanted)[0])
        known = ["auto", *choices[:-1], *(NARROW if narrow else []), *narrow, TORCH]
        of_targets = [name for name in known if not is_for_drafts(name)]
        more = f"; for drafts also {[name for name in known if is_for_drafts(name)]}" if narrow else ""
        if narrow and (ending := wanted.rpartition("-")[2]) in _INSTEAD:
            more += f"; instead of {ending!r}, CPUs have {_INSTEAD[ending]!r}"
        problem = "is not available here" if reason else "is unknown"
        raise ValueError(f"{source} {problem}; choices: {of_targets}{more}{f' ({reason})' if reason else ''}")
    return wanted


def is_for_drafts(kernels: str) -> bool:
    """Whether only drafts may have these kernels."""
    return kernels.rpartition("-")[2] in FOR_DRAFTS


def check_target(kernels: str) -> None:
    """Raise ``ValueError`` for kernels that a target may not have."""
    if is_for_drafts(kernels):
        raise ValueError(f"kernels {kernels!r} are for drafts: likely tokens alone get logits; a target takes 'w4a8'")
