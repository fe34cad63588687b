"""Keeps the state of a request between its submission and its last event."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.chat.output_text import OutputText
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.engine.events import Listener, Outbox
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.speculative.prediction import PredictionCount
from paged_sdk.types.response import CompletionTokensDetails, FinishReason, Usage

__all__ = ["ChoiceState", "RequestState"]


class ChoiceState:
    """Keeps the state of one choice of a request while its text grows.

    :ivar sequence: the sequence with its tokens; None until the prompt is computed, for every choice but the first
    :ivar finish_reason: why it has ended; None before
    :ivar text: the text in which stop strings are searched; None if the request has no stop strings
    :ivar is_plain: whether it has begun and, until it ends, sends nothing but tokens
    :ivar num_unwanted: how many tokens of its sequence come after a stop string
    :ivar num_forced: how many of its tokens were forced by its constraint
    """

    __slots__ = (
        "finish_reason",
        "index",
        "is_plain",
        "listener",
        "num_forced",
        "num_unwanted",
        "outbox",
        "sequence",
        "text",
    )

    def __init__(self, index: int, listener: Listener, outbox: Outbox, text: OutputText | None) -> None:
        self.index: int = index
        self.listener: Listener = listener
        self.outbox: Outbox = outbox
        self.text: OutputText | None = text
        self.sequence: Sequence | None = None
        self.finish_reason: FinishReason | None = None
        self.is_plain: bool = False
        self.num_unwanted: int = 0
        self.num_forced: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of its text, including the token that ended it."""
        return 0 if self.sequence is None else self.sequence.num_output_tokens - self.num_unwanted

    def post(self, token_ids: list[int]) -> None:
        """Put new tokens for the listener into the outbox."""
        outbox = self.outbox
        outbox.listeners.append(self.listener)
        outbox.indices.append(self.index)
        outbox.token_ids.append(token_ids)

    def end(self, reason: FinishReason) -> None:
        """End the choice. Flushing the held-back text may still find a stop string."""
        if self.text is not None and not self.text.is_stopped:
            self.text.flush()
        self.finish_reason = "stop" if self.text is not None and self.text.is_stopped else reason
        self.is_plain = False


class RequestState:
    """Keeps the state of a request and of its choices.

    :ivar prompt_logprobs: logprobs of the prompt tokens computed so far
    :ivar prediction: counts the tokens of the text that the request's prediction had; None: it has no prediction
    :ivar first_token_at: when the first token came, in seconds of the monotonic clock; None before
    """

    def __init__(self, root: Sequence, listener: Listener, outbox: Outbox, tokenizer: Tokenizer) -> None:
        request = root.request
        stops = request.sampling.stop
        self.request: Request = request
        self.root = root
        self.listener = listener
        self.outbox = outbox
        self.choices: list[ChoiceState] = [
            ChoiceState(index, listener, outbox, self._make_text(tokenizer) if stops else None)
            for index in range(request.sampling.n_choices)
        ]
        self.choices[0].sequence = root
        self.prompt_logprobs: list[RawLogprobs] = []
        predicted = request.prediction_token_ids
        self.prediction: PredictionCount | None = PredictionCount(predicted) if predicted else None
        self.first_token_at: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def sequences(self) -> list[Sequence]:
        """Return the sequences of the choices that have begun."""
        return [choice.sequence for choice in self.choices if choice.sequence is not None]

    @property
    def start(self) -> RequestStart:
        """Return the token counts and times of the request's start."""
        return RequestStart(
            prompt_tokens=len(self.request.prompt_token_ids),
            num_choices=len(self.choices),
            arrival=self.request.arrival,
            scheduled_at=self.root.first_scheduled_at,
            first_token_at=self.first_token_at,
            cached_tokens=self.root.num_cached_tokens,
        )

    def _make_text(self, tokenizer: Tokenizer) -> OutputText:
        request = self.request
        text = OutputText(
            tokenizer,
            request.sampling.stop,
            continues_prompt=request.continues_prompt,
            kept=request.kept_special_ids,
        )
        if request.healing is not None:
            text.leave_out(len(request.healing.data))
        return text

    def usage(self, now: float) -> Usage:
        """Return the request's usage up to ``now`` (seconds of the monotonic clock)."""
        usage = self.start.usage(sum(choice.num_tokens for choice in self.choices), now)
        prediction = self.prediction
        if prediction is None and self.request.grammar is None:
            return usage
        details = CompletionTokensDetails(
            accepted_prediction_tokens=0 if prediction is None else prediction.num_accepted,
            rejected_prediction_tokens=0 if prediction is None else prediction.num_rejected,
            forced_tokens=sum(choice.num_forced for choice in self.choices),
        )
        return evolve(usage, completion_tokens_details=details)
