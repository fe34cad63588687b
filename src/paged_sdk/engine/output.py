"""From the tokens of a step to the events of its requests: text, logprobs, finish reasons, usage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.engine.events import ChoiceDelta, RequestEvent
from paged_sdk.engine.live import LiveRequest
from paged_sdk.runner.output import RawLogprobs, RunnerOutput
from paged_sdk.scheduler.output import Advance, SchedulerOutput
from paged_sdk.types.response import FinishReason, Logprobs, TokenLogprob, TopLogprob

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Turns tokens into events. It ends choices (``finish_reason``), never sequences: that is the scheduler's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def process(
        self,
        live: Mapping[str, LiveRequest],
        advances: Iterable[Advance],
        output: SchedulerOutput,
        result: RunnerOutput,
        now: float,
    ) -> list[RequestEvent]:
        """The events of one step.

        :param live: the requests that the advances belong to, by id
        :param advances: what the scheduler made of the sampled tokens
        :param output: the step that was executed, whose rows the advances and the logprobs refer to
        :param now: seconds of the monotonic clock
        """
        for row, entries in result.prompt_logprobs.items():
            owner = live.get(output.scheduled[row].sequence.request_id)
            if owner is not None:
                if output.scheduled[row].start == 0:  # after a preemption the prompt is computed again
                    owner.prompt_logprobs.clear()
                owner.prompt_logprobs.extend(map(self._token_logprob, entries))

        deltas: defaultdict[str, list[ChoiceDelta]] = defaultdict(list)
        events = []
        for advance in advances:
            owner = live[advance.sequence.request_id]
            choice = owner.choices[advance.sequence.choice_index]
            choice.sequence = advance.sequence
            text = choice.push(advance.token_ids, advance.finish_reason)
            raw = result.logprobs[advance.row]
            deltas[owner.request.request_id].append(
                ChoiceDelta(
                    index=advance.sequence.choice_index,
                    text=text,
                    logprobs=() if raw is None else (self._token_logprob(raw[advance.sample]),),
                    finish_reason=choice.finish_reason,
                )
            )
        for request_id, choices in deltas.items():
            owner = live[request_id]
            is_first = owner.first_token_at is None
            if owner.first_token_at is None:
                owner.first_token_at = now
            events.append(
                RequestEvent(
                    request_id=request_id,
                    choices=tuple(choices),
                    prompt_logprobs=Logprobs(content=tuple(owner.prompt_logprobs))
                    if is_first and owner.prompt_logprobs
                    else None,
                    usage=owner.usage(now) if owner.is_finished else None,
                )
            )
        return events

    def end(self, owner: LiveRequest, indices: Iterable[int], reason: FinishReason, now: float) -> RequestEvent:
        """The choices ``indices`` end without a new token; text that was held back comes out."""
        deltas = []
        for index in indices:
            text = owner.choices[index].push((), reason)
            deltas.append(ChoiceDelta(index=index, text=text, finish_reason=owner.choices[index].finish_reason))
        return RequestEvent(
            request_id=owner.request.request_id,
            choices=tuple(deltas),
            usage=owner.usage(now) if owner.is_finished else None,
        )

    def _token_logprob(self, raw: RawLogprobs) -> TokenLogprob:
        token, data = self._text_and_bytes(raw.token_id)
        top = tuple(self._top_logprob(token_id, logprob) for token_id, logprob in raw.top)
        return TokenLogprob(token=token, token_id=raw.token_id, logprob=raw.logprob, bytes=data, top_logprobs=top)

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        token, data = self._text_and_bytes(token_id)
        return TopLogprob(token=token, token_id=token_id, logprob=logprob, bytes=data)

    def _text_and_bytes(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        data = self._tokenizer.token_bytes(token_id)
        return data.decode("utf-8", errors="replace"), tuple(data)
