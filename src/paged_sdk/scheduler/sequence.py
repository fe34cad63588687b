"""Holds the state of one text that is being generated, from the queue to its end."""

from __future__ import annotations

import copy
from enum import Enum

from paged_sdk.kv.manager import KvTable
from paged_sdk.scheduler.request import Request
from paged_sdk.types.response import FinishReason

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """Says whether a sequence waits, runs or has ended."""

    WAITING = "waiting"
    """It is in the queue, without KV: it has never run, or was preempted."""
    AWAITING_IMAGES = "awaiting images"
    """It will be in the queue once images of its prompt are encoded; it has no KV."""
    RUNNING = "running"
    """It holds KV and gets tokens in each step."""
    FINISHED = "finished"
    """It has ended; ``finish_reason`` says why."""


class Sequence:
    """Holds the state of one text that is being generated. The caller makes it; from then on only the scheduler
    changes it.

    There is no prefill and no decode state: ``num_computed_tokens`` catches up with ``token_ids``. The token sampled
    last has no KV yet, so a sequence that only decodes has ``num_computed_tokens == len(token_ids) - 1``.

    Steps may be under way: then more tokens are scheduled than computed, and the text will be longer than ``token_ids``
    when their results are taken in.

    :ivar seq_id: its id, unique in the engine. A sequence with n choices owns the n ids from ``seq_id`` on
    :ivar request: the request that it belongs to
    :ivar choice_index: which choice of the request this is
    :ivar token_ids: the tokens of prompt and output
    :ivar num_prompt_tokens: how many of them are the prompt
    :ivar draft_token_ids: guesses at the tokens that follow, for the next step to verify
    :ivar num_computed_tokens: how many leading tokens have their KV
    :ivar num_scheduled: how many leading tokens have their KV or get it from steps under way. It equals ``length``
        while a step verifies drafts: what follows them is known only after ``update``
    :ivar length: how many tokens the text has, those included that steps under way sample where the next step finds
        them
    :ivar max_length: the most tokens that the text may have, prompt included
    :ivar end_length: the length from which on the scheduler has nothing to schedule for it
    :ivar epoch: a count that grows when it loses its KV and when it ends: rows of an earlier epoch are ignored
    :ivar num_cached_tokens: how many prompt tokens the prefix cache had at the first admission
    :ivar num_choices: how many choices it becomes when the prompt is computed; 1 from then on
    :ivar first_scheduled_at: when it first ran, in seconds of the monotonic clock; None before
    :ivar is_long: whether it has outgrown the length from which on the model rotates all its keys otherwise
    :ivar table: its KV memory
    :ivar times_passed: how many later requests were admitted while it was the first of its priority in the queue
    """

    __slots__ = (
        "choice_index",
        "draft_token_ids",
        "end_length",
        "epoch",
        "finish_reason",
        "first_scheduled_at",
        "is_long",
        "length",
        "max_length",
        "num_cached_tokens",
        "num_choices",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_scheduled",
        "request",
        "seq_id",
        "status",
        "table",
        "times_passed",
        "token_ids",
    )

    def __init__(self, seq_id: int, request: Request) -> None:
        self.seq_id: int = seq_id
        self.request: Request = request
        self.choice_index: int = 0
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens: int = len(self.token_ids)
        self.draft_token_ids: list[int] = []
        self.num_computed_tokens: int = 0
        self.num_scheduled: int = 0
        self.length: int = self.num_prompt_tokens
        self.max_length: int = self.num_prompt_tokens + request.max_tokens
        self.end_length: int = self.max_length
        self.epoch: int = 0
        self.num_cached_tokens: int = 0
        self.status: SequenceStatus = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_choices: int = request.num_choices
        self.first_scheduled_at: float | None = None
        self.is_long: bool = False
        self.table: KvTable = KvTable(
            request.cache_keys,
            share=request.shares_prefix,
            most_shared=request.most_shared,
            hashes=request.block_hashes,
        )
        self.times_passed: int = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{len(self.token_ids)} tokens)"
        )

    @property
    def output_token_ids(self) -> list[int]:
        """Return the tokens generated so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_in_flight(self) -> int:
        """Return how many tokens steps under way compute."""
        return self.num_scheduled - self.num_computed_tokens

    @property
    def num_awaited(self) -> int:
        """Return how many tokens steps under way sample where the next step finds them."""
        return self.length - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def whole_end(self, end: int) -> int:
        """Return where a chunk ends that is to end there: behind an image, or a text, whose tokens have to be computed
        together, even where that is beyond the budget.
        """
        if self.request.is_whole:
            return len(self.token_ids)
        media = self.request.media
        return end if media is None else media.whole_end(end)

    def whole_start(self, end: int) -> int:
        """Return where a chunk ends for which there is no more memory: before such an image or text."""
        if self.request.is_whole:
            return end if end == len(self.token_ids) else 0
        media = self.request.media
        return end if media is None else media.whole_start(end)

    def fork(self, choice_index: int, table: KvTable) -> Sequence:
        """Make another choice of the same request, with the same tokens so far and its own table."""
        child = copy.copy(self)
        child.seq_id = self.seq_id + choice_index
        child.choice_index = choice_index
        child.token_ids = list(self.token_ids)
        child.draft_token_ids = []
        child.num_choices = 1
        child.table = table
        return child
