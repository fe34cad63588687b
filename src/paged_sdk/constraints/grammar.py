"""Tracks outputs that are constrained by a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from paged_sdk.types.call_grammar import CallGrammar
from paged_sdk.types.constraint import Constraint

if TYPE_CHECKING:
    import llguidance

__all__ = ["Grammar", "GrammarState", "Language", "error_of"]

Language: TypeAlias = Constraint | CallGrammar
"""The sources that a grammar can be compiled from."""


@frozen(eq=False)
class Grammar:
    """Holds a compiled constraint, from which any number of texts, in any threads, can start.

    :ivar matcher: a matcher before the first token; copied for each text
    :ivar end_ids: the model's end tokens, which :attr:`matcher` allows where a text may end
    """

    matcher: llguidance.LLMatcher
    end_ids: tuple[int, ...]

    def begin(self, stop_token_ids: Iterable[int], vocab_size: int) -> GrammarState:
        """Start a new text.

        :param stop_token_ids: tokens that end this text: allowed where the grammar lets it end, and nowhere else
        :param vocab_size: columns of the logits
        """
        ends = tuple(sorted(token for token in stop_token_ids if token < vocab_size))
        return GrammarState(self, self.matcher.deep_copy(), [], ends)


class GrammarState:
    """Keeps the output tokens of one sequence, and a matcher that has consumed a prefix of them.

    The matcher consumes tokens lazily, only when :meth:`move_to` is called.

    :param num_consumed: number of tokens that the matcher has consumed
    :ivar tokens: the output, which may end with drafts that the grammar does not allow
    :ivar end_ids: tokens that end this text, where the grammar lets it end
    :ivar matcher: the matcher
    """

    def __init__(
        self,
        grammar: Grammar,
        matcher: llguidance.LLMatcher,
        tokens: list[int],
        end_ids: tuple[int, ...],
        num_consumed: int = 0,
    ) -> None:
        self.tokens = tokens
        self.end_ids = end_ids
        self._grammar = grammar
        self.matcher: llguidance.LLMatcher = matcher
        self._num_consumed = num_consumed

    @property
    def own_end_ids(self) -> tuple[int, ...]:
        """Return the end tokens that the matcher's masks contain where the text may end."""
        return self._grammar.end_ids

    def cut(self, num_tokens: int) -> None:
        """Drop all but the first tokens."""
        del self.tokens[num_tokens:]
        if self._num_consumed > num_tokens:
            # Start over: llguidance 1.9 cannot roll back over tokens that the grammar names by id.
            self.matcher = self._grammar.matcher.deep_copy()
            self._num_consumed = 0

    def copy(self) -> GrammarState:
        """Return an independent copy."""
        return GrammarState(
            self._grammar, self.matcher.deep_copy(), self.tokens.copy(), self.end_ids, self._num_consumed
        )

    def move_to(self, num_tokens: int) -> str:
        """Let the matcher consume tokens up to a position, which must not be before its own.

        :param num_tokens: number of tokens before the position
        :returns: why the matcher cannot get there; empty if it does
        """
        missing = self.tokens[self._num_consumed : num_tokens]
        if missing:
            self._num_consumed += self.matcher.try_consume_tokens(missing)
        return error_of(self.matcher) or (
            "it does not allow the text so far" if self._num_consumed < num_tokens else ""
        )

    def forced(self) -> list[int]:
        """Return the tokens that have to follow at the matcher's position.

        Other tokens may spell the same text. These are the ones that the tokenizer chooses, up to where it could merge
        them with the text after them, or up to an end token of this text, which is not allowed where more has to
        follow.
        """
        tokens: list[int] = self.matcher.compute_ff_tokens()
        ends = (index for index, token in enumerate(tokens) if token in self.end_ids)
        return tokens[: next(ends, len(tokens))]

    def may_end(self) -> bool:
        """Tell whether the grammar lets the text end at the matcher's position."""
        return self.matcher.is_accepting()

    def num_allowed(self, token_ids: list[int]) -> int:
        """Return how many of these tokens, from the first on, may follow at the matcher's position."""
        return self.matcher.validate_tokens(token_ids) if token_ids else 0


def error_of(matcher: llguidance.LLMatcher) -> str:
    """Return the error of a matcher, on one line; empty if it has none."""
    if not matcher.is_error():
        return ""
    error = matcher.get_error().partition("<non-verbose/>")[0].partition("<backtrace>")[0]
    return " ".join(error.replace("NoExtensionBias", "no text of the vocabulary's tokens satisfies it").split())
