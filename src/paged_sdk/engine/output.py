"""Turns the tokens of a step into output for the listeners of its requests."""

from __future__ import annotations

from itertools import count

from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.engine.events import Listener, Outbox, RequestEvent
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.engine.request_state import ChoiceState, RequestState
from paged_sdk.guard import RequestGuard
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.output import NewTokens, SchedulerOutput
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.reading import ReadResult
from paged_sdk.types.response import FinishReason

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Keeps the unfinished requests and sends their output to the listeners.

    Listeners get tokens and detokenize them on their own threads; only requests with stop strings are detokenized
    here. This class ends choices (it sets ``finish_reason``), but only the scheduler ends sequences, so methods return
    the sequences to end.

    :param tokenizer: detokenizes the text in which stop strings are searched
    :ivar num_forced: how many tokens, of all requests, were forced by constraints
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_forced: int = 0
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._choices: dict[int, ChoiceState] = {}  # by sequence id

    @property
    def num_requests(self) -> int:
        """Return how many requests have not ended."""
        return len(self._requests)

    def uses_adapter(self, number: int) -> bool:
        """Return whether an unfinished request uses an adapter."""
        adapters = (state.request.adapter for state in self._requests.values())
        return any(adapter is not None and adapter.number == number for adapter in adapters)

    def begin(self, root: Sequence, listener: Listener, outbox: Outbox) -> RequestState:
        """Make the state of a request, to be passed to :meth:`add`.

        :param root: the sequence of the first choice; the other choices' sequences have the following ids
        :param outbox: collects output for the listener
        """
        return RequestState(root, listener, outbox, self._tokenizer)

    def add(self, state: RequestState) -> None:
        """Start tracking a request."""
        self._requests[state.request.request_id] = state
        self._choices.update(zip(count(state.root.seq_id), state.choices, strict=False))

    def process(
        self, new_tokens: NewTokens, output: SchedulerOutput, result: RunnerOutput, now: float
    ) -> list[Sequence]:
        """Put the results of a step into the outboxes.

        :param new_tokens: the sampled tokens that the scheduler added to sequences
        :param output: the step that was executed, whose rows ``new_tokens`` and the logprobs refer to
        :param now: the time, in seconds of the monotonic clock
        :returns: the sequences to end: a stop string was found, or their request has failed
        """
        for row, entries in result.prompt_logprobs.items():
            owner = self._requests.get(output.scheduled[row].sequence.request.request_id)
            if owner is not None:
                if output.scheduled[row].start == 0:  # after a preemption the prompt is computed again
                    owner.prompt_logprobs.clear()
                owner.prompt_logprobs.extend(entries)
        for row, reading in result.readings.items():
            owner = self._requests.get(output.scheduled[row].sequence.request.request_id)
            if owner is not None and output.scheduled[row].sequence.finish_reason is not None:
                owner.first_token_at = now
                self._end(owner, owner.choices[0], "stop", now, reading)
        for sequence in new_tokens.pinned:
            self._note_pinned(self._requests[sequence.request.request_id], now)
        ended: list[Sequence] = []
        choices = self._choices
        for index, (sequence, token_ids) in enumerate(zip(new_tokens.sequences, new_tokens.token_ids, strict=True)):
            choice = choices.get(sequence.seq_id)
            if choice is None:  # another choice of its request has failed in this step
                ended.append(sequence)
                continue
            if choice.is_plain and sequence.finish_reason is None:
                outbox = choice.outbox
                outbox.listeners.append(choice.listener)
                outbox.indices.append(choice.index)
                outbox.token_ids.append(token_ids)
                continue
            row, sample = new_tokens.rows[index], new_tokens.samples.get(index, 0)
            raw, forced = result.logprobs[row], [place - sample for place in result.forced.get(row, ())]
            with self._guarded(sequence.request.request_id, ended):
                logprobs = () if raw is None else tuple(raw[sample : sample + len(token_ids)])
                self._advance(choice, sequence, token_ids, logprobs, forced, now)
                if choice.finish_reason is not None and sequence.finish_reason is None:
                    ended.append(sequence)
        return ended

    def end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a choice without a new token."""
        owner = self._requests[sequence.request.request_id]
        with self._guarded(sequence.request.request_id, []):
            self._end(owner, owner.choices[sequence.choice_index], reason, now)

    def cancel(self, request_id: str, now: float) -> list[Sequence]:
        """End a request with "canceled"; nothing happens if it has ended already.

        :returns: its sequences
        """
        owner = self._requests.get(request_id)
        if owner is None:
            return []
        with self._guarded(request_id, []):
            for choice in owner.choices:
                if choice.finish_reason is None:
                    self._end(owner, choice, "canceled", now)
        return owner.sequences

    def fail(self, request_id: str, error: Exception) -> list[Sequence]:
        """End a request with an error; nothing happens if it has ended already.

        :returns: its sequences
        """
        owner = self._requests.get(request_id)
        if owner is None:
            return []
        owner.outbox.events.append((owner.listener, RequestEvent(request_id=request_id, error=error)))
        self._forget(owner)
        return owner.sequences

    def _guarded(self, request_id: str, ended: list[Sequence]) -> RequestGuard:
        """Return a guard that ends the request with an error if its block raises.

        :param ended: receives the request's sequences in that case
        """
        return RequestGuard(request_id, lambda error: ended.extend(self.fail(request_id, error)))

    def _advance(
        self,
        choice: ChoiceState,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: tuple[RawLogprobs, ...],
        forced: list[int],
        now: float,
    ) -> None:
        owner = self._requests[sequence.request.request_id]
        start: RequestStart | None = None
        prompt_logprobs: tuple[RawLogprobs, ...] = ()
        if owner.first_token_at is None:
            owner.first_token_at = now
            start = owner.start
            prompt_logprobs = tuple(owner.prompt_logprobs)
        choice.sequence = sequence
        choice.is_plain = (
            choice.text is None and not logprobs and owner.prediction is None and owner.request.grammar is None
        )
        # The token that ends a text is not part of it.
        shown = token_ids[:-1] if sequence.finish_reason == "stop" else token_ids
        if choice.text is not None:
            num_shown = choice.text.push_until_stopped(shown)
            if choice.text.is_stopped:
                # A step may sample several tokens: those after the stop string are dropped.
                choice.num_unwanted = len(token_ids) - num_shown
                shown, logprobs = shown[:num_shown], logprobs[:num_shown]
        if forced:
            num_forced = sum(0 <= place < len(token_ids) - choice.num_unwanted for place in forced)
            choice.num_forced += num_forced
            self.num_forced += num_forced
        if shown:
            choice.post(shown)
            if owner.prediction is not None:
                owner.prediction.note(shown)
        if logprobs or start is not None:
            event = RequestEvent(
                request_id=sequence.request.request_id,
                index=choice.index,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                start=start,
            )
            owner.outbox.events.append((owner.listener, event))
        if sequence.finish_reason is not None:
            self._end(owner, choice, sequence.finish_reason, now)
        elif choice.text is not None and choice.text.is_stopped:
            self._end(owner, choice, "stop", now)

    def _note_pinned(self, owner: RequestState, now: float) -> None:
        """Tell the listener, once, that the prompt is computed and held."""
        if owner.first_token_at is None:
            owner.first_token_at = now
            event = RequestEvent(request_id=owner.request.request_id, start=owner.start)
            owner.outbox.events.append((owner.listener, event))

    def _end(
        self,
        owner: RequestState,
        choice: ChoiceState,
        reason: FinishReason,
        now: float,
        reading: ReadResult | None = None,
    ) -> None:
        choice.end(reason)
        is_last = owner.is_finished
        event = RequestEvent(
            request_id=owner.request.request_id,
            index=choice.index,
            finish_reason=choice.finish_reason,
            start=None if reading is None else owner.start,
            reading=reading,
            usage=owner.usage(now) if is_last else None,
        )
        owner.outbox.events.append((owner.listener, event))
        if is_last:
            self._forget(owner)

    def _forget(self, owner: RequestState) -> None:
        del self._requests[owner.request.request_id]
        for choice in owner.choices:
            del self._choices[owner.root.seq_id + choice.index]
