"""Simulate many replicas: the real scheduler, block manager and router, with a simulated clock instead of a device."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Final, Protocol

from attrs import define

from benchmarks.replica_trace import Chat, Costs
from paged_sdk import SamplingParams
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kv.block_hash import block_hashes
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.routing import Route, Router
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.scheduler.sequence import Sequence as Text

__all__ = ["BLOCK_SIZE", "MOST_TEXTS", "Engine", "Queue", "Replica", "Simulation", "Turn"]

BLOCK_SIZE: Final = 32
MOST_TEXTS: Final = 32
"""Maximum number of concurrent sequences of one replica."""
GREEDY: Final = SamplingParams.deterministic()


@define(eq=False)
class Turn:
    """Holds one request, a turn of a chat. Times are seconds of the simulated clock.

    :ivar num_answer: number of tokens of the answer
    :ivar num_cached: number of the prompt's tokens that were in the replica's cache
    """

    chat: Chat
    num_answer: int
    arrived_at: float
    num_prompt: int
    hashes: Sequence[bytes]
    replica: int = -1
    route: Route | None = None
    num_cached: int = 0
    first_at: float | None = None
    ended_at: float | None = None


class Replica(Protocol):
    """Describes a simulated replica, which answers turns."""

    def submit(self, turn: Turn) -> None: ...

    def die(self) -> list[Turn]:
        """Stop, and return the unfinished turns."""
        ...


class Simulation:
    """Simulates chats on replicas, event by event.

    :param policy: chooses an open replica by its index, instead of the router; None: the router chooses
    :ivar turns: all turns so far
    :ivar num_lost: turns that lost their replica during the answer, and were sent again
    :ivar router_seconds: CPU time of the router
    """

    def __init__(self, router: Router, policy: Callable[[int], int] | None = None) -> None:
        self.now: float = 0.0
        self.turns: list[Turn] = []
        self.replicas: list[Replica] = []
        self.num_lost: int = 0
        self.router_seconds: float = 0.0
        self._router = router
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Schedule a call on the simulated clock."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), act))

    def run(self, chats: Iterable[Chat], seconds: float) -> None:
        """Simulate chats for a number of seconds."""
        coming = iter(chats)

        def begin(chat: Chat) -> None:
            self._say(chat)
            self._await_next(coming, begin)

        self._await_next(coming, begin)
        while self._events and self._events[0][0] <= seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = seconds

    def kill(self, replicas: Iterable[int]) -> None:
        """Let replicas die. Turns without output are sent to other replicas; the others are lost and sent again."""
        for number in replicas:
            self._router.close(number)
            for turn in self.replicas[number].die():
                self._router.finished(_route(turn))
                if turn.first_at is None:
                    self._send(turn)
                else:
                    self.num_lost += 1
                    again = Turn(turn.chat, turn.num_answer, self.now, turn.num_prompt, turn.hashes)
                    self.turns.append(again)
                    self._send(again)

    def started(self, turn: Turn, num_cached: int) -> None:
        """Record a turn's first token."""
        turn.first_at, turn.num_cached = self.now, num_cached
        start = time.thread_time()
        self._router.started(_route(turn))
        self.router_seconds += time.thread_time() - start

    def ended(self, turn: Turn, answer: Sequence[int]) -> None:
        """Record a turn's end, and schedule the chat's next turn."""
        turn.ended_at = self.now
        start = time.thread_time()
        self._router.finished(_route(turn), len(answer))
        self.router_seconds += time.thread_time() - start
        chat, turn.hashes = turn.chat, ()
        if not chat.turns_left:
            del chat.tokens[:]
        else:
            chat.tokens.extend(answer)
            self.after(chat.pause(), lambda: self._say(chat))

    def _await_next(self, coming: Iterator[Chat], begin: Callable[[Chat], None]) -> None:
        chat = next(coming, None)
        if chat is not None:
            self.after(max(chat.begins_at - self.now, 0.0), partial(begin, chat))

    def _say(self, chat: Chat) -> None:
        num_answer = chat.say()
        hashes = block_hashes(chat.tokens, BLOCK_SIZE)
        turn = Turn(chat, num_answer, self.now, len(chat.tokens), hashes)
        self.turns.append(turn)
        self._send(turn)

    def _send(self, turn: Turn) -> None:
        others: Sequence[int] = ()
        if self._policy is not None:
            open_replicas = self._router.open_replicas
            chosen = open_replicas[self._policy(len(open_replicas))]
            others = [each for each in open_replicas if each != chosen]
        start = time.thread_time()
        turn.route = self._router.route(turn.hashes, turn.num_prompt, avoid=others)
        self.router_seconds += time.thread_time() - start
        turn.replica = _route(turn).replica
        self.replicas[turn.replica].submit(turn)


