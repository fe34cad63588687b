"""Run whole tiny models on both sides: transformers, and ours with a KV backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.recurrent import StatefulBackend
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.loading import load_model
from spans import span

CPU = torch.device("cpu")
MAX_TOKENS = 512

MakeBackend = Callable[[DecoderModel], AttentionBackend]


class DictSource:
    """Gives tensors by name, as a checkpoint would."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise CheckpointError(f"there is no tensor {name!r}")
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._tensors[name].to(dtype=dtype, device=device)

    def matrix(self, name: str) -> StoredMatrix:
        return DenseMatrix(self._tensors[name].flatten(0, -2))

    def close(self) -> None:
        """Do nothing: nothing is open."""


def ours(reference: PreTrainedModel, *, dtype: torch.dtype = torch.float32, **options: Any) -> DecoderModel:
    """Build the same model from the same tensors."""
    source = DictSource(reference.state_dict())
    return load_model(reference.config.to_dict(), source, dtype=dtype, placement=CPU, **options)


def paged(block_size: int, cache_type: PagedCacheType = PagedCacheType.AUTO) -> MakeBackend:
    """Make a pool with capacity for :data:`MAX_TOKENS`."""

    def make(model: DecoderModel) -> AttentionBackend:
        settings = PoolSettings(block_size=block_size, dtype=model.dtype, device=CPU, cache_type=cache_type)
        return _with_states(model, PagedBackend(_attending(model), settings, -(-MAX_TOKENS // block_size)))

    return make


def contiguous(model: DecoderModel) -> AttentionBackend:
    """Make contiguous KV with one slot per text."""
    return _with_states(model, ContiguousBackend(_attending(model), dtype=model.dtype, device=CPU))


def _attending(model: DecoderModel) -> DecoderConfig:
    return model.config.of_layers(model.config.attention_layers)


def _with_states(model: DecoderModel, backend: AttentionBackend) -> AttentionBackend:
    """Keep the states of recurrent layers, too, if the model has any, each text's in the slot of its first KV; and
    number the layers with attention as the backend does, if there are others.
    """
    if not model.config.recurrent_layers and len(model.config.attention_layers) == model.config.num_layers:
        return backend
    return StatefulBackend(backend, model.config, num_slots=MAX_TOKENS, dtype=model.dtype, device=CPU)


def logits(
    model: CausalModel,
    backend: AttentionBackend,
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    *,
    num_prompt_tokens: Mapping[int, int] | None = None,
) -> list[Tensor]:
    """Run one step.

    :param rows: per row the new tokens, how many came before, and where the KV lies
    :param num_prompt_tokens: how long the prompts of some rows are, by index; of the others, several tokens are a
        prompt's, and one was generated
    :returns: per row ``[num_tokens, vocab_size]``
    """
    token_ids = [token for tokens, _, _ in rows for token in tokens]
    positions = [start + i for tokens, start, _ in rows for i in range(len(tokens))]
    lengths = num_prompt_tokens or {}
    spans = [
        span(start, len(tokens), kv_ids, num_prompt_tokens=lengths.get(index))
        for index, (tokens, start, kv_ids) in enumerate(rows)
    ]
    # Each row holds its text's last token, so that its end is the length of the text.
    switch = model.config.rope_switch if isinstance(model, DecoderModel | FusedDecoderModel) else None
    is_long = [switch is not None and start + len(tokens) > switch for tokens, start, _ in rows for _ in tokens]
    with torch.inference_mode():
        context = StepContext(attention=backend.prepare(spans), is_long=torch.tensor(is_long))
        hidden = model.forward(torch.tensor(token_ids), torch.tensor(positions), context)
        parts = torch.split(model.logits(hidden), [len(tokens) for tokens, _, _ in rows])
    return list(parts)


def greedy(
    model: DecoderModel,
    make_backend: MakeBackend,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    chunk: int | None = None,
) -> list[int]:
    """Generate greedy tokens, the prompt in chunks of ``chunk`` tokens (None: at once)."""
    backend = make_backend(model)
    kv_ids = [0]
    if isinstance(backend, PagedBackend):
        kv_ids = torch.randperm(backend.num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
    text, start = list(prompt), 0
    while len(text) < len(prompt) + num_tokens:
        new = text[start : start + (chunk or len(text))]
        (scores,) = logits(model, backend, [(new, start, kv_ids)])
        start += len(new)
        if start == len(text):
            text.append(int(scores[-1].argmax()))
    return text[len(prompt) :]


def reference_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what transformers generates, end tokens or not."""
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # the model's own stops at end tokens
    with torch.inference_mode():
        generated: Any = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=num_tokens, do_sample=False, use_cache=True, pad_token_id=0
            ),
        )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


def random_prompt(length: int, *, seed: int = 0, vocab_size: int = 512) -> list[int]:
    """Draw random tokens."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    tokens: list[int] = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
    return tokens
