"""Step an engine without weights by hand, with listeners that record what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_sdk.chat.output_text import OutputText
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.engine.engine import Engine
from paged_sdk.engine.events import Outbox, RequestEvent
from paged_sdk.engine.request_start import RequestStart
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.testing.fake_runner import FakeRunner
from paged_sdk.testing.next_token import HashedTokens, NextToken
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.reading import Reading

VOCAB = 400
STOP = 399
HASHED = HashedTokens(range(300, VOCAB))


class RecordingListener:
    """Records everything that was said of one request.

    :ivar events: the events that say more than that it has begun
    :ivar texts: the texts of the choices that have begun, by index
    """

    def __init__(self, texts: Sequence[OutputText]) -> None:
        self.token_ids: list[list[int]] = [[] for _ in texts]
        self.events: list[RequestEvent] = []
        self.start: RequestStart | None = None
        self.texts: dict[int, str] = {}
        self.has_ended = False
        self._output_texts = texts

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        assert not self.has_ended
        self.token_ids[index] += token_ids
        self._show(index, self._output_texts[index].push(token_ids))

    def add(self, event: RequestEvent) -> None:
        assert not self.has_ended
        self.start = event.start or self.start
        if event != RequestEvent(request_id=event.request_id, index=event.index, start=event.start):
            self.events.append(event)
        self.has_ended = event.is_last
        if event.finish_reason is not None:
            self._show(event.index, self._output_texts[event.index].flush())

    def fail(self, error: Exception) -> None:
        raise error

    def _show(self, index: int, text: str) -> None:
        self.texts[index] = self.texts.get(index, "") + text


class Driver:
    """Holds an engine, and what its requests have been told."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_blocks: int = 64,
        max_slowdown: float = 0.0,
        next_token: NextToken = HASHED,
        proposer: Proposer | None = None,
        **runner: Any,
    ) -> None:
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=6,
            max_num_batched_tokens=16 if not max_slowdown else 48,
            max_slowdown=max_slowdown,
        )
        self.kv = KvCacheManager(num_blocks, 4)
        self.runner = FakeRunner(next_token, vocab_size=VOCAB, **runner)
        self.engine = Engine(Scheduler(config, self.kv), self.kv, self.runner, tokenizer, proposer=proposer)
        self.listeners: dict[str, RecordingListener] = {}
        self._tokenizer = tokenizer
        self.outbox = Outbox()

    @property
    def texts(self) -> dict[tuple[str, int], str]:
        """Return the texts of each request, by name and index."""
        return {
            (name, index): text for name, listener in self.listeners.items() for index, text in listener.texts.items()
        }

    @property
    def ends(self) -> dict[str, Any]:
        """Return the usage or the error of the requests that have ended."""
        ended = {name: listener.events[-1] for name, listener in self.listeners.items() if listener.has_ended}
        return {name: event.usage or event.error for name, event in ended.items()}

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 20,
        *,
        adapter: AdapterUse | None = None,
        reading: Reading | None = None,
        **sampling: Any,
    ) -> RecordingListener:
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(temperature=0.0, seed=0, **sampling),
            stop_token_ids=frozenset({STOP}),
            max_tokens=max_tokens,
            arrival=0.0,
            adapter=adapter,
            reading=reading,
        )
        choices = range(request.sampling.n_choices)
        listener = RecordingListener([OutputText(self._tokenizer, request.sampling.stop) for _ in choices])
        self.engine.submit(request, listener, self.outbox)
        self.listeners[name] = listener
        return listener

    def step(self) -> None:
        self.engine.step()
        self.deliver()

    def deliver(self) -> None:
        self.outbox.take().deliver()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
