"""Define how tokens are sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Attribute, evolve, field, frozen

from paged_sdk.config.checks import (
    AreFewTexts,
    IntAtLeast,
    IsA,
    NumberBetween,
    are_token_ids,
    as_float,
    as_int,
    as_optional_float,
    as_optional_int,
    as_tuple,
    is_bool,
    is_finite,
    is_token_id,
    name_of,
    plain,
)
from paged_sdk.config.frozen_mapping import FrozenMapping
from paged_sdk.errors import ConfigError

__all__ = ["DryParams", "GenerationDefaults", "SamplingParams"]

GREEDY_BELOW = 1e-7
"""A temperature below this is greedy: dividing by it would only overflow."""


# Stop strings and DRY breakers are searched for in every text, partly on the engine's thread.
_are_few_texts = AreFewTexts(max_number=256, max_characters=16_384)


def _strings(value: str | Iterable[str] | None) -> tuple[str, ...]:
    strings: tuple[str, ...] = as_tuple(() if value is None else value)
    return strings


def _token_ids(value: Iterable[int]) -> tuple[int, ...]:
    token_ids: tuple[int, ...] = as_tuple(value)
    return token_ids


def _top_k(value: int | None) -> int | None:
    number = as_optional_int(value)
    return 0 if type(number) is int and number == -1 else number


def _frozen_bias(value: Mapping[int, float] | None) -> Mapping[int, float] | None:
    if not isinstance(value, Mapping):
        return value  # for the validator to reject
    return FrozenMapping({plain(token): plain(bias) for token, bias in value.items()})


def _is_bias(instance: object, attribute: Attribute[Any], value: object) -> None:
    allowed = "a mapping of token ids to finite numbers, or -inf to ban one"
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError.of(name_of(instance, attribute), value, allowed)
    for token, bias in (value or {}).items():
        # NaN or +inf would make every probability NaN.
        if not (is_token_id(token) and (bias == -math.inf or is_finite(bias))):
            raise ConfigError.of(name_of(instance, attribute), {token: bias}, allowed)


@frozen(kw_only=True)
class DryParams:
    """Configures DRY ("don't repeat yourself"): the logit of a token that would extend an earlier repetition of n
    tokens is lowered by ``multiplier * base ** (n - allowed_length)``.

    :ivar multiplier: strength; 0 is off
    :ivar base: growth per repeated token
    :ivar allowed_length: repetitions up to this length are not penalized
    :ivar sequence_breakers: strings across which repetitions are not counted. At most 256, of 16,384 characters
        together
    """

    multiplier: float = field(default=0.0, converter=as_float, validator=NumberBetween(0))
    base: float = field(default=1.75, converter=as_float, validator=NumberBetween(1))
    allowed_length: int = field(default=2, converter=as_int, validator=IntAtLeast(0))
    sequence_breakers: tuple[str, ...] = field(
        default=("\n", ":", '"', "*"), converter=_strings, validator=_are_few_texts
    )


@frozen(kw_only=True)
class GenerationDefaults:
    """Holds the sampling defaults of a checkpoint's generation_config.json."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


