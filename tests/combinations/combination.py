"""Draws a model and what is asked of it from one number, and looks for less that fails, too."""

from __future__ import annotations

import random
from collections.abc import Iterator

from attrs import evolve, frozen

from combinations.configuration import Checkpoints, Configuration
from combinations.description import described
from combinations.drawing import draw_script
from combinations.script import Script
from combinations.task import Task
from combinations.trial import Outcome, try_script

__all__ = ["Combination"]


@frozen
class Combination:
    """Holds a model and what is asked of it."""

    configuration: Configuration
    script: Script

    @classmethod
    def draw(cls, seed: int) -> Combination:
        rng = random.Random(seed)
        configuration = Configuration.draw(rng)
        return cls(configuration, draw_script(rng, configuration))

    def __str__(self) -> str:
        return described(self.configuration, self.script)

    def run(self, checkpoints: Checkpoints) -> Outcome:
        """Ask all, and say how it went."""
        return try_script(self.configuration, self.script, checkpoints)

    def shrunk(self, checkpoints: Checkpoints, *, num_tries: int = 3) -> Combination:
        """Leave out requests and settings, one after the other, as long as something is still wrong.

        :param num_tries: how often each is tried: what depends on which requests meet in a step is not always wrong
        """
        best = self
        candidates = best._simpler()
        while (candidate := next(candidates, None)) is not None:
            if any(candidate.run(checkpoints).problems for _ in range(num_tries)):
                best = candidate
                candidates = best._simpler()
        return best

    def _simpler(self) -> Iterator[Combination]:
        script = self.script
        for place in reversed(range(len(script.events))):
            yield evolve(self, script=script.without(place))
        for name in script.adapters:
            yield evolve(self, script=evolve(script, adapters={k: v for k, v in script.adapters.items() if k != name}))
        for configuration in self.configuration.simpler():
            yield evolve(self, configuration=configuration)
        for place, event in enumerate(script.events):
            if isinstance(event, Task):
                for task in event.simpler():
                    yield evolve(self, script=script.with_event(place, task))
