"""Holds the state of one sequence: a prompt and one generated output, from the queue to its end."""

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
    """In the queue, without KV: never scheduled yet, or preempted."""
    AWAITING_IMAGES = "awaiting images"
    """Waits for images of its prompt to be encoded, then goes to the queue; has no KV."""
    AWAITING_BLOCKS = "awaiting blocks"
    """Waits for stored blocks of its prompt to be read back into the pool, then goes to the queue; has no KV."""
    RUNNING = "running"
    """Holds KV and is scheduled."""
    PINNED = "pinned"
    """Holds the KV of its prompt, all of which is computed, and is not scheduled."""
    FINISHED = "finished"
    """Has ended; ``finish_reason`` says why."""


class Sequence:
    """Holds the state of one sequence. The engine creates it; from then on only the scheduler changes it.

    There is no prefill and no decode state: ``num_computed_tokens`` catches up with ``token_ids``. The token sampled
    last has no KV yet, so a sequence that only decodes has ``num_computed_tokens == len(token_ids) - 1``.

    While steps are in flight, more tokens are scheduled than computed, and ``length`` counts tokens that are not in
    ``token_ids`` yet.

    :ivar seq_id: its id, unique in the engine. A sequence with n choices owns the n ids from ``seq_id`` on
    :ivar request: the request that it belongs to
    :ivar choice_index: which choice of the request this is
    :ivar token_ids: the tokens of prompt and output
    :ivar num_prompt_tokens: how many of them are the prompt
    :ivar draft_token_ids: guesses at the next tokens, for the next step to verify
    :ivar num_computed_tokens: how many leading tokens have their KV
    :ivar num_scheduled: how many leading tokens have their KV or get it from steps in flight. It equals ``length``
        while a step verifies drafts: the tokens after them are known only after ``update``
    :ivar length: number of tokens, including those sampled by steps in flight that the next step finds on the device
    :ivar max_length: the most tokens, prompt included
    :ivar end_length: once ``length`` reaches this, nothing more is scheduled for the sequence
    :ivar epoch: incremented when it loses its KV and when it ends: rows of an earlier epoch are ignored
    :ivar num_cached_tokens: how many prompt tokens the prefix cache had at the first admission
    :ivar num_choices: how many choices it forks into when the prompt is computed; 1 from then on
    :ivar first_scheduled_at: when it was first admitted, in seconds of the monotonic clock; None before
    :ivar is_long: whether it has outgrown the trained context, so that all its keys use LongRoPE's long frequencies
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
            most_shared=request.most_shared,
            hashes=request.block_hashes,
            keeps_all=request.is_pinned,
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
        """Return how many tokens steps in flight compute."""
        return self.num_scheduled - self.num_computed_tokens

    @property
    def num_awaited(self) -> int:
        """Return how many tokens steps in flight sample that the next step finds on the device."""
        return self.length - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return how many tokens have been generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def chunk_end_after(self, end: int) -> int:
        """Return the end of a chunk that is planned to end at ``end``: moved behind an image or a bidirectional prompt,
        whose tokens have to be computed together, even if that exceeds the budget.
        """
        if self.request.is_bidirectional:
            return len(self.token_ids)
        media = self.request.media
        return end if media is None else media.chunk_end_after(end)

    def chunk_end_before(self, end: int) -> int:
        """Return the end of a chunk that has memory up to ``end``: moved before an image or bidirectional prompt that
        does not fit.
        """
        if self.request.is_bidirectional:
            return end if end == len(self.token_ids) else 0
        media = self.request.media
        return end if media is None else media.chunk_end_before(end)

    def append(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Append tokens, up to the one that ends the sequence.

        :returns: the appended tokens, and why the sequence ends with them; None: it continues
        """
        stop_token_ids, own = self.request.stop_token_ids, self.token_ids
        for count, token_id in enumerate(token_ids, start=1):
            own.append(token_id)
            if token_id in stop_token_ids:
                return token_ids[:count], "stop"
            if len(own) >= self.max_length:
                return token_ids[:count], "length"
        return token_ids, None

    def fork(self, choice_index: int, table: KvTable) -> Sequence:
        """Return another choice of the same request, with a copy of the tokens so far and its own table."""
        child = copy.copy(self)
        child.seq_id = self.seq_id + choice_index
        child.choice_index = choice_index
        child.token_ids = list(self.token_ids)
        child.draft_token_ids = []
        child.num_choices = 1
        child.table = table
        return child
