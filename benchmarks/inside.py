"""Open an engine's parts, for measurements that the public API does not allow.

Of the benchmarks, only this file uses private names. The engine is assembled by the same code as in an application.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk import TextModelBuilder
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.build.assembly import load_parts
from paged_sdk.build.parts import ModelParts
from paged_sdk.config.env import read_environment
from paged_sdk.kernels.step import AttentionStep, StepContext
from paged_sdk.kv.manager import KvManager
from paged_sdk.model import Model
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.types.step import StepRow

__all__ = ["OpenEngine", "open_engine"]

# The runner's tile of rows of logits for prompt_logprobs.
_LOGITS_TILE = 64


@frozen
class OpenEngine:
    """Holds an engine that has not been started.

    :ivar parts: the parts from which :class:`Model` is made
    :ivar backend: the runner's attention backend
    :ivar kv: the scheduler's KV manager
    """

    parts: ModelParts
    runner: ModelRunner
    backend: AttentionBackend
    kv: KvManager

    def start(self) -> Model:
        """Start the model, with its worker thread."""
        return Model(self.parts)

    def watch(self, after_prepare: Callable[[], None]) -> None:
        """Call ``after_prepare`` on the worker thread whenever a step has allocated its KV memory."""
        assert self.runner._step_runner is not None
        self.runner._step_runner = evolve(
            self.runner._step_runner, backend=_WatchedBackend(self.backend, after_prepare)
        )

    @property
    def model_class(self) -> type:
        """Return the class of the runner's model."""
        assert self.runner._step_runner is not None
        return type(self.runner._step_runner.model)

    @property
    def decoder(self) -> DecoderModel:
        """Return the runner's model in the form that computes layers one by one."""
        assert self.runner._step_runner is not None
        model = self.runner._step_runner.model
        decoder = model._model if isinstance(model, FusedDecoderModel) else model
        assert isinstance(decoder, DecoderModel)
        return decoder

    def with_backend(self, backend: AttentionBackend) -> OpenEngine:
        """Return the same engine on another backend. The runner, which both share, computes layers one by one on it
        from then on.
        """
        assert self.runner._step_runner is not None
        self.runner._step_runner = evolve(self.runner._step_runner, model=self.decoder, backend=backend)
        return evolve(self, backend=backend)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits per weight of the layers' matrices, without experts."""
        linears = [linear for layer in self.decoder.layers for linear in layer.linears]
        weights = sum(linear.in_features * linear.out_features for linear in linears)
        return 8 * sum(linear.num_bytes for linear in linears) / weights

    def logits(self, token_ids: Sequence[int], *, chunk: int, streams: int = 1) -> Tensor:
        """Compute the logits after every token of a text.

        :param chunk: tokens per step: the engine's token budget for its prefill path; 1 for its decode path, on which
            all tokens count as generated
        :param streams: number of sequences that compute the same text in one batch
        :returns: float32 ``[len(token_ids), vocab_size]``, the logits of the first sequence
        """
        assert self.runner._step_runner is not None
        model = self.runner._step_runner.model
        tiles = []
        num_prompt = 0 if chunk == 1 else len(token_ids)
        tables = [self._kv_ids(len(token_ids), stream) for stream in range(streams)]
        with torch.inference_mode():
            for start in range(0, len(token_ids), chunk):
                tokens = torch.tensor(token_ids[start : start + chunk])
                rows = [
                    StepRow(stream, start, [0] * len(tokens), table, num_prompt, num_logits=len(tokens))
                    for stream, table in enumerate(tables)
                ]
                context = StepContext(attention=self.backend.prepare(rows))
                positions = torch.arange(start, start + len(tokens))
                hidden = model.forward(tokens.repeat(streams), positions.repeat(streams), context)
                # As in a step, all decode rows reach the output projection together.
                heads = hidden if chunk == 1 else hidden[: len(tokens)]
                tiles += [model.logits(tile)[: len(tokens)] for tile in torch.split(heads, _LOGITS_TILE)]
        return torch.cat(tiles)

    def _kv_ids(self, num_tokens: int, stream: int) -> list[int]:
        if not self.parts.config.paged:
            return [stream]
        num_blocks = -(-num_tokens // self.parts.config.block_size)
        return list(range(stream * num_blocks, (stream + 1) * num_blocks))


def open_engine(builder: TextModelBuilder) -> OpenEngine:
    """Load the model that ``builder`` describes, as ``build()`` does."""
    parts = load_parts(builder.source, builder.settings, read_environment())
    runner = parts.engine._runner
    assert isinstance(runner, ModelRunner)
    assert runner._step_runner is not None
    return OpenEngine(parts, runner, runner._step_runner.backend, parts.engine._kv)


class _WatchedBackend(AttentionBackend):
    def __init__(self, backend: AttentionBackend, after_prepare: Callable[[], None]) -> None:
        self._backend = backend
        self._after_prepare = after_prepare

    @property
    def num_bytes(self) -> int:
        return self._backend.num_bytes

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        step = self._backend.prepare(rows)
        self._after_prepare()
        return step

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._backend.copy(copies)

    def release(self, kv_ids: Iterable[int]) -> None:
        self._backend.release(kv_ids)
