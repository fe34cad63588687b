"""Bans the tokens that a request's constraint does not allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from attrs import define
from torch import Tensor

from paged_sdk.constraints.grammar import GrammarText
from paged_sdk.constraints.masks import Mask, MaskFiller, Positions
from paged_sdk.errors import ConstraintError
from paged_sdk.sampling.candidates import argmax, select_rows
from paged_sdk.sampling.failures import Failures
from paged_sdk.sampling.processor import ALL_TOKENS, Processor, ProcessorState
from paged_sdk.sampling.sparse import keep_only
from paged_sdk.sampling.truncation import is_greedy
from paged_sdk.scheduler.request import Request

__all__ = ["ConstraintChange", "ConstraintState", "Constraints"]


@define(eq=False)
class ConstraintChange:
    """Holds what is allowed at one position of a text.

    :ivar num_tokens: how many tokens of the text are before the position
    :ivar mask: what is allowed, or why the grammar cannot say it; None until it is known, and for a row that may do
        without it
    """

    request: Request
    text: GrammarText
    num_tokens: int
    mask: Mask | str | None = None

    def look(self, *, may_wait: bool) -> bool:
        """Find out what needs no mask.

        :param may_wait: whether a mask may be made later, if the likeliest token is not allowed
        :returns: whether a mask is to be made now
        """
        if not may_wait:
            return True
        error = self.text.move_to(self.num_tokens)
        if error:
            self.mask = error
            return False
        forced = self.text.forced()
        if forced:
            self.mask = Mask(np.array(forced[:1]), are_allowed=True)
        return not forced and self.text.may_end()

    def allows(self, token: int) -> bool:
        """Tell whether the text may go on with a token, where it may neither end nor is left one token."""
        return token not in self.text.end_ids and self.text.num_allowed([token]) == 1


class Constraints(Processor[ConstraintChange]):
    """Bans what the grammars of requests do not allow. The masks of a step are made together.

    Where a text can only end, it does, whatever other settings have done to the token that ends it.

    A mask takes 0.1 to 0.3 ms of two processors, to ask for one token 0.01. So where the likeliest token is taken,
    it is asked for first, and a mask is made only if it is not allowed. On a device masks are made ahead, while it
    computes the logits.

    :param vocab_size: columns of the logits
    :param ahead: whether every mask is made before there are logits
    """

    def __init__(self, vocab_size: int, *, ahead: bool = False) -> None:
        self._vocab_size = vocab_size
        self._ahead = ahead
        self._filler = MaskFiller(vocab_size)

    def applies_until(self, request: Request) -> int:
        return 0 if request.grammar is None else ALL_TOKENS

    def begin(self, request: Request) -> ConstraintState:
        assert request.grammar is not None, "the request needs no constraint"
        sampling = request.sampling
        # Where end tokens are to be ignored, they are left out as long as anything else may follow.
        ends = sampling.stop_token_ids if sampling.ignore_eos else request.stop_token_ids
        return ConstraintState(request, request.grammar.begin(ends, self._vocab_size))

    def prepare(self, changes: Sequence[tuple[int, ConstraintChange]]) -> None:
        num = Counter(id(change.text) for _, change in changes)
        self._fill(
            [
                change
                for _, change in changes
                if change.look(
                    may_wait=not self._ahead and num[id(change.text)] == 1 and is_greedy(change.request.sampling)
                )
            ]
        )

    def _fill(self, changes: Sequence[ConstraintChange]) -> None:
        positions: list[Positions] = []
        for change in changes:
            if positions and positions[-1].text is change.text:  # drafts of one text lie side by side
                last = positions.pop()
                positions.append(Positions(last.text, last.first, last.num + 1))
            else:
                positions.append(Positions(change.text, change.num_tokens, 1))
        for change, mask in zip(changes, self._filler.fill(positions), strict=True):
            change.mask = mask

    def only_token(self, change: ConstraintChange) -> int | None:
        mask = change.mask
        return int(mask.tokens[0]) if isinstance(mask, Mask) and mask.are_allowed and len(mask.tokens) == 1 else None

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, ConstraintChange]]) -> Failures:
        open_rows = [(row, change) for row, change in changes if change.mask is None]
        if open_rows:
            likeliest = argmax(
                logits if len(open_rows) == len(logits) else select_rows(logits, [r for r, _ in open_rows])
            )
            self._fill([c for (_, c), token in zip(open_rows, likeliest.tolist(), strict=True) if not c.allows(token)])
        failures: dict[int, ConstraintError] = {}
        for row, change in changes:
            if isinstance(change.mask, str):
                failures[row] = _failure(change.request, change.mask)
            elif change.mask is not None:
                _keep_allowed(logits[row], change.mask)
        return failures


def _keep_allowed(logits: Tensor, mask: Mask) -> None:
    """Ban what a mask does not allow. The token that ends a text which can only end is not to be banned.

    :param logits: of one row
    """
    if mask.ending is not None:
        logits.fill_(-torch.inf)
        logits[mask.ending] = 0
        return
    if mask.are_allowed:
        keep_only(logits, mask.tokens)
    else:
        logits.index_fill_(0, torch.from_numpy(mask.tokens).to(logits.device), -torch.inf)


class ConstraintState(ProcessorState[ConstraintChange]):
    """Follows one text by its grammar."""

    def __init__(self, request: Request, text: GrammarText) -> None:
        self._request = request
        self._text = text

    def advance(self, token_ids: Sequence[int]) -> None:
        self._text.tokens += token_ids

    def roll_back(self, num_tokens: int) -> None:
        self._text.cut(len(self._text.tokens) - num_tokens)

    def fork(self) -> Self:
        return type(self)(self._request, self._text.copy())

    def change(self) -> ConstraintChange:
        return ConstraintChange(self._request, self._text, len(self._text.tokens))


def _failure(request: Request, reason: str) -> ConstraintError:
    return ConstraintError(
        f"request {request.request_id}: the constraint cannot be enforced any further: {reason}",
        request_id=request.request_id,
        kind=request.options.constraint_kind,
    )
