"""Compiled kernels on matrices in blocks: rounding to four and eight bits, and GGUF files that compute as they are, all
held to the values that the ``gguf`` library decodes.

The bound for every type of block: a product differs from that of the decoded values by at most half a step of each
group's inputs (``bound_of_groups``), and float32 rounding.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from fly import LLM, SamplingParams
from fly.backends import load_executor
from fly.backends.cpu import CpuExecutor, PackedLlama, available, why_not
from fly.backends.cpu.blocks import KINDS, eight_bits, four_bits
from fly.models import LlamaConfig, load_model, save_model
from fly.models.loading import Loading
from tests.ggufs import write_gguf
from tests.kernels import paged, text
from tests.toys import build_llama, dense_logits, random_llama
from tests.twins import DRAWS, Twin, assert_within, decoded, shaken

VARIANTS = [name for name in available() if name != "torch"]
built = pytest.mark.skipif(not VARIANTS, reason=why_not() or "compiled kernels are here")


def drawn(n: int, k: int, seed: int, scale: float) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * scale


def nearest(weight_NGX: Tensor) -> Tensor:
    """The error of plain rounding, a scale and a minimum of each group in float32 that take its range to 15 steps."""
    least, most = weight_NGX.amin(2, keepdim=True).clamp(max=0), weight_NGX.amax(2, keepdim=True)
    scale = ((most - least) / 15).clamp(min=1e-30)
    return ((weight_NGX - least) / scale).round() * scale + least - weight_NGX


@given(
    n=st.integers(1, 70),
    k=st.integers(1, 12),
    seed=st.integers(0, 99),
    scale=st.floats(1e-2, 1e2),
    centre=st.integers(-3, 3),
)
def test_four_bits_are_closer_than_plain_rounding(n: int, k: int, seed: int, scale: float, centre: int) -> None:
    """Also where all weights of a group are above or below 0. Rounded scales cost no more than a better fit gains."""
    weight_NK = drawn(n, 32 * k, seed, scale) + centre * scale
    error_NK = decoded(four_bits(weight_NK), "Q4_K", 32 * k) - weight_NK
    plain = float(nearest(weight_NK.unflatten(1, (-1, 32))).norm())
    assert float(error_NK.norm()) <= 1.05 * plain
    if centre == 0 and n * k > 20:
        assert float(error_NK.norm()) < 0.98 * plain


def bound_of_groups(values_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """How far rounding the rows may move their products with a matrix, [T, N]: half a step for each input."""
    values_TGX = pad(values_TK.double(), (0, -values_TK.shape[1] % 32)).unflatten(1, (-1, 32))
    weight_NGX = pad(weight_NK.double(), (0, -weight_NK.shape[1] % 32)).unflatten(1, (-1, 32))
    return values_TGX.abs().amax(2) / 254 @ weight_NGX.abs().sum(2).T


STEPS = 14.2, 14.6, 15.0, 15.4  # src/rounding.cpp: line_of


def best_lines(weight_NK: Tensor, random: torch.Generator) -> Tensor:
    """What ``four_bits`` makes of weights, by a plain search in float64: draws [D, N, K padded to 256], which decide
    near ties of lines and of numbers either way (``tests/twins.py``)."""
    weight_NSGX = pad(weight_NK.double(), (0, -weight_NK.shape[1] % 256)).unflatten(1, (-1, 8, 32))
    w = weight_NSGX.expand(DRAWS + 1, *weight_NSGX.shape)
    least, most, mean = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True), w.mean(-1, keepdim=True)
    size = w.abs().amax(-1, keepdim=True)
    flat = most == least
    lines = [torch.stack([torch.full_like(least, torch.inf), 0 * least, least])]  # error, scale, minimum
    for steps in STEPS:
        number = shaken((w - least) * torch.where(flat, 0, steps / (most - least)), 15 + 0 * w, random).round()
        number = number.clamp(max=15)
        apart = number - number.mean(-1, keepdim=True)
        square, spread = (x.square().sum(-1, keepdim=True) for x in (number, apart))
        scale = torch.where(spread > 0, (apart * w).sum(-1, keepdim=True) / spread, 0)
        scale = shaken(scale, scale * (square / spread).nan_to_num(posinf=0), random)  # of which much may cancel
        minimum = mean - scale * number.mean(-1, keepdim=True)
        through_0 = (number * w).sum(-1, keepdim=True) / square
        above = shaken(minimum, size, random) > 0
        scale, minimum = torch.where(above, through_0, scale), torch.where(above, 0, minimum)
        error = (number * scale + minimum - w).square().sum(-1, keepdim=True)
        error = shaken(error, w.square().sum(-1, keepdim=True), random)
        lines.append(torch.where(flat, lines[0], torch.stack([error, scale, minimum])))
    tried = torch.stack(lines)
    best = tried[:, 0].argmin(0, keepdim=True).unsqueeze(1).expand(1, 3, *least.shape)
    _, scale, minimum = tried.gather(0, best)[0]

    def rounded(part: Tensor) -> Tensor:
        """To whole numbers up to 63 of a superblock's factor, which is a float16."""
        factor = shaken(part, part, random).amax(-2, keepdim=True).clamp(min=0).div(63).half().double()
        return shaken(part / torch.where(factor > 0, factor, 1), 63 + 0 * part, random).round().clamp(0, 63) * factor

    scale, minus = rounded(scale), rounded(-minimum)
    number = shaken((w + minus) / torch.where(scale > 0, scale, torch.inf), 15 + 0 * w, random).round().clamp(0, 15)
    return shaken(number * scale - minus, size + 0 * w, random).flatten(2)


