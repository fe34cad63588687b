"""An engine over a real runner that takes the way for devices: steps overlap, on CPU tensors and without kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.engine.engine import Engine
from paged_sdk.engine.events import Outbox, RequestEvent
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.types.reading import Reading, TokenScores

__all__ = ["NUM_TOKENS", "VOCAB", "Found", "Heard", "Rig"]

CPU: Final = torch.device("cpu")
VOCAB: Final = 512
NUM_TOKENS: Final = 20

Found: TypeAlias = dict[str, Any]
"""What came of a request: its tokens, its prompt's logprobs, what was read of it, and its end."""


class Heard:
    """Is a listener that writes down what it hears."""

    def __init__(self, num_choices: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.events: list[RequestEvent] = []

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        self.token_ids[index] += token_ids

    def add(self, event: RequestEvent) -> None:
        assert not self.has_ended
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        raise error

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1].is_last

    @property
    def found(self) -> Found:
        last = self.events[-1]
        found: Found = {"tokens": self.token_ids, "end": last.finish_reason if last.error is None else str(last.error)}
        if last.error is not None:
            return {"end": str(last.error)}  # how far its text was depends on who was in which step
        for event in self.events:
            if event.prompt_logprobs:
                assert "prompt" not in found
                found["prompt"] = [(each.token_id, each.logprob, each.top) for each in event.prompt_logprobs]
        if isinstance(last.reading, TokenScores):
            found["scores"] = last.reading.logprobs
            found["likeliest"] = last.reading.are_likeliest.tolist()
        elif last.reading is not None:
            assert isinstance(last.reading, np.ndarray)
            found["vector"] = last.reading
        return found


class Rig:
    """Holds such an engine, and what its requests have been told.

    :param overlaps: whether the runner takes the way for devices; otherwise that for the CPU
    """

    def __init__(
        self, tokenizer: Tokenizer, model: DecoderModel, *, num_blocks: int = 96, overlaps: bool = True
    ) -> None:
        config = EngineConfig(
            num_blocks=num_blocks, block_size=8, max_num_seqs=8, max_num_batched_tokens=24, max_slowdown=0.0
        )
        self.kv = KvCacheManager(num_blocks, 8)
        self.scheduler = Scheduler(config, self.kv)
        settings = PoolSettings(block_size=8, dtype=model.dtype, device=CPU)
        processors = default_processors(VOCAB, lambda text: [ord(letter) % VOCAB for letter in text])
        path = None
        if overlaps:
            path = DeviceDecoding(DeviceSampler(processors, 8, VOCAB, CPU), OverlapTokens(8, CPU), None)
        backend = PagedBackend(model.config, settings, num_blocks)
        self.runner = ModelRunner(model, backend, Sampler(VOCAB, CPU, processors), path)
        self.engine = Engine(self.scheduler, self.kv, self.runner, tokenizer)
        self.heard: dict[str, Heard] = {}
        self._outbox = Outbox()

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        reading: Reading | None = None,
        *,
        num_tokens: int = NUM_TOKENS,
        **sampling: Any,
    ) -> None:
        """Submit a request, greedy unless said otherwise."""
        params = SamplingParams(**{"temperature": 0.0, "seed": 0, **sampling})
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling=params,
            stop_token_ids=frozenset(),
            max_tokens=num_tokens,
            arrival=0.0,
            reading=reading,
        )
        self.heard[name] = Heard(params.n_choices)
        self.engine.submit(request, self.heard[name], self._outbox)

    def step(self) -> None:
        self.engine.step()
        self._outbox.take().deliver()

    def run(self) -> dict[str, Found]:
        """Step until all has ended, and return what came of each request."""
        while self.engine.has_work:
            self.step()
        assert self.engine.stats().blocks_used == 0
        return {name: heard.found for name, heard in self.heard.items()}
