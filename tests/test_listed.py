"""What a new rule, condition, family, scorer or strategy must be listed in, named place by place."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import fly.drafts
import fly.policies
from fly.backends.cpu.packed import refusal
from fly.drafts import DraftStrategy, draft_types
from fly.drafts.base import Wrapper
from fly.drafts.trained import HeadDraft
from fly.extras.eval import scorers
from fly.models.families import FAMILIES, Family
from fly.models.gguf import _ARCHITECTURES
from fly.models.llama import skeleton
from fly.parallel import Part
from fly.parallel.plan import PlanError
from fly.policies import AcceptancePolicy, Condition, condition_types, policy_types
from fly.policies.registry import _COMPOSITES, CATALOGUE, GATES
from tests import test_kernels, test_model, test_parallel
from tests.rule_twins import POLICIES
from tests.test_compiled import BUDGETS
from tests.test_docs import DOCS, ROOT
from tests.test_families import PUBLISHED, SIZES


def classes(room: ModuleType, *bases: type) -> Iterator[type]:
    """The finished ones that a room's modules define."""
    for info in pkgutil.iter_modules(room.__path__):
        module = importlib.import_module(f"{room.__name__}.{info.name}")
        for name, found in vars(module).items():
            ours = isinstance(found, type) and issubclass(found, bases) and found.__module__ == module.__name__
            if ours and not name.startswith("_") and not inspect.isabstract(found):
                yield found


def require_listed(what: str, places: dict[str, bool]) -> None:
    missing = [place for place, listed in places.items() if not listed]
    assert not missing, f"{what} is missing in {', '.join(missing)}"


def text(*path: str) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


