"""Describes what happens to a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from attrs import evolve, frozen

from combinations.configuration import AdapterContent
from combinations.task import Change, Task

__all__ = ["Event", "Script"]

Event: TypeAlias = Task | Change


@frozen
class Script:
    """Holds what happens to a model, in order.

    Requests are under way at the same time, and those through an adapter that changes wait for that.

    :ivar adapters: those that the model is built with
    :ivar come_together: whether the engine takes no step before the first requests are there
    :ivar backend: whose event loop runs it
    """

    adapters: Mapping[str, AdapterContent]
    events: tuple[Event, ...]
    come_together: bool = False
    backend: str = "asyncio"

    @property
    def tasks(self) -> list[Task]:
        return [event for event in self.events if isinstance(event, Task)]

    def contents(self) -> dict[int, AdapterContent | None]:
        """Return what each task goes through that names an adapter; None: there is none of that name by then."""
        now = dict(self.adapters)
        found: dict[int, AdapterContent | None] = {}
        for event in self.events:
            if isinstance(event, Change):
                if event.content is None:
                    now.pop(event.name, None)
                else:
                    now[event.name] = event.content
            elif event.adapter is not None:
                found[event.number] = now.get(event.adapter)
        return found

    @property
    def later_contents(self) -> set[AdapterContent]:
        """Return the adapters that are loaded while requests are under way."""
        return {event.content for event in self.events if isinstance(event, Change) and event.content is not None}

    def with_last(self, task: Task) -> Script:
        return evolve(self, events=(*self.events, task))

    def without(self, place: int) -> Script:
        """Return the script without one of its events."""
        return evolve(self, events=self.events[:place] + self.events[place + 1 :])

    def with_event(self, place: int, event: Event) -> Script:
        return evolve(self, events=(*self.events[:place], event, *self.events[place + 1 :]))
