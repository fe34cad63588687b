"""Maps the sampling fields that the APIs share to the SDK's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypedDict

from paged_sdk import (
    Constraint,
    ConstraintError,
    DryParams,
    InvalidRequestError,
    RequestBuilder,
    SamplingParams,
)
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
    "with_answer_constraint",
]

MAX_TOP_LOGPROBS: Final = 20
"""OpenAI's limit. Each top token is returned with its text and bytes."""

MAX_TOKEN_IDS: Final = 1 << 16
"""Maximum number of token ids in a field. Checking these takes a tenth of a second, during which the event loop serves
no other request.
"""

GRAMMAR_KINDS: Final = ("regex", "json_schema", "lark", "llguidance")


class Grammar(TypedDict):
    """Describes a constraint that every answer must match."""

    type: Literal["regex", "json_schema", "lark", "llguidance"]
    value: str | dict[str, Any]


class SamplingDefaults(TypedDict, total=False):
    """Holds the fields for which a server can have defaults."""

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
    """Holds the fields of a body that control sampling. Defaults come from the checkpoint."""

    logit_bias: Annotated[dict[str, float] | None, "Token ids to numbers added to their logits."]
    n: Annotated[int | None, Bounds(1), "How many answers."]
    max_tokens: Annotated[int | None, Bounds(1), "Maximum number of tokens to generate."]
    user: Annotated[str | None, "A label for the end user, for the server's log."]
    stop_token_ids: Annotated[list[int] | None, Bounds(0, MAX_TOKEN_IDS), "Extension: tokens that end the answer."]
    min_tokens: Annotated[int | None, Bounds(0), "Extension: minimum number of tokens to generate."]
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
    """Return the sampling settings of a body.

    :param max_len: maximum number of tokens to generate
    :param top_n: how many of the likeliest tokens to return with each generated token
    :param prompt_logprobs: how many of the likeliest tokens to return with each token of the prompt
    :raises InvalidRequestError: invalid value
    :raises ConfigError: invalid value
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
        seed=None if seed is None else seed % 2**64,  # OpenAI's API accepts negative seeds
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
    """Return the settings of DRY; None, which disables it, without a multiplier.

    :raises InvalidRequestError: other settings of DRY without a multiplier
    :raises ConfigError: invalid value
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
    """Return how many of the likeliest tokens a chat's answer lists with each token; None: no logprobs.

    :param default: the number if ``top_logprobs`` is None
    :raises InvalidRequestError: ``top_logprobs`` without ``logprobs``
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
    """Return the constraint of a kind and its source.

    :param kind: one of ``GRAMMAR_KINDS``
    :param field: the field that holds the kind, for errors
    :raises InvalidRequestError: unknown kind, or invalid source
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


def with_answer_constraint(request: RequestBuilder, constraint: Constraint) -> RequestBuilder:
    """Return a request with a constraint on its answer. Where the model has to call a tool, there is no other answer
    that it could apply to.
    """
    return request if request.options.forced_tools else request.with_constraint(constraint)


def _logits_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > MAX_TOKEN_IDS:
        raise InvalidRequestError.of("logit_bias", f"{len(bias)} tokens", f"at most {MAX_TOKEN_IDS} tokens")
    numbers = {}
    for token, number in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10) or not -100 <= number <= 100:
            raise InvalidRequestError.of("logit_bias", {token: number}, "token ids to numbers from -100 to 100")
        numbers[int(token)] = number
    return numbers
