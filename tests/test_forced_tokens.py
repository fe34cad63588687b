"""Tokens that a constraint leaves no choice in take no steps of their own, and texts stay what they are."""

from __future__ import annotations

from typing import Any, Final

import pytest
from attrs import evolve

from arrivals import wait_for_requests
from drafting import NoDrafts, drafting
from paged_sdk import (
    Constraint,
    ConstraintError,
    Model,
    ModelStats,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.config.sampling import DryParams
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.speculative.forced_tokens import ForcedTokens
from tiny import VOCAB_SIZE

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "on_the_sea": {"type": "boolean"},
        "population": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind_of_place": {"enum": ["a village of farmers", "a village of fishermen", "a large town"]},
    },
    "required": ["on_the_sea", "population", "kind_of_place"],
    "additionalProperties": False,
}
COMPACT: Final = Constraint.json_schema(SCHEMA, compact=True)
LIST: Final = Constraint.regex("(the first (one|two|three) of them, ){2,6}and the last")
MARKED: Final = Constraint.lark(
    """start: call (" of the sea and" <[1]> call){2,4} " of the sea"
call: " a large town" number " and"
number: /[1-9]{2}/
"""
)
"""Marks what it has with a special token, as models mark calls."""

GREEDY: Final = SamplingParams(temperature=0.0, max_len=150)
DRAWN: Final = SamplingParams(temperature=1.0, seed=5, max_len=150)
SAMPLINGS: Final = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "truncated": evolve(DRAWN, top_k=20, top_p=0.9, min_p=0.02),
    "penalized": evolve(GREEDY, repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=0.1),
    "biased": evolve(DRAWN, logits_bias={7: 4.0, 9: -4.0}),
    "dry": evolve(GREEDY, dry_params=DryParams(multiplier=0.8)),
    "with logprobs": evolve(GREEDY, top_n_logprobs=3),
    "choices": evolve(DRAWN, n_choices=3),
    "stopped": evolve(GREEDY, stop=["population", "last"]),
    "end tokens ignored": evolve(GREEDY, ignore_eos=True),
    "short": evolve(GREEDY, max_len=7),
}


@pytest.fixture
def anyio_backend() -> str:
    """Run each test once: the event loop has no part in what is tested here."""
    return "asyncio"


async def ask(
    builder: TextModelBuilder, requests: list[RequestBuilder], proposer: Proposer | None
) -> tuple[list[Any], ModelStats]:
    """Return what each request was answered, times and ids left out, and what the engine counted."""
    async with Model(load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)) as model:
        wait_for_requests(model, len(requests))
        responses = await model.send_chat_requests(requests)
        stats = model.stats()
    found = []
    for response in responses:
        usage = response.usage
        texts = [(choice.message.content, choice.finish_reason) for choice in response.choices]
        entries = [choice.logprobs.content for choice in response.choices if choice.logprobs is not None]
        logprobs = [(entry.token, round(entry.logprob, 3)) for content in entries for entry in content]
        found.append((texts, logprobs, usage.completion_tokens, usage.completion_tokens_details.forced_tokens))
    return found, stats


def asked(constraint: Constraint | None, sampling: SamplingParams) -> RequestBuilder:
    request = RequestBuilder().add_message("user", "Hello").with_sampling(sampling)
    return request if constraint is None else request.with_constraint(constraint)


@pytest.mark.anyio
@pytest.mark.parametrize("constraint", [COMPACT, LIST, MARKED], ids=["schema", "regex", "special tokens"])
async def test_every_text_is_the_one_of_a_token_in_each_step(builder: TextModelBuilder, constraint: Constraint) -> None:
    requests = [asked(constraint, sampling) for sampling in SAMPLINGS.values()]
    plain, plain_stats = await ask(builder, requests, NoDrafts())
    forced, stats = await ask(builder, requests, None)
    assert forced == plain
    assert stats.forced_tokens == plain_stats.forced_tokens == sum(num_forced for *_, num_forced in plain)
    assert stats.forced_tokens > 0.5 * stats.completion_tokens
    assert stats.steps < 0.6 * plain_stats.steps
    # They are no guesses.
    assert stats.drafted_tokens == stats.accepted_tokens == 0


