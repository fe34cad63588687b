"""Run transformers on a model with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from benchmarks.gpu.random_model import Shape
from benchmarks.protocol import Prompt, RequestTimes, UnsupportedError

__all__ = ["Generate", "TransformersModel"]

Generate: TypeAlias = Callable[[Sequence[Prompt], int], list[RequestTimes]]
"""A function like :meth:`~benchmarks.protocol.BenchmarkEngine.generate`."""


class TransformersModel:
    """Holds a transformers model with random weights, made on the device.

    :ivar version: version of transformers
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        import transformers

        self.version = transformers.__version__
        self._transformers: Any = transformers
        self._device = device
        config = transformers.AutoConfig.for_model(**shape.config)
        with torch.device("meta"):
            self._model = self._transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._model = self._model.to_empty(device=device).eval()
        for parameter in self._model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.ones_(parameter)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        # No end token, so that texts are as long as every other engine's.
        self._model.config.eos_token_id = self._model.generation_config.eos_token_id = None
        # Rotary frequencies are not parameters: made on the meta device, they would be uninitialized memory.
        body = self._model.model
        body.rotary_emb = type(body.rotary_emb)(config).to(device)

    @contextmanager
    def continuous_batching(self) -> Iterator[Generate]:
        """Run with paged attention and continuous batching, as ``transformers serve`` does.

        :raises UnsupportedError: this version does not have it
        """
        if not hasattr(self._model, "init_continuous_batching"):
            raise UnsupportedError(f"transformers {self.version} has no continuous batching")
        # On a CPU, the pool would take all memory.
        pool = {} if self._device.type == "cuda" else {"num_blocks": 16, "max_batch_tokens": 256}
        manager: Any = self._model.init_continuous_batching(
            generation_config=self._settings(1),
            continuous_batching_config=self._transformers.ContinuousBatchingConfig(**pool),
        )
        manager.start()

        def generate(prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
            start = time.perf_counter()
            inputs = [prompt.token_ids for prompt in prompts]
            manager.add_requests(inputs=inputs, max_new_tokens=max_tokens, record_timestamps=True)
            times: list[RequestTimes] = []
            while len(times) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the manager of continuous batching stopped")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    first, last = (result.timestamps[place] - start for place in (0, -1))
                    times.append(RequestTimes(first, last, len(result.timestamps), len(result.prompt_ids)))
            return times

        try:
            yield generate
        finally:
            manager.stop(block=True)

    @contextmanager
    def static_batch(self) -> Iterator[Generate]:
        """Run ``generate``: one batch of prompts of one length."""
        yield self._generate

    def _generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        token_ids = torch.tensor([prompt.token_ids for prompt in prompts], device=self._device)
        times: list[float] = []

        def note_time(ids: Any, scores: Any, **_: Any) -> Any:
            self._synchronize()
            times.append(time.perf_counter() - start)
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        self._synchronize()
        start = time.perf_counter()
        self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            generation_config=self._settings(max_tokens),
            stopping_criteria=self._transformers.StoppingCriteriaList([note_time]),
        )
        return [RequestTimes(times[0], times[-1], len(times), len(prompt.token_ids)) for prompt in prompts]

    def _settings(self, max_tokens: int) -> Any:
        return self._transformers.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, use_cache=True
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
