"""From the tokens of a step to what the listeners of its requests are told."""

from __future__ import annotations

from itertools import count

from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.engine.events import Listener, Outbox, RequestEvent
from paged_sdk.engine.request_state import ChoiceState, RequestState
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.output import NewTokens, SchedulerOutput
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.types.response import FinishReason

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """The requests under way, as their listeners see them.

    Listeners get tokens and make text of them themselves, each on its own thread; only for stop strings is text made
    here. It ends choices (``finish_reason``), never sequences: that is the scheduler's, so it returns those to end.

    :param tokenizer: for stop strings
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestState] = {}
        self._choices: dict[int, ChoiceState] = {}  # by the id of their sequence

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, root: Sequence, listener: Listener, outbox: Outbox) -> None:
        """Begin with a request.

        :param root: its first choice's sequence; the other choices have the ids that follow
        :param outbox: where news for the listener go
        """
        state = RequestState(root, listener, outbox, self._tokenizer)
        self._requests[root.request.request_id] = state
        self._choices.update(zip(count(root.seq_id), state.choices, strict=False))

    def process(
        self, new_tokens: NewTokens, output: SchedulerOutput, result: RunnerOutput, now: float
    ) -> list[Sequence]:
        """Pass on what a step has brought.

        :param new_tokens: what the scheduler made of the sampled tokens
        :param output: the step that was executed, whose rows the new_tokens and the logprobs refer to
        :param now: seconds of the monotonic clock
        :returns: sequences that a stop string ends
        """
        for row, entries in result.prompt_logprobs.items():
            owner = self._requests.get(output.scheduled[row].sequence.request.request_id)
            if owner is not None:
                if output.scheduled[row].start == 0:  # after a preemption the prompt is computed again
                    owner.prompt_logprobs.clear()
                owner.prompt_logprobs.extend(entries)
        stopped: list[Sequence] = []
        choices = self._choices
        for index, (sequence, token_ids) in enumerate(zip(new_tokens.sequences, new_tokens.token_ids, strict=True)):
            choice = choices[sequence.seq_id]
            if choice.is_plain and sequence.finish_reason is None:
                outbox = choice.outbox
                outbox.listeners.append(choice.listener)
                outbox.indices.append(choice.index)
                outbox.token_ids.append(token_ids)
                continue
            raw, sample = result.logprobs[new_tokens.rows[index]], new_tokens.samples.get(index, 0)
            logprobs = () if raw is None else tuple(raw[sample : sample + len(token_ids)])
            self._advance(choice, sequence, token_ids, logprobs, now)
            if choice.finish_reason is not None and sequence.finish_reason is None:
                stopped.append(sequence)
        return stopped

    def end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A choice ends without a new token."""
        owner = self._requests[sequence.request.request_id]
        self._end(owner, owner.choices[sequence.choice_index], reason, now)

    def cancel(self, request_id: str, now: float) -> list[Sequence]:
        """End a request with "canceled"; nothing happens if it has ended already.

        :returns: its sequences
        """
        owner = self._requests.get(request_id)
        if owner is None:
            return []
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

    def _advance(
        self,
        choice: ChoiceState,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: tuple[RawLogprobs, ...],
        now: float,
    ) -> None:
        owner = self._requests[sequence.request.request_id]
        prompt_logprobs: tuple[RawLogprobs, ...] = ()
        if owner.first_token_at is None:
            owner.first_token_at = now
            prompt_logprobs = tuple(owner.prompt_logprobs)
        choice.sequence = sequence
        choice.is_plain = choice.text is None and not logprobs
        # The token that ends a text is not part of it.
        shown = token_ids[:-1] if sequence.finish_reason == "stop" else token_ids
        if choice.text is not None:
            num_shown = choice.text.push_until_stopped(shown)
            if choice.text.is_stopped:
                # Several tokens of one step: those after the stop string are as if they had never been sampled.
                choice.num_unwanted = len(token_ids) - num_shown
                shown, logprobs = shown[:num_shown], logprobs[:num_shown]
        if shown:
            choice.post(shown)
        if logprobs or prompt_logprobs:
            event = RequestEvent(
                request_id=sequence.request.request_id,
                index=choice.index,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            owner.outbox.events.append((owner.listener, event))
        if sequence.finish_reason is not None:
            self._end(owner, choice, sequence.finish_reason, now)
        elif choice.text is not None and choice.text.is_stopped:
            self._end(owner, choice, "stop", now)

    def _end(self, owner: RequestState, choice: ChoiceState, reason: FinishReason, now: float) -> None:
        choice.end(reason)
        is_last = owner.is_finished
        event = RequestEvent(
            request_id=owner.request.request_id,
            index=choice.index,
            finish_reason=choice.finish_reason,
            usage=owner.usage(now) if is_last else None,
        )
        owner.outbox.events.append((owner.listener, event))
        if is_last:
            self._forget(owner)

    def _forget(self, owner: RequestState) -> None:
        del self._requests[owner.request.request_id]
        for choice in owner.choices:
            del self._choices[owner.root.seq_id + choice.index]
