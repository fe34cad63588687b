"""Choose the next token of a fake model."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

from attrs import Attribute, field, frozen

from paged_sdk.errors import ConfigError

__all__ = ["HashedTokens", "NextToken", "ScriptedTokens"]


class NextToken(Protocol):
    """Replaces a model and its sampler, deterministically."""

    def __call__(self, prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
        """Return the next token.

        :param prompt: token ids of the prompt
        :param output: token ids generated so far
        :param choice_index: the index of the request's choice
        """
        ...


def _tokens(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(value)


def _not_empty(instance: object, attribute: Attribute[tuple[int, ...]], value: tuple[int, ...]) -> None:
    if not value:
        raise ConfigError.of(f"{type(instance).__name__}.{attribute.name}", value, "at least one token id")


@frozen
class ScriptedTokens:
    """Generates the same output for every request: the script, then the end token forever.

    :ivar token_ids: the script
    :ivar end_token_id: the text processor's end-of-text token
    """

    token_ids: tuple[int, ...] = field(converter=_tokens)
    end_token_id: int

    def __call__(self, prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
        return self.token_ids[len(output)] if len(output) < len(self.token_ids) else self.end_token_id


@frozen
class HashedTokens:
    """Picks tokens by a hash of the whole history and the choice index, so that each prompt has its own output, always
    the same.

    :ivar token_ids: the tokens to pick from
    :raises ConfigError: if there are none
    """

    token_ids: tuple[int, ...] = field(converter=_tokens, validator=_not_empty)

    def __call__(self, prompt: Sequence[int], output: Sequence[int], choice_index: int) -> int:
        history = array("q", [choice_index, len(prompt), *prompt, *output])
        digest = hashlib.blake2b(history.tobytes(), digest_size=8).digest()
        return self.token_ids[int.from_bytes(digest, "little") % len(self.token_ids)]
