"""Cost twins: checkpoints that compute the same function at a multiple of the cost: ``python -m benchmarks.twins``.

They measure what a pair of small models gains at the cost ratio of a large pair. Every figure must be labelled as a
twin's: texts and acceptance are the small pair's, times are not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from fly.backends import executor_of
from fly.cli.options import LOADING, Json, Rules, takes
from fly.cli.run import alone, rules_of
from fly.cli.show import console, note, progress, ratio, table, write_json
from fly.cli.terminal import Table
from fly.drafts import SingleDraft
from fly.extras.bench.loaded import drafts_alone, subjects_of
from fly.extras.bench.speed import Forward, Forwards, Shape, measure_forwards
from fly.extras.eval import Result, Setting, compare
from fly.llm import LLM
from fly.models import Llama, LlamaConfig, load_model, save_model
from fly.models.bundled import resolve_checkpoint
from fly.models.bundled.tasks import problems as bundled_problems
from fly.models.llama import allocate, skeleton
from fly.policies import AcceptancePolicy, Exact
from fly.types import SamplingParams

PAIRS = {"70b:8b": (8 / 70, 15), "405b:8b": (8 / 405, 25)}
"""Cost of a drafted token relative to a token of the target, taken as the ratio of parameters, and the draft length
published for the pair (arXiv 2511.22972, section 4)."""

SURE = 0.4  # transformers' least probability of a drafted token
_CONTEXT = 128  # stored tokens after which forwards are timed
_TOKENS = 1024  # tokens per cache


def twin(model: Llama, width: int = 1, layers: int | None = None) -> Llama:
    """Build a model with ``model``'s function, ``width`` times as wide and with ``layers`` layers.

    Wider: hidden and feed-forward width, heads and key/value heads are multiplied by ``width``, and the new ones are
    zero; the cost of a layer grows with the square. RMSNorm divides by the mean square over all channels, which is
    then ``width`` times smaller, so its weights are divided by the square root of ``width``, and epsilon by ``width``.
    Deeper: layers with zero output matrices are appended; each adds nothing.

    The only difference is rounding: sums may have another order and, if ``width`` is not a power of four, norm weights
    are rounded once more to the model's dtype.

    Raises ``ValueError`` for a width below one, fewer layers than the model has, or a family whose function depends on
    its width in other ways.
    """
    config = model.config
    layers = config.num_hidden_layers if layers is None else layers
    if width < 1:
        raise ValueError(f"width {width} must be at least 1")
    if width > 1 and (config.traits.query_norm != "none" or config.traits.scaled_embedding):
        raise ValueError(f"a model of family {config.family!r} has no wider twin; width must be 1")
    if layers < config.num_hidden_layers:
        raise ValueError(f"layers {layers} are fewer than the model's {config.num_hidden_layers}")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    wider = {name: getattr(config, name) * width for name in sizes}
    made = skeleton(config.resized(layers, **wider, rms_norm_eps=config.rms_norm_eps / width))
    allocate(made, model.dtype, model.device)
    source = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.zero_()
            own, added = _source(name, config)
            if added and any(part in name for part in (".o_proj.", ".down_proj.")):
                continue
            at = 0
            for piece in source[own].split(_fused(own, config) or len(source[own])):
                parameter[at : at + len(piece)].narrow(-1, 0, piece.shape[-1]).copy_(piece)
                at += len(piece) * width
            if width > 1 and name.endswith("norm.weight"):
                parameter[: config.hidden_size].copy_(source[own].double() / width**0.5)
    return made.eval().requires_grad_(False)


def _source(name: str, config: LlamaConfig) -> tuple[str, bool]:
    """The original parameter that ``name`` is made from, and whether its layer was added. Added layers repeat the
    original's weights, so that their values are ordinary numbers."""
    if not name.startswith("layers."):
        return name, False
    _, number, rest = name.split(".", 2)
    return f"layers.{int(number) % config.num_hidden_layers}.{rest}", int(number) >= config.num_hidden_layers


