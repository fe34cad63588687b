"""Map what bodies say about sampling, which chats and plain texts say alike, to the SDK's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypedDict

from paged_sdk import Constraint, ConstraintError, DryParams, InvalidRequestError, SamplingParams
from paged_sdk.wire.body import Bounds

__all__ = [
    "MAX_TOP_LOGPROBS",
    "Grammar",
    "SamplingDefaults",
    "SamplingFields",
    "constraint_of",
    "dry_params",
    "read_sampling",
    "top_n_logprobs",
]

MAX_TOP_LOGPROBS: Final = 20
"""OpenAI's API has no more: every token's come with their texts and bytes."""

MAX_TOKENS: Final = 1 << 16
"""So many tokens' ids are looked at in a tenth of a second, in which nobody else is answered."""

GRAMMAR_KINDS: Final = ("regex", "json_schema", "lark", "llguidance")


class Grammar(TypedDict):
    """A language that every text is a sentence of."""

    type: Literal["regex", "json_schema", "lark", "llguidance"]
    value: str | dict[str, Any]


class SamplingDefaults(TypedDict, total=False):
    """What a server may say for requests that do not say it."""

    temperature: Annotated[float | None, Bounds(0), "Divides the logits; 0 takes the likeliest token."]
    top_p: Annotated[float | None, Bounds(0, 1), "Keep the likeliest tokens that together reach p."]
    frequency_penalty: Annotated[float | None, Bounds(-2, 2), "Lowers a token once per earlier occurrence."]
    presence_penalty: Annotated[float | None, Bounds(-2, 2), "Lowers a token that occurred."]
    stop: Annotated[str | list[str] | None, "Strings that end the answer, and are not part of it."]
    seed: Annotated[int | None, Bounds(-(2**63), 2**63 - 1), "Gives the same random choices for the same request."]
    top_k: Annotated[int | None, Bounds(-1), "Extension: keep the k likeliest tokens; 0 or -1 keeps all."]
    min_p: Annotated[
        float | None, Bounds(0, 1), "Extension: keep tokens at least this fraction as likely as the likeliest."
    ]
    repetition_penalty: Annotated[float | None, Bounds(0.01, 100), "Extension: divides logits of tokens that occurred."]


class SamplingFields(SamplingDefaults, total=False):
    """What a body may say about how tokens are chosen. What it leaves open comes from the checkpoint."""

    logit_bias: Annotated[dict[str, float] | None, "Token ids to numbers added to their logits."]
    n: Annotated[int | None, Bounds(1), "How many answers."]
    max_tokens: Annotated[int | None, Bounds(1), "Maximum number of tokens to generate."]
    user: Annotated[str | None, "A label for the end user, for the server's log."]
    stop_token_ids: Annotated[list[int] | None, Bounds(0, MAX_TOKENS), "Extension: tokens that end the answer."]
    min_tokens: Annotated[int | None, Bounds(0), "Extension: no end before so many tokens."]
    ignore_eos: Annotated[bool | None, "Extension: continue past the end token."]
    dry_multiplier: Annotated[float | None, Bounds(0), "Extension: strength of DRY, against repetition."]
    dry_base: Annotated[float | None, Bounds(1), "Extension: DRY's growth per repeated token."]
    dry_allowed_length: Annotated[int | None, Bounds(0), "Extension: repetitions up to this length are not penalized."]
    dry_sequence_breakers: Annotated[list[str] | None, "Extension: texts across which DRY counts no repetition."]
    grammar: Annotated[Grammar | None, "Extension: a constraint on every answer."]
    truncate_sequence: Annotated[bool | None, "Extension: cut a prompt that is too long at its front."]
    cache_salt: Annotated[str | None, Bounds(1, 256), "Extension: share cached prefixes only with the same salt."]


