"""Who wrote each character of a rendered template: random templates beside plain Jinja's rendering."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from fly.models.sandbox import Sandbox
from fly.models.traced import OTHER, TEMPLATE, message_writer, trace, writers_of

chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")

SANDBOX = Sandbox()

# --- random templates --------------------------------------------------------------------------------------

# What a template may do with texts ``{}``: each makes a text.
ONE = [
    "({}|upper)", "({}|lower)", "({}|title)", "({}|capitalize)", "({}|trim)", "({}|reverse)", "({}|first)",
    "({}|last)", "({}|center(12))", "({}|indent(2))", "({}|indent('q', true, true))", "({}|wordwrap(5))",
    "({}|truncate(6, true, '..', 0))", "({}|urlize)", "({}|e)", "({}|forceescape)", "({}|safe)", "({}|string)",
    "({}|list|join('-'))", "({}|replace('a', 'b'))", "({}|tojson)", "({}|tojson(ensure_ascii=true)|safe)",
    "({}|striptags)", "({}|urlencode)", "({}|pprint)", "({}|default('x'))", "({}|random)", "({}|list|sort|join)",
    "({}|unique|join(' '))", "({}|batch(3, '_')|list|first|join)", "({}|slice(2)|list|last|join)",
    "({}|map('upper')|join)", "({}|select('equalto', 'a')|join)", "({}|max)", "({}|wordcount)", "({}|length)",
    "({{'k': {}}}|xmlattr)", "({{'k': {}, 3: none}}|tojson(indent=1, sort_keys=false))", "([{}]|string)",
    "({{'k': [1, {}]}} ~ '')", "([{{'k': {}}}]|groupby('k')|map(attribute='grouper')|join)", "({}|attr('upper'))()",
    "({}|int(5)|string)", "{}[1:]", "{}[:-1]", "{}[::-1]", "{}[0]", "{}.split('a')[-1]",
    "('|'.join({}.split()))", "('|'.join({}.rsplit(none, 1)))", "{}.partition(' ')[2]", "{}.rpartition('<')[0]",
    "('+'.join({}.splitlines(true)))", "{}.strip('<a')", "{}.lstrip()", "{}.rstrip('>')", "({}*2)", "{}.zfill(9)",
    "{}.ljust(9, '*')", "{}.rjust(9)", "{}.center(8, 'q')", "{}.expandtabs(3)", "{}.swapcase()", "{}.casefold()",
    "{}.title()", "{}.capitalize()", "{}.upper()", "{}.removeprefix('<|')", "{}.removesuffix('>')",
    "{}.translate({{97: 'zz', 98: none}})", "{}.replace('', '.')", "{}.replace('a', '', 1)", "('%s' % {})",
    "('%-8s.' % {})", "('%(a)s%%' % {{'a': {}}})", "('{{!r}}|'.format({}))", "('{{:>9}}{{{{'.format({}))",
    "('%s;'|format({}))", "'{{a}}'.format_map({{'a': {}}})", "({} is string)", "({}.encode()|string)",
    "({}|e|string)", "({}|safe).split('a')[-1]", "({}|safe)[1:]", "({}|safe)|list|join('<')",
    "({}|tojson|safe).upper()",
]  # fmt: skip
TWO = [
    "({} ~ {})", "({} + {})", "({} if {} == 'a' else '<|end|>')", "('<|end|>' if 'a' in {} else {})",
    "([{}, 'b']|join({}))", "{}.join(['a', 'b', {}])", "('a-b'|replace('-', {}) ~ {})", "{}.replace('a', {})",
    "('%s-%5s' % ({}, {}))", "('{{0}}{{1}}{{0}}'.format({}, {}))", "([{}, {}]|sort|join)", "([{}, {}]|unique|join)",
    "('{{:{{}}}};'.format({}, {}|length))", "('{{:{{}}>7}}'.format({}, {}[:1]))",
    "({}.split({})|join)", "({} if {} > 'b' else 'c')", "(dict(a={}, b={})|tojson)", "({}|e + {})", "({} + {}|e)",
    "({}|safe + {})", "({} + {}|tojson|safe)", "({}|safe).join([{}, 'b<'])", "({}|safe).replace('a', {})",
]  # fmt: skip
STATEMENTS = [
    "{{{{ {} }}}}", "{{% set x = {} %}}{{{{ x }}}}[{{{{ x }}}}]", "{{% if {} %}}yes{{% endif %}}",
    "{{% set y %}}<{{{{ {} }}}}>{{% endset %}}{{{{ y }}}}", "{{% filter upper %}}<|{{{{ {} }}}}{{% endfilter %}}",
    "{{% filter indent(3) %}}a\n{{{{ {} }}}}\nb{{% endfilter %}}",
    "{{% for c in {} %}}{{{{ c }}}}{{% if not loop.last %}},{{% endif %}}{{% endfor %}}",
    "{{% macro m(a, b='<|end|>') %}}{{{{ a }}}}{{{{ b }}}}{{% endmacro %}}{{{{ m({}) }}}}{{{{ m('x', a) }}}}",
    "{{% macro w() %}}({{{{ caller() }}}}){{% endmacro %}}{{% call w() %}}{{{{ {} }}}}{{% endcall %}}",
    "{{% set ns = namespace(t='') %}}{{% set ns.t = ns.t ~ {} %}}{{{{ ns.t }}}}",
    "{{% generation %}}{{{{ {} }}}}{{% endgeneration %}}", "{{% autoescape true %}}<{{{{ {} }}}}{{% endautoescape %}}",
    "{{% with z = {} %}}{{{{ z ~ z }}}}{{% endwith %}}",
    "{{% block q %}}{{{{ {} }}}}{{% endblock %}}{{{{ self.q() }}}}",
    "{{% for k, v in {{'a': {}}}|items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}}", "{{{{ {}|random }}}}",
]  # fmt: skip


def templates(
    atoms: list[str], one: list[str] = ONE, two: list[str] = TWO, statements: list[str] = STATEMENTS
) -> st.SearchStrategy[str]:
    """Templates of lines that show what these operations make of texts ``atoms``."""

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        ones = st.builds(lambda form, a: form.format(a), st.sampled_from(one), inner)
        return ones | st.builds(lambda form, a, b: form.format(a, b), st.sampled_from(two), inner, inner)

    shown = st.recursive(st.sampled_from(atoms), grow, max_leaves=4)
    line = st.builds(lambda form, a: form.format(a), st.sampled_from(statements), shown)
    return st.lists(line, min_size=1, max_size=3).map(" ".join)


def plainly(source: str, **variables: Any) -> str | None:
    """What transformers' environment makes of the variables; None if the template fails."""
    random.seed(0)  # for the filter of that name
    try:
        return chat_template_utils._compile_jinja_template(source).render(variables)
    except Exception:
        return None