def _fused(name: str, config: LlamaConfig) -> list[int] | None:
    """Row counts of the matrices that are fused in ``name``, each of which is padded by itself."""
    if ".qkv_proj." in name:
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        return [count * config.head_dim for count in heads]
    return [config.intermediate_size] * 2 if ".gate_up_proj." in name else None


def save_twin(model: Llama, source: Path, directory: Path) -> None:
    """Write a twin of the checkpoint ``source`` to ``directory``, with its tokenizer and end tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, directory / name)
    save_model(model, directory, model.dtype)


def parse_pair(text: str) -> tuple[float, int]:
    """Cost ratio and draft length of a pair's name, or of a number. Raises ``ValueError`` naming the choices."""
    if text in PAIRS:
        return PAIRS[text]
    try:
        cost = float(text)
    except ValueError:
        cost = 0.0
    if not 0 < cost <= 1:
        raise ValueError(f"pair {text!r} is neither a cost ratio in (0, 1] nor one of {[*PAIRS]}")
    return cost, 15


@dataclass(frozen=True)
class Twins:
    """Measurements of a pair of twins. ``results``: autoregressive decoding, then every policy at every draft length.
    Timed alone: the target decoding step by step (``plain``), its forwards by number of tokens (``target``), and the
    draft decoding a number of tokens (``draft``)."""

    results: list[Result]
    plain: Forward
    target: dict[int, Forward]
    draft: dict[int, Forward]

    @property
    def token(self) -> float:
        """Seconds per token of the target, decoding step by step."""
        return self.plain.timing.low / self.plain.tokens

    def cost(self, k: int) -> float:
        """c, measured: time of a drafted token over time of a target token."""
        return self.draft[k].timing.low / k / self.token

    def verification(self, k: int) -> float:
        """v(K), measured: time of the target's forward over K+1 tokens over time of one decoded token."""
        return self.target[k + 1].timing.low / self.token

    def exact(self, result: Result) -> bool:
        """Whether this is exact speculation, with one level or two."""
        return result.setting.k > 0 and result.setting.policy == Exact()

    def predicted(self, result: Result) -> float | None:
        """The formula τ / (K·c + v(K)); None if drafted tokens have no fixed cost, or drafts are not K long."""
        k, strategy = result.setting.k, result.setting.llm.draft
        if not k or not drafts_alone(strategy) or strategy.confidence:
            return None
        return result.stats.tau / (k * self.cost(k) + self.verification(k))

    def describe(self) -> str:
        """The twins' sizes and times per token."""
        target, draft = self.plain, next(iter(self.draft.values()))
        sizes = [
            f"{f.config.num_hidden_layers} layers of {f.config.hidden_size}, {f.weights / 1e6:,.0f} MB"
            for f in (target, draft)
        ]
        return f"target: {sizes[0]}, {self.token * 1e3:,.2f} ms a token\ndraft: {sizes[1]}"

    def as_json(self) -> dict[str, Any]:
        return {
            "twins": self.describe().replace("\n", "; "),
            "problems": len(self.results[0].right),
            "lengths": {k: {"c": self.cost(k), "v": self.verification(k)} for k in self.draft},
            "results": [
                {
                    "decoding": result.setting.name,
                    "policy": str(result.setting.policy),
                    "k": result.setting.k,
                    "tau": result.stats.tau,
                    "tokens_per_second": result.decoding_speed,
                    "tokens_per_second_with_prompts": result.tokens_per_second,
                    "overhead": result.times.overhead,
                    "accuracy": result.accuracy,
                    "predicted": self.predicted(result),
                }
                for result in self.results
            ],
        }


