"""Takes out of answers all that they promise to say, and finds where two of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from paged_sdk import (
    ChatCompletionResponse,
    CompletionChunkResponse,
    CompletionResponse,
    EmbeddingResponse,
    Logprobs,
    RankResponse,
    ScoreResponse,
)

__all__ = ["begins_like", "check_chunks", "difference", "said"]

_NEAR: Final = 2e-3
"""By so much logprobs may differ where the arithmetic depends on how many tokens share a step."""


def said(
    response: ChatCompletionResponse | CompletionResponse | ScoreResponse | EmbeddingResponse | RankResponse,
) -> dict[str, Any]:
    """Return what an answer says, whatever was computed beside it: all but times, ids and cached tokens."""
    if isinstance(response, EmbeddingResponse):
        return {"embeddings": response.embeddings.tolist(), "prompt_tokens": response.usage.prompt_tokens}
    if isinstance(response, RankResponse):
        ranked = sorted(response.results, key=lambda each: each.index)
        return {"logits": [each.logit for each in ranked], "prompt_tokens": response.usage.prompt_tokens}
    if isinstance(response, ScoreResponse):
        return {
            "scores": [
                {"tokens": each.token_ids, "logprobs": each.logprobs.tolist(), "likeliest": each.are_likeliest.tolist()}
                for each in response.scores
            ],
            "prompt_tokens": response.usage.prompt_tokens,
        }
    usage = response.usage
    return {
        "choices": [_choice(choice) for choice in response.choices],
        "prompt_logprobs": _logprobs(response.prompt_logprobs),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "details": usage.completion_tokens_details.to_dict(),
    }


def _choice(choice: Any) -> dict[str, Any]:
    is_chat = hasattr(choice, "message")
    return {
        "index": choice.index,
        "text": choice.message.content if is_chat else choice.text,
        "thoughts": choice.message.reasoning_content if is_chat else None,
        "finish_reason": choice.finish_reason,
        "stop_string": choice.stop_string,
        "logprobs": _logprobs(choice.logprobs),
        "content_logprobs": _logprobs(choice.content_logprobs) if is_chat else None,
    }


def _logprobs(logprobs: Logprobs | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [
        [token.token_id, token.logprob, [[top.token_id, top.logprob] for top in token.top_logprobs]]
        for token in logprobs.content
    ]


def difference(expected: Any, found: Any, *, exact: bool, where: str = "") -> str | None:
    """Return where two answers differ first, and in what; None: nowhere.

    :param exact: whether numbers are to be equal to the last bit
    """
    if isinstance(expected, Mapping) and isinstance(found, Mapping) and expected.keys() == found.keys():
        pairs = [(f"{where}.{name}" if where else name, expected[name], found[name]) for name in expected]
    elif _is_list(expected) and _is_list(found):
        pairs = [(f"{where}[{place}]", *pair) for place, pair in enumerate(zip(expected, found, strict=False))]
        if len(expected) != len(found):
            pairs.append((f"len({where})", len(expected), len(found)))
    else:
        near = isinstance(expected, float) and isinstance(found, float) and abs(expected - found) <= _NEAR
        is_same = expected == found or (near and not exact)
        return None if is_same else f"{where}: {found!r} instead of {expected!r}"
    return next(filter(None, (difference(*pair, exact=exact, where=name) for name, *pair in pairs)), None)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def begins_like(expected: dict[str, Any], found: dict[str, Any], *, exact: bool) -> str | None:
    """Return where what was read of an answer is no beginning of it; None: it is one."""
    for whole, part in zip(expected["choices"], found["choices"], strict=True):
        name = f"choices[{part['index']}]"
        # A text that ends within a character shows a replacement for it.
        if not whole["text"].startswith(part["text"].rstrip("\ufffd")):
            return f"{name}.text: {part['text']!r} instead of a beginning of {whole['text']!r}"
        if part["logprobs"] is not None:
            beginning = whole["logprobs"][: len(part["logprobs"])]
            problem = difference(beginning, part["logprobs"], exact=exact, where=f"{name}.logprobs")
            if problem is not None:
                return problem
    return None


def check_chunks(chunks: Sequence[CompletionChunkResponse], whole: CompletionResponse) -> None:
    """Check that the chunks of a completion say what the whole of it says."""
    *before, last = chunks
    assert all(chunk.usage is None for chunk in before)
    assert last.usage == whole.usage
    for choice in whole.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [choice.finish_reason]
        logprobs = [each for piece in pieces if piece.logprobs for each in piece.logprobs.content]
        assert logprobs == list(choice.logprobs.content if choice.logprobs else ())
