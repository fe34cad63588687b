"""One text being generated, from the queue to its end."""

from __future__ import annotations

from enum import Enum

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kv.manager import KvTable
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
    """One text being generated. The caller makes it; from then on the scheduler alone changes it.

    There is no prefill and no decode state: ``num_computed_tokens`` catches up with ``token_ids``. The token sampled
    last has no KV yet, so a sequence that only generates has ``num_computed_tokens == len(token_ids) - 1``.

    Steps may be under way: then ``num_in_flight`` tokens beyond the computed ones are being computed, and the text is
    ``num_awaited`` tokens longer than ``token_ids``.

    :ivar seq_id: unique in the engine. A sequence with n choices owns the n ids from ``seq_id`` on
    :ivar choice_index: which choice of the request this is
    :ivar token_ids: prompt and output
    :ivar num_computed_tokens: leading tokens whose KV is there
    :ivar num_in_flight: tokens after them that steps under way compute
    :ivar num_awaited: tokens that these steps sample
    :ivar num_preemptions: times that it lost its KV
    :ivar max_length: tokens, prompt included, that the text ends with at the latest
    :ivar num_cached_tokens: prompt tokens that the prefix cache had at the first admission
    :ivar sampling: with defaults filled in and a seed
    :ivar stop_token_ids: tokens that end the text
    :ivar max_tokens: output tokens at most
    :ivar num_choices: choices still to be forked off when the prompt is computed; 1 from then on
    :ivar priority: higher goes first
    :ivar arrival: monotonic seconds
    :ivar extra_keys: what, beside the tokens, the KV depends on (keys of the prefix cache)
    :ivar skip_prefix_cache: compute every prompt token, because its logits are wanted
    :ivar first_scheduled_at: monotonic seconds; None while it has never run
    :ivar table: its KV memory
    :ivar times_passed: later requests admitted while this one was the first of its priority in the queue
    """

    __slots__ = (
        "arrival",
        "choice_index",
        "extra_keys",
        "finish_reason",
        "first_scheduled_at",
        "max_length",
        "max_tokens",
        "num_awaited",
        "num_cached_tokens",
        "num_choices",
        "num_computed_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling",
        "seq_id",
        "skip_prefix_cache",
        "status",
        "stop_token_ids",
        "table",
        "times_passed",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        max_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        num_choices: int = 1,
        priority: int = 0,
        arrival: float = 0.0,
        extra_keys: tuple[bytes, ...] = (),
        skip_prefix_cache: bool = False,
    ) -> None:
        self.seq_id = seq_id
        self.request_id = request_id
        self.choice_index = 0
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_awaited = 0
        self.num_preemptions = 0
        self.max_length = len(prompt_token_ids) + max_tokens
        self.num_cached_tokens = 0
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.max_tokens = max_tokens
        self.num_choices = num_choices
        self.priority = priority
        self.arrival = arrival
        self.extra_keys = extra_keys
        self.skip_prefix_cache = skip_prefix_cache
        self.first_scheduled_at: float | None = None
        self.table = KvTable(extra_keys, share=not skip_prefix_cache)
        self.times_passed = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{len(self.token_ids)} tokens)"
        )

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far (a new list)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def fork(self, choice_index: int, table: KvTable) -> Sequence:
        """Another choice of the same request, with the same tokens so far, on a table of its own."""
        child = Sequence(
            self.seq_id + choice_index,
            self.request_id,
            self.token_ids,
            self.sampling,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            priority=self.priority,
            arrival=self.arrival,
            extra_keys=self.extra_keys,
            skip_prefix_cache=self.skip_prefix_cache,
        )
        child.choice_index = choice_index
        child.num_prompt_tokens = self.num_prompt_tokens
        child.max_length = self.max_length
        child.num_computed_tokens = self.num_computed_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.status = self.status
        child.first_scheduled_at = self.first_scheduled_at
        child.table = table
        child.times_passed = self.times_passed
        return child
