"""Have every function that the worker's thread calls raise once, and look at what becomes of the requests.

Every request gets an answer, the thread ends and no block stays in use, whatever raises. Where the engine lives on,
only the request that the fault belonged to fails: the others have the text that they have when nothing raises.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

import anyio
import pytest
from attrs import define

from paged_sdk import DryParams, PagedError, SamplingParams, TextModelBuilder
from paged_sdk.attention import native_paged
from paged_sdk.chat import detokenizer, output_text, stop_strings
from paged_sdk.engine import engine, events, metrics, output, request_start, request_state
from paged_sdk.kv import block_pool, paged
from paged_sdk.runner import model_runner, step_runner
from paged_sdk.sampling import bias, candidates, dry, logprobs, min_tokens, penalties, sampler, text_state, truncation
from paged_sdk.scheduler import output as scheduler_output
from paged_sdk.scheduler import scheduler, sequence, waiting_queue
from paged_sdk.system import event_loop
from paged_sdk.worker import mailbox, output_loops, subscription, worker

FOR_ONE_REQUEST: Final = (
    *(bias, dry, min_tokens, penalties, text_state, truncation, candidates, logprobs),
    *(detokenizer, output_text, stop_strings, request_start, request_state, subscription),
)
"""What these do, they do for one request. Several rows may be drawn at once, but one at a time after an exception."""
FOR_ALL: Final = (
    *(engine, events, metrics, output, sampler, scheduler_output, scheduler, sequence, waiting_queue, event_loop),
    *(block_pool, paged, model_runner, step_runner, native_paged, mailbox, output_loops, worker),
)
OUTERMOST: Final = frozenset(
    {"Worker._run", "Worker._attempt", "Worker._sweep", "Outbox.deliver", "_FutureWaiter.set", "Worker.join"}
)
"""The thread and the event loop call these: nothing of ours is around them. What they call is tried."""
FOR_A_LOOP: Final = frozenset({"_LoopListeners.post", "Outbox.take", "EventLoop.call_soon"})
"""All requests of one event loop fail with these."""

GREEDY: Final = SamplingParams(temperature=0, max_len=6, ignore_eos=True)
REQUESTS: Final = {
    "plain": GREEDY,
    "stopped": SamplingParams(temperature=0.9, seed=1, max_len=6, ignore_eos=True, stop="never said", n_choices=2),
    "processed": SamplingParams(
        temperature=0.8,
        top_k=20,
        seed=2,
        max_len=6,
        min_tokens=4,
        logits_bias={5: -3.0},
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        dry_params=DryParams(multiplier=0.8),
        top_n_logprobs=2,
        prompt_logprobs=1,
    ),
}


class InjectedError(Exception):
    """Is raised where nobody expects it."""


def sites() -> Iterator[tuple[Any, str, str]]:
    """Return every function and method of the modules: its owner, its name, and the name that tests use."""
    for module in FOR_ONE_REQUEST + FOR_ALL:
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, FunctionType):
                yield module, name, f"{module.__name__.rpartition('.')[2]}.{name}"
            elif isinstance(value, type):
                for method, function in vars(value).items():
                    if isinstance(function, FunctionType) and not method.startswith("__"):
                        yield value, method, f"{value.__name__}.{method}"


def is_for_one_request(owner: Any) -> bool:
    return owner in FOR_ONE_REQUEST or getattr(owner, "__module__", "") in {each.__name__ for each in FOR_ONE_REQUEST}


class Faults:
    """Counts the calls of every site on the worker's thread and of what a loop calls for it, and raises in one.

    :ivar calls: how often each site was called since the last :meth:`inject`
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self._target, self._nth = "", 0
        for owner, name, site in sites():
            if site not in OUTERMOST:
                on_any_thread = getattr(owner, "__module__", "") == subscription.__name__
                patch.setattr(owner, name, self._wrapped(site, getattr(owner, name), on_any_thread=on_any_thread))

    def inject(self, site: str, nth: int) -> None:
        """Have a site raise the next time but ``nth - 1``."""
        self.calls.clear()
        self._target, self._nth = site, nth

    def _wrapped(self, site: str, function: Callable[..., Any], *, on_any_thread: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if on_any_thread or threading.current_thread().name == "paged-sdk-worker":
                self.calls[site] += 1
                if site == self._target and self.calls[site] == self._nth:
                    raise InjectedError(site)
            return function(*args, **kwargs)

        return call


@define
class Outcome:
    """Holds the texts of each request, or its error; "hangs" if it got no answer.

    :ivar again: the text of a request that was sent afterwards
    :ivar num_used: blocks in use when all had ended
    """

    texts: dict[str, Any]
    again: object
    num_used: int


async def run(builder: TextModelBuilder, faults: Faults, site: str = "", nth: int = 0) -> Outcome:
    """Send all requests at once to a new model in which one call raises."""
    texts: dict[str, object] = dict.fromkeys([*REQUESTS, "again"], "hangs")

    async def send(name: str, sampling: SamplingParams) -> None:
        try:
            response = await model.send_completion_request([*range(3, 40), len(name)], sampling)
            texts[name] = [choice.text for choice in response.choices]
        except Exception as error:
            texts[name] = error

    async with builder.build() as model:
        faults.inject(site, nth)
        with anyio.move_on_after(60):  # what hangs, hangs for ever
            async with anyio.create_task_group() as tasks:
                for name, sampling in REQUESTS.items():
                    tasks.start_soon(send, name, sampling)
            await send("again", GREEDY)
            while model.stats().blocks_used:
                await anyio.sleep(0.001)
        outcome = Outcome(texts, texts.pop("again"), model.stats().blocks_used)
    assert model._worker.join(0)
    return outcome


def complaints(owner: Any, site: str, expected: Outcome, outcome: Outcome) -> Iterator[str]:
    """Return what is wrong with the outcome of a run in which ``site`` has raised once."""
    answers = {**outcome.texts, "again": outcome.again}
    for name, answer in answers.items():
        if answer == "hangs" or (isinstance(answer, Exception) and not isinstance(answer, PagedError)):
            yield f"{name}: {answer!r}"
    if outcome.num_used:
        yield f"{outcome.num_used} blocks in use"
    num_failed = sum(isinstance(answer, Exception) for answer in answers.values())
    if isinstance(outcome.again, Exception) and num_failed > 1:
        if is_for_one_request(owner):
            yield f"the engine is dead: {outcome.again!r}"
    else:
        texts = {**expected.texts, "again": expected.again}
        yield from (
            f"{name} differs" for name, answer in answers.items() if type(answer) is list and answer != texts[name]
        )
        if num_failed > 1 and site not in FOR_A_LOOP:
            yield f"{num_failed} requests failed"


@pytest.mark.parametrize(
    "which", [pytest.param("middle"), *(pytest.param(each, marks=pytest.mark.long) for each in ("first", "last"))]
)
def test_whatever_raises_every_request_gets_an_answer(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """:param which: the call of each site that raises"""
    faults = Faults(monkeypatch)
    expected = anyio.run(run, builder, faults)
    counts = dict(faults.calls)
    assert len(counts) > 130, "the sites of a whole run"
    assert not any(isinstance(each, Exception) for each in expected.texts.values())
    found = []
    for owner, _, site in sites():
        if site in counts:
            nth = {"first": 1, "middle": counts[site] // 2 + 1, "last": counts[site]}[which]
            outcome = anyio.run(run, builder, faults, site, nth)
            found += [
                f"{site}, call {nth} of {counts[site]}: {each}" for each in complaints(owner, site, expected, outcome)
            ]
    assert not found, "\n".join(found)
