"""Products on tiles (src/amx.cpp) against those of vectors, and against themselves. A processor without tiles runs them
on a library in which ``tests/tiles.h`` emulates them. (Where the processor has tiles, and under a sanitizer, the other
tests of kernels run ``amx`` as well.)"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fly.backends.cpu import PackedLlama, available, chosen, library
from fly.cli.doctor import examine
from fly.models import LlamaConfig
from tests.kernels import DTYPES, WIDE, cut, paged, same_bits, text
from tests.sanitizers import COMPILER, build
from tests.toys import PLAIN, build_llama, llama_configs, random_llama
from tests.twins import Twin, assert_within

ENDINGS = ["", "-w8a8", "-w4a8", "-w4"]
# Outputs and inputs: of no whole tile, to be shared out among threads, and as many as real models have.
SIZES = [(101, 72), (2100, 512), (151_936, 32), (64, 8960)]


def _forget() -> None:
    for found in (library._open, library._built, library.fast_call):
        found.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def emulated() -> Iterator[bool]:
    """Whether tiles are emulated in this file's tests."""
    if "amx" in available():
        yield hasattr(library.load(), "fly_tile_error")
        return
    if "avx512bf16" not in available() or shutil.which(COMPILER) is None:
        pytest.skip("tiles are emulated beside avx512bf16, and by a compiler")
    file = build("tiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_file", lambda: file)
        _forget()
        yield True
    _forget()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("vocab", "hidden"), SIZES)
def test_no_number_of_rows_changes_a_product(vocab: int, hidden: int, ending: str) -> None:
    """Bit for bit: in 8 and 4 bits the sums of vectors. In bfloat16 those of each row alone, within rounding."""
    model = random_llama(1, vocab, hidden, 1, 4, 2, 16, scale=0.05).bfloat16()
    tiles, vectors = PackedLlama(model, f"amx{ending}"), PackedLlama(model, f"avx512bf16{ending}")
    weight_VC = model.lm_head.weight.double()
    for count in (1, 4, 5, 16, 17, 31, 32, 33, *([63, 64, 90, 257] if vocab < 10_000 else [])):
        hidden_TC = torch.randn(count, hidden, generator=torch.Generator().manual_seed(count)).bfloat16()
        got_TV = tiles.logits(hidden_TC)
        some = sorted({0, count // 2, count - 1})
        assert same_bits(got_TV[some], torch.cat([tiles.logits(hidden_TC[[row]]) for row in some])), count
        if ending:
            assert same_bits(got_TV, vectors.logits(hidden_TC)), count
            continue
        some_TC = hidden_TC[some].double()
        bound_TV = hidden * 2**-24 * some_TC.abs().mm(weight_VC.abs().T)
        assert ((got_TV[some] - some_TC.mm(weight_VC.T)).abs() <= bound_TV).all(), count


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("count", [3, 20, 40])
def test_a_row_of_no_numbers_changes_no_other_row(bad: float, count: int) -> None:
    model = PackedLlama(random_llama(1, 101, 72).bfloat16(), "amx")
    hidden_TC = torch.randn(count, 72, generator=torch.Generator().manual_seed(1)).bfloat16()
    others = [row for row in range(count) if row != count // 2]
    before_TV = model.logits(hidden_TC)[others]
    hidden_TC[count // 2] = bad
    assert same_bits(model.logits(hidden_TC)[others], before_TV)


@settings(max_examples=30)
@given(data=st.data(), config=llama_configs(families=PLAIN) | st.just(WIDE), seed=st.integers(0, 5))
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_forward_on_tiles_is_that_on_vectors(
    ending: str, data: st.DataObject, config: LlamaConfig, seed: int
) -> None:
    """Of all families, in pieces of any length, on any threads; and in bfloat16 the PyTorch model's."""
    reference = build_llama(config, seed, scale=0.1).to(data.draw(st.sampled_from(DTYPES)))
    rows = [text(data.draw(st.integers(1, 60)), b, config.vocab_size) for b in range(data.draw(st.integers(1, 3)))]
    tiles = PackedLlama(reference, f"amx{ending}")
    whole = paged(tiles, rows, [[len(row)] for row in rows])
    threads = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    try:
        pieces = paged(tiles, rows, [data.draw(cut(len(row))) for row in rows])
    finally:
        torch.set_num_threads(threads)
    assert all(map(same_bits, whole, pieces))
    if ending or reference.dtype == torch.float32:
        assert all(
            map(
                same_bits,
                whole,
                paged(PackedLlama(reference, f"avx512bf16{ending}"), rows, [[1] * len(row) for row in rows]),
            )
        )
        return
    twin = Twin(reference, "amx")
    for row, logits in zip(rows, whole):
        assert_within(logits, partial(twin.logits, row))


@pytest.mark.parametrize("ending", ["", "-w8a8"])
def test_a_prompt_of_many_tiles_is_its_tokens_one_by_one(ending: str) -> None:
    """2,100 tokens, with a matrix of 8,960 inputs."""
    reference = random_llama(2, 64, 32, 1, 2, 1, 16, 8960, 4096, scale=0.05).bfloat16()
    tiles, row = PackedLlama(reference, f"amx{ending}"), text(2100, 0, 64)
    (whole,) = paged(tiles, [row], [[2100]], block_size=16)
    assert same_bits(whole, paged(tiles, [row], [[3, 1, 256, 300, 17, 33, *[1] * 20, 1470]], block_size=16)[0])
    if ending:
        assert same_bits(whole, paged(PackedLlama(reference, f"avx512bf16{ending}"), [row], [[2100]], block_size=16)[0])


def test_tiles_that_give_wrong_sums_are_not_used(
    emulated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next set of kernels is, and the log and ``fly doctor`` say why."""
    if not emulated:
        pytest.skip("the processor's tiles are right")
    monkeypatch.delenv("FLY_KERNELS", raising=False)
    assert chosen() == "amx"
    error = ctypes.c_int.in_dll(library.load(), "fly_tile_error")
    try:
        for number, kind in ((1, "8 bits"), (2, "bfloat16")):
            error.value = number
            library._built.cache_clear()
            assert chosen() == "avx512bf16" and "amx" not in available()
            reason = f"tiles gave wrong sums of {kind} in a test"
            assert caplog.messages.pop() == f"kernels 'amx' are not used: {reason}"
            assert ("kernels amx", "compiled", reason) in list(examine())
            with pytest.raises(ValueError, match=f"'amx-w8a8' is not available here.*{reason}"):
                chosen("amx-w8a8")
    finally:
        error.value = 0
        library._built.cache_clear()
    assert chosen() == "amx"


def test_emulated_tiles_refuse_what_a_processor_would(emulated: bool) -> None:
    if not emulated:
        pytest.skip("the processor does")
    program = f"import ctypes\nctypes.CDLL({library.load()._name!r}).fly_fault_shape()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode and "tile fault: tile 0 has no shape in this thread" in ran.stderr, ran.stderr
