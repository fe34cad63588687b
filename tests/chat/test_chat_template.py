"""Chat templates, judged by transformers' apply_chat_template; and what hostile ones can do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_data import gpt2_like, smollm2_metadata

from paged_sdk.chat.sandbox import RenderLimits
from paged_sdk.chat.template import ChatTemplate, choose_template, read_template
from paged_sdk.errors import CheckpointError, InvalidRequestError
from paged_sdk.types.messages import Message, TextMessageRole

# Each shows what real templates of that family need, no more.
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{% endif %}
{{- "Today: " + (date_string if date_string is defined else strftime_now("%d %b %Y")) + "\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN25 = """{%- if tools %}
    {{- "never" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
        and not message.content.startswith('<tool>') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant/...') }}
{% endif %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception("Only user and assistant, got " + message.role) }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}
{%- endfor %}
"""
PHI3 = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
    "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
    "{% else %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
FEATURES = """{%- macro turn(message, number=0) -%}
    {{ number }}: {{ message.content | tojson }}
{%- endmacro %}
{% for message in messages if message.role != 'system' %}
  {{ loop.index }}/{{ loop.length }}/{{ loop.revindex }}
  {{ (loop.previtem | default(loop)).role }}-{{ loop.nextitem.role if not loop.last }}
  {{ turn(message, number=loop.index) }} {{ loop.cycle('a', 'b') }}
  {% if message.content | length > 1000 %}{% break %}{% elif message.content == '' %}{% continue %}{% endif %}
  {% if message.role == 'assistant' %}
    {% generation %}{% set x = 1 %}<{{ message.content }}>{% endgeneration %}
  {% endif %}{{ x }}
{% else %}
  none
{% endfor %}
{% set block %}{% for n in range(3) %}{{ n ~ ',' ~ n * 2 }};{% endfor %}{% endset %}{{ block | upper }}
{{ messages | map(attribute='role') | join(' ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% for key, value in messages[0] | dictsort %}{{ key }}={{ value | tojson(indent=2) }} {% endfor %}
{{ {'html': '<b>&</b>', 'ü': [1, 2.5, none, true]} | tojson }}
{{ '%s-%d' | format('x', 3) }} {{ '{}'.format(7) }} {{ 2 ** 10 }} {{ 'ab' * 3 }} {{ [1] + [2] }} {{ 1 + 2 }}
{{ dict(a=1).items() | list }} {{ documents is none }} {{ tools is none }} {{ undefined_name }}{{ messages[0].nothing }}
{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}
{%- raw %} {{ raw }} {% endraw %}{# comment #}
{% if add_generation_prompt %}go{% endif %}"""

TEMPLATES = {
    "llama3": LLAMA3,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "features": FEATURES,
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def chat(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(TextMessageRole(role), content) for role, content in turns)


CHATS = (
    chat(("user", "Hello!")),
    chat(
        ("user", '  <b>spaces & "quotes"</b> \n\n{{ not code }} {% nor this %}  '),
        ("assistant", " fine \n"),
        ("user", "ü 😀"),
    ),
    chat(("system", "Be brief. "), ("user", "1"), ("assistant", "<think>\nhm\n</think>\n\ntwo"), ("user", "3")),
    chat(("user", "a"), ("assistant", "<think>\nlast\n</think>\n\nword")),
    chat(("user", "")),
    chat(("user", "x" * 2000), ("assistant", ""), ("user", "y")),
)


@cache
def transformers_judge() -> Any:
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=gpt2_like(), **TOKENS)


def judged(source: str, messages: Sequence[Message], **options: Any) -> str:
    dicts = [{"role": message.role.value, "content": message.content} for message in messages]
    text = transformers_judge().apply_chat_template(dicts, chat_template=source, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_as_in_transformers(name: str, messages: tuple[Message, ...], add_generation_prompt: bool) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    try:
        expected = judged(TEMPLATES[name], messages, add_generation_prompt=add_generation_prompt)
    except Exception as refusal:
        with pytest.raises(InvalidRequestError) as caught:
            template.render(messages, add_generation_prompt=add_generation_prompt)
        assert str(refusal) in str(caught.value)
        assert "refuses" in str(caught.value)
    else:
        assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_smollm2_as_in_transformers(messages: tuple[Message, ...]) -> None:
    source = smollm2_metadata()["tokenizer.chat_template"]
    expected = judged(source, messages, add_generation_prompt=True)
    assert ChatTemplate(source, {}).render(messages) == expected


BEGUN = (
    chat(("user", "a"), ("assistant", "The capital of")),
    chat(("system", "Be brief."), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4\n\n5 EndOfThe")),
    chat(("user", "a"), ("assistant", "<think>\nhm\n</think>\n\n<b>wo")),
)


@pytest.mark.parametrize("messages", BEGUN, ids=range(len(BEGUN)))
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "features"])
def test_an_answer_that_has_begun_as_in_transformers(name: str, messages: tuple[Message, ...]) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    try:
        expected = judged(TEMPLATES[name], messages, continue_final_message=True)
    except Exception:
        with pytest.raises(InvalidRequestError):
            template.render(messages, continue_final_message=True)
    else:
        assert template.render(messages, continue_final_message=True) == expected
        assert expected.endswith(messages[-1].content[-5:])


@pytest.mark.parametrize(
    ("source", "content", "ending"),
    [
        ("{% for m in messages %}[{{ m.content|trim }}]{% endfor %}", "so \n", "[hi][so \n"),
        ("{% for m in messages %}{{ m.content|tojson }},{% endfor %}", "a", '"hi","a'),
        ("{% for m in messages %}{{ m.content }}{{ '</s>' if not loop.last }}{% endfor %}", "a", "hi</s>a"),
    ],
)
def test_an_answer_that_has_begun_ends_where_its_text_does(source: str, content: str, ending: str) -> None:
    messages = chat(("user", "hi"), ("assistant", content))
    assert ChatTemplate(source, {}).render(messages, continue_final_message=True) == ending


@pytest.mark.parametrize("body", ["{{ m.content|upper }}", "{{ m.content[:3] }}", "{{ m.role }}"])
def test_a_template_that_writes_another_text_cannot_have_it_continued(body: str) -> None:
    template = ChatTemplate(f"{{% for m in messages %}}{body}{{% endfor %}}", {})
    with pytest.raises(InvalidRequestError, match="does not write the last message") as caught:
        template.render(chat(("user", "hi"), ("assistant", "abcdef")), continue_final_message=True)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_thinking(enable_thinking: bool) -> None:
    text = ChatTemplate(QWEN3, TOKENS).render(CHATS[0], enable_thinking=enable_thinking)
    assert text == judged(QWEN3, CHATS[0], add_generation_prompt=True, enable_thinking=enable_thinking)
    assert ("</think>" in text) is not enable_thinking


def test_the_date() -> None:
    before = datetime.now()
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render(CHATS[0])
    assert text in {before.strftime("%Y-%m-%d"), datetime.now().strftime("%Y-%m-%d")}


def test_the_templates_own_message_is_shown() -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages: System role not supported") as caught:
        ChatTemplate(GEMMA, TOKENS).render(CHATS[2])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ 'unfinished",
        "{% unknown_tag %}",
        "{{ messages | no_such_filter }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% include 'other' %}{% if %}",
    ],
)
def test_what_is_no_template_is_refused_at_load(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template cannot be used"):
        ChatTemplate(source, {})


HOSTILE = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class as item": "{{ ''['__class__']['__base__'] }}",
    "attr filter": "{{ (messages | attr('__class__')) }}",
    "map attribute": "{{ messages | map(attribute='__class__') | list }}",
    "function globals": "{{ raise_exception.__globals__ }}",
    "strftime globals": "{{ strftime_now.__globals__['__builtins__'] }}",
    "namespace init": "{{ namespace.__init__.__globals__ }}",
    "range init": "{{ range.__init__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "self": "{{ self.__init__.__globals__ }}",
    "loop": "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "macro": "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__ }}",
    "generator frame": "{{ (messages | map('upper')).gi_frame }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format map": "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "format method passed on": "{% set f = '{0.__class__.__base__}'.format %}{{ f(1) }}",
    "format through map": "{{ ['{0.__class__}'] | map('format', 1) | first }}{{ ('{0.__class__}'.format)(1) }}",
    "append": "{{ messages.append(1) }}",
    "clear": "{{ messages[0].clear() }}",
    "update": "{{ messages[0].update({'role': 'system'}) }}",
    "dunder namespace": "{% set ns = namespace(__class__=1) %}",
    "dunder in namespace": "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "namespace from a list": "{% set ns = namespace([(1, 2)]) %}",
    "range": "{% for n in range(10**9) %}x{% endfor %}",
    "range list": "{{ range(999999999) | list }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power by a loop": "{% set ns = namespace(n=10) %}{% for i in range(9) %}{% set ns.n = ns.n ** 10 %}{% endfor %}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition the other way": "{{ 10**9 * [1] }}",
    "doubling by +": "{% set ns = namespace(s='ab') %}{% for n in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by ~": "{% set ns = namespace(s='ab') %}{% for n in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "undefined": "{{ nothing.at.all }}",
    "calling a string": "{{ 'text'() }}",
    "division": "{{ 1 / 0 }}",
    "loop over a number": "{% for x in 5 %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "raise without text": "{{ raise_exception() }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates(source: str) -> None:
    messages = CHATS[2]
    start = time.thread_time()
    with pytest.raises((CheckpointError, InvalidRequestError)):
        ChatTemplate(source, TOKENS).render(messages)
    assert time.thread_time() - start < 20
    assert messages == CHATS[2]


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for a in [1, 2, 3] recursive %}{{ loop([1, 2, 3]) if loop.depth < 50 }}{% endfor %}",
    "set blocks": "{% for a in range(9999) %}{% set s %}{% for b in range(9999) %}{% endfor %}{% endset %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_endless_templates_end(source: str) -> None:
    template = ChatTemplate(source, {}, limits=RenderLimits(max_seconds=0.1))
    start = time.thread_time()
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.1 seconds"):
        template.render(CHATS[0])
    assert time.thread_time() - start < 10


def test_size_limits_count_the_whole_text() -> None:
    template = ChatTemplate(
        "{% for n in range(100) %}{{ n ~ 'y' }}{% endfor %}", {}, limits=RenderLimits(max_chars=289)
    )
    with pytest.raises(InvalidRequestError, match="grows beyond 289 characters"):
        template.render(CHATS[0])
    assert len(ChatTemplate(template.source, {}, limits=RenderLimits(max_chars=290)).render(CHATS[0])) == 290


def test_renderings_share_nothing() -> None:
    template = ChatTemplate(QWEN3, TOKENS)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(template.render(CHATS[2]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [template.render(CHATS[2])] * 8


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (None, None),
        ("{{ x }}", "{{ x }}"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
    ],
)
def test_choosing_a_template(value: object, chosen: str | None) -> None:
    assert choose_template(value, where="here") == chosen


@pytest.mark.parametrize(
    "value",
    [5, [], ["{{ x }}"], [{"name": "default"}], [{"name": "default", "template": 5}], {"default": "d"},
     [{"name": "a", "template": "a"}, {"name": "b", "template": "b"}]],
)  # fmt: skip
def test_no_template_to_choose(value: object) -> None:
    with pytest.raises(CheckpointError, match="here"):
        choose_template(value, where="here")


def test_a_users_template_is_text_or_a_file(tmp_path: Path) -> None:
    jinja = tmp_path / "own.jinja"
    jinja.write_text("ünï {{ x }}", encoding="utf-8")
    config = tmp_path / "own.json"
    config.write_text(json.dumps({"chat_template": "{{ y }}"}), encoding="utf-8")
    assert read_template("{% set a = 1 %}") == "{% set a = 1 %}"
    assert read_template("{{ a }}") == "{{ a }}"
    assert read_template(jinja) == read_template(str(jinja)) == "ünï {{ x }}"
    assert read_template(config) == "{{ y }}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jinja", None, "No such file"),
        ("latin1.jinja", b"\xff", "cannot be read"),
        ("empty.json", b"{}", "no chat_template"),
        ("list.json", b"[]", "JSON object"),
        ("broken.json", b"{", "is not JSON"),
    ],
)
def test_a_users_template_that_cannot_be_had(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_template(path)


def test_a_text_without_jinja_is_no_template() -> None:
    with pytest.raises(CheckpointError, match=r"^'chatml' is neither a file nor a chat template"):
        read_template("chatml")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_developer_is_the_system_of_a_template_that_knows_none(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS)

    def rendered(role: str) -> str:
        try:
            return template.render(chat((role, "Be brief."), ("user", "Hello!")))
        except InvalidRequestError as refusal:  # some templates know no system either
            return str(refusal)

    assert rendered("developer") == rendered("system")


def test_a_developer_stays_one_where_the_template_knows_the_role() -> None:
    source = "{% for m in messages %}{% if m.role in ['system', 'developer'] %}[{{ m.role }}]{% endif %}{% endfor %}"
    assert ChatTemplate(source, TOKENS).render(chat(("developer", "a"), ("system", "b"))) == "[developer][system]"


def test_what_a_template_says_is_cut() -> None:
    template = ChatTemplate("{{ raise_exception('no ' ~ messages[0].content * 1000) }}", {})
    with pytest.raises(InvalidRequestError) as refused:
        template.render([Message(TextMessageRole.USER, "way ")])
    assert len(str(refused.value)) < 300
    assert "no way way" in str(refused.value)
