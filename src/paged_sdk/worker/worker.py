"""Drive one engine on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from attrs import evolve

from paged_sdk.config.isq import IsqType
from paged_sdk.engine.engine import Engine
from paged_sdk.errors import EngineDeadError, EngineError, PagedError
from paged_sdk.guard import RequestGuard, clear_frames
from paged_sdk.logs import get_logger
from paged_sdk.scheduler.request import Request
from paged_sdk.system.event_loop import wait_until_done
from paged_sdk.system.owner import Owner, closed_model
from paged_sdk.system.threads import thread_must_start
from paged_sdk.types.stats import ModelStats
from paged_sdk.worker.mailbox import Abort, Call, CallAlone, Close, Command, Mailbox, Submit, Wake
from paged_sdk.worker.output_loops import OutputLoops, end_with_error
from paged_sdk.worker.subscription import Subscriber
from paged_sdk.worker.throughput import ThroughputLog

__all__ = ["Worker"]

_log = get_logger(__name__)
_T = TypeVar("_T")


class Worker:
    """Owns an engine and the thread that steps it; every method may be called from any thread.

    The thread takes commands from the mailbox between steps and passes each step's output to the subscriptions' event
    loops, with one wake-up per loop and step. It never waits for an event loop.

    Every request gets an answer. An exception in work for one request ends that request. If a step raises, that first
    exception is kept: every live and every later request gets an :class:`EngineDeadError` raised from it.

    :param engine: closed by the thread when it ends
    :param on_start: called first, on the thread (thread-local settings of the tensor library)
    :param log_throughput: log a line of figures every few seconds of work
    :raises EngineError: the system gives this process no more threads
    """

    def __init__(
        self, engine: Engine, *, on_start: Callable[[], None] | None = None, log_throughput: bool = False
    ) -> None:
        self._engine = engine
        self._on_start = on_start
        self._throughput = ThroughputLog() if log_throughput else None
        self._mailbox = Mailbox()
        engine.on_inputs_ready(partial(self._mailbox.put, Wake()))
        self._in_hand: Command | None = None
        self._alone: CallAlone | None = None  # runs when the live requests have ended
        self._held: deque[Submit | CallAlone] = deque()  # commands that wait for _alone
        self._loops = OutputLoops(engine.abort)
        self._stats = engine.stats()
        self._watchers: tuple[Callable[[], object], ...] = ()
        self._death: BaseException | None = None
        self._closing: Close | None = None
        self._ended = False
        self._num_steps = 0
        self._running_step: int | None = None
        self._owner = Owner()
        # A daemon: an application that forgets to close must still be able to exit.
        self._thread = threading.Thread(target=self._run, name="paged-sdk-worker", daemon=True)
        try:
            with thread_must_start("for the engine to run on"):
                self._thread.start()
        except EngineError:
            engine.close()
            raise

    # From any thread

    @property
    def stats(self) -> ModelStats:
        """Return the snapshot taken after the last step."""
        return self._stats

    @property
    def has_ended(self) -> bool:
        """Return whether the thread has stopped stepping the engine for good."""
        return self._ended

    @property
    def running_step(self) -> int | None:
        """Return the number of the running step; None between steps. If it stays the same for too long, the engine
        hangs.
        """
        return self._running_step

    def watch(self, callback: Callable[[], object]) -> None:
        """Register a callback. The thread calls it when :attr:`stats` have changed without any output, and when it has
        ended.
        """
        self._watchers += (callback,)

    def unwatch(self, callback: Callable[[], object]) -> None:
        """Remove a callback of :meth:`watch`."""
        self._watchers = tuple(each for each in self._watchers if each != callback)

    def check(self) -> None:
        """Raise if the engine takes no more work.

        :raises ModelClosedError: it was closed, or this process is a forked child of the one that built it
        :raises EngineDeadError: it stopped because of an exception
        """
        self.check_process()
        if self._death is not None:
            raise self._dead()
        if self._closing is not None:
            raise closed_model()

    def check_process(self) -> None:
        """Raise if the worker thread does not exist in this process.

        :raises ModelClosedError: this process is a forked child of the one that built it
        """
        self._owner.check()

    @property
    def is_this_thread(self) -> bool:
        """Return whether the calling thread is the one that steps the engine, as in a logits processor: waiting for the
        engine there would deadlock.
        """
        return self._thread is threading.current_thread()

    def submit(self, request: Request, subscription: Subscriber) -> None:
        """Queue a request; its output or error, a refusal too, goes to the subscription.

        :raises ModelClosedError: see :meth:`check`
        :raises EngineDeadError: see :meth:`check`
        """
        self.check()
        self._put(Submit(request, subscription))

    def abort(self, request_id: str) -> None:
        """End a request and free its KV within two steps. Safe in finalizers; unknown ids are ignored."""
        self._mailbox.put(Abort(request_id))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, between two steps."""
        await self.call(Engine.reset_prefix_cache)

    async def requantize(self, isq: IsqType) -> None:
        """Requantize the weights, see :meth:`paged_sdk.Model.re_isq_model`."""
        await self.call_alone(lambda engine, check_cancelled: engine.requantize(isq, check_cancelled))

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run ``function`` on the engine between two steps and return its result."""
        result: _T = await self._called(Call(function, Future()))
        return result

    def post(self, function: Callable[[Engine], _T]) -> Future[_T]:
        """Schedule ``function`` to run on the engine between two steps, and return at once. The future gets its result,
        or the error of an engine that ended before.
        """
        future: Future[_T] = Future()
        self._put(Call(function, future))
        return future

    async def call_alone(self, function: Callable[[Engine, Callable[[], None]], _T]) -> _T:
        """Run ``function`` on the engine when the live requests have ended, and return its result. Later requests wait
        until it returns. If the caller is cancelled, it is not run, or runs to its end if it has begun.

        :param function: receives the engine, and a function to call from time to time, which raises once the engine is
            closed
        :raises EngineDeadError: the function left the engine unusable
        """
        command = CallAlone(function, Future())
        try:
            result: _T = await self._called(command)
            return result
        finally:
            command.future.cancel()  # no effect once the function has begun
            del command  # an error's traceback holds this frame, and the command's future holds the error

    async def _called(self, command: Call | CallAlone) -> Any:
        self.check()
        self._put(command)
        try:
            await wait_until_done(command.future)
            return command.future.result()
        finally:
            del command  # as above

    def _put(self, command: Command) -> None:
        self._mailbox.put(command)
        self._sweep()

    def close(self, *, drain: bool = False) -> None:
        """Refuse new work and make the thread end, without waiting for it. Idempotent."""
        self._closing = self._closing or Close(drain)
        self._mailbox.put(Close(drain))

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; return False if it is still running after ``timeout`` seconds."""
        if self._owner.is_here and not self.is_this_thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # On the thread

    def _run(self) -> None:
        # Each call is made whatever the earlier ones raise: the sweep answers every remaining request.
        self._attempt(self._work)
        self._closing = self._closing or Close(drain=False)
        self._attempt(self._loops.publish)  # events from before an exception
        self._attempt(self._engine.close)
        self._stats = self._stats.at_rest()
        self._ended = True
        self._attempt(self._sweep)
        self._attempt(self._tell_watchers)

    def _attempt(self, act: Callable[[], object]) -> None:
        """Call ``act``; keep its exception, if it is the first, as the cause of the engine's death."""
        try:
            act()
        except BaseException as exception:
            self._stats = self._stats.at_rest()
            if self._death is None:
                self._death = exception
            with suppress(Exception):  # an application's own log handlers may raise
                _log.exception("the engine stopped")
            clear_frames(exception)

    def _work(self) -> None:
        """Step the engine until it is closed."""
        if self._on_start is not None:
            self._on_start()
        while self._take_commands():
            self._step()
            self._take_stats()
            if not self._loops.publish():
                self._tell_watchers()
            if self._throughput is not None:
                with suppress(Exception):  # an application's own log handlers may raise
                    self._throughput.step_done(self._stats, time.monotonic())
        for command in list(self._held):  # end held requests like those that wait in the engine
            if isinstance(command, Submit):
                self._admit_held(command.request.request_id)
        self._loops.abort_all()
        self._take_stats()

    def _step(self) -> None:
        self._running_step = self._num_steps
        self._num_steps += 1
        try:
            self._engine.step()
        finally:
            self._running_step = None

    def _tell_watchers(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _take_stats(self) -> None:
        stats, num_held = self._engine.stats(), sum(isinstance(each, Submit) for each in self._held)
        self._stats = evolve(stats, waiting=stats.waiting + num_held) if num_held else stats

    def _take_commands(self) -> bool:
        """Execute the commands in the mailbox, and wait for more if there is nothing to compute; return False when the
        thread should end.
        """
        while True:
            for command in self._mailbox.drain():
                self._in_hand = command
                self._execute(command)
                del command  # its future may hold an error
            self._in_hand = None
            self._call_alone()
            has_work = self._engine.has_work or self._alone is not None
            if self._closing is not None and not (self._closing.drain and has_work):
                return False
            if has_work and not self._engine.is_stalled:
                return True
            self._take_stats()
            self._tell_watchers()
            self._in_hand = self._mailbox.wait(is_stalled=self._engine.has_work)
            self._execute(self._in_hand)

    def _call_alone(self) -> None:
        """Run the function that waits for the engine to be idle, if it is, then the commands held for it."""
        while self._alone is not None and (self._alone.future.cancelled() or not self._engine.has_work):
            if self._closing is not None and not self._closing.drain:
                return
            command, self._alone = self._alone, None
            self._in_hand = command
            if command.future.set_running_or_notify_cancel():
                self._run_for(command.future, partial(command.function, self._engine, self._check_cancelled))
            del command  # an error's traceback leads to this frame, and the command's future holds the error
            while self._held and self._alone is None:
                self._in_hand = held = self._held.popleft()
                self._execute(held)
                del held
            self._in_hand = None

    def _check_cancelled(self) -> None:
        if self._closing is not None and not self._closing.drain:
            raise closed_model()

    def _run_for(self, future: Future[Any], function: Callable[[], Any]) -> None:
        """Run a function and pass its result or error to the future."""
        try:
            result = function()
        except EngineDeadError as error:  # the engine is unusable: let the thread end
            raise error.__cause__ or error from None
        except Exception as error:
            self._take_stats()
            future.set_exception(error)
            del future  # an error's traceback holds this frame
        else:
            # Taken before the caller resumes, so that the snapshot it reads includes the function's effects.
            self._take_stats()
            future.set_result(result)

    def _execute(self, command: Command) -> None:
        match command:
            case Submit() | CallAlone() if self._alone is not None:
                self._held.append(command)
            case CallAlone():
                self._alone = command
            case Submit(request, subscription):
                self._submit(request, subscription)
            case Abort(request_id):
                self._admit_held(request_id)
                self._engine.abort(request_id)
                self._take_stats()  # before the caller resumes, as below
                self._loops.publish()
            case Call(function, future):
                self._run_for(future, partial(function, self._engine))
                del command, future  # an error's traceback leads to this frame
                self._loops.publish()  # the function may have ended requests
            case Close(drain):
                # A close without drain overrides one with it.
                self._closing = Close(drain and (self._closing is None or self._closing.drain))
            case Wake():
                pass  # the next step finds what is ready

    def _admit_held(self, request_id: str) -> None:
        """Submit a held request at once, so that the engine can end it."""
        for command in list(self._held):
            if isinstance(command, Submit) and command.request.request_id == request_id:
                self._held.remove(command)
                self._submit(command.request, command.subscription)

    def _submit(self, request: Request, subscription: Subscriber) -> None:
        with RequestGuard(request.request_id, partial(end_with_error, request.request_id, subscription)):
            self._engine.submit(request, subscription, self._loops.outbox(subscription.loop))
            self._loops.add(request.request_id, subscription)

    def _sweep(self) -> None:
        """Answer the commands left in the mailbox. After the thread has ended, whichever thread put the last command
        answers all of them.
        """
        if not self._ended:
            return
        self._loops.end_all(self._ending)
        in_hand, self._in_hand = self._in_hand, None  # the command that was executing when an exception was raised
        alone, self._alone = self._alone, None
        held, self._held = self._held, deque()
        left = [each for each in (in_hand, alone) if each is not None]
        for command in chain(left, held, self._mailbox.drain()):
            match command:
                case Submit(request, subscription):
                    end_with_error(request.request_id, subscription, self._ending())
                case Call(_, future) | CallAlone(_, future):
                    with suppress(InvalidStateError):  # cancelled
                        future.set_exception(self._ending())
                case Abort() | Close() | Wake():
                    pass

    def _ending(self) -> PagedError:
        return self._dead() if self._death is not None else closed_model()

    def _dead(self) -> EngineDeadError:
        error = EngineDeadError(f"the engine stopped: {self._death!r}")
        error.__cause__ = self._death
        return error