@frozen(kw_only=True)
class SamplingParams:
    """Says how tokens are sampled.

    Settings are applied in this order: bias, penalties, temperature, top-k, top-p, min-p.

    Unset temperature, top_k, top_p, min_p and repetition_penalty come from the checkpoint's generation_config.json.

    :ivar temperature: divides the logits; 0 (or below 1e-7) is greedy
    :ivar top_k: keep the k likeliest tokens; 0 or -1 keeps all
    :ivar top_p: keep the smallest set of likeliest tokens whose probabilities reach p
    :ivar min_p: keep tokens at least this fraction as likely as the likeliest
    :ivar frequency_penalty: subtracted once per earlier occurrence in the output, -2 to 2
    :ivar presence_penalty: subtracted once if the token occurs in the output, -2 to 2
    :ivar repetition_penalty: divides positive logits (multiplies negative ones) of tokens in prompt or output, 0.01 to
        100
    :ivar max_len: maximum number of tokens to generate; None: until the end token or the context's end. ``max_tokens``
        is an alias
    :ivar stop: strings that end the text, and are not part of it. At most 256, of 16,384 characters together
    :ivar ignore_eos: continue past the end token
    :ivar logits_bias: token id to a number added to its logit; -inf bans it
    :ivar n_choices: number of texts, which share the prompt's KV blocks
    :ivar top_n_logprobs: None: no logprobs; n: those of the chosen token and the n likeliest ones, at most 1,024
    :ivar seed: gives the same random numbers for the same request, whatever else is in the batch; None draws a seed
    :ivar dry_params: repetition control, see :class:`DryParams`
    :ivar stop_token_ids: tokens that end the text, besides the model's end tokens
    :ivar min_tokens: end tokens are banned before that many; at most ``max_len``
    :ivar prompt_logprobs: None: off; n: logprobs of every prompt token but the first, and of the n likeliest ones, at
        most 128
    :raises ConfigError: at construction
    """

    temperature: float | None = field(
        default=None, converter=as_optional_float, validator=NumberBetween(0, optional=True)
    )
    top_k: int | None = field(default=None, converter=_top_k, validator=IntAtLeast(0, optional=True))
    top_p: float | None = field(
        default=None, converter=as_optional_float, validator=NumberBetween(0, 1, low_open=True, optional=True)
    )
    min_p: float | None = field(default=None, converter=as_optional_float, validator=NumberBetween(0, 1, optional=True))
    frequency_penalty: float = field(default=0.0, converter=as_float, validator=NumberBetween(-2, 2))
    presence_penalty: float = field(default=0.0, converter=as_float, validator=NumberBetween(-2, 2))
    repetition_penalty: float | None = field(
        default=None, converter=as_optional_float, validator=NumberBetween(0.01, 100, optional=True)
    )
    max_len: int | None = field(default=None, converter=as_optional_int, validator=IntAtLeast(1, optional=True))
    _max_tokens: int | None = field(
        default=None,
        converter=as_optional_int,
        validator=IntAtLeast(1, optional=True),
        alias="max_tokens",
        eq=False,
        repr=False,
    )
    stop: tuple[str, ...] = field(default=(), converter=_strings, validator=_are_few_texts)
    ignore_eos: bool = field(default=False, validator=is_bool)
    logits_bias: Mapping[int, float] | None = field(default=None, converter=_frozen_bias, validator=_is_bias)
    n_choices: int = field(default=1, converter=as_int, validator=IntAtLeast(1))
    top_n_logprobs: int | None = field(
        default=None, converter=as_optional_int, validator=IntAtLeast(0, maximum=1024, optional=True)
    )
    seed: int | None = field(default=None, converter=as_optional_int, validator=IntAtLeast(0, optional=True))
    dry_params: DryParams | None = field(default=None, validator=IsA(DryParams, optional=True))
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_token_ids, validator=are_token_ids)
    min_tokens: int = field(default=0, converter=as_int, validator=IntAtLeast(0))
    prompt_logprobs: int | None = field(
        default=None, converter=as_optional_int, validator=IntAtLeast(0, maximum=128, optional=True)
    )

    @_max_tokens.validator
    def _agrees_with_max_len(self, attribute: object, value: int | None) -> None:
        if value is not None and self.max_len not in (None, value):
            allowed = f"only one of max_len (here {self.max_len}) and max_tokens: they are two names of one setting"
            raise ConfigError.of("SamplingParams.max_tokens", value, allowed)

    @min_tokens.validator
    def _fits_max_len(self, attribute: object, value: int) -> None:
        limit = self._max_tokens if self.max_len is None else self.max_len
        if limit is not None and isinstance(value, int) and value > limit:
            raise ConfigError.of("SamplingParams.min_tokens", value, f"at most max_len = {limit}")

    def __attrs_post_init__(self) -> None:
        if self._max_tokens is not None:  # stored under one name only, so that evolve(max_len=...) works
            object.__setattr__(self, "max_len", self._max_tokens)
            object.__setattr__(self, "_max_tokens", None)

    @property
    def max_tokens(self) -> int | None:
        """Return ``max_len``, by OpenAI's name for it."""
        return self.max_len

    @classmethod
    def deterministic(cls) -> SamplingParams:
        """Return greedy settings, whatever generation_config.json says."""
        return cls(temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, repetition_penalty=1.0)

    @property
    def is_greedy(self) -> bool:
        """Tell whether the likeliest token is taken. An unset temperature counts as 1."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    def with_defaults(self, defaults: GenerationDefaults) -> SamplingParams:
        """Return these settings with unset ones taken from the checkpoint. Those that are still None are off."""
        if not isinstance(defaults, GenerationDefaults):
            raise ConfigError.of("defaults", defaults, "GenerationDefaults")

        def pick(name: str) -> Any:
            own = getattr(self, name)
            return getattr(defaults, name) if own is None else own

        names = ("temperature", "top_p", "min_p", "repetition_penalty")
        return evolve(self, top_k=pick("top_k") or None, **{name: pick(name) for name in names})
