"""Builds the compiled kernels, where there is a compiler for them. Everything else is in pyproject.toml.

One shared library, loaded by ctypes: each source is compiled with the flags of the processors it is for, and which of
them runs is chosen when it is loaded (fly/backends/cpu/library.py). Without it everything works, on PyTorch alone; why
it is missing is kept beside the package's code.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# GCC's own header of intrinsics starts from undefined registers
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"]
AVX512 += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
SRC = "fly/backends/cpu/src"
PLAIN = "library", "threads", "models", "blocks", "rounding", "calls", "decide", "rounds"
SOURCES = {f"{SRC}/{name}.cpp": [] for name in PLAIN}
SOURCES |= {
    f"{SRC}/amx.cpp": [],  # its functions name their instructions, as one of them runs on every processor
    f"{SRC}/avx2.cpp": AVX2,
    f"{SRC}/avx512.cpp": AVX512,
    f"{SRC}/avx512bf16.cpp": [*AVX512, "-mavx512bf16"],
}
HEADERS = sorted(map(str, Path(SRC).glob("*.h")))
# No contraction: what is fused must not depend on where the compiler happens to vectorise.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno"]
FLAGS += ["-ffp-contract=off", "-g0", "-Wall", "-Wextra"]


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        note = Path(__file__).parent if self.editable_mode or self.inplace else Path(self.build_lib)
        note = note / "fly" / "backends" / "cpu" / "not_built.txt"
        note.unlink(missing_ok=True)

        def compiled(source: str) -> list[str]:
            return self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=[*FLAGS, *SOURCES[source]], depends=ext.depends
            )

        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # those with the most flags take longest, and go first
                longest_first = sorted(SOURCES, key=lambda source: -len(SOURCES[source]))
                objects = [path for made in pool.map(compiled, longest_first) for path in made]
            target = self.get_ext_fullpath(ext.name)
            self.compiler.link_shared_object(objects, target, extra_postargs=["-pthread"], target_lang="c++")
        except Exception as error:
            compiler = (getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so)[0]
            self.warn(f"the compiled kernels were not built, PyTorch will be used instead ({error})")
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{compiler} failed to build them; install a C++17 compiler and then this package again\n")


if __name__ == "__main__":
    extensions = []
    if sys.platform != "win32" and platform.machine().lower() in ("x86_64", "amd64"):
        extensions.append(
            Extension("fly.backends.cpu._library", list(SOURCES), depends=HEADERS, language="c++", optional=True)
        )
    setup(ext_modules=extensions, cmdclass={"build_ext": BuildKernels})
