"""Templates rendered on an account make the text that the sandbox makes, and never much more than it allows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from template_fuzz import random_template
from test_chat_template import TEMPLATES, TOKENS

from paged_sdk.chat.metered import MeteredTemplate, NotCheapError
from paged_sdk.chat.plain_data import TooLargeError, measure
from paged_sdk.chat.sandbox import RenderLimits, TemplateEnvironment
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.errors import InvalidRequestError
from paged_sdk.types.messages import Message, TextMessageRole

LIMITS = RenderLimits(max_chars=1 << 20, max_seconds=0.2)
VARIABLES: Mapping[str, Any] = {
    **TOKENS,
    "messages": [
        {"role": "system", "content": "Be brief, and\nprecise."},
        {"role": "user", "content": " a, b, Größe <|im_end|> ", "name": "anna"},
        {"role": "assistant", "content": "<think>hm</think>\n\nyes"},
        {"role": "user", "content": ""},
    ],
    "tools": None,
    "add_generation_prompt": True,
}


def metered(source: str, limits: RenderLimits = LIMITS) -> str:
    return MeteredTemplate(TemplateEnvironment(limits).parse(source), limits).render(VARIABLES)


def sandboxed(source: str) -> str:
    from jinja2 import Template

    environment = TemplateEnvironment(LIMITS)
    code = environment.compile_with_limits(source)
    return str(Template.from_code(environment, code, environment.make_globals(None)).render(**VARIABLES))


def outcome(render: Any, source: str) -> str | type[Exception]:
    try:
        return str(render(source))
    except Exception as error:
        return type(error)


def check_seeds(seeds: range) -> None:
    counted = {"text": 0, "error": 0, "not cheap": 0}
    for seed in seeds:
        source = random_template(seed)
        start = time.thread_time()
        here = outcome(metered, source)
        assert time.thread_time() - start < 2, seed
        if here is NotCheapError:
            counted["not cheap"] += 1
            continue
        assert here == outcome(sandboxed, source), f"seed {seed}: {source}"
        counted["text" if isinstance(here, str) else "error"] += 1
    assert counted["text"] > len(seeds) // 4, counted


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages|join(', ', attribute='role') }}",
        "{{ messages|join(', ', 'role') }}",
        "{{ messages|map(attribute='role')|join(d='-') }}",
        "{{ ['a', 'b']|join(d='-') }}",
        "{{ messages|tojson(2) }}",
        "{{ ['é']|tojson(true, 1) }}",
        "{{ ['é']|tojson(false, none, (',', ':')) }}",
        "{{ [1, 2, 4]|select('divisibleby', num=2)|list|length }}",
        "{{ messages|rejectattr('role', 'sameas', other=none)|list|length }}",
        "{{ 'axa'|replace(old='a', new='b', count=1) }}",
        "{{ 'xax'|trim(chars='x') }}",
    ],
)
def test_filters_take_what_those_of_the_sandbox_take(source: str) -> None:
    template = ChatTemplate(source, TOKENS)
    try:
        messages = [Message(**each) for each in VARIABLES["messages"]]
        assert template.render(messages) == sandboxed(source)
    finally:
        template.close()


def test_random_templates_as_in_the_sandbox() -> None:
    check_seeds(range(60))


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 20_000, 1000))
def test_many_random_templates_as_in_the_sandbox(start: int) -> None:
    check_seeds(range(start, start + 1000))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "features"])
def test_the_usual_templates_are_rendered_here(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    assert template.runs_in_process
    template.close()


def test_a_long_chat_of_a_usual_template_is_rendered_here() -> None:
    source = TEMPLATES["qwen3"]
    long = {"messages": [{"role": "user", "content": "word " * 900}, {"role": "assistant", "content": "w " * 900}] * 80}
    template = MeteredTemplate(TemplateEnvironment(RenderLimits()).parse(source), RenderLimits())
    assert len(template.render(long)) > 500_000


def test_what_is_too_large_for_an_account_is_rendered_elsewhere() -> None:
    template = ChatTemplate(TEMPLATES["phi3"], TOKENS)
    message = Message(TextMessageRole.USER, "word " * 500_000)
    assert len(template.render([message])) == 2_500_000 + len("<|user|>\n<|end|>\n<|assistant|>\n")
    template.close()
    small = ChatTemplate(TEMPLATES["phi3"], TOKENS, limits=RenderLimits(max_chars=1000))
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        small.render([message])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 3 }}", "str"),
        ("{{ messages }}", "prints a list"),
        ("{{ messages ~ '' }}", "prints a list"),
        ("{{ 'x'.ljust(3) }}", "a call in line 1"),
        ("{% set f = 'x'.ljust %}{{ f(3) }}", "a call in line 1"),
        ("{% set range = 'x'.ljust %}{{ range(3) }}", "calls ljust"),
        ("{{ 'x'|center(3) }}", "the filter center"),
        ("{{ 3 is odd }}", "the test odd"),
        ("{{ 2 ** 3 }}", "Pow"),
        ("{% for a in [1] recursive %}{% endfor %}", "a recursive loop"),
        ("{{ ('a', x) }}", "a tuple"),
        ("{{ {x: 1} }}", "a computed key"),
        ("{{ 'a'.strip(*['a']) }}", r"with \*"),
        ("{{ messages[0].content|trim('x' * 9) }}", "str"),
        ("{{ strftime_now('%9999d') }}", "an unusual date"),
        ("{% import 'x' as x %}", "Import"),
        ("{{ namespace(a=1) == namespace(a=1) }}", "compares a PublicNamespace"),
        ("{{ messages|selectattr('content', 'in', 'abc')|list|length }}", "an unusual way"),
        ("{{ messages|map('upper')|list }}", "maps in an unusual way"),
        ("{{ messages|map(attribute='role', default='x')|list }}", "maps in an unusual way"),
        ("{{ messages|tojson(sort_keys=true) }}", "an unusual way"),
        ("{{ ('x' ~ 'y').rfind('" + "a" * 65 + "') }}", "from the end"),
        ("{{ 'x'.rsplit(sep='" + "a" * 65 + "') }}", "from the end"),
        ("{% set ns = namespace(n=3) %}{% for i in range(5000) %}{% set ns.n = ns.n + ns.n %}{% endfor %}", "int"),
        ("{{ 'a'|replace('', messages) }}", "text of a list"),
        ("{% for i in range(99999) %}{{ 'a text that is repeated often' }}{% endfor %}", "too much text|too long"),
        ("{% for i in range(9) %}{% set ns = namespace(x='ab') %}{% endfor %}{% set x = 'ab' %}"
         "{% set x = x + x %}{% set x = x * 1 %}", "str"),
    ],
)  # fmt: skip
def test_what_is_not_cheap_says_why(source: str, reason: str) -> None:
    with pytest.raises(NotCheapError, match=reason):
        metered(source)


def test_data_is_measured_part_by_part() -> None:
    assert measure(["ab", {"c": [1, None, True, 2.5]}], limit=1000).chars == 3
    assert measure([[[]]], limit=1000).depth == 2
    assert measure("abc", limit=19).weight == 19
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    for value, limit in (("abc", 18), (nested, 100_000), ([object()], 1000), ([{"a": {1}}], 1000)):
        with pytest.raises(TooLargeError):
            measure(value, limit=limit)