@pytest.mark.anyio
async def test_stop_tokens_are_not_proposed_within_a_text(builder: TextModelBuilder) -> None:
    """They are banned there, though the tokenizer would choose them. Other tokens may spell the text."""

    async def answers(proposer: Proposer | None) -> list[str]:
        found = []
        parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
        async with Model(parts) as model:
            for token in dict.fromkeys(await model.tokenize(" of them, and the last")):
                letters = await model.tokenize((await model.detokenize([token]))[:1])
                sampling = evolve(GREEDY, stop_token_ids=(token,), logits_bias=dict.fromkeys(letters, 90.0))
                request = asked(LIST, sampling)
                try:
                    response = await model.send_chat_request(request)
                except ConstraintError:  # of all tokens, the likeliest of which are none that may follow
                    found.append("refused")
                else:
                    found.append(response.choices[0].message.content or "")
        return found

    plain = await answers(NoDrafts())
    assert any(text.endswith("and the last") for text in plain)
    assert await answers(None) == plain


@pytest.mark.anyio
async def test_guesses_go_beyond_what_is_forced(builder: TextModelBuilder) -> None:
    """Beside other drafts, too, every text stays; and no guess is made that the constraint refuses."""
    requests = [asked(LIST, sampling) for sampling in SAMPLINGS.values()]
    plain, _ = await ask(builder, requests, NoDrafts())
    guessed, guessed_stats = await ask(builder, requests, drafting())
    both, stats = await ask(builder, requests, ForcedTokens(drafting()))
    assert guessed == both == plain
    assert stats.steps < guessed_stats.steps
    assert stats.accepted_tokens > 0


@pytest.mark.anyio
async def test_a_list_of_prompts_counts_those_of_all(builder: TextModelBuilder) -> None:
    async with builder.build() as model:
        alone = [await model.send_completion_request(each, GREEDY, constraint=LIST) for each in ("a", "So")]
        together = await model.send_completion_request(["a", "So"], GREEDY, constraint=LIST)
    forced = [each.usage.completion_tokens_details.forced_tokens for each in (*alone, together)]
    assert all(forced)
    assert forced[2] == forced[0] + forced[1]


@pytest.mark.anyio
async def test_a_token_that_a_stop_token_leaves_alone_is_not_forced(builder: TextModelBuilder) -> None:
    """With drafts or without: the constraint leaves a choice, of which the request takes one half."""
    async with builder.build() as model:
        pieces = [await model.detokenize([token]) for token in range(VOCAB_SIZE)]
    stops = [token for token, piece in enumerate(pieces) if "b" in piece or "aa" in piece]
    request = asked(Constraint.regex("[ab]{20}c"), evolve(GREEDY, ignore_eos=True, stop_token_ids=stops))
    requests = [request, request.with_prediction("a" * 20)]
    for proposer in (NoDrafts(), None, ForcedTokens(drafting())):
        found, stats = await ask(builder, requests, proposer)
        assert [texts for texts, *_ in found] == [[("a" * 20 + "c", "stop")]] * 2
        assert [num_forced for *_, num_forced in found] == [1, 1]
    assert stats.accepted_tokens > 0


@pytest.mark.anyio
async def test_a_request_without_a_constraint_is_not_followed(builder: TextModelBuilder) -> None:
    proposer = ForcedTokens(NoDrafts())
    requests = [asked(None, evolve(GREEDY, max_len=8)), asked(COMPACT, GREEDY)]
    (_, answer), stats = await ask(builder, requests, proposer)
    assert proposer.num_followed <= 1  # the last one's end is told with the next step
    assert stats.forced_tokens == answer[-1] > 0
    _, stats = await ask(builder, requests[:1], proposer)
    assert stats.forced_tokens == 0


@pytest.mark.anyio
async def test_a_forced_token_that_is_banned_ends_its_request(builder: TextModelBuilder) -> None:
    """It needs no logits where nothing else changes them; a ban does."""
    async with builder.build() as model:
        for text in ("the first", "of them"):
            banned = dict.fromkeys((await model.tokenize(text))[-1:], float("-inf"))
            with pytest.raises(ConstraintError, match="ban every token"):
                await model.send_chat_request(asked(LIST, evolve(GREEDY, logits_bias=banned)))
        await model.send_chat_request(asked(LIST, GREEDY))