def read_sampling(
    body: SamplingFields, *, max_len: int | None, top_n: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """Return how the tokens of an answer are chosen.

    :param max_len: tokens to generate at most
    :param top_n: how many of the likeliest tokens are returned beside each, and
    :param prompt_logprobs: beside each of the prompt's
    :raises InvalidRequestError: a value that cannot be used
    :raises ConfigError: likewise
    """
    seed = body.get("seed")
    return SamplingParams(
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        min_p=body.get("min_p"),
        frequency_penalty=body.get("frequency_penalty") or 0.0,
        presence_penalty=body.get("presence_penalty") or 0.0,
        repetition_penalty=body.get("repetition_penalty"),
        max_len=max_len,
        stop=body.get("stop"),
        ignore_eos=body.get("ignore_eos") or False,
        logits_bias=_logits_bias(body.get("logit_bias")),
        n_choices=body.get("n") or 1,
        top_n_logprobs=top_n,
        seed=None if seed is None else seed % 2**64,  # OpenAI's API takes negative ones
        dry_params=dry_params(
            multiplier=body.get("dry_multiplier"),
            base=body.get("dry_base"),
            allowed_length=body.get("dry_allowed_length"),
            sequence_breakers=body.get("dry_sequence_breakers"),
        ),
        stop_token_ids=body.get("stop_token_ids") or (),
        min_tokens=body.get("min_tokens") or 0,
        prompt_logprobs=prompt_logprobs,
    )


def dry_params(
    *,
    multiplier: float | None,
    base: float | None,
    allowed_length: int | None,
    sequence_breakers: Sequence[str] | None,
) -> DryParams | None:
    """Return the settings of DRY, which is off without a multiplier.

    :raises InvalidRequestError: details without a multiplier
    :raises ConfigError: a value that cannot be used
    """
    details: dict[str, Any] = {"base": base, "allowed_length": allowed_length, "sequence_breakers": sequence_breakers}
    given = {name: value for name, value in details.items() if value is not None}
    if multiplier is not None:
        return DryParams(multiplier=multiplier, **given)
    for name, value in given.items():
        raise InvalidRequestError(
            f"dry_{name} does nothing without dry_multiplier: give both or none", field=f"dry_{name}", value=value
        )
    return None


def top_n_logprobs(logprobs: bool, top_logprobs: int | None, *, default: int) -> int | None:
    """Return how many of the likeliest tokens a chat's answer has beside each; None: it has no logprobs.

    :param default: how many they are if nothing is said
    :raises InvalidRequestError: a number of them without logprobs
    """
    if logprobs:
        return default if top_logprobs is None else top_logprobs
    if top_logprobs:
        raise InvalidRequestError(
            "top_logprobs does nothing unless logprobs is true: give both or none",
            field="top_logprobs",
            value=top_logprobs,
        )
    return None


def constraint_of(kind: str, source: str | Mapping[str, Any], *, field: str) -> Constraint:
    """Return the language that a kind of description stands for.

    :param field: the field that says the kind
    :raises InvalidRequestError: there is no such kind, or its description is none
    """
    makes: dict[str, Callable[[Any], Constraint]] = {
        "json_schema": Constraint.json_schema,
        "regex": Constraint.regex,
        "lark": Constraint.lark,
        "llguidance": Constraint.llguidance,
    }
    if kind not in makes:
        raise InvalidRequestError.of(field, kind, f"one of {', '.join(GRAMMAR_KINDS)}")
    if kind != "json_schema" and not isinstance(source, str):
        raise InvalidRequestError.of("grammar", source, f"a string: it is a {kind}")
    try:
        return makes[kind](source)
    except ConstraintError as error:
        raise InvalidRequestError(str(error), field="grammar", value=source) from error


def _logits_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > MAX_TOKENS:
        raise InvalidRequestError.of("logit_bias", f"{len(bias)} tokens", f"at most {MAX_TOKENS} tokens")
    numbers = {}
    for token, number in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10) or not -100 <= number <= 100:
            raise InvalidRequestError.of("logit_bias", {token: number}, "token ids to numbers from -100 to 100")
        numbers[int(token)] = number
    return numbers
