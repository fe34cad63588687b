"""Present several requests as one to the task that reads them."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from paged_sdk.engine.events import RequestEvent
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.types.response import Usage
from paged_sdk.worker.subscription import Subscriber, Subscription

__all__ = ["joined_subscribers"]


def joined_subscribers(subscription: Subscription, starts: Sequence[RequestStart]) -> list[Subscriber]:
    """Return a subscriber for each of several requests; the subscription sees one request with all their choices.

    It ends with the last of them, or with the first error; the reader then aborts the others.

    :param subscription: has the choices of the first request, then those of the second, and so on
    :param starts: the start of each request, in order
    """
    joined = _Joined(list(starts))
    subscribers: list[Subscriber] = []
    first_choice = 0
    for place, start in enumerate(starts):
        subscribers.append(_Part(subscription, joined, place, first_choice))
        first_choice += start.num_choices
    return subscribers


class _Joined:
    """Holds the starts and usages of the joined requests."""

    def __init__(self, starts: list[RequestStart]) -> None:
        self.starts = starts
        self.usages: list[Usage | None] = [None] * len(starts)

    def usage(self) -> Usage | None:
        """Return the joint usage, or None until all requests have ended."""
        ended = [usage for usage in self.usages if usage is not None]
        if len(ended) < len(self.usages):
            return None
        start = RequestStart.joined(self.starts)
        seconds = max(usage.total_time_sec for usage in ended)
        return start.usage(sum(usage.completion_tokens for usage in ended), start.arrival + seconds)


class _Part:
    """Forwards the output of one request to the joint subscription."""

    def __init__(self, subscription: Subscription, joined: _Joined, place: int, first_choice: int) -> None:
        self.loop = subscription.loop
        self._subscription = subscription
        self._joined = joined
        self._place = place
        self._first_choice = first_choice

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        self._subscription.add_tokens(self._first_choice + index, token_ids)

    def add(self, event: RequestEvent) -> None:
        joined, start, usage = self._joined, event.start, None
        if start is not None:
            joined.starts[self._place] = start
            start = RequestStart.joined(joined.starts)
        if event.usage is not None:
            joined.usages[self._place] = event.usage
            usage = joined.usage()
        self._subscription.add(evolve(event, index=self._first_choice + event.index, start=start, usage=usage))

    def fail(self, error: Exception) -> None:
        self._subscription.fail(error)
