"""Plain texts that begin with their prompts, with the logprobs of these: what programs that score texts ask for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM

from paged_sdk import ContextLengthError, InvalidRequestError, Model, TextModelBuilder
from paged_sdk.testing import fake_model
from paged_sdk.wire.body import schema_of
from paged_sdk.wire.completions import read_completion
from paged_sdk.wire.echo import Echo
from paged_sdk.wire.forms import TextCompletion
from paged_sdk.wire.problem import problem_of, renamed

pytestmark = pytest.mark.anyio

TEXT = "The quick brown fox jumps over the lazy dog."


async def asked(model: Model, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}
    call = read_completion(body)
    return call.response(await call.collect(model, adapter=None, timeout=60))


async def test_as_transformers_reads_the_same_text(tiny_checkpoint: Path) -> None:
    judge: Any = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    async with builder.with_token_healing().build() as model:
        ids = await model.tokenize(TEXT, add_special_tokens=True)
        by_text = await asked(model, prompt=TEXT)
        by_ids = await asked(model, prompt=[ids])
        assert by_ids["usage"]["prompt_tokens"] == by_text["usage"]["prompt_tokens"] == len(ids)
        (choice,) = by_ids["choices"]
        found = choice["logprobs"]
        said = await model.tokenize(choice["text"], add_special_tokens=True)
    assert found == by_text["choices"][0]["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert "prompt_logprobs" not in by_ids
    assert {len(each) for each in found.values()} == {len(ids) + 3}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    offsets = found["text_offset"]
    assert offsets[0] == 0
    assert [choice["text"][a:b] for a, b in pairwise(offsets)] == found["tokens"][:-1]
    with torch.inference_mode():
        logprobs = judge(torch.tensor([said])).logits[0].log_softmax(-1)
    for place, (logprob, top) in enumerate(
        zip(found["token_logprobs"][1:-3], found["top_logprobs"][1:-3], strict=True)
    ):
        assert logprob == pytest.approx(float(logprobs[place, said[place + 1]]), abs=1e-4)
        assert list(top.values()) == pytest.approx(logprobs[place].topk(2).values.tolist(), abs=1e-4)
        is_likeliest = int(logprobs[place].argmax()) == said[place + 1]
        assert (logprob == max(top.values())) == is_likeliest  # how an evaluation sees that a text is the likeliest


async def test_each_choice_has_the_prompt() -> None:
    async with fake_model("AÉ") as model:
        answer = await asked(model, prompt="aé", n=2, logprobs=0, max_tokens=3)
    for choice in answer["choices"]:
        assert choice["text"] == "aéAÉ"
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 3]
        assert choice["logprobs"]["top_logprobs"] == [None, *[{}] * 5]


async def test_the_first_token_has_no_logprob_and_the_openapi_document_says_so() -> None:
    async with fake_model("AÉ") as model:
        answer = await asked(model, prompt="ab", logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    Draft202012Validator(schema_of(TextCompletion)).validate(answer)


@pytest.mark.parametrize(
    ("prompt", "offsets", "first"),
    [
        ("☃a", [0, 0, 0, 1, 2, 3], "bytes:\\xe2"),
        ("é", [0, 0, 1, 2], "bytes:\\xc3"),
        ("é☃", [0, 0, 1, 1, 1, 2, 3], "bytes:\\xc3"),
        ("a☃", [0, 1, 1, 1, 2, 3], "a"),
        ("a", [0, 1, 2], "a"),
    ],
)
async def test_a_prompt_whose_first_token_is_a_part_of_a_character(prompt: str, offsets: list[int], first: str) -> None:
    async with fake_model("xyz") as model:
        for asked_for in (prompt, [await model.tokenize(prompt, add_special_tokens=True)]):
            (choice,) = (await asked(model, prompt=asked_for, max_tokens=2))["choices"]
            assert choice["text"] == prompt + "xy"
            assert choice["logprobs"]["text_offset"] == offsets
            assert choice["logprobs"]["tokens"][0] == first


async def test_several_prompts_are_as_each_alone(tiny_checkpoint: Path) -> None:
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    async with builder.build() as model:
        prompts = [await model.tokenize(TEXT[start:]) for start in (0, 9, 30)] + [[7]]
        together = await asked(model, prompt=prompts, n=2, temperature=0.7, seed=3)
        alone = [await asked(model, prompt=prompt, n=2, temperature=0.7, seed=3) for prompt in prompts]
    assert [choice["index"] for choice in together["choices"]] == list(range(8))
    for number, answer in enumerate(alone):
        for place, choice in enumerate(answer["choices"]):
            other = together["choices"][2 * number + place]
            assert (other["text"], other["logprobs"]["tokens"]) == (choice["text"], choice["logprobs"]["tokens"])
            assert len(other["logprobs"]["token_logprobs"]) == len(prompts[number]) + 3
            found, expected = (each["logprobs"]["token_logprobs"][1:] for each in (other, choice))
            assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"truncate_sequence": True},
        {"prompt": [1, 2], "logprobs": None, "echo": True},
    ],
)
def test_what_cannot_be_echoed_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_completion({"model": "m", "prompt": "a", "echo": True, "logprobs": 1, **fields})
    assert caught.value.field in fields


async def test_a_prompt_of_no_tokens_is_refused() -> None:
    async with fake_model("AÉ") as model:
        with pytest.raises(InvalidRequestError):
            await asked(model, prompt="")
        with pytest.raises(InvalidRequestError) as caught:
            await asked(model, prompt=[1 << 30])
    call = read_completion({"model": "m", "prompt": [1 << 30], "echo": True, "logprobs": 1})
    assert renamed(problem_of(caught.value), call.names).param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([1 << 30], "prompt"),
        ([[1], [1 << 30]], "prompt[1]"),
        (["a", "", "b"], "prompt[1]"),
        (["a", "\ud800"], "prompt[1]"),
        (["a", "b" * 20_000], "prompt[1]"),
    ],
)
async def test_the_prompt_that_cannot_be_echoed_is_named(prompt: Any, field: str) -> None:
    async with fake_model("AÉ") as model:
        with pytest.raises((InvalidRequestError, ContextLengthError)) as caught:
            await asked(model, prompt=prompt)
    problem = problem_of(caught.value)
    assert problem.param == field
    assert problem.message.startswith(field)


async def test_a_token_before_every_text_is_none_of_it() -> None:
    class WithBos:
        async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [1, 7] if add_special_tokens else [7]

        async def detokenize(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join({1: "" if skip_special_tokens else "<s>", 7: "a"}[each] for each in token_ids)

    model: Any = WithBos()
    by_text, by_ids = await Echo.of(model, "a"), await Echo.of(model, [1, 7])
    assert (by_text.token_ids, by_text.text, by_text.first.token, by_text.first.bytes) == ([1, 7], "a", "<s>", ())
    assert (by_ids.text, by_ids.first.bytes) == ("<s>a", tuple(b"<s>"))