def traced(source: str, **variables: Any) -> Any:
    """The same in our sandbox."""
    random.seed(0)
    try:
        return SANDBOX.from_string(source).render(variables)
    except Exception:
        return None


OWN = ("<|end|>", "ab", "x <|", "|>\n", "Straße")  # what templates write here
THEIRS = st.lists(st.sampled_from(["ж", "Щ ", "<|", "|>", "\t", "Σ", "\n", "ώ", " ", "'", '"', "&", "я я"]), max_size=6)


@settings(max_examples=150)
@given(source=templates(["a", "b", *map(repr, OWN)]), a=THEIRS.map("".join), b=THEIRS.map("".join))
@example("{{ [a, 'ab']|tojson }}{{ ['ab', a] }}", "ж\n'", "")
def test_no_letter_of_a_message_is_said_to_be_the_templates(source: str, a: str, b: str) -> None:
    """Messages here have no Latin letter and templates no other, so letters tell who wrote them."""
    note(repr((source, a, b)))
    text = traced(source, a=trace(a, message_writer(0)), b=trace(b, OTHER))
    assert text == plainly(source, a=a, b=b)
    if text is not None:
        assert len(writers_of(text)) == len(text)
        own = {character for character, writer in zip(text, writers_of(text)) if writer == TEMPLATE}
        assert not own.intersection("жщяώσςΣЖЩЯΏ")
