"""One text being generated, from the queue to its end."""

from __future__ import annotations

import copy
from enum import Enum

from paged_sdk.kv.manager import KvTable
from paged_sdk.scheduler.request import Request
from paged_sdk.types.response import FinishReason

__all__ = ["Sequence", "SequenceStatus"]


class SequenceStatus(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """In the queue, without KV: never run, or preempted."""
    RUNNING = "running"
    """Holds KV and gets tokens in each step."""
    FINISHED = "finished"
    """Ended, for ``finish_reason``."""


class Sequence:
    """One text being generated: what is its own, beside the request that it belongs to. The caller makes it; from then
    on the scheduler alone changes it.

    There is no prefill and no decode state: ``num_computed_tokens`` catches up with ``token_ids``. The token sampled
    last has no KV yet, so a sequence that only generates has ``num_computed_tokens == len(token_ids) - 1``.

    Steps may be under way: then more tokens are scheduled than computed, and the text will be longer than ``token_ids``
    when their results are taken in.

    :ivar seq_id: unique in the engine. A sequence with n choices owns the n ids from ``seq_id`` on
    :ivar request: what was asked for
    :ivar choice_index: which choice of the request this is
    :ivar token_ids: prompt and output
    :ivar num_prompt_tokens: how many of them are the prompt
    :ivar draft_token_ids: guesses at the tokens that follow, for the next step to verify
    :ivar num_computed_tokens: leading tokens whose KV is there
    :ivar num_scheduled: leading tokens whose KV is there, or is being computed by steps under way. All of them while a
        step verifies drafts: what follows is known only when that is taken in
    :ivar length: tokens of the text, with those that steps under way sample
    :ivar max_length: tokens, prompt included, that the text ends with at the latest
    :ivar end_length: length from which on the scheduler has nothing to schedule for it
    :ivar epoch: grows when it loses its KV and when it ends: rows of an earlier epoch do not count any more
    :ivar num_cached_tokens: prompt tokens that the prefix cache had at the first admission
    :ivar num_choices: choices still to be forked off when the prompt is computed; 1 from then on
    :ivar first_scheduled_at: monotonic seconds; None while it has never run
    :ivar table: its KV memory
    :ivar times_passed: later requests admitted while this one was the first of its priority in the queue
    """

    __slots__ = (
        "choice_index",
        "draft_token_ids",
        "end_length",
        "epoch",
        "finish_reason",
        "first_scheduled_at",
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
        self.seq_id = seq_id
        self.request = request
        self.choice_index = 0
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.draft_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_scheduled = 0
        self.length = self.num_prompt_tokens
        self.max_length = self.end_length = self.num_prompt_tokens + request.max_tokens
        self.epoch = 0
        self.num_cached_tokens = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_choices = request.num_choices
        self.first_scheduled_at: float | None = None
        self.table = KvTable(request.cache_keys, share=request.shares_prefix)
        self.times_passed = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{len(self.token_ids)} tokens)"
        )

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far (a new list)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_in_flight(self) -> int:
        """Tokens after the computed ones that steps under way compute."""
        return self.num_scheduled - self.num_computed_tokens

    @property
    def num_awaited(self) -> int:
        """Tokens that steps under way sample, accepted drafts not counted."""
        return self.length - len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def fork(self, choice_index: int, table: KvTable) -> Sequence:
        """Make another choice of the same request, with the same tokens so far, on a table of its own."""
        child = copy.copy(self)
        child.seq_id = self.seq_id + choice_index
        child.choice_index = choice_index
        child.token_ids = list(self.token_ids)
        child.draft_token_ids = []
        child.num_choices = 1
        child.table = table
        return child
