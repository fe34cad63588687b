"""Proposes the tokens that constraints force as drafts."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Texts
from typing import TYPE_CHECKING, Final

from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from paged_sdk.constraints.grammar import GrammarState

__all__ = ["ForcedTokens"]

MOST: Final = 32
"""Most forced tokens of a sequence per step, about 130 characters, so that the step is not too long for the others."""


class ForcedTokens:
    """Proposes the tokens that a constraint forces, and otherwise the drafts of another proposer.

    Forced tokens are always right, so they are proposed whether or not drafts pay: if a forced text has several
    tokenizations, the constraint's mask allows only the tokenizer's, which is proposed. Drafts of the other proposer
    are cut before the first token that the grammar forbids.

    :param guesses: makes the other drafts
    """

    def __init__(self, guesses: Proposer) -> None:
        self._guesses = guesses
        self._texts: dict[int, GrammarState] = {}

    @property
    def num_followed(self) -> int:
        """Return the number of sequences with state."""
        return len(self._texts)

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        """Propose the tokens that follow each sequence."""
        found = self._guesses.propose(sequences)
        for place, sequence in enumerate(sequences):
            if sequence.request.grammar is not None:
                found[place] = self._allowed(sequence, found[place])
        return found

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended."""
        ended = list(seq_ids)
        self._guesses.forget(ended)
        for seq_id in ended:
            self._texts.pop(seq_id, None)

    def reset(self) -> None:
        """Forget texts that have ended."""
        self._guesses.reset()

    def _allowed(self, sequence: Sequence, guessed: list[int]) -> list[int]:
        """Return the forced tokens, or guesses that begin with them and may go further."""
        text, output = self._text_of(sequence), sequence.num_output_tokens
        text.tokens += sequence.token_ids[sequence.num_prompt_tokens + len(text.tokens) :]
        if text.move_to(output):
            return []  # the step reports the error
        forced = text.forced()[:MOST]
        if guessed[: len(forced)] == forced:
            return guessed[: text.num_allowed(guessed)]
        return forced

    def _text_of(self, sequence: Sequence) -> GrammarState:
        text = self._texts.get(sequence.seq_id)
        if text is None:
            grammar, stops = sequence.request.grammar, sequence.request.sampling.stop_token_ids
            assert grammar is not None, "the request has no constraint"
            # Within a text its stop tokens are banned, though the tokenizer would choose them: others spell it then.
            own = (token for token in stops if token not in grammar.end_ids)
            text = self._texts[sequence.seq_id] = grammar.begin(own, sys.maxsize)
        return text