RULES = [rule for rule in classes(fly.policies, AcceptancePolicy, Condition) if rule not in _COMPOSITES.values()]
TESTS_OF_RULES = ("rule_twins", "policy_cases", "test_policies", "test_conditions", "test_schedule", "test_vocabulary")
TRIED = {type(policy) for policy in POLICIES}
TRIED |= {type(each) for policy in POLICIES if policy.relaxation is not None for each in policy.relaxation.clauses}
TWINS = "".join(text("tests", f"{name}.py") for name in TESTS_OF_RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_or_condition_is_listed_everywhere(rule: Any) -> None:
    bases = rule.__subclasses__()  # one that others are made of, such as ExactCore, need not be named in texts
    registered = rule in {*policy_types().values(), *condition_types().values()} or bool(bases)
    has_tests_of_its_own = registered and rule not in (CATALOGUE | GATES).values()
    require_listed(
        rule.__name__,
        {
            "fly/policies/registry.py (CATALOGUE or GATES)": registered,
            "fly/policies/__init__.py (__all__)": rule.__name__ in fly.policies.__all__,
            "tests/rule_twins.py (a twin), or another test of rules": re.search(rf"\b{rule.__name__}\b", TWINS)
            is not None,
            "tests/rule_twins.py (an instance in POLICIES)": has_tests_of_its_own or rule in TRIED,
        },
    )


@pytest.mark.parametrize("strategy", list(classes(fly.drafts, DraftStrategy)), ids=lambda kind: kind.__name__)
def test_a_strategy_is_listed_everywhere(strategy: type[DraftStrategy]) -> None:
    if (
        strategy in (HeadDraft, Wrapper) or strategy.__name__ == "TranslatedDraft"
    ):  # what others are made of, or wrapped in
        return
    require_listed(
        strategy.__name__,
        {
            "fly/drafts/registry.py": strategy in draft_types().values()
            or strategy.__name__ in ("CascadeDraft", "LookupDraft"),  # a+b
            "fly/drafts/__init__.py (__all__)": strategy.__name__ in fly.drafts.__all__,
            "tests": any(strategy.__name__ in path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py")),
        },
    )


def compiled(family: Family) -> bool:
    return refusal(skeleton(config_of(family))) is None


def divided(family: Family) -> bool:
    try:
        Part(config_of(family), 0, 2)
    except PlanError:
        return False
    return True


def config_of(family: Family) -> Any:
    from fly.models import LlamaConfig

    return LlamaConfig(family=family.name, **SIZES)  # type: ignore[arg-type]


def reader_name(model_type: str) -> str:
    """A regular expression for the family's name where people write it: without the number of its generation, and with
    a space, a dash or nothing in place of an underscore (``seed_oss`` is Seed-OSS, ``gemma3_text`` is Gemma 3)."""
    return model_type.removesuffix("_text").rstrip("0123456789_").replace("_", "[-_ ]?")


@pytest.mark.parametrize(
    ("model_type", "written"),
    # What the pages of transformers on these models are called.
    [
        ("seed_oss", "Seed-OSS"),
        ("gemma3_text", "Gemma 3"),
        ("qwen3", "Qwen3"),
        ("gpt_neox", "GPT-NeoX"),
        ("phi3", "Phi-3"),
        ("olmo2", "OLMo2"),
        ("ernie4_5", "Ernie 4.5"),
        ("llama", "Llama"),
    ],
)
def test_a_family_is_looked_for_as_readers_write_it(model_type: str, written: str) -> None:
    assert re.search(reader_name(model_type), f"Llama, {written} and others", re.IGNORECASE)
    assert model_type == "llama" or not re.search(reader_name(model_type), "Llama, Mistral", re.IGNORECASE)


def families_tried(tests: ModuleType) -> set[str]:
    """The families that a module's tests have in their ids, so that ``pytest -k`` finds them."""
    marks = [mark for test in vars(tests).values() for mark in getattr(test, "pytestmark", ())]
    of_families = [mark.args[1] for mark in marks if mark.name == "parametrize" and mark.args[0] == "family"]
    return {getattr(family, "name", family) for families in of_families for family in families}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_is_listed_everywhere(family: Family) -> None:
    """And the table of what runs where says what the code does."""
    rows = re.findall(rf"^\| [^|]*`{family.name}`[^|]*\|(.*)\|$", text("docs", "contributing.md"), flags=re.MULTILINE)
    published = {name for raw in PUBLISHED.values() for name in raw["architectures"]}
    read = [*_ARCHITECTURES.values(), "MistralForCausalLM"]  # whose files say "llama"
    shown = reader_name(family.name)
    require_listed(
        family.name,
        {
            "docs/contributing.md (a row of what runs where)": len(rows) == 1,
            "tests/test_families.py (PUBLISHED)": family.architecture in published,
            "tests/test_compiled.py (BUDGETS)": family.name in BUDGETS,
            "tests/test_model.py (ids)": family.name in families_tried(test_model),
            "tests/test_kernels.py (ids)": family.name in families_tried(test_kernels),
            "tests/test_parallel.py (ids)": family.name in families_tried(test_parallel) or not divided(family),
            "docs/how-to/models.md": re.search(shown, text("docs", "how-to", "models.md"), re.IGNORECASE) is not None,
            "README.md": re.search(shown, text("README.md"), re.IGNORECASE) is not None,
        },
    )
    _, kernels, gguf, ranks = (cell.strip() for cell in rows[0].split("|"))
    assert kernels.startswith("yes") == compiled(family), f"compiled kernels of {family.name}: {kernels!r}"
    assert gguf.startswith("yes") == (family.architecture in read), f"GGUF files of {family.name}: {gguf!r}"
    assert ranks.startswith("yes") == divided(family), f"ranks of {family.name}: {ranks!r}"


def test_a_scorer_is_listed_everywhere() -> None:
    page = (DOCS / "how-to" / "evaluate.md").read_text(encoding="utf-8")
    kinds = {kind.model_fields["kind"].default for kind in scorers._Scorer.__subclasses__()}
    for kind in kinds:
        shown = {"own": "my_module:function", "bundled": "bundled-heldout"}.get(kind, kind)
        require_listed(
            f"scorer {kind!r}",
            {
                "fly/extras/eval/scorers.py (KINDS)": kind in scorers.KINDS,
                "docs/how-to/evaluate.md (the table of scorers)": f"| `{shown}`" in page,
            },
        )
