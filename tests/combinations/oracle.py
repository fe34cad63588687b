"""Asks a plain model each request of a script, one after the other."""

from __future__ import annotations

from typing import Any, Final

from attrs import evolve, frozen

from combinations.answer import difference, said
from combinations.configuration import RANKING_TOKENS, Checkpoints, Configuration, build_model
from combinations.script import Script
from combinations.sending import Request, WrongAnswerError
from drafting import NoDrafts
from paged_sdk import ContextLengthError, Model, PagedError, SamplingParams
from tiny import tokenizer

__all__ = ["Expected", "ask_alone"]

_ACTIVATED: Final = "activated"
"""An adapter that begins where a prompt says begins elsewhere where the text is a part of the prompt."""
_READ: Final = SamplingParams(temperature=0.0, max_len=1, prompt_logprobs=1)


@frozen(kw_only=True)
class Expected:
    """Holds a request, and what it is answered alone.

    :ivar answer: what it says; None: it is refused
    :ivar refused: the name of the error
    :ivar is_exact: whether all bits of the answer are promised
    """

    request: Request
    answer: dict[str, Any] | None
    refused: str | None = None
    is_exact: bool = True

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens of the prompt and of the first text, if they are known."""
        prompt = self.request.prompts[0]
        if isinstance(prompt, str) or self.answer is None:
            return ()
        logprobs = self.answer["choices"][0]["logprobs"]
        return (*prompt, *(token_id for token_id, *_ in logprobs or ()))


async def ask_alone(configuration: Configuration, script: Script, checkpoints: Checkpoints) -> dict[int, Expected]:
    """Return what each task of a script is answered, by its number.

    :raises PagedError: there is no such model
    :raises WrongAnswerError: two ways of asking the plain model say different things
    """
    contents = script.contents()
    adapters = {str(content): content for content in contents.values() if content is not None}
    found: dict[int, Expected] = {}
    async with build_model(configuration.plain(), checkpoints, adapters, NoDrafts()) as model:
        for task in script.tasks:
            request = Request(task=task, prompts=task.prompts)
            if task.adapter is not None:
                request = evolve(request, adapter=str(contents[task.number]))
            if task.follows in found and found[task.follows].token_ids:
                own = task.prompts[0]
                tail = own[-9:] if isinstance(own, tuple) else ()
                request = evolve(request, prompts=((*found[task.follows].token_ids, *tail),))
            if task.predicts:
                first = await _ask(model, request)
                request = evolve(request, prediction=_nearly(first))
            content = contents.get(task.number)
            # Sums over the tokens of a text are made chunk by chunk.
            is_sum = task.kind == "embed" and task.pooling == "mean"
            is_exact = configuration.is_exact and not is_sum and (content is None or content.is_exact)
            expected = evolve(await _ask(model, request), is_exact=is_exact)
            found[task.number] = expected
            problem = await _judge(model, expected)
            if problem is not None:
                raise WrongAnswerError(f"request {task.number}, asked alone in two ways: {problem}")
    return found


async def _ask(model: Model, request: Request) -> Expected:
    try:
        return Expected(request=request, answer=await request.whole(model))
    except PagedError as error:
        return Expected(request=request, answer=None, refused=type(error).__name__)


def _nearly(expected: Expected) -> str:
    """Return a text that departs from an answer, comes back to it, and goes beyond."""
    text = expected.answer["choices"][0]["text"] if expected.answer else ""
    return f"{text[: len(text) // 3]}?{text[len(text) // 2 :]} and more"


async def _judge(model: Model, expected: Expected) -> str | None:
    """Return what is wrong with an answer, going by what it says itself, or by another way to ask for a part of it.

    A text that has ended is a sentence of its constraint. A text's score is what the logprobs of a prompt are that
    holds it, and what those of its tokens were when it was generated. A document's rank is what the scores of the two
    tokens differ by.
    """
    request, answer = expected.request, expected.answer
    if answer is None:
        return None
    if request.task.generates:
        texts = [
            each["text"] for each in answer["choices"] if each["finish_reason"] == "stop" and not each["stop_string"]
        ]
        wrong = [text for text in texts if not request.task.allows(text)]
        if wrong:
            return f"a text that has ended as a whole, and is no sentence of its constraint: {wrong[0]!r}"
    is_activated = request.adapter is not None and request.adapter.startswith(_ACTIVATED)
    if request.task.kind == "score":
        for text, score in zip(request.prompts, answer["scores"], strict=True):
            if isinstance(text, tuple) and score["tokens"]:
                problem = await _judge_score(model, (*request.task.prefix, *text), score, request.adapter)
                if problem is not None:
                    return problem
    elif request.task.kind == "rank" and not is_activated:
        query, *documents = request.prompts
        for document, logit in zip(documents, answer["logits"], strict=True):
            problem = await _judge_rank(model, f"{query}", f"{document}", logit, request.adapter)
            if problem is not None:
                return problem
    elif request.task.has_plain_logprobs and expected.token_ids and not is_activated:
        return await _judge_text(model, expected, answer["choices"][0]["logprobs"])
    return None


async def _judge_score(
    model: Model, token_ids: tuple[int, ...], score: dict[str, Any], adapter: str | None
) -> str | None:
    try:
        response = await model.send_completion_request(token_ids, _READ, adapter=adapter)
    except ContextLengthError:  # there is no room for a token after it
        return None
    entries = said(response)["prompt_logprobs"][-len(score["tokens"]) :]
    read = {
        "tokens": [token_id for token_id, *_ in entries],
        "logprobs": [logprob for _, logprob, _ in entries],
        "likeliest": [logprob == top[0][1] for _, logprob, top in entries],
    }
    return difference(read, score, exact=False, where="a text's score")


async def _judge_rank(model: Model, query: str, document: str, logit: float, adapter: str | None) -> str | None:
    text = f"<|im_start|>query\n{query}<|im_end|>\n<|im_start|>document\n{document}<|im_end|>\n"
    tokens = [tokenizer().encode(each).ids for each in RANKING_TOKENS]
    try:
        response = await model.score(tokens, prefix=tokenizer().encode(text).ids, adapter=adapter)
    except ContextLengthError:  # nothing goes on after the last token of a text
        return None
    true, false = (each.logprob for each in response.scores)
    return difference(true - false, logit, exact=False, where="a document's rank")


async def _judge_text(model: Model, expected: Expected, entries: list[Any]) -> str | None:
    prompt = expected.request.prompts[0]
    text = expected.token_ids[len(prompt) :]
    try:
        response = await model.score([text], prefix=prompt, adapter=expected.request.adapter)
    except ContextLengthError:  # nothing goes on after the last token of a text
        return None
    logprobs = [logprob for _, logprob, _ in entries]
    return difference(logprobs, said(response)["scores"][0]["logprobs"], exact=False, where="the score of its text")
