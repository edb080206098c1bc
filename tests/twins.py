"""A float64 twin of any model, and how far rounding may move what the model computes.

A ``Twin`` is the PyTorch model in float64. It rounds where given kernels store a value in fewer bits: weights, what a
product takes, the cache, final hidden states. What is left is the error of float32, which the twin does not compute but
samples: in each of its draws every value has noise, four times what float32 loses there. How far the draws lie apart is
the condition of this model on this text. Where it magnifies noise, or where a value lies so near the middle of two
steps that noise decides which one it takes, the draws differ, and so may the kernels; elsewhere they may not.

Shape legend: D draws, T tokens, C hidden width, N outputs, K inputs, V vocabulary; X inputs of a step, G such groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import gguf
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fly.backends.cpu import int8_weights
from fly.backends.cpu.blocks import eight_bits, four_bits
from fly.backends.cpu.library import split
from fly.models import DenseCausal, Llama
from fly.models.llama import Norm, embedding_scale, rotary_frequencies, signed_tables, skeleton

__all__ = ["DRAWS", "Twin", "assert_within", "decoded", "in_steps", "rounded_weight", "shaken"]

NOISE = 2.0**-22  # float32 rounds by up to 2^-24
DRAWS = 24  # where the kernels take the other of two steps, each draw does with a chance of nearly one half
MORE = 30  # times as many draws before an error is called one
FACTOR = 3.0  # in 1,600 random models the error was at most 1.0 times the distance of the farthest draw


def assert_within(got: Tensor, draw: Callable[[], Tensor], draws_D: Tensor | None = None) -> None:
    """Assert that each vector of ``got`` [..., N] is as near to the draw without noise as ``FACTOR`` times the farthest
    of the others (Euclidean distances).

    ``draw`` returns draws, the one without noise first; ``draws_D`` are the first of them, if they are drawn already.
    Where these do not allow an error, further draws are taken: a value that lies just far enough from the middle of two
    steps takes the other step in few draws.
    """
    draws_D = draw() if draws_D is None else draws_D
    want = draws_D[0]
    assert got.shape == want.shape
    error = (got.double() - want).norm(dim=-1)
    allowed = torch.zeros_like(error)
    for number in range(MORE):
        if number:
            draws_D = draw()
        allowed = allowed.maximum(FACTOR * (draws_D[1:] - want).norm(dim=-1).amax(0))
        if bool((error <= allowed).all()):
            return
    worst = int((error - allowed).argmax())
    raise AssertionError(f"{worst}: {error.flatten()[worst]:.3g} > {allowed.flatten()[worst]:.3g}")


def shaken(x_D: Tensor, size_D: Tensor, random: torch.Generator) -> Tensor:
    """Draws with noise on all but the first: ``NOISE`` times a ``size``, up or down. Each draw may be several rows."""
    noise_D = torch.randint(2, x_D.shape, generator=random, dtype=torch.float32).mul_(2 * NOISE).sub_(NOISE)
    noise_D[: len(x_D) // (DRAWS + 1)] = 0
    return torch.addcmul(x_D, noise_D, size_D)


def decoded(blocks_NB: Tensor, kind: str, inputs: int) -> Tensor:
    """What blocks of a GGUF file stand for, float32 [N, K]."""
    values = gguf.dequantize(blocks_NB.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values)[:, :inputs]


def in_steps(values_TK: Tensor, width: int | None) -> Tensor:
    """Values as products of 8 bits take them: each ``width`` of a row (None: all) rounded to whole steps of 1/127 of
    their largest, float64 [T, K]."""
    inputs = values_TK.shape[1]
    values_TGX = F.pad(values_TK.float(), (0, -inputs % (width or inputs))).unflatten(1, (-1, width or inputs))
    peak_TG1 = values_TGX.abs().amax(2, keepdim=True)
    inverse_TG1 = torch.where(peak_TG1 > 0, torch.full_like(peak_TG1, 127) / peak_TG1, 0)  # 127 / x rounds twice
    whole_TGX = (values_TGX * inverse_TG1).round().double()
    return (whole_TGX * (peak_TG1 / 127).double()).flatten(1)[:, :inputs]


class _Cached(DenseCausal):
    """Attention that rounds keys and values to the type ``stored``, and queries and weights to the type ``taken``.

    A weight is exp(score - largest score). ``shake`` adds noise to scores, weights and sums before they are rounded.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        stored: torch.dtype,
        taken: torch.dtype,
        shake: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(batch, length)
        self.stored = stored
        self.taken = taken
        self.shake = shake

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        q_THD = q_THD.to(self.taken).double()
        k_TGD, v_TGD = (x_TGD.to(self.stored).double() for x_TGD in (k_TGD, v_TGD))
        queries_a_key = q_THD.shape[1] // k_TGD.shape[1]
        q_BHTD, k_BHTD, v_BHTD = (
            x.unflatten(0, (self.batch, self.length)).transpose(1, 2).repeat_interleave(times, 1)
            for x, times in ((q_THD, 1), (k_TGD, queries_a_key), (v_TGD, queries_a_key))
        )
        # A sum has the errors of its parts, even where the parts cancel.
        scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
        k_BHDT = k_BHTD.transpose(2, 3)
        scores_BHTT = self.shake(q_BHTD @ k_BHDT * scale, q_BHTD.abs() @ k_BHDT.abs() * scale)
        seen_TT = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        if window is not None:
            seen_TT = seen_TT.triu(1 - window)
        scores_BHTT = scores_BHTT.masked_fill(~seen_TT, -torch.inf)
        weights_BHTT = (scores_BHTT - scores_BHTT.amax(-1, keepdim=True)).exp()
        weights_BHTT = self.shake(weights_BHTT, weights_BHTT)
        rounded_BHTT = weights_BHTT.to(self.taken).double()
        sums_BHTD = self.shake(rounded_BHTT @ v_BHTD, rounded_BHTT @ v_BHTD.abs())
        out_BHTD = sums_BHTD / weights_BHTT.sum(-1, keepdim=True)
        return out_BHTD.transpose(1, 2).flatten(0, 1)


