"""Proposes the tokens that constraints force."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Texts
from typing import TYPE_CHECKING, Final

from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from paged_sdk.constraints.grammar import GrammarText

__all__ = ["ForcedTokens"]

MOST: Final = 32
"""Of one text, a step takes so many forced tokens: others wait for no longer step. 32 are about 130 letters."""


class ForcedTokens:
    """Proposes the tokens to which a constraint leaves no alternative, and otherwise what another proposer guesses.

    A text cannot go on without them, so they are proposed whether or not drafts pay. Where several tokens or sequences
    of tokens make the same forced text, they are those that the tokenizer would choose, and those alone the
    constraint's mask allows: so they are never wrong. Guesses that no sentence goes on with are cut off.

    :param guesses: makes the other drafts
    """

    def __init__(self, guesses: Proposer) -> None:
        self._guesses = guesses
        self._texts: dict[int, GrammarText] = {}

    @property
    def num_followed(self) -> int:
        """Return of how many sequences it keeps state."""
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
        """Forget what is kept of texts that have ended."""
        self._guesses.reset()

    def _allowed(self, sequence: Sequence, guessed: list[int]) -> list[int]:
        """Return the tokens that are forced, or guesses that begin with them and go further."""
        text, output = self._text_of(sequence), sequence.num_output_tokens
        text.tokens += sequence.token_ids[sequence.num_prompt_tokens + len(text.tokens) :]
        if text.move_to(output):
            return []  # what is wrong with it, the step will say
        forced = text.forced()[:MOST]
        if guessed[: len(forced)] == forced:
            return guessed[: text.num_allowed(guessed)]
        return forced

    def _text_of(self, sequence: Sequence) -> GrammarText:
        text = self._texts.get(sequence.seq_id)
        if text is None:
            assert sequence.request.grammar is not None, "the request has no constraint"
            text = self._texts[sequence.seq_id] = sequence.request.grammar.begin((), 0)
        return text