class Engine:
    """Answers turns with the real scheduler and block manager (a :class:`Replica`). Durations of steps come from
    :class:`Costs`.

    :param speed: factor by which steps are faster
    """

    def __init__(
        self,
        simulation: Simulation,
        costs: Costs,
        *,
        num_blocks: int,
        max_num_seqs: int = MOST_TEXTS,
        speed: float = 1.0,
    ) -> None:
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_slowdown=3.0,
            max_model_len=16_384,
            max_queue=1 << 30,
        )
        self._simulation = simulation
        self._costs = costs
        self._speed = speed
        self._kv = KvCacheManager(num_blocks, BLOCK_SIZE)
        self._scheduler = Scheduler(config, self._kv)
        self._turns: dict[int, Turn] = {}
        self._num_texts = 0
        self._is_stepping = False
        self._is_dead = False

    def submit(self, turn: Turn) -> None:
        self._num_texts += 1
        request = Request(
            request_id=str(self._num_texts),
            prompt_token_ids=turn.chat.tokens,
            sampling=GREEDY,
            max_tokens=turn.num_answer,
            arrival=self._simulation.now,
        )
        self._turns[self._num_texts] = turn
        self._scheduler.add(Text(self._num_texts, request))
        if not self._is_stepping:
            self._step()

    def die(self) -> list[Turn]:
        self._is_dead = True
        turns, self._turns = list(self._turns.values()), {}
        return turns

    def _step(self) -> None:
        output = self._scheduler.schedule()
        self._is_stepping = bool(output.scheduled)
        if self._is_stepping:
            texts, chunks = output.scheduled[: output.num_decodes], output.scheduled[output.num_decodes :]
            seconds = self._costs.step_seconds(
                len(texts),
                sum(row.start for row in texts),
                sum(row.num_new_tokens for row in chunks),
                sum(row.num_new_tokens * (row.start + row.num_new_tokens / 2) for row in chunks),
            )
            seconds /= self._speed
            self._simulation.after(seconds, lambda: self._end_step(output, seconds))

    def _end_step(self, output: SchedulerOutput, seconds: float) -> None:
        if self._is_dead:
            return
        sampled = [[_token(row.sequence)] if row.num_samples else [] for row in output.scheduled]
        new = self._scheduler.update(output, sampled)
        self._scheduler.costs.note(output, seconds)
        for text in new.sequences:
            if text.num_output_tokens == 1:
                self._simulation.started(self._turns[text.seq_id], text.num_cached_tokens)
            if text.finish_reason is not None:
                self._simulation.ended(self._turns.pop(text.seq_id), text.output_token_ids)
        self._step()