def rounded_weight(weight_NK: Tensor, ending: str, head: bool) -> Tensor:
    """What kernels take a matrix for, float64 [N, K]."""
    if ending == "w8a8":
        whole_NK, scale_N = int8_weights(weight_NK)
        return whole_NK * scale_N.double().unsqueeze(1)
    if ending in ("w4a8", "w4"):
        rounded, kind = (eight_bits, "Q8_0") if head and ending == "w4a8" else (four_bits, "Q4_K")
        return decoded(rounded(weight_NK), kind, weight_NK.shape[1]).double()
    return weight_NK.detach().double()


def _kept(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class Twin:
    """``reference`` as ``kernels`` compute it (``fly.backends.cpu.PackedLlama``), or as PyTorch does in float32.

    Kernels that are ``stored`` take the weights of ``reference`` as they are. ``angles``: rotary angles have noise too,
    for a model that computes its own.
    """

    def __init__(self, reference: Llama, kernels: str = "torch", angles: bool = False) -> None:
        variant, ending = split(kernels)
        self.config, self.angles, self.stored = reference.config, angles, reference.dtype
        self.pairs = variant in ("amx", "avx512bf16")  # such kernels multiply pairs of bfloat16
        self.whole = ending != ""  # whether products take whole steps
        self.width = None if ending == "w8a8" else 32  # how many inputs share a step
        halves = self.pairs and (ending or reference.dtype == torch.bfloat16)
        self.taken = torch.bfloat16 if halves or (variant == "avx512" and self.whole) else torch.float32
        self.model = skeleton(reference.config)
        self._random = torch.Generator().manual_seed(0)
        for module, original in zip(list(self.model.modules()), reference.modules()):
            if isinstance(module, nn.Linear):
                head = original is reference.lm_head
                module.weight = _kept(rounded_weight(original.weight, ending, head))
                module.bias = None if original.bias is None else _kept(original.bias.double())
                module.register_forward_pre_hook(partial(self._take, head))
                module.register_forward_hook(self._multiply)
            elif isinstance(module, Norm):
                module.forward = partial(self._normalise, original.factors().double(), module.eps)
        # An embedding that is tied to the head is rounded like it. Its factor is rounded to the type of the reference.
        tied = reference.lm_head.weight is reference.embed_tokens.weight
        table_VC = (self.model.lm_head if tied else reference.embed_tokens).weight.double()
        factor = embedding_scale(self.config, reference.dtype) / embedding_scale(self.config, torch.float64)
        self.model.embed_tokens.weight = _kept(table_VC * factor)
        self.model.embed_tokens.register_forward_hook(lambda _, __, x_TC: self._shake(x_TC, x_TC))

    def hidden(self, tokens_T: Tensor | Sequence[int], cache: torch.dtype | None = None) -> Tensor:
        """Final hidden states [D, T, C] of one text, over a cache of that type (None: the reference's). The first draw
        has no noise."""
        tokens_T = torch.as_tensor(tokens_T, dtype=torch.int64)
        copies, length = DRAWS + 1, len(tokens_T)
        cache = cache or self.stored
        taken = torch.bfloat16 if self.pairs and cache == torch.bfloat16 else torch.float32
        positions_T = torch.arange(copies * length) if self.angles else torch.arange(length).repeat(copies)
        if self.angles:
            self.model._rotary = [self._turn(length, which) for which in range(len(self.config.ropes))]
        kv = _Cached(copies, length, cache, taken, self._shake)
        return self.model(tokens_T.repeat(copies), positions_T, kv).unflatten(0, (copies, length))

    def logits(self, tokens_T: Tensor | Sequence[int], cache: torch.dtype | None = None) -> Tensor:
        """Logits [D, T, V] of one text, as ``hidden``."""
        return self.project(self.hidden(tokens_T, cache))

    def project(self, hidden_DTC: Tensor) -> Tensor:
        """Logits [D, T, V] of final hidden states [D, T, C], or [T, C] for all draws."""
        hidden_DTC = hidden_DTC.double().expand(DRAWS + 1, *hidden_DTC.shape[-2:])
        return self.model.lm_head(hidden_DTC.flatten(0, 1)).unflatten(0, hidden_DTC.shape[:2])

    def _shake(self, x_TN: Tensor, size_TN: Tensor) -> Tensor:
        return shaken(x_TN, size_TN, self._random)

    def _turn(self, length: int, which: int) -> tuple[Tensor, Tensor]:
        """Rotary tables [D · T, 1, E] (E: the width of a head), the draws' one after the other."""
        signs_E = torch.ones(self.config.head_dim).double()
        signs_E[: len(signs_E) // 2] = -1
        angle_TE = torch.outer(torch.arange(length), rotary_frequencies(self.config, which)).double().repeat(1, 2)
        angle_T1E = angle_TE.repeat(DRAWS + 1, 1).unsqueeze(1)
        turn_T1E = signs_E * (self._shake(angle_T1E, angle_T1E) - angle_T1E)
        tables = signed_tables(self.config, torch.float64, torch.device("cpu"))[which]
        cos_T1E, sin_T1E = (table_P1E[:length].repeat(DRAWS + 1, 1, 1) for table_P1E in tables)
        return cos_T1E - turn_T1E * sin_T1E, sin_T1E + turn_T1E * cos_T1E

    def _normalise(self, factors_C: Tensor, eps: float, x_TC: Tensor) -> Tensor:
        x_TC = F.rms_norm(x_TC, factors_C.shape, factors_C, eps)
        return self._shake(x_TC, x_TC)

    def _take(self, head: bool, linear: nn.Linear, given: tuple[Tensor]) -> tuple[Tensor]:
        x_TK = given[0].to(self.stored) if head else self._shake(given[0], given[0])
        x_TK = x_TK.to(self.taken)
        return (in_steps(x_TK, self.width) if self.whole else x_TK.double(),)

    def _multiply(self, linear: nn.Linear, taken: tuple[Tensor], x_TN: Tensor) -> Tensor:
        # A sum has the errors of its parts, even where the parts cancel.
        size_TN = taken[0].abs().sum(-1, keepdim=True) * linear.weight.abs().amax(1)
        return self._shake(x_TN, size_TN if linear.bias is None else size_TN + linear.bias.abs())
