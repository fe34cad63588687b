"""Texts of constrained requests are sentences, whatever else the requests ask for."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from schemas import check_text, make_schema
from torch import Tensor

from arrivals import gather
from paged_sdk import (
    Constraint,
    ConstraintError,
    GgufModelBuilder,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.constraints.compiler import GrammarCompiler
from test_seams import Remembers

WORDS: Final = Constraint.regex("(foo|ba+r)( [a-z]{1,6}){2,9}[.]")
PERSON: Final = Constraint.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
SUMS: Final = Constraint.lark(
    """
    start: sum
    sum: term | sum "+" term
    term: /[1-9][0-9]{0,3}/ | "(" sum ")"
    """
)
NESTED: Final = Constraint.llguidance(json.dumps({"grammars": [{"lark_grammar": 'start: "<" start ">" | "x"'}]}))

DRAWN: Final = SamplingParams(temperature=1.0, seed=7, max_len=400)


@pytest.fixture
def anyio_backend() -> str:
    """Run each test once: the event loop has no part in what is tested here."""
    return "asyncio"


def asked(constraint: Constraint, sampling: SamplingParams = DRAWN) -> RequestBuilder:
    return RequestBuilder().add_message("user", "Hello").with_sampling(sampling).with_constraint(constraint)


def check(constraint: Constraint, text: str) -> None:
    """Raise an error for what is no sentence."""
    match constraint.kind:
        case "regex":
            assert re.fullmatch(constraint.source, text), text
        case "json_schema":
            check_text(text, json.loads(constraint.source))
        case "lark":
            assert re.fullmatch(r"[0-9+()]+", text), text
            assert eval(text) > 0
        case _:
            assert re.fullmatch(r"<*x>*", text), text
            assert text.count("<") == text.count(">")


async def texts(model: Model, request: RequestBuilder) -> list[str]:
    """Return the texts of a request, all of which are to end by themselves."""
    response = await model.send_chat_request(request)
    assert {choice.finish_reason for choice in response.choices} == {"stop"}
    return [str(choice.message.content) for choice in response.choices]


CONSTRAINTS: Final = {"regex": WORDS, "schema": PERSON, "lark": SUMS, "llguidance": NESTED}


@pytest.mark.anyio
@pytest.mark.parametrize("name", CONSTRAINTS)
async def test_every_kind_is_obeyed(model: Model, name: str) -> None:
    for sampling in (SamplingParams(temperature=0.0, max_len=400, repetition_penalty=1.1), DRAWN):
        for text in await texts(model, asked(CONSTRAINTS[name], sampling)):
            check(CONSTRAINTS[name], text)


@pytest.mark.anyio
async def test_random_schemas_are_obeyed_in_one_batch(model: Model) -> None:
    await obey(model, range(20))


@pytest.mark.long
@pytest.mark.anyio
async def test_many_random_schemas_are_obeyed(model: Model) -> None:
    for start in range(0, 300, 50):
        await obey(model, range(start, start + 50))


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.anyio
@pytest.mark.parametrize("start", range(0, 300, 25))
async def test_random_schemas_are_obeyed_by_a_real_model(smollm2: Path, start: int) -> None:
    async with GgufModelBuilder(smollm2).with_force_cpu().with_max_num_seqs(25).build() as model:
        await obey(model, range(start, start + 25), num_choices=1, share=0.6)


async def obey(model: Model, seeds: range, num_choices: int = 2, share: float = 0.95) -> None:
    """Send a request of each seed's schema at once, and check the texts.

    :param share: of the texts, at least so many end before their length does
    """
    schemas = [make_schema(seed) for seed in seeds]
    requests = [
        asked(
            Constraint.json_schema(schema),
            SamplingParams(temperature=1.0, seed=seed, max_len=600, n_choices=num_choices),
        )
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    responses = await model.send_chat_requests(requests)
    num_finished = 0
    for response, schema in zip(responses, schemas, strict=True):
        for choice in response.choices:
            assert choice.finish_reason in ("stop", "length")
            if choice.finish_reason == "stop":
                num_finished += 1
                check_text(str(choice.message.content), schema)
    assert num_finished >= share * num_choices * len(seeds)


SAMPLINGS: Final[dict[str, dict[str, Any]]] = {
    "end tokens ignored": {"ignore_eos": True},
    "more tokens than a sentence has": {"min_tokens": 390},
    "penalties": {"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias against the end": {"logits_bias": {0: -100.0, 2: -100.0}},
    "top-k": {"top_k": 1, "temperature": 0.7},
    "top-p": {"top_p": 0.1},
    "min-p": {"min_p": 0.5},
    "choices": {"n_choices": 3},
    "logprobs": {"top_n_logprobs": 2},
    "cold": {"temperature": 0.05},
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_other_settings_do_not_matter(model: Model, name: str) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_len": 400, **SAMPLINGS[name]}
    for constraint in (PERSON, WORDS):
        found = await texts(model, asked(constraint, SamplingParams(**settings)))
        for text in found:
            check(constraint, text)
        assert len(set(found)) == settings.get("n_choices", 1)


@pytest.mark.anyio
async def test_a_text_that_is_cut_off_says_so(model: Model) -> None:
    response = await model.send_chat_request(asked(PERSON, SamplingParams(temperature=1.0, seed=1, max_len=5)))
    assert response.choices[0].finish_reason == "length"


@pytest.mark.anyio
async def test_a_stop_string_ends_a_text_before_its_sentence_does(model: Model) -> None:
    words = Constraint.regex("(one two ){40}three")
    for temperature in (0.0, 1.0):
        stopped = SamplingParams(temperature=temperature, seed=4, stop=["two one"])
        response = await model.send_completion_request("x", stopped, constraint=words)
        choice = response.choices[0]
        assert (choice.text, choice.finish_reason) == ("one ", "stop")


@pytest.mark.anyio
async def test_a_request_that_is_left_while_its_constraint_is_compiled_is_left_at_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, has_begun = threading.Event(), threading.Event()
    compiled = GrammarCompiler._compiled

    def wait(self: GrammarCompiler, constraint: Constraint) -> Any:
        has_begun.set()
        may_go_on.wait()
        return compiled(self, constraint)

    monkeypatch.setattr(GrammarCompiler, "_compiled", wait)
    constraint = Constraint.regex("(left|alone)")
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(model.send_completion_request, "x", constraint=constraint))
            with anyio.fail_after(60):
                while not has_begun.is_set():
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        assert not may_go_on.is_set()
        assert (await model.send_completion_request("x", SamplingParams(max_len=3))).choices[0].text
    finally:
        may_go_on.set()
    # What was begun is of use to the next one.
    assert (await model.send_completion_request("x", constraint=constraint)).choices[0].text in ("left", "alone")


@pytest.mark.anyio
async def test_a_space_at_the_beginning_stays(model: Model) -> None:
    (text,) = await texts(model, asked(Constraint.regex(" {3}x? {2}")))
    assert text in ("     ", "   x  ")


@pytest.mark.anyio
async def test_logprobs_are_those_of_the_raw_logits(model: Model) -> None:
    only = Constraint.regex("zq")
    plain = RequestBuilder().add_message("user", "Hello").with_logprobs(3)
    free = (await model.send_chat_request(plain)).choices[0].logprobs
    bound = (await model.send_chat_request(plain.with_constraint(only))).choices[0].logprobs
    assert free is not None
    assert bound is not None
    assert [top.token_id for top in bound.content[0].top_logprobs] == [
        top.token_id for top in free.content[0].top_logprobs
    ]
    assert bound.content[0].logprob < free.content[0].logprob


@pytest.mark.anyio
async def test_plain_requests_beside_constrained_ones_are_not_touched(model: Model) -> None:
    plain = RequestBuilder().add_message("user", "Hello").with_sampling(SamplingParams(temperature=0.0, max_len=40))
    alone = await model.send_chat_request(plain)
    *bound, free = await model.send_chat_requests([asked(PERSON), asked(WORDS), asked(SUMS), plain])
    assert free.choices[0].message.content == alone.choices[0].message.content
    for constraint, response in zip((PERSON, WORDS, SUMS), bound, strict=True):
        check(constraint, str(response.choices[0].message.content))


@pytest.mark.anyio
async def test_completions_take_constraints(model: Model) -> None:
    response = await model.send_completion_request(["One", "Two"], DRAWN, constraint=WORDS)
    assert [choice.finish_reason for choice in response.choices] == ["stop", "stop"]
    for choice in response.choices:
        check(WORDS, choice.text)


@pytest.mark.anyio
async def test_processors_of_ones_own_come_before_the_constraint(model: Model) -> None:
    def one_token(token_ids: object, logits: Tensor) -> None:
        logits[5] = 1e4

    def none(token_ids: object, logits: Tensor) -> None:
        logits.fill_(-float("inf"))

    (text,) = await texts(model, asked(WORDS).with_logits_processors(one_token))
    check(WORDS, text)
    with pytest.raises(ConstraintError, match="ban every token that the constraint allows") as raised:
        await model.send_chat_request(asked(WORDS).with_logits_processors(none))
    assert raised.value.kind == "regex"
    (text,) = await texts(model, asked(WORDS))
    check(WORDS, text)


@pytest.mark.anyio
async def test_a_grammar_that_explodes_ends_its_request_alone(model: Model) -> None:
    explodes = Constraint.regex("a{1000000}")
    async with model.stream_chat_request(asked(PERSON)) as stream:
        with pytest.raises(ConstraintError, match="any further: lexer error: too many expressions"):
            await model.send_chat_request(asked(explodes))
        (whole,) = (await stream.collect()).choices
    check(PERSON, str(whole.message.content))


@pytest.mark.parametrize("cache_type", [PagedCacheType.AUTO, PagedCacheType.F8E4M3])
def test_preempted_texts_go_on_as_if_nothing_had_been(builder: TextModelBuilder, cache_type: PagedCacheType) -> None:
    async def run(num_tokens: int) -> tuple[list[list[str]], int]:
        memory = MemoryGpuConfig.ContextSize(num_tokens)
        pool = PagedAttentionMeta(block_size=8, gpu_memory=memory, cache_type=cache_type)
        async with builder.with_paged_attn(pool).with_prefix_cache_n(None).build() as model:
            sampling = SamplingParams(temperature=1.0, seed=5, max_len=100, n_choices=2)
            requests = [asked(constraint, sampling) for constraint in (PERSON, WORDS, SUMS)]
            found = await gather(model, *(texts(model, request) for request in requests))
            return found, model.stats().preemptions

    expected, none = asyncio.run(run(4000))
    # The two texts of a person do not fit beside each other, whenever the other requests come.
    found, num_preemptions = asyncio.run(run(72))
    assert found == expected
    assert (none, num_preemptions > 0) == (0, True)


@pytest.mark.anyio
@pytest.mark.parametrize("paged", [True, False])
async def test_drafts_change_no_text(builder: TextModelBuilder, *, paged: bool) -> None:
    """A proposer that knows nothing of grammars proposes much that these do not allow."""
    builder = builder if paged else builder.without_paged_attn()
    requests = [
        asked(constraint, SamplingParams(temperature=temperature, seed=9, max_len=200, n_choices=num))
        for constraint in CONSTRAINTS.values()
        for temperature, num in ((0.3, 2), (1.0, 1))
    ] * 2

    async def run(proposer: Remembers | None) -> tuple[list[list[str | None]], int]:
        parts = load_parts(builder.source, builder.settings, read_environment(), proposer=proposer)
        async with Model(parts) as model:
            responses = [await model.send_chat_request(request) for request in requests]
            return [[c.message.content for c in response.choices] for response in responses], model.stats().steps

    expected, num_steps = await run(None)
    found, num_with_drafts = await run(Remembers())
    assert found == expected
    assert num_with_drafts < num_steps * 0.8


@pytest.mark.anyio
async def test_a_request_that_is_left_leaves_nothing(model: Model) -> None:
    async with model.stream_chat_request(asked(Constraint.regex("[a-z ]*"))) as stream:
        async for _ in stream:
            break
    (text,) = await texts(model, asked(PERSON))
    check(PERSON, text)
    assert model.stats().blocks_used == 0