def measure_twins(
    model: str,
    draft: str,
    cost: float,
    lengths: Sequence[int],
    rules: Sequence[AcceptancePolicy],
    problems: int,
    directory: Path,
    width: int = 4,
    dtype: str = "auto",
    device: str = "auto",
    kernels: str = "auto",
    confidence: float = SURE,
    advance: Callable[[str], None] = lambda name: None,
) -> Twins:
    """Make twins of ``model`` and ``draft`` with a cost ratio of about ``cost`` here, and decode held-out problems.

    Both are made ``width`` times as wide. Then the target is made deeper, or else the draft, until the times per token
    have that ratio. Settings take turns of two problems, greedily: autoregressive decoding; speculation by each of
    ``rules``, with the draft model alone and with prompt lookup drafting for it, at every draft length; and both at the
    longest with a draft that stops below a ``confidence``. ``advance(name)`` is called after every completion;
    ``directory`` is for the twins' weights.
    """
    if (longest := max(lengths)) >= _TOKENS - _CONTEXT:
        raise ValueError(f"k {longest} must be below {_TOKENS - _CONTEXT}, for which twins have room")
    sources = [resolve_checkpoint(name) for name in (model, draft)]
    originals = [load_model(source, dtype, device) for source in sources]
    depths = _depths(originals, width, cost, sorted(lengths)[len(lengths) // 2], kernels)
    paths = []
    for name, source, original, layers in zip(("target", "draft"), sources, originals, depths):
        save_twin(twin(original, width, layers), source, path := directory / name)
        paths.append(str(path))
    del originals
    options: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels, "cache": _TOKENS}
    plain = LLM(paths[0], **options)
    single = LLM(plain, f"model({paths[1]!r})", **options)
    levels = LLM(plain, f"ngram+model({paths[1]!r})", **options)
    options = {"dtype": dtype, "device": device, "kernels": kernels}
    surely = LLM(plain, SingleDraft(paths[1], confidence=confidence, **options))
    ways = [(llm, how, k) for k in lengths for llm, how in ((single, ""), (levels, ", multi-level"))]
    settings = [Setting("autoregressive", plain, 0)]
    for llm, how, k in [*ways, (surely, f" (to {confidence:g})", longest)]:
        for rule, name in zip(rules, map(str, rules)):
            settings.append(Setting(f"{name}{how}", llm, k, rule))
    subjects = subjects_of(single, "target", "draft")
    target, drafting = (Forwards(subject.name, subject.make(), _TOKENS) for subject in subjects)
    wanted = [(target, Shape(1, _CONTEXT, longest, drafting=True))]
    for k in lengths:  # in the order of a round, so that each model finds cold caches
        wanted += [(target, Shape(1, _CONTEXT, k + 1)), (drafting, Shape(1, _CONTEXT, k, drafting=True))]
    decoded, *forwards = measure_forwards(wanted)
    asked = bundled_problems(None, "heldout", 0, problems)
    clocked = target.model.device.type == "cpu"  # on a GPU the clock would wait after every forward
    params = SamplingParams(temperature=0.0, max_tokens=400)
    # Turns of few problems: reading prompts takes long, and all settings share the target's weights.
    results = compare(settings, asked, params, advance, clocked, together=2)
    alone = [{f.tokens: f for f in forwards if f.drafting == steps} for steps in (False, True)]
    return Twins(results, decoded, *alone)


def _depths(originals: Sequence[Llama], width: int, cost: float, k: int, kernels: str) -> list[int]:
    """Numbers of layers of target and draft twin with which a drafted token, one of ``k``, takes ``cost`` times a
    target token's time."""
    room = _CONTEXT + k + 16
    wanted = [
        (Forwards("", executor_of(twin(original, width, layers), kernels), room), Shape(1, _CONTEXT, k, drafting=True))
        for original in originals
        for layers in (original.config.num_hidden_layers, 3 * original.config.num_hidden_layers)
    ]
    seconds = [step.timing.low / step.tokens for step in measure_forwards(wanted)]
    (shallow, deep), (small, tall) = seconds[:2], seconds[2:]
    layers, few = (original.config.num_hidden_layers for original in originals)

    def deeper(least: int, shallow: float, deep: float, wanted: float) -> int:
        """Layers for ``wanted`` seconds, given a model's time with the least number of layers and with thrice as
        many."""
        each = max(deep - shallow, shallow * 1e-3) / (2 * least)
        return max(least, least + round((wanted - shallow) / each))

    if small / shallow > cost:
        return [deeper(layers, shallow, deep, small / cost), few]
    return [layers, deeper(few, small, tall, shallow * cost)]


@alone
@takes(LOADING)
def main(
    pair: Annotated[
        list[str] | None,
        typer.Option(
            help="The cost ratio: 70b:8b, 405b:8b, or a number such as 0.05; repeatable. Default: both names."
        ),
    ] = None,
    draft: Annotated[str, typer.Option(help="Draft checkpoint.")] = "fly-draft",
    policy: Rules = None,
    k: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Draft length to measure; repeatable. Default: those published for the pair."),
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="How many times as wide both models are made; 4 is exact.")] = 4,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 24,
    json_: Json = None,
    *,
    model: str,
    dtype: str,
    device: str,
    kernels: str,
) -> None:
    """What a pair gains at the cost ratio of a large pair, measured on twins: the same functions at a higher cost.

    Acceptance and answers are those of the small pair; only the time is a larger pair's.
    """

    rules = rules_of(policy)
    records = []
    for name in pair or list(PAIRS):
        cost, published = parse_pair(name)
        lengths = k or [published]
        turns = 1 + len(rules) * (2 * len(lengths) + 1)
        with TemporaryDirectory() as temporary, progress(turns * problems, "twins") as advance:
            twins = measure_twins(
                *(model, draft, cost, lengths, rules, problems, Path(temporary), width),
                *(dtype, device, kernels, SURE, advance),
            )
        console.print(twins_table(twins, f"Twins of {model} and {draft} at the cost ratio of {name}: c {cost:.3f}"))
        records.append({"pair": name, "cost": cost, **twins.as_json()})
    note(
        "every figure is a twin's: texts and acceptance of the small pair, time of a\n"
        "larger one, after each prompt; 'with prompts' is over AR with those in ·\n"
        "formula: τ / (K·c + v(K)), where c is the time of a drafted token and v that of\n"
        "a forward of K + 1, each timed alone, over a token of plain decoding · over\n"
        "exact: over the fastest exact speculation · rest: share of that time that is\n"
        f"neither target nor draft · (to {SURE}): while the draft has at least that\n"
        "probability · recovery: accuracy over autoregressive's"
    )
    write_json(json_, records)