@given(
    n=st.integers(1, 5),
    k=st.integers(1, 300),
    seed=st.integers(0, 99),
    spread=st.sampled_from([0.1, 0.1, 0.003, 0.0]),
    centre=st.integers(-3, 3),
)
def test_four_bits_are_the_best_line_of_several(n: int, k: int, seed: int, spread: float, centre: int) -> None:
    """As a plain search finds it, superblock by superblock."""
    weight_NK = (drawn(n, k, seed, spread) + 0.1 * centre).bfloat16()
    blocks_NB = four_bits(weight_NK)
    assert torch.equal(blocks_NB, four_bits(weight_NK.float()))
    got_NSX = decoded(blocks_NB, "Q4_K", -(-k // 256) * 256).unflatten(1, (-1, 256))
    random = torch.Generator().manual_seed(0)
    assert_within(got_NSX, lambda: best_lines(weight_NK, random).unflatten(2, (-1, 256)))


@given(groups=st.integers(1, 9), value=st.floats(-1e3, 1e3, width=32))
def test_equal_weights_stay_what_they_are(groups: int, value: float) -> None:
    """But for the rounding of a factor to float16, whose numbers are 2^-24 apart near 0."""
    whole_NK = decoded(four_bits(torch.full((1, 32 * groups), value)), "Q4_K", 32 * groups)
    assert float((whole_NK - value).abs().max()) <= 2.0**-10 * abs(value) + 15 * 63 * 2.0**-25


@pytest.mark.filterwarnings("ignore:.*value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    weight_NK = drawn(3, 600, 0, 0.1)
    weight_NK[1, 300] = bad
    for blocks_NB, kind, size in ((four_bits(weight_NK), "Q4_K", 256), (eight_bits(weight_NK), "Q8_0", 32)):
        lost_NK = decoded(blocks_NB, kind, 600).isnan()
        assert lost_NK[1, 300 // size * size : (300 // size + 1) * size].all() and int(lost_NK.sum()) == size


@given(n=st.integers(1, 40), k=st.integers(1, 300), seed=st.integers(0, 99))
def test_blocks_end_with_zeros_after_the_last_input(n: int, k: int, seed: int) -> None:
    weight_NK = drawn(n, k, seed, 0.1)
    weight_NK[0] = 0.0
    for blocks_NB, kind, size in ((four_bits(weight_NK), "Q4_K", 256), (eight_bits(weight_NK), "Q8_0", 32)):
        whole = decoded(blocks_NB, kind, -(-k // size) * size)
        assert not whole[0].any() and whole.isfinite().all()
        if kind == "Q8_0":
            assert not whole[:, k:].any()


@given(n=st.integers(1, 40), k=st.integers(1, 300), seed=st.integers(0, 99), scale=st.floats(1e-2, 1e3))
def test_eight_bits_are_the_nearest_of_their_scale(n: int, k: int, seed: int, scale: float) -> None:
    weight_NK = drawn(n, k, seed, scale)
    blocks_NB = eight_bits(weight_NK)
    whole = torch.from_numpy(gguf.dequantize(blocks_NB.numpy(), Kind.Q8_0))
    step_NK = (whole.unflatten(1, (-1, 32)).abs().amax(2) / 127).repeat_interleave(32, 1)[:, :k]
    near_0 = 127 * 2.0**-25  # where float16 has steps of 2^-24
    assert ((decoded(blocks_NB, "Q8_0", k) - weight_NK).abs() <= 0.57 * step_NK + near_0).all()


def config_of(data: st.DataObject, wide: bool) -> LlamaConfig:
    """Families that GGUF files are read for; ``wide`` rows hold whole blocks of K-quants. Queries, keys and values are
    no multiple of 16 or 32 rows at times."""
    family = data.draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
    head_dim = data.draw(st.sampled_from([32, 64])) if wide else data.draw(st.sampled_from([16, 24, 64]))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    heads = 256 // head_dim if wide else kv_heads * group
    if not wide and heads * head_dim % 32:
        heads, kv_heads = 4 * kv_heads, kv_heads
    return LlamaConfig(
        family=family,
        vocab_size=data.draw(st.integers(3, 70)),
        hidden_size=data.draw(st.sampled_from([256, 512])) if wide else data.draw(st.sampled_from([32, 96, 288])),
        intermediate_size=256 if wide else data.draw(st.sampled_from([32, 96, 352])),
        num_hidden_layers=data.draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=64,
        tie_word_embeddings=data.draw(st.booleans()),
    )


@built
@settings(max_examples=6)
@given(data=st.data(), seed=st.integers(0, 5))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [*KINDS, "Q3_K"])
def test_a_file_computes_as_it_is(kind: str, variant: str, data: st.DataObject, seed: int) -> None:
    """Products with the head to the bits of float32; the embedding bit by bit; the whole model as PyTorch's on decoded
    values. Blocks that kernels do not know (Q3_K) are rounded to eight bits."""
    config = config_of(data, kind.endswith("_K"))
    model = build_llama(config, seed, scale=0.1)
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(model, file := Path(folder) / "model.gguf", Kind[kind])
        reference = load_model(file, "float32", "cpu")
        if kind not in KINDS:
            with pytest.raises(ValueError, match="this model has none"):
                PackedLlama(Loading(file, "float32", "cpu").model, f"{variant}-stored", Loading(file, "float32", "cpu"))
            return
        packed = PackedLlama((loading := Loading(file, "float32", "cpu")).model, f"{variant}-stored", loading)
        weight_VC = reference.lm_head.weight.double()
        assert torch.equal(packed.embedding(), reference.embed_tokens.weight)
        # Rows of activations with an outlier, as many as one block has, or more.
        hidden_TC = drawn(data.draw(st.integers(1, 40)), config.hidden_size, seed, 1.0)
        hidden_TC[0, 3] = 50.0
        if config.head_dim % 16 and config.num_key_value_heads % 2:  # values begin within a strip of 16 rows
            for layer in reference.layers:
                qkv = layer.self_attn.qkv_proj.weight
                qkv.copy_(decoded(eight_bits(qkv), "Q8_0", config.hidden_size))
        twin, got_TV = Twin(reference, packed.kernels), packed.logits(hidden_TC)
        assert_within(got_TV, partial(twin.project, hidden_TC))
        taken_TC = hidden_TC.to(twin.taken).double()
        slack_TV = 1e-5 * taken_TC.abs() @ weight_VC.abs().T
        exact_TV = taken_TC @ weight_VC.T
        assert ((got_TV - exact_TV).abs() <= bound_of_groups(taken_TC, weight_VC) + slack_TV).all()
        row = text(20, seed, config.vocab_size)
        (logits,) = paged(packed, [row], [[13, 1, 6]])
        assert_within(logits, partial(twin.logits, row))


@built
@pytest.mark.parametrize("variant", VARIANTS)
def test_matrices_of_several_kinds_side_by_side(variant: str, tmp_path: Path) -> None:
    """Query, key and value of their own kinds, as files of llama.cpp often are, and a matrix that is not in blocks."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    kinds = {
        "q_proj": "Q4_K", "k_proj": "Q4_0", "v_proj": "Q6_K", "o_proj": "Q5_1", "gate_proj": "Q5_K",
        "up_proj": "Q4_1", "down_proj": "BF16", "lm_head": "Q5_0", "embed_tokens": "Q8_0",
    }  # fmt: skip
    write_gguf(build_llama(config, 2, scale=0.1), file := tmp_path / "m.gguf", Kind.Q8_0, kinds=kinds)
    reference, loading = load_model(file, "float32", "cpu"), Loading(file, "float32", "cpu")
    packed = PackedLlama(loading.model, f"{variant}-stored", loading)
    down = reference.layers[0].mlp.down_proj.weight
    down.copy_(decoded(eight_bits(down), "Q8_0", 256))
    row = text(20, 0, 50)
    (logits,) = paged(packed, [row], [[20]])
    assert_within(logits, partial(Twin(reference, packed.kernels).logits, row))


@built
def test_a_file_is_taken_as_it_is_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``auto``, as a target and as a draft. Named kernels decode it; files without blocks run as before."""
    model = random_llama(0)
    config = model.config.model_copy(update={"hidden_size": 32, "head_dim": 16, "intermediate_size": 64})
    write_gguf(build_llama(config), file := tmp_path / "q.gguf", Kind.Q8_0)
    write_gguf(build_llama(config), plain := tmp_path / "f.gguf", Kind.F32)
    best = VARIANTS[0]
    assert load_executor(file, device="cpu").kernels == f"{best}-stored"
    assert load_executor(file, device="cpu", kernels=best).kernels == best
    assert load_executor(file, device="cpu", kernels="torch").kernels == "torch"
    assert load_executor(file, device="cpu", kernels="w8a8").kernels == f"{best}-w8a8"
    assert load_executor(plain, device="cpu").kernels == best
    monkeypatch.setenv("FLY_KERNELS", best)
    assert load_executor(file, device="cpu").kernels == best
    monkeypatch.delenv("FLY_KERNELS")
    with pytest.raises(
        ValueError, match=r"kernels .*-stored' compute with the blocks of a GGUF file; this model has none"
    ):
        load_executor(plain, device="cpu", kernels="stored")
    with pytest.raises(ValueError, match="this model has none"):
        PackedLlama(model, f"{best}-stored")
    save_model(build_llama(config), directory := tmp_path / "directory", torch.bfloat16)
    for target, draft, wanted in (
        (directory, file, [best, f"{best}-stored"]),
        (file, file, [f"{best}-stored"] * 2),
        (file, directory, [f"{best}-stored", best]),
    ):
        llm = LLM(target, f"model({draft})", device="cpu")
        kernels = [runner.executor.kernels for runner in (llm.engine.runner, llm.draft.runner)]
        assert kernels == wanted
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0))[0].token_ids
    monkeypatch.setattr("fly.backends.choice._LARGE", 0)
    assert LLM(file, f"model({file})", device="cpu").computed[1][0] == f"{best}-w4"


@built
def test_texts_are_those_of_the_decoded_values_where_logits_are_apart(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    write_gguf(build_llama(config, 4, scale=0.2), file := tmp_path / "m.gguf", Kind.Q4_K)
    packed, decoded_one = load_executor(file, device="cpu"), load_model(file, "float32", "cpu")
    assert isinstance(packed, CpuExecutor)
    row = text(60, 3, 64)
    (got,) = paged(packed.packed, [row], [[60]])
    want = dense_logits(decoded_one, row)
    error = float((got - want).abs().max())
    top = want.topk(2).values
    apart = top[:, 0] - top[:, 1] > 2 * error
    assert apart.any() and torch.equal(got.argmax(1)[apart], want.argmax(1)[apart])
    assert error < 0.05 * float(want.std() + want.abs().mean()) + 0.05


def test_what_is_wrong_with_blocks_is_refused_by_name() -> None:
    if not VARIANTS:
        pytest.skip(why_not())
    from fly.backends.cpu.library import CStored, load

    packed = PackedLlama(build_llama(random_llama(0).config), f"{VARIANTS[0]}-w4a8")
    c, vocab = packed.config.hidden_size, packed.vocab
    blocks = eight_bits(torch.zeros(vocab, c))

    def hand(*parts: tuple[int, int, Tensor], bias: Tensor | None = None) -> None:
        made = [CStored(kind, rows) for kind, rows, _ in parts]
        for part, (_, _, memory) in zip(made, parts):
            part.hand(data=memory)
        load().fly_set_stored(packed.handle, 0, 4, (CStored * len(made))(*made), bias, False)

    hand((KINDS["Q8_0"], vocab, blocks))
    for parts, said in (
        ([(9, vocab, blocks)], "a kind of blocks is 9"),
        ([(0, vocab, blocks)], "a kind of blocks is 0"),
        ([(8, vocab - 1, blocks)], f"rows of all parts is {vocab - 1}"),
        ([(8, vocab, blocks[:-1])], "bytes of 'a part of a matrix'"),
        ([(8, 5, blocks), (8, vocab - 5, blocks)], "first row by 16 is 5"),
        ([(8, -1, blocks)], "rows of a part is -1"),
    ):
        with pytest.raises(ValueError, match=said):
            hand(*parts)
    with pytest.raises(ValueError, match="bytes of 'bias'"):
        hand((8, vocab, blocks), bias=torch.zeros(vocab - 1))
    with pytest.raises(ValueError, match="a kind of blocks is 11"):
        load().fly_set_embedding(packed.handle, 11, blocks)
    other = PackedLlama(random_llama(0), VARIANTS[0])
    with pytest.raises(ValueError, match="weights of this model is 0, not 3 to 3"):
        load().fly_set_stored(other.handle, 0, 4, (CStored * 0)(), None, False)
