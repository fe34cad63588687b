"""transformers on a model with random weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.random_model import Shape
from benchmarks.protocol import Prompt, RequestTimes, UnsupportedError

__all__ = ["TransformersModel"]


class TransformersModel:
    """A model of a shape, made on the device.

    :ivar version: of the package
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        import transformers

        self.version = transformers.__version__
        self._transformers: Any = transformers
        self._device = device
        config = transformers.AutoConfig.for_model(**shape.config)
        with torch.device("meta"):
            self._model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._model = self._model.to_empty(device=device).eval()
        for parameter in self._model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.ones_(parameter)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        # Frequencies of positions are no parameters: without storage they would be what memory held before.
        body = self._model.model
        body.rotary_emb = type(body.rotary_emb)(config).to(device)

    def continuous_batching(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        """Paged attention, requests batched as they come. Times of first tokens are those of a run for them alone.

        :raises UnsupportedError: this version has no such thing
        """
        if not hasattr(self._model, "generate_batch"):
            raise UnsupportedError(f"transformers {self.version} has no generate_batch")
        first = self._timed_batch(prompts, 1)
        last = self._timed_batch(prompts, max_tokens) if max_tokens > 1 else first
        return [RequestTimes(first, last, max_tokens, len(prompt.token_ids)) for prompt in prompts]

    def generate(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RequestTimes]:
        """One static batch of prompts of one length."""
        token_ids = torch.tensor([prompt.token_ids for prompt in prompts], device=self._device)
        times: list[float] = []

        def note_time(ids: Any, scores: Any, **_: Any) -> Any:
            self._synchronise()
            times.append(time.perf_counter() - start)
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        self._synchronise()
        start = time.perf_counter()
        self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            generation_config=self._settings(max_tokens),
            stopping_criteria=self._transformers.StoppingCriteriaList([note_time]),
        )
        return [RequestTimes(times[0], times[-1], len(times), len(prompt.token_ids)) for prompt in prompts]

    def _timed_batch(self, prompts: Sequence[Prompt], max_tokens: int) -> float:
        """Seconds, without what making a manager takes."""
        inputs = [prompt.token_ids for prompt in prompts]
        settings = self._settings(max_tokens)
        manager = self._model.init_continuous_batching(generation_config=settings)
        manager.start()
        try:
            self._synchronise()
            start = time.perf_counter()
            manager.add_requests(inputs=inputs, max_new_tokens=max_tokens)
            finished = 0
            while finished < len(inputs):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    finished += 1
                elif not manager.is_running():
                    raise RuntimeError("the manager of continuous batching stopped")
            return time.perf_counter() - start
        finally:
            manager.stop(block=True)

    def _settings(self, max_tokens: int) -> Any:
        # No token ends a text, so each is as long as every other engine's.
        return self._transformers.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
        )

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
