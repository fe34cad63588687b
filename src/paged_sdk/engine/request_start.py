"""Compute the token counts and times of a request's usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from paged_sdk.types.response import PromptTokensDetails, Usage

__all__ = ["RequestStart"]


@frozen(kw_only=True)
class RequestStart:
    """Holds a request's token counts and times up to its first token. Times are in seconds of the monotonic clock.

    :ivar arrival: when the request was submitted
    :ivar scheduled_at: when the request was first scheduled; None: unknown, or not yet
    :ivar first_token_at: when its first token came; None: not yet
    :ivar cached_tokens: how many tokens of the prompt had their KV in the prefix cache
    """

    prompt_tokens: int
    num_choices: int
    arrival: float
    scheduled_at: float | None = None
    first_token_at: float | None = None
    cached_tokens: int = 0

    @classmethod
    def joined(cls, starts: Sequence[RequestStart]) -> RequestStart:
        """Combine the values of several requests that are a single request for the caller."""
        return cls(
            prompt_tokens=sum(start.prompt_tokens for start in starts),
            num_choices=sum(start.num_choices for start in starts),
            arrival=min(start.arrival for start in starts),
            scheduled_at=_earliest(start.scheduled_at for start in starts),
            first_token_at=_earliest(start.first_token_at for start in starts),
            cached_tokens=sum(start.cached_tokens for start in starts),
        )

    def usage(self, completion_tokens: int, now: float) -> Usage:
        """Return the request's usage up to ``now``.

        :param completion_tokens: the number of tokens of all choices by then
        """
        prompt, completion = self.prompt_tokens, completion_tokens
        scheduled = now if self.scheduled_at is None else self.scheduled_at
        first = now if self.first_token_at is None else self.first_token_at
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            avg_tok_per_sec=_rate(prompt + completion, now - scheduled),
            avg_prompt_tok_per_sec=_rate(prompt, first - scheduled),
            # The last prefill step yields the first token of each choice.
            avg_compl_tok_per_sec=_rate(completion - self.num_choices, now - first),
            total_time_sec=now - self.arrival,
            total_prompt_time_sec=first - scheduled,
            total_completion_time_sec=now - first,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            time_to_first_token_sec=first - self.arrival,
            queue_time_sec=scheduled - self.arrival,
        )


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds > 0 and tokens > 0 else 0.0