def twins_table(twins: Twins, title: str) -> Table:
    """A table of speed, acceptance and accuracy of all settings on a pair of twins; the first is autoregressive."""
    lengths = "; ".join(f"K {k}: c {twins.cost(k):.3f}, v {twins.verification(k):.2f}" for k in twins.draft)
    plain = twins.results[0]
    right = f"{len(plain.right)} held-out problems, of which autoregressive decoding solves {sum(plain.right)}"
    fastest = max(result.decoding_speed for result in twins.results if twins.exact(result))
    return table(
        f"{title}\n{twins.describe()}\n{lengths}\n{right}",
        twins.results,
        {
            "decoding (twin)": lambda r: "AR" if r is plain else escape(r.setting.name),
            "K": lambda r: "–" if r is plain else str(r.setting.k),
            "τ": lambda r: f"{r.stats.tau:.2f}",
            "tok/s": lambda r: f"{r.decoding_speed:,.0f}",
            "over\nAR": lambda r: ratio(r.decoding_speed, plain.decoding_speed),
            "formula": lambda r: ratio(twins.predicted(r)),
            "over\nexact": lambda r: "–" if r is plain else ratio(r.decoding_speed, fastest),
            "rest": lambda r: "–" if r.times.overhead is None else f"{r.times.overhead:.1%}",
            "with\nprompts": lambda r: ratio(r.tokens_per_second, plain.tokens_per_second),
            "recovery": lambda r: f"{r.accuracy / plain.accuracy:.1%}" if plain.accuracy else "–",
        },
    )


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()