class Queue:
    """Answers turns by a queue model with the same costs (a :class:`Replica`), for simulations with too many replicas
    to run their schedulers.

    Prompts are computed one after another, at two thirds of the speed if texts are running. Every running text gets a
    token per step; steps take three times as long during prefill. The least recently used blocks are evicted first.

    :ivar _tokens: number of tokens generated per text since the start
    :ivar _texts: turns that are being answered, with the value of ``_tokens`` at which each ends
    """

    def __init__(self, simulation: Simulation, costs: Costs, *, num_blocks: int) -> None:
        self._simulation = simulation
        self._costs = costs
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._waiting: deque[tuple[Turn, int]] = deque()
        self._is_computing = False
        self._tokens = 0.0
        self._texts: list[tuple[float, int, Turn]] = []
        self._num_keys = 0
        self._counted_at = 0.0
        self._num_changes = 0
        self._num_begun = 0
        self._is_dead = False

    def submit(self, turn: Turn) -> None:
        num_cached = min(self._use(turn.hashes) * BLOCK_SIZE, turn.num_prompt - 1)
        self._waiting.append((turn, num_cached))
        if not self._is_computing:
            self._count_tokens()
            self._compute()

    def die(self) -> list[Turn]:
        self._is_dead = True
        return [turn for turn, _ in self._waiting] + [turn for _, _, turn in self._texts]

    def _use(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are cached, and put all blocks into the cache."""
        blocks, keys = self._blocks, [int.from_bytes(name[:8], "little") for name in hashes]
        num_found = next((place for place, key in enumerate(keys) if key not in blocks), len(keys))
        for key in reversed(keys):  # first blocks last, so that they are evicted last, as in a pool
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self._num_blocks:
            blocks.popitem(last=False)
        return num_found

    def _step_seconds(self) -> float:
        seconds = self._costs.step_seconds(len(self._texts), self._num_keys, 0, 0)
        return 3 * seconds if self._is_computing else seconds

    def _count_tokens(self) -> None:
        """Update ``_tokens`` to the current time; called before the speed changes."""
        now = self._simulation.now
        if self._texts:
            self._tokens += (now - self._counted_at) / self._step_seconds()
        self._counted_at = now

    def _compute(self) -> None:
        """Start the next prefill, if a turn waits and fewer than ``MOST_TEXTS`` texts run."""
        self._is_computing = bool(self._waiting) and len(self._texts) < MOST_TEXTS
        if self._is_computing:
            turn, num_cached = self._waiting[0]
            missing, costs = turn.num_prompt - num_cached, self._costs
            seconds = (missing * costs.token_ms + missing * (turn.num_prompt - missing / 2) * costs.pair_ms) / 1e3
            if self._texts:
                seconds *= 1.5
            seconds += costs.texts_seconds(0)
            self._simulation.after(seconds, self._begin)
        self._await_end()

    def _begin(self) -> None:
        """Start the answer to the prompt that was computed."""
        if self._is_dead:
            return
        self._count_tokens()
        turn, num_cached = self._waiting.popleft()
        self._simulation.started(turn, num_cached)
        self._num_begun += 1
        heapq.heappush(self._texts, (self._tokens + turn.num_answer - 1, self._num_begun, turn))
        self._num_keys += turn.num_prompt
        self._compute()

    def _await_end(self) -> None:
        """Schedule the end of the text that ends first; obsolete if the speed changes before."""
        self._num_changes += 1
        if self._texts:
            num_changes = self._num_changes
            seconds = max(self._texts[0][0] - self._tokens, 0.0) * self._step_seconds()
            self._simulation.after(seconds, lambda: self._end(num_changes))

    def _end(self, num_changes: int) -> None:
        if self._is_dead or num_changes != self._num_changes:
            return
        self._count_tokens()
        self._tokens, _, turn = heapq.heappop(self._texts)
        self._num_keys -= turn.num_prompt
        answer = [7] * turn.num_answer
        self._use(block_hashes([*turn.chat.tokens, *answer], BLOCK_SIZE))
        if self._is_computing:
            self._await_end()
        else:
            self._compute()
        self._simulation.ended(turn, answer)


def _route(turn: Turn) -> Route:
    assert turn.route is not None
    return turn.route


def _token(text: Text) -> int:
    return (text.seq_id * 31 + len(text.token_ids) * 17) % 150_000
