"""Follows texts that are to be sentences of a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from paged_sdk.types.call_grammar import CallGrammar
from paged_sdk.types.constraint import Constraint

if TYPE_CHECKING:
    import llguidance

__all__ = ["Grammar", "GrammarText", "Language", "error_of"]

Language: TypeAlias = Constraint | CallGrammar
"""Says in words what a grammar is compiled of."""


@frozen(eq=False)
class Grammar:
    """Holds a compiled constraint. Any number of texts, in any threads, begin from it.

    :ivar matcher: stands before the first token of a text, and is copied for each
    :ivar end_ids: the model's tokens that end a text, which :attr:`matcher` allows after every sentence
    """

    matcher: llguidance.LLMatcher
    end_ids: tuple[int, ...]

    def begin(self, stop_token_ids: Iterable[int], vocab_size: int) -> GrammarText:
        """Follow a new text.

        :param stop_token_ids: tokens that end the text where it is a sentence, and are not allowed elsewhere
        :param vocab_size: how many logits a token has
        """
        ends = tuple(sorted(token for token in stop_token_ids if token < vocab_size))
        return GrammarText(self, self.matcher.deep_copy(), [], ends)


class GrammarText:
    """Keeps the tokens of one text, and where the grammar stands in it.

    The grammar is moved on only when it has to say what may follow.

    :param num_consumed: how many of the tokens the matcher has consumed
    :ivar tokens: the text, which may end with drafts that the grammar does not allow
    :ivar end_ids: tokens that end this text where it is a sentence
    :ivar matcher: stands where the grammar does
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
        """Return the tokens by which the grammar says that the text may end."""
        return self._grammar.end_ids

    def cut(self, num_tokens: int) -> None:
        """Keep only the first tokens."""
        del self.tokens[num_tokens:]
        if self._num_consumed > num_tokens:
            # It begins anew: llguidance 1.9 does not find back over tokens that the grammar names by number.
            self.matcher = self._grammar.matcher.deep_copy()
            self._num_consumed = 0

    def copy(self) -> GrammarText:
        """Return a text of its own that begins with the same tokens."""
        return GrammarText(
            self._grammar, self.matcher.deep_copy(), self.tokens.copy(), self.end_ids, self._num_consumed
        )

    def move_to(self, num_tokens: int) -> str:
        """Move the grammar to a position that it has not passed.

        :returns: why it cannot get there; empty if it does
        """
        missing = self.tokens[self._num_consumed : num_tokens]
        if missing:
            self._num_consumed += self.matcher.try_consume_tokens(missing)
        return error_of(self.matcher) or (
            "it does not allow the text so far" if self._num_consumed < num_tokens else ""
        )

    def forced(self) -> list[int]:
        """Return the tokens to which there is no alternative where the grammar stands; they may go on after them.

        The same text may be made of other tokens: these are the tokenizer's, up to where it would join them with what
        may follow, or to one that ends this text, which is not allowed where more has to follow.
        """
        tokens: list[int] = self.matcher.compute_ff_tokens()
        ends = (place for place, token in enumerate(tokens) if token in self.end_ids)
        return tokens[: next(ends, len(tokens))]

    def may_end(self) -> bool:
        """Tell whether the text is a sentence where the grammar stands."""
        return self.matcher.is_accepting()

    def num_allowed(self, token_ids: list[int]) -> int:
        """Return how many of some tokens may follow where the grammar stands."""
        return self.matcher.validate_tokens(token_ids) if token_ids else 0


def error_of(matcher: llguidance.LLMatcher) -> str:
    """Return what is wrong with a matcher, on one line; nothing if it is in order."""
    if not matcher.is_error():
        return ""
    error = matcher.get_error().partition("<non-verbose/>")[0].partition("<backtrace>")[0]
    return " ".join(error.replace("NoExtensionBias", "no text of the vocabulary's tokens satisfies it").split())
