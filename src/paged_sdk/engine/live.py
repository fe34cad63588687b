"""A request between its submission and its last event."""

from __future__ import annotations

from collections.abc import Sequence

from paged_sdk.chat.detokenizer import Detokenizer
from paged_sdk.chat.stop_strings import StopStrings
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.engine.request import EngineRequest
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.types.response import FinishReason, PromptTokensDetails, TokenLogprob, Usage

__all__ = ["LiveChoice", "LiveRequest"]


class LiveChoice:
    """One choice as it grows.

    :ivar sequence: its tokens; None until the prompt is computed, for every choice but the first
    :ivar finish_reason: None until it has ended
    """

    def __init__(self, tokenizer: Tokenizer, request: EngineRequest) -> None:
        self.sequence: TokenSequence | None = None
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer, continues_prompt=request.continues_prompt)
        self._stop_strings = StopStrings(request.sampling.stop) if request.sampling.stop else None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> str:
        """New tokens in; out comes the text that can be shown now. A stop string may end the choice here."""
        # The token that ends a text is not part of it.
        text = self._detokenizer.append(token_ids[:-1] if finish_reason == "stop" else token_ids)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        self.finish_reason = finish_reason
        if self._stop_strings is not None:
            text, matched = self._stop_strings.push(text)
            if matched:
                self.finish_reason = "stop"
            elif finish_reason is not None:
                text += self._stop_strings.flush()
        return text


class LiveRequest:
    """A request with its choices.

    :ivar prompt_logprobs: of the prompt tokens computed so far
    :ivar first_token_at: seconds of the monotonic clock, None until then
    """

    def __init__(self, request: EngineRequest, root: TokenSequence, tokenizer: Tokenizer) -> None:
        self.request = request
        self.choices = [LiveChoice(tokenizer, request) for _ in range(request.sampling.n_choices)]
        self.choices[0].sequence = root
        self.root = root
        self.prompt_logprobs: list[TokenLogprob] = []
        self.first_token_at: float | None = None

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def usage(self, now: float) -> Usage:
        """What it cost, up to ``now``."""
        prompt = len(self.request.prompt_token_ids)
        completion = sum(choice.sequence.num_output_tokens for choice in self.choices if choice.sequence is not None)
        arrival = self.request.arrival
        scheduled = self.root.first_scheduled_at if self.root.first_scheduled_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            avg_tok_per_sec=_rate(prompt + completion, now - scheduled),
            avg_prompt_tok_per_sec=_rate(prompt, first - scheduled),
            # The first token of each choice comes out of the prompt's last step.
            avg_compl_tok_per_sec=_rate(completion - len(self.choices), now - first),
            total_time_sec=now - arrival,
            total_prompt_time_sec=first - scheduled,
            total_completion_time_sec=now - first,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.root.num_cached_tokens),
            time_to_first_token_sec=first - arrival,
            queue_time_sec=scheduled - arrival,
        )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 and tokens > 0 else 0.0
