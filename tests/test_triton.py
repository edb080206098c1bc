"""The Triton kernels without a GPU: their values by Triton's interpreter (``tests/triton_values.py``), and what its
compiler and ``ptxas`` make of them for each kind of GPU: nothing spilt, shared memory below what every one has."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fly.backends.cuda.kernels import attention, layer, product, steps

ROOT = Path(__file__).parent.parent
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = 99 << 10  # bytes of shared memory that every GPU since Ampere gives a block
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS = {torch.int32: "i32", torch.uint8: "u8", torch.int64: "i64", torch.int8: "i8", **TYPES}


class Launches:
    """Takes the place of ``launch``: notes each launch as the compiler would be given it."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any], dict[Any, Any]]] = []

    def __call__(self, kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        how = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
        signature, constants, attributes = dict[str, str](), dict[str, Any](), dict[Any, Any]()
        for number, (name, value) in enumerate(zip(kernel.arg_names, args)):
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{POINTERS[value.dtype]}"
            elif value is None:
                signature[name], constants[name] = "constexpr", None
            elif isinstance(value, int) and value == 1:  # as the launcher does it
                signature[name], constants[name] = "constexpr", 1
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(number,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(options, "constexpr")
        self.made.append((kernel, signature, constants | options, how, attributes))


def compiled(launches: Launches, capability: int) -> list[str]:
    """What ``ptxas -v`` says of each launch."""
    said = []
    for kernel, signature, constants, how, attributes in launches.made:
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=how)
        assert made.metadata.shared <= SHARED, (kernel.__name__, constants, made.metadata.shared)
        arch = re.search(r"\.target (sm_\w+)", made.asm["ptx"])
        assert arch is not None
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "kernel.ptx"
            path.write_text(made.asm["ptx"])
            tool = PTXAS / ("ptxas-blackwell" if capability >= 100 else "ptxas")
            ran = subprocess.run(
                [tool, "-v", f"--gpu-name={arch[1]}", path, "-o", os.devnull],
                capture_output=True,
                text=True,
                check=True,
            )
        found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ran.stderr)
        registers = re.search(r"Used (\d+) registers", ran.stderr)
        assert found is not None and registers is not None
        said.append(f"{kernel.__name__}: {registers[1]} registers, {made.metadata.shared} bytes shared, {found[0]}")
        assert found.groups() == ("0", "0"), (said[-1], constants)
    return said


def attend(launches: Launches, dtype: torch.dtype, width: int, group: int, new: int, **options: Any) -> None:
    """The launches of one attention of one row's ``new`` tokens, in a context of 8,192."""
    q, k = torch.empty(new, 2 * group, width, dtype=dtype), torch.empty(512, 2, width, dtype=dtype)
    numbers = torch.zeros(new, dtype=torch.int32)
    tree = options.pop("tree", False)
    more = {"start_B": numbers[:1], "seen_TN": torch.zeros(new, new, dtype=torch.uint8)} if tree else {}
    table = torch.zeros(1, 32, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "launch", launches)
        attention.attend(q, k, k, numbers[:2], numbers, numbers, table, new, 256, options.get("window", 0), 0.1, **more)


def run_layer(launches: Launches, dtype: torch.dtype) -> None:
    """The launches of the small steps of a layer of an 8B model, and of a product with int8 weights."""
    x, qkv = torch.empty(9, 4096, dtype=dtype), torch.empty(9, 48 * 128, dtype=dtype)
    cache, table = torch.empty(512, 8, 128, dtype=dtype), torch.empty(9, 1, 128, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        for module in (layer, product):
            patch.setattr(module, "launch", launches)
        layer.add_norm(x, x, x[0], 1e-5)
        layer.gate(torch.empty(9, 2 * 14336, dtype=dtype))
        layer.rotate_store(qkv, table, table, torch.zeros(9, dtype=torch.int64), cache, cache)
        product.multiply_int8(x, torch.zeros(6144, 4096, dtype=torch.int8), torch.empty(6144, 1), None)
        for size in (32, 128):
            groups = 4096 // size
            zeros = torch.zeros(6144, groups, dtype=torch.uint8)
            product.multiply_int4(
                x, torch.zeros(6144, 2048, dtype=torch.uint8), torch.empty(6144, groups, dtype=dtype), zeros, None
            )


def run_steps(launches: Launches) -> None:
    """The launches of the other steps of a round, for a vocabulary of 128,256."""
    logits, column = torch.empty(9, 128256), torch.empty(9)
    numbers, table = torch.zeros(9, dtype=torch.int64), torch.zeros(9, 32, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "launch", launches)
        steps.place(table, numbers, torch.zeros(9, 9, dtype=torch.bool), 256, 99, 8192)
        steps.uniforms(numbers, numbers, 1, 8)
        steps.find_kept(logits, column, None, column, None)
        steps.find_kept(logits, column, column, column, column)
        steps.share_mass(logits, torch.empty(3, 9), column)
        steps.draw(logits, column)


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_kernels_compile_without_spills(capability: int) -> None:
    launches = Launches()
    attend(launches, torch.bfloat16, 128, 4, 9)
    attend(launches, torch.bfloat16, 256, 8, 9, tree=True, window=100)
    run_layer(launches, torch.bfloat16)
    run_steps(launches)
    for line in compiled(launches, capability):
        print(capability, line)


def test_values_are_those_of_the_reference() -> None:
    """In a process of its own: Triton asks for its interpreter when it is imported."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/triton_values.py"],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]


def main() -> None:
    """Compile everything that the kernels are used for: ``python -m tests.test_triton``."""
    for capability in (80, 89, 90, 120):
        for dtype in TYPES:
            for width in (64, 128, 256):
                for new in (1, 9):
                    for options in ({}, {"tree": True, "window": 100}):
                        launches, said = Launches(), ""
                        attend(launches, dtype, width, 4, new, **options)
                        try:
                            said = "; ".join(compiled(launches, capability))
                        except AssertionError as error:
                            said = f"refused: {error}"[:150]
                        print(capability, dtype, width, new, options, said, flush=True)


if __name__ == "__main__":
    main()
