"""Computes which tokens grammars allow next, for all sequences of a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

from paged_sdk.constraints.grammar import GrammarState, error_of
from paged_sdk.system.processors import usable_processors

if TYPE_CHECKING:
    import llguidance

__all__ = ["Mask", "MaskFiller", "Positions"]

_MAX_KNOWN: Final = 256
"""Number of cached masks: they take 4 MB for a vocabulary of 49,000 tokens, and at worst 50 MB."""

_Words: TypeAlias = npt.NDArray[np.uint32]


@frozen(eq=False)
class Positions:
    """Identifies consecutive positions of one text.

    :ivar first: number of tokens before the first position
    :ivar num: number of positions
    """

    state: GrammarState
    first: int
    num: int


@frozen(eq=False)
class Mask:
    """Holds the allowed tokens of a position, or the banned ones if these are fewer.

    Within a JSON string, a hundredth of a vocabulary is banned; elsewhere nearly all of it.

    :ivar tokens: ascending token ids, int64
    :ivar are_allowed: whether :attr:`tokens` are the allowed tokens, not the banned ones
    :ivar ending: a token that ends the text, if nothing else may follow
    :ivar lacks_ends: whether tokens that the grammar allows were removed, because they would end the text too early
    """

    tokens: npt.NDArray[np.int64]
    are_allowed: bool
    ending: int | None = None
    lacks_ends: bool = False

    def allows(self, token: int) -> bool:
        """Tell whether a token is allowed."""
        index = int(np.searchsorted(self.tokens, token))
        return (index < len(self.tokens) and int(self.tokens[index]) == token) == self.are_allowed


class MaskFiller:
    """Computes the masks of a step together, in parallel.

    :param vocab_size: columns of the logits
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._executor: llguidance.LLExecutor | None = None
        self._known: OrderedDict[tuple[bytes, tuple[int, ...], tuple[int, ...]], Mask] = OrderedDict()

    def fill(self, positions: Sequence[Positions]) -> list[Mask | str]:
        """Compute a mask for each position, in order.

        :param positions: positions of different texts
        :returns: masks, which allow nothing after drafts that the grammar does not allow; or the error of a grammar
            that has failed
        """
        words = np.zeros((sum(each.num for each in positions), (self._vocab_size + 31) // 32), np.int32)
        starts = [0, *accumulate(each.num for each in positions)]
        errors = [each.state.move_to(each.first) for each in positions]
        alone: list[tuple[llguidance.LLMatcher, int]] = []
        drafted: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
        for each, start, error in zip(positions, starts, errors, strict=False):
            if error:
                continue
            if each.num == 1:
                alone.append((each.state.matcher, start))
            else:
                # A copy (2 us) is used and thrown away: llguidance 1.9 consumes the drafts and rolls back, which fails
                # or leaves a wrong state after tokens that the grammar names by id.
                drafts = each.state.tokens[each.first : each.first + each.num - 1]
                drafted.append((each.state.matcher.deep_copy(), start, drafts))
        self._compute(words, alone, drafted)
        masks: list[Mask | str] = []
        for each, start, error in zip(positions, starts, errors, strict=False):
            own, failure = words[start : start + each.num].view(np.uint32), error or error_of(each.state.matcher)
            masks += [failure or self._mask(row, each.state) for row in own]
        return masks

    def _compute(
        self,
        words: npt.NDArray[np.int32],
        alone: list[tuple[llguidance.LLMatcher, int]],
        drafted: list[tuple[llguidance.LLMatcher, int, list[int]]],
    ) -> None:
        """Set the bit of each token that may follow.

        :param words: one bitmask per row
        :param alone: matchers, and the row of each
        :param drafted: matchers, the first row of each, and the drafts between its rows
        """
        from llguidance import LLExecutor, numpy

        if len(alone) == 1 and not drafted:  # handing it to another thread would take longer
            numpy.fill_next_token_bitmask(alone[0][0], words, alone[0][1])
            return
        if self._executor is None:
            self._executor = LLExecutor(usable_processors())
        if alone:
            numpy.fill_next_token_bitmask_par(self._executor, alone, words)
        if drafted:
            numpy.fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, words)

    def _mask(self, words: _Words, state: GrammarState) -> Mask:
        """Convert a bitmask, with a cache: a grammar has few different masks, one for most of a JSON string."""
        key = words.tobytes(), state.end_ids, state.own_end_ids
        mask = self._known.get(key)
        if mask is None:
            ending, lacks_ends = _set_ends(words, state)
            mask = self._known[key] = _mask_of(words, self._vocab_size, ending, lacks_ends=lacks_ends)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return mask


def _mask_of(words: _Words, vocab_size: int, ending: int | None, *, lacks_ends: bool) -> Mask:
    bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")
    are_allowed = int(bits.sum(dtype=np.int64)) * 2 < vocab_size
    tokens = np.flatnonzero(bits if are_allowed else bits == 0)
    return Mask(tokens, are_allowed, ending, lacks_ends)


def _set_ends(mask: _Words, state: GrammarState) -> tuple[int | None, bool]:
    """Replace the grammar's end tokens in a bitmask by the end tokens of this text.

    :param mask: a bit for each token; changed in place
    :returns: a token that ends the text, if nothing else may follow (:attr:`Mask.ending`), and
        :attr:`Mask.lacks_ends`
    """
    own = state.own_end_ids
    may_end = _allows(mask, own[0])
    lacks_ends = not may_end and any(_allows(mask, end) for end in state.end_ids)
    for end in {*own, *state.end_ids}:
        mask[end >> 5] &= ~np.uint32(1 << (end & 31))
    if not may_end:
        return None, lacks_ends
    if not mask.any():
        end = (state.end_ids or own)[0]
        mask[end >> 5] |= np.uint32(1 << (end & 31))
        return end, False
    for end in state.end_ids:
        mask[end >> 5] |= np.uint32(1 << (end & 31))
    return None, False


def _allows(mask: _Words, token: int) -> bool:
    return bool(mask[token >> 5] >> np.uint32(token & 31) & 1)
