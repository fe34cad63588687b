"""Runs a script on a model, and compares what each request is answered with what it is answered alone."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import anyio
from attrs import Factory, define, evolve

from arrivals import wait_for_requests
from combinations.answer import begins_like, difference, said
from combinations.configuration import AdapterContent, Checkpoints, Configuration, build_model
from combinations.oracle import Expected, ask_alone
from combinations.rest import more_threads, problems_at_rest, threads_of_package
from combinations.script import Script
from combinations.sending import Request, WrongAnswerError
from combinations.task import Change, Task
from paged_sdk import (
    ContextLengthError,
    InvalidRequestError,
    Model,
    PagedError,
    Pin,
    PinLimitError,
    SamplingParams,
)

__all__ = ["Outcome", "try_script"]

_MOST_SECONDS: Final = 60
_LAST: Final = Task(
    number=-1,
    kind="completion",
    prompts=((5, 6, 7, 8, 9, 5, 6, 7),),
    sampling=SamplingParams(temperature=0.0, max_len=6, ignore_eos=True),
)
"""Is asked when all others have ended: they have to leave a model that works."""


@define
class Outcome:
    """Says what became of a script.

    :ivar problems: what is wrong
    :ivar counts: what happened how often
    """

    problems: list[str] = Factory(list)
    counts: Counter[str] = Factory(Counter)


def try_script(configuration: Configuration, script: Script, checkpoints: Checkpoints) -> Outcome:
    """Run a script, and say how it went."""
    threads = threads_of_package()
    outcome = Outcome()
    try:
        anyio.run(_try, configuration, script, checkpoints, outcome, backend=script.backend)
    except WrongAnswerError as error:
        outcome.problems.append(str(error))
    except Exception as error:  # whatever it is, it is not what a request or a model may end with
        outcome.problems.append("".join(traceback.format_exception(error)))
    outcome.problems += more_threads(threads)
    return outcome


async def _try(configuration: Configuration, script: Script, checkpoints: Checkpoints, outcome: Outcome) -> None:
    script = script.with_last(_LAST)
    refused: type[PagedError] | None = None
    expected: Mapping[int, Expected] = {}
    try:
        expected = await ask_alone(configuration, script, checkpoints)
    except PagedError as error:
        refused = type(error)
    try:
        proposer = configuration.make_proposer(checkpoints)
        model = build_model(configuration, checkpoints, script.adapters, proposer)
    except PagedError as error:
        if type(error) is not refused:
            raise WrongAnswerError(f"the model is refused, as the plain one is not: {error}") from error
        outcome.counts["refused models"] += 1
        return
    async with model:
        if refused is not None:
            raise WrongAnswerError(f"the model is not refused, as the plain one is: {refused.__name__}")
        paths = {content: checkpoints.adapter(content, configuration) for content in script.later_contents}
        run = _Run(model, script, expected, paths, outcome)
        with anyio.move_on_after(_MOST_SECONDS) as scope:
            await run.send_all()
        if scope.cancelled_caught:
            raise WrongAnswerError(f"requests have not ended after {_MOST_SECONDS} s: {model.stats()}")
        stats = model.stats()
        for name in ("preemptions", "prefix_hits", "drafted_tokens", "accepted_tokens", "forced_tokens"):
            outcome.counts[name.replace("_", " ")] += getattr(stats, name)
        outcome.problems += await problems_at_rest(model, proposer)


class _Run:
    """Sends the requests of a script to a model.

    :param expected: what each is answered alone
    :param paths: where adapters are
    :param outcome: gets what is wrong
    """

    def __init__(
        self,
        model: Model,
        script: Script,
        expected: Mapping[int, Expected],
        paths: Mapping[AdapterContent, Path],
        outcome: Outcome,
    ) -> None:
        self._model = model
        self._script = script
        self._expected = expected
        self._paths = paths
        self._outcome = outcome
        self._are_sent = {task.number: anyio.Event() for task in script.tasks}
        self._have_ended = {task.number: anyio.Event() for task in script.tasks}
        self._pins: list[Pin] = []

    async def send_all(self) -> None:
        """Send all requests, and the last one when all others have ended."""
        *events, last = self._script.events
        assert isinstance(last, Task)
        changed: dict[str, anyio.Event] = {}
        async with anyio.create_task_group() as tasks:
            through: dict[str, list[anyio.Event]] = {}
            num_at_once = 0
            for event in events:
                if isinstance(event, Change):
                    before, changed[event.name] = changed.get(event.name), anyio.Event()
                    after = [*through.pop(event.name, []), *([] if before is None else [before])]
                    tasks.start_soon(self._change, event, after, changed[event.name])
                else:
                    name, when = event.adapter, None
                    if name is not None:
                        through.setdefault(name, []).append(self._are_sent[event.number])
                        when = changed.get(name)
                    num_at_once += when is None and self._comes_at_once(event)
                    tasks.start_soon(self._send, event, when)
            if self._script.come_together:  # none of the tasks has begun yet
                wait_for_requests(self._model, num_at_once)
        await self._send(last, None)
        for pin in self._pins:
            await pin.aclose()

    def _comes_at_once(self, task: Task) -> bool:
        """Tell whether a request is one for the engine, and waits for nothing."""
        is_refused = self._expected[task.number].answer is None
        waits = task.delay or task.follows is not None or task.is_pinned
        return task.generates and not waits and not is_refused

    async def _change(self, change: Change, after: list[anyio.Event], done: anyio.Event) -> None:
        """Change what a name stands for, once all requests through it are with the engine that come before."""
        for event in after:
            await event.wait()
        model = self._model
        if not change.name:
            await model.reset_prefix_cache()
        if change.name in model.adapters:
            await model.unload_adapter(change.name)
        if change.content is not None:
            await model.load_adapter(self._paths[change.content], name=change.name)
        self._outcome.counts["changes"] += 1
        done.set()

    async def _send(self, task: Task, when: anyio.Event | None) -> None:
        """Send a request, and compare its answer."""
        if when is not None:
            await when.wait()
        if task.follows in self._have_ended:
            await self._have_ended[task.follows].wait()
        await self._wait(task.delay)
        expected = self._expected[task.number]
        try:
            problem = await self._compare(expected)
        except PagedError as error:
            refused = type(error).__name__
            expects = expected.refused or "an answer"
            problem = None if refused == expected.refused else f"{refused}: {error}, instead of {expects}"
            self._outcome.counts["refused requests"] += problem is None
        except WrongAnswerError as error:
            problem = "".join(traceback.format_exception(error))
        self._are_sent[task.number].set()
        self._have_ended[task.number].set()
        self._outcome.counts["requests"] += 1
        if problem is not None:
            self._outcome.problems.append(f"request {task.number}: {problem}")

    async def _compare(self, expected: Expected) -> str | None:
        """Return in what an answer differs from the one that is expected."""
        task, is_whole = expected.request.task, True
        request = evolve(expected.request, adapter=task.adapter)
        if task.is_pinned:
            await self._pin(request)
        if task.generates and task.is_streamed:
            async with request.stream(self._model) as stream:
                self._are_sent[task.number].set()
                found, is_whole = await request.piecewise(stream)
        elif task.generates:
            async with request.stream(self._model) as stream:
                self._are_sent[task.number].set()
                found = said(await stream.collect())
        else:
            found = await request.whole(self._model)
        if expected.answer is None:
            return f"an answer instead of {expected.refused}" if is_whole else None
        if is_whole:
            return difference(expected.answer, found, exact=expected.is_exact)
        self._outcome.counts["half-read answers"] += 1
        return begins_like(expected.answer, found, exact=expected.is_exact)

    async def _pin(self, request: Request) -> None:
        """Pin what a chat begins with, if the model can and has room for it."""
        try:
            self._pins.append(await self._model.pin(request.task.chat(request.adapter, None)))
        except (InvalidRequestError, ContextLengthError, PinLimitError):
            self._outcome.counts["refused pins"] += 1
        else:
            self._outcome.counts["pins"] += 1

    async def _wait(self, num_steps: int) -> None:
        """Wait for steps of the engine, but not where it has nothing to do."""
        first = self._model.stats().steps
        for _ in range(200):
            stats = self._model.stats()
            if stats.steps - first >= num_steps:
                break
            await anyio.sleep(0.0005)
