"""A Llama whose forward is one call of compiled code over the paged cache. Knows nothing of the engine or policies.

A result does not depend on the other rows of a call, on how a text is split over calls, or on the number of threads,
because every sum is added in one fixed order (src/decoder.h). ``fly.models.Llama`` is the reference; it rounds
intermediate values at other points.

Shape legend: T packed tokens, C hidden width, V vocabulary, N outputs and K inputs of a matrix, n some of the outputs,
U the tokens of a trimmed head.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from collections import abc
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from fly.backends.cpu.blocks import KINDS, eight_bits, four_bits
from fly.backends.cpu.library import TORCH, CBatch, CStored, Shape, chosen, load, spans, split, variant_number
from fly.cache import PagedBatch, PagedKVCache
from fly.models import Llama, LlamaConfig
from fly.models.checkpoint import Checkpoint
from fly.models.directory import Directory
from fly.models.llama import KV, Layer, Norm, embedding_scale, rotary_tables
from fly.models.loading import Loading

__all__ = [
    "CORRECT", "FUSE", "HEAD", "JOINT", "TYPES", "WIDEST_HEAD", "PackedLlama",
    "computes_as_stored", "float_weights", "int8_weights", "new_model", "pool_threads", "refusal", "shape_of",
]  # fmt: skip

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # src/interface.h: Type
TYPES_OF_ENDINGS = {"w8a8": 2, "w4a8": 3, "w4": 3, "stored": 3}
_FLOATS = [torch.float32, torch.bfloat16]
WIDEST_HEAD = 1024
# Numbers of matrices (src/models.cpp: fly_set_matrix).
_GATE_UP, HEAD, FUSE, CORRECT, JOINT = 2, 4, 5, 6, 7
_SKETCHED = 1 << 14  # from so many tokens on, a head in four bits has a sketch: four times what is computed of the head
_STRIP = 16  # rows that are packed together, and so must have the same kind of blocks
_PACKERS = 4  # at most so many threads pack, because each holds a layer's weights in memory

_local = threading.local()


def pool_threads() -> int:
    """Return how many threads a forward uses when this thread calls it."""
    return getattr(_local, "threads", None) or torch.get_num_threads()


def keep_threads() -> None:
    """From now on, torch's own operations in this thread use one thread, and forwards use as many threads as torch had.
    Torch's other threads would spin for milliseconds on the cores that a forward needs next. Other threads of the
    process keep their setting."""
    if (count := torch.get_num_threads()) == 1:
        return
    _local.threads = count
    torch.set_num_threads(1)
    # That call also changed torch's default for new threads. A new thread sets the default back.
    restore = threading.Thread(target=torch.set_num_threads, args=(count,))
    restore.start()
    restore.join()


def refusal(model: Llama) -> str | None:
    """Return why there is no compiled code for ``model``; None if there is."""
    if model.device.type not in ("cpu", "meta"):  # meta: a skeleton whose values are still to be read
        return f"compiled kernels run on the CPU, not on {model.device}"
    if model.dtype not in _FLOATS:
        return f"compiled kernels take {[str(dtype).removeprefix('torch.') for dtype in _FLOATS]}, not {model.dtype}"
    if (reason := layer_refusal(model.config)) is not None:
        return reason
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "compiled kernels know nothing of hooks, which this model has (fly.parallel.load compiles a rank's part)"
    return None


def layer_refusal(config: LlamaConfig) -> str | None:
    """Return why there is no compiled code for layers with this configuration; None if there is."""
    if config.head_dim > WIDEST_HEAD:
        return f"compiled kernels take heads up to {WIDEST_HEAD} wide, not {config.head_dim}"
    if config.traits.query_norm == "whole":
        return "compiled kernels normalise queries and keys head by head; this model normalises all heads at once"
    if not config.traits.input_norms:
        return "compiled kernels normalise the inputs of attention and feed-forward; this model takes them as they are"
    return None


def new_model(owner: object, variant: str, shape: Shape, *weights: Tensor | None) -> ctypes.c_void_p:
    """Make an empty model of the library (src/models.cpp: fly_new). It is freed with its ``owner``, but not when the
    interpreter ends: another thread may still be in a call of it."""
    library = load()
    handle = ctypes.c_void_p()
    library.fly_new(ctypes.byref(handle), variant_number(variant), ctypes.byref(shape), *weights)
    weakref.finalize(owner, library.fly_free, handle).atexit = False
    return handle


def shape_of(config: LlamaConfig, **others: float) -> Shape:
    """Lay out the sizes of a model for the library. ``others`` are the sizes that ``config`` does not have."""
    return Shape(
        width=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        positions=config.max_position_embeddings,
        scale=config.attention_scale,
        **others,
    )


class PackedLlama:
    """A loaded ``Llama``, its weights packed for one kind of processor.

    Only the embedding table of ``model`` is kept, unless it is tied to the head; then nothing is. The ending of
    ``variant`` says how the matrices are stored:

    - ``w8a8``: weights are rounded by ``int8_weights``, and so is an embedding that is tied to the head. Each token's
      inputs to a matrix are rounded to whole numbers from -127 to 127 times a scale (dynamic quantisation by token, as
      in arXiv 2206.01861, section 3.1; on AVX-512 they are rounded to bfloat16 first). Products multiply whole numbers,
      and are exact.
    - ``w4a8``: matrices of layers are rounded by ``fly.backends.cpu.blocks.four_bits``. The head is rounded by
      ``eight_bits``, because its errors go straight into the logits. Inputs are rounded as for ``w8a8``, but with a
      scale for every 32 inputs of a token.
    - ``w4``: as ``w4a8``, but the head has four bits too. It is for drafts, and a large draft has it by default, since
      its target verifies what it proposes. A head of 16,384 tokens or more has a sketch of one bit a weight
      (src/logits.h). For each place the sketch finds the 256 strips of 16 tokens with the largest logits. Only these
      are computed, and all others are -inf.
    - ``stored``: matrices keep the numbers and scales of a GGUF file's blocks, in another order. A matrix of another
      type is rounded by ``eight_bits``. Inputs are rounded as for ``w4a8``.

    Args:
        model: on the CPU, in float32 or bfloat16.
        variant: the name of a variant that runs here (``fly.backends.cpu.available``), maybe with an ending.
        loading: the loader, if the model's parameters have no values yet. Modules then get their weights one by one, so
            that no weight is in memory twice. ``stored`` needs it.
    """

    kept: list[int] | None = None  # the tokens that a trimmed head has rows for; None: all

    def __init__(self, model: Llama, variant: str, loading: Loading | None = None) -> None:
        if variant == TORCH or (reason := refusal(model)) is not None:
            raise ValueError(reason if variant != TORCH else f"{variant!r} is no compiled variant")
        self.config = model.config
        self.dtype = model.dtype
        self.device = torch.device("cpu")
        self.kernels, self.library = chosen(variant), load()
        variant, self._narrow = split(self.kernels)
        self._loading = loading
        if self._narrow == "stored" and (loading is None or not computes_as_stored(loading.checkpoint)):
            raise ValueError(f"kernels {self.kernels!r} compute with the blocks of a GGUF file; this model has none")
        self.vocab = model.lm_head.weight.shape[0]  # how many tokens it has logits for; a rank's part has fewer
        self.kept = model.kept
        # Kernels add the outputs of attention and feed-forward unscaled. If a family scales these first, the residual
        # stream is stored divided by that scale. Norms give the same result then, once their epsilon is divided too
        # (``_make``).
        self.divided = self.config.residual_multiplier
        self._scale = embedding_scale(self.config, self.dtype) / self.divided
        blocks = self._make(model, variant)
        if blocks is not None:
            self._embedding_blocks = blocks[1]  # the file's memory, which the library reads
            self.library.fly_set_embedding(self.handle, *blocks)
        if self.kept is not None:
            self.kept_U = torch.tensor(self.kept)  # which the library reads
            self.library.fly_draft_for(self.handle, self.config.vocab_size, self.kept_U)
        self._pack_all({HEAD: model.lm_head}, cast(list[Layer], model.layers))
        self._loading = None
        self._note_weight_bytes(model)
        self._prepare_calls()

    def _make(self, model: Llama, variant: str) -> tuple[int, Tensor] | None:
        """Make the library's model from its sizes, its last norm, the rotary tables, and the embedding if it is not
        tied to the head. Return the embedding's kind and blocks if it is used as a GGUF file stores it."""
        self._embedding: Tensor | None = None
        blocks = None
        if model.lm_head.weight is not model.embed_tokens.weight:
            if self._narrow == "stored" and self.kept is None and (stored := self._blocks_of(model.embed_tokens)):
                (blocks,) = stored
            else:
                with self._filled(model.embed_tokens):
                    self._embedding = model.embed_tokens.weight.detach().contiguous()
        shape = shape_of(
            self.config,
            vocab=self.vocab,
            weights=self._weights,
            hidden=TYPES[self.dtype],
            gelu=self.config.traits.activation == "gelu_tanh",
            ropes=len(self.config.ropes),
            eps=self.config.rms_norm_eps / self.divided**2,
            embedding=self._scale,
        )
        with self._filled(model.norm):
            norm, tables = float_weights(model.norm), rotary_tables(self.config)
        cos, sin = (torch.cat(table).contiguous() for table in zip(*tables))
        self.handle = new_model(self, variant, shape, norm, cos, sin, self._embedding)
        return blocks

    @property
    def _weights(self) -> int:
        """The library's number for the type of the matrices."""
        return TYPES_OF_ENDINGS[self._narrow] if self._narrow else TYPES[self.dtype]

    def _note_weight_bytes(self, *modules: nn.Module) -> None:
        """Note how many bytes a forward reads for each weight, on average over the matrices of ``modules``."""
        self.weight_bytes: float = 1 if self._narrow else self.dtype.itemsize
        if self._in_groups:
            linears = [each for module in modules for each in module.modules() if isinstance(each, nn.Linear)]
            count = sum(linear.weight.numel() for linear in linears)
            self.weight_bytes = self.library.fly_weight_bytes(self.handle) / count

    def _prepare_calls(self) -> None:
        """Prepare what consecutive calls share: a description of the KV cache used last, for the library."""
        self._cache: weakref.ref[PagedKVCache] | None = None
        self._call, self._calls = CBatch(), threading.Lock()

    @property
    def _in_groups(self) -> bool:
        """Whether matrices are stored in blocks, with a scale for each group of weights."""
        return self._narrow in ("w4a8", "w4", "stored")

    def _filled(self, module: nn.Module, but: frozenset[nn.Parameter] = frozenset()) -> AbstractContextManager[Any]:
        """Return a context in which the module's parameters have values, except those in ``but``."""
        return nullcontext() if self._loading is None else self._loading.filled(module, but)

    def _pack_all(self, others: abc.Mapping[int, nn.Linear], layers: abc.Iterable[Layer]) -> None:
        """Hand over the matrices of all layers, and ``others`` by their numbers."""
        # A few threads pack the modules in parallel: the library's calls release the interpreter lock. The head, the
        # largest module, goes first.
        with ThreadPoolExecutor(min(torch.get_num_threads(), _PACKERS), initializer=keep_threads) as pool:
            waiting = [pool.submit(self._pack, 0, which, linear) for which, linear in others.items()]
            waiting += [pool.submit(self._pack_layer, number, layer) for number, layer in enumerate(layers)]
            for done in waiting:
                done.result()
        _return_memory()

    def _pack_layer(self, number: int, layer: Layer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        around, heads = layer.norms(), [attention.q_norm, attention.k_norm] if attention.normalised else []
        norms = dict([*enumerate(around), *enumerate(heads, 4)])
        with self._filled(layer, frozenset(cast(nn.Parameter, linear.weight) for linear in linears)):
            self._set_layer(number, norms, attention.window, layer.rope)
        for which, linear in enumerate(linears):
            self._pack(number, which, linear)

    def _set_layer(
        self,
        number: int,
        norms: abc.Mapping[int, Norm],
        window: int | None,
        rope: int,
        causal: bool = True,
        anchored: bool = False,
    ) -> None:
        weights = [float_weights(norms[which]) if which in norms else None for which in range(7)]  # src/fly.h: Norm
        self.library.fly_set_layer(self.handle, number, spans(weights), window or 0, rope, causal, anchored)

    def _pack(self, layer: int, which: int, linear: nn.Linear) -> None:
        """Hand a matrix to the library: as plain values, as whole numbers with a scale for each output, or as
        blocks."""
        trimmed = which == HEAD and self.kept is not None  # the rows it keeps are not adjacent in the file
        parts = self._blocks_of(linear, which == _GATE_UP) if self._narrow == "stored" and not trimmed else None
        with self._filled(linear, frozenset() if parts is None else frozenset([cast(nn.Parameter, linear.weight)])):
            bias_N = None if linear.bias is None else _float(linear.bias)
            if parts is None:
                weight_NK, scale_N = linear.weight.detach().contiguous(), None
                if self._narrow == "w8a8":
                    weight_NK, scale_N = int8_weights(weight_NK)
                if not self._in_groups:
                    self.library.fly_set_matrix(self.handle, layer, which, weight_NK, bias_N, scale_N)
                    return
                wide = self._narrow == "stored" or (which in (HEAD, CORRECT) and self._narrow == "w4a8")
                kind, rounded = (KINDS["Q8_0"], eight_bits) if wide else (KINDS["Q4_K"], four_bits)
                # Gates and ups are two parts, because each must begin a strip.
                parts = [(kind, rounded(part)) for part in weight_NK.chunk(2 if which == _GATE_UP else 1)]
            handed = [CStored(kind, len(blocks)) for kind, blocks in parts]
            for part, (_, blocks) in zip(handed, parts):
                part.hand(data=blocks)
            rows = (CStored * len(handed))(*handed)
            self.library.fly_set_stored(
                self.handle, layer, which, rows, bias_N, which == HEAD and self._has_sketch(bias_N)
            )

    def _has_sketch(self, bias_V: Tensor | None) -> bool:
        """Whether the head has a sketch. A rank's part has none, as each rank would choose other tokens."""
        whole = self.config.vocab_size if self.kept is None else len(self.kept)
        return self._narrow == "w4" and bias_V is None and self.vocab == whole >= _SKETCHED

    def _blocks_of(self, module: nn.Linear | nn.Embedding, halves: bool = False) -> list[tuple[int, Tensor]] | None:
        """Return the stored tensors that make up a matrix, each as the number of its kind and its blocks, uint8 [rows,
        bytes]. Return None if kernels cannot use one of them as it is: they do not know its type, or it begins in the
        middle of a strip of 16 rows. With ``halves``, the second half of the rows begins a new strip."""
        assert self._loading is not None
        parts = []
        row = 0
        rows = module.weight.shape[0]
        for stored in self._loading.stored(cast(nn.Parameter, module.weight)):
            if stored.kind not in KINDS or (row - rows // 2 if halves and row >= rows // 2 else row) % _STRIP:
                return None
            parts.append((KINDS[stored.kind], stored.blocks()))
            row += stored.shape[0]
        return parts

    @property
    def workspace_bytes(self) -> int:
        """Memory held for the values between two layers. It grows with the tokens of a call, up to a bound, with the
        rows that are drafted for at once, and with the longest sequence."""
        return int(self.library.fly_workspace(self.handle))

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, kv: KV) -> Tensor:
        """Return the final hidden states [T, C] of packed ``tokens_T`` (int64) at ``positions_T`` (int64). ``kv`` is a
        batch of a ``PagedKVCache``.

        Raises ``IndexError`` for an id outside the vocabulary or a position outside the context.
        """
        tokens_T, positions_T = tokens_T.contiguous(), positions_T.contiguous()
        if len(tokens_T) != len(positions_T):
            raise ValueError(f"{len(tokens_T)} tokens, {len(positions_T)} positions")
        batch = self.batch(tokens_T, positions_T, kv)
        hidden_TC = torch.empty(len(tokens_T), self.config.hidden_size, dtype=self.dtype)
        self.library.fly_forward(self.handle, ctypes.byref(batch), hidden_TC)
        return hidden_TC

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Return the logits [T, V] in float32. A rank's part of a model, and a trimmed head, have logits of their own
        tokens only. With a sketch, unlikely tokens have -inf."""
        if hidden_TC.dtype != self.dtype:
            raise TypeError(f"hidden states are {hidden_TC.dtype}, this model's are {self.dtype}")
        hidden_TC = hidden_TC.contiguous()
        count = len(hidden_TC)
        logits_TV = torch.empty(count, self.vocab)
        self.library.fly_logits(self.handle, hidden_TC, count, logits_TV, pool_threads())
        return logits_TV

    def embedding(self) -> Tensor:
        """Return the embedding table [V, C], before the family's scaling."""
        if self._embedding is not None:
            return self._embedding
        embedding_VC = torch.empty(self.vocab, self.config.hidden_size, dtype=self.dtype)
        self.library.fly_embedding(self.handle, embedding_VC, pool_threads())
        return embedding_VC / self._scale

    def output(self) -> Tensor:
        """Return the output matrix [V, C], as the kernels round it."""
        rows_VC = torch.empty(self.vocab, self.config.hidden_size, dtype=self.dtype)
        self.library.fly_head_rows(self.handle, rows_VC, pool_threads())
        return rows_VC

    def batch(self, tokens: abc.Sized | None, positions: abc.Sized | None, kv: KV) -> CBatch:
        """Describe a batch to the library. Tokens and positions (int64) are arrays or tensors, or None if the call
        needs only the rows of ``kv``."""
        if not isinstance(kv, PagedBatch):
            raise TypeError(f"compiled kernels attend over a PagedKVCache, not over {type(kv).__name__}")
        with self._calls:  # each thread works on its own copy
            if self._cache is None or self._cache() is not kv.cache:
                self._use_cache(kv.cache)
            call = CBatch.from_buffer_copy(self._call)
        if tokens is not None and len(tokens) != sum(kv.counts):
            raise ValueError(f"{len(tokens)} tokens, {sum(kv.counts)} slots")
        tables = call.pages = [array("i", table) for table in kv.tables()]
        masks = None
        if kv.masks is not None:
            call.seen = [None if mask is None else mask.contiguous() for mask in kv.masks]
            masks = spans(call.seen)
        call.rows = len(tables)
        call.tokens = 0 if tokens is None else len(tokens)
        call.threads = pool_threads()
        call.hand(
            token=tokens,
            position=positions,
            start=array("i", kv.starts),
            count=array("i", kv.counts),
            tables=spans(tables),
            masks=masks,
        )
        return call

    def _use_cache(self, cache: PagedKVCache) -> None:
        """Use the keys and values of ``cache`` from now on. Raises ``ValueError`` if they are not this model's."""
        keys, heads = cache.keys, (self.config.num_key_value_heads, self.config.head_dim)
        if keys.dtype not in _FLOATS or keys.shape[2:] != heads or keys.device.type != "cpu":
            raise ValueError(
                f"the cache is {keys.dtype} on {keys.device} with heads of {tuple(keys.shape[2:])}; compiled kernels "
                f"take {_FLOATS} on the CPU, this model heads of {heads}"
            )
        call = self._call
        call.hand(keys=keys, values=cache.values)
        vars(call).clear()  # hold no reference, so that the cache can be freed
        call.layer_stride = keys.stride(0)
        call.cache_type, call.page = TYPES[keys.dtype], cache.allocator.block_size
        self._cache = weakref.ref(cache)


def computes_as_stored(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint stores matrices in blocks that kernels can use as they are."""
    if isinstance(checkpoint, Directory):  # it has no blocks, and may be a draft head's
        return False
    return any(stored.kind in KINDS for stored in checkpoint.tensors.values())


def _return_memory() -> None:
    """Return freed memory to the system, which the allocator would keep."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def int8_weights(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights to whole numbers of -127 to 127, int8 [N, K], times a scale for each output, float32 [N]. The scale
    maps an output's largest absolute weight to 127 (symmetric absolute maximum quantisation by output channel, as in
    Dettmers et al., arXiv 2208.07339, section 2.1)."""
    whole_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    scale_N = torch.empty(len(weight_NK), dtype=torch.float32)
    # A few outputs at a time, so that their float32 values stay in the processor's caches.
    for weight_nK, whole_nK, scale_n in zip(*(x.split(64) for x in (weight_NK.detach(), whole_NK, scale_N))):
        weight_nK = weight_nK.float()
        torch.div(weight_nK.abs().amax(1), 127, out=scale_n)
        scale_n[scale_n == 0] = 1.0
        whole_nK.copy_((weight_nK / scale_n.unsqueeze(1)).round_())
    return whole_NK, scale_N


def _float(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


def float_weights(norm: Norm) -> Tensor:
    """Return the factors of a norm, in float32."""
    return norm.factors().detach().contiguous()
