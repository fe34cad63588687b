"""Let models in a test take the way of those on CUDA devices: steps that are "recorded" are run again as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend, AttentionSetup, KvStorage
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.build.device_steps import make_overlap
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.kv_cache import copy_blocks_reference, reshape_and_cache_reference
from paged_sdk.kernels.lora_slots import AdapterSlots
from paged_sdk.kernels.paged_attention import paged_attention_reference
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.rotary import rotate_and_cache_reference
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.parallel.group import Group
from paged_sdk.runner.decode_graphs import DecodeGraphs, batch_sizes
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.lockstep import LockstepModel, recorded_alike
from paged_sdk.runner.mixed_graphs import MixedGraphs
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import StepResults
from paged_sdk.runner.step_table import Record
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.processor import Processor

__all__ = ["ATTENDING", "Attending", "Recorder", "let_record", "let_torch_attend"]


ATTENDING: Final = DecoderConfig(
    model_type="none",
    vocab_size=50,
    hidden_size=64,
    intermediate_size=1,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    norm_eps=1e-6,
    ropes=(RopeConfig(rotary_dim=16),),
    sliding_windows=(None,),
    attention_scale=0.25,
)


class Attending:
    """Stands in for a model, of :data:`ATTENDING`: its states are what attention makes of tokens and positions."""

    device = torch.device("cpu")

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: Any) -> Tensor:
        attention: AttentionStep = ctx.attention
        states = (token_ids[:, None] * torch.arange(1, 129) + positions[:, None]).float().sin()
        query, key, value = states[:, :64], states[:, 64:96], states[:, 96:]
        heads = query.view(-1, 4, 16), key.view(-1, 2, 16), value.view(-1, 2, 16)
        return attention.forward(0, *heads).flatten(1)

    def logits(self, hidden: Tensor, adapted: object = None) -> Tensor:
        return hidden[:, :50].clone()


class Recorder:
    """Counts how often each step of so many rows is replayed.

    :ivar checks: whether steps are checked first, of which nothing is counted
    :ivar counts: the numbers of tokens to record steps with chunks of prompts for
    :ivar mixed: of those steps, the number of tokens of each that was replayed
    """

    def __init__(self) -> None:
        self.checks = False
        self.replays: list[int] = []
        self.counts: tuple[int, ...] = ()
        self.mixed: list[int] = []
        self._num_recorded = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        index = self._num_recorded
        self._num_recorded += 1

        def replay() -> None:
            self.replays.append(index)
            function()

        return replay

    def record_mixed(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record a step with chunks of prompts."""
        function()
        step: Any = getattr(function, "__self__", None)

        def replay() -> None:
            self.mixed.append(step.num_tokens)
            function()

        return replay


def let_record(patch: pytest.MonkeyPatch, device: torch.device, recorder: Recorder) -> None:
    """Have models that are built from now on keep their KV as on CUDA, and replay what the recorder records."""
    from paged_sdk.attention.triton_paged import TritonPagedBackend

    def storage(setup: AttentionSetup, candidates: object) -> KvStorage:
        engine = setup.engine
        settings = PoolSettings(
            block_size=engine.block_size, dtype=setup.dtype, device=device, cache_type=engine.cache_type
        )
        return KvStorage(
            make=lambda num_blocks: TritonPagedBackend(
                setup.model,
                settings,
                num_blocks,
                max_num_seqs=engine.max_num_seqs,
                max_model_len=engine.max_model_len,
            )
        )

    def path(
        model: CausalModel,
        backend: AttentionBackend,
        config: EngineConfig,
        *,
        processors: Sequence[Processor[Any]],
        vocab_size: int,
        placement: Placement,
        visible: bool,
        make_slots: Callable[[int], AdapterSlots] | None,
        group: Group | None,
    ) -> DeviceDecoding:
        assert placement.is_one_device
        assert isinstance(backend, TritonPagedBackend)
        overlap = make_overlap(config.max_num_seqs, device, group)
        record: Record = recorder
        record_mixed: Record = recorder.record_mixed
        if group is not None:
            model = LockstepModel(model, group)
            record, record_mixed = recorded_alike(record, group), recorded_alike(record_mixed, group)
        largest = max((config.max_num_seqs, *recorder.counts))
        slots = None if make_slots is None else make_slots(largest)
        bounds = [24, config.max_model_len]
        with torch.inference_mode():
            layers = RecordableLayers(model, backend, StepResults(overlap.tokens, largest), slots)
            mixed = None
            if recorder.counts:
                mixed = MixedGraphs(layers, counts=recorder.counts, bounds=bounds, record=record_mixed)
            sizes = batch_sizes(config.max_num_seqs)
            graphs = DecodeGraphs(layers, sizes=sizes, bounds=bounds, record=record)
            if recorder.checks:
                graphs.check()
                recorder.replays.clear()
            sampler = DeviceSampler(processors, config.max_num_seqs, vocab_size, device)
            path = DeviceDecoding(sampler, overlap, graphs, mixed, slots)
            path.warm_up(torch.zeros(1, vocab_size))
        return path

    patch.setattr("paged_sdk.build.kv_storage.choose_storage", storage)
    patch.setattr("paged_sdk.build.assembly.make_device_decoding", path)
    patch.setattr("paged_sdk.build.ranks.part.make_device_decoding", path)


def let_torch_attend(patch: pytest.MonkeyPatch) -> None:
    """Have torch's operations compute what Triton's kernels would: in the interpreter these take a hundred times as
    long.
    """

    def attend(
        query: Tensor, cache: LayerCache, rows: PagedRows, scores: ScoreOptions, *, out: Tensor | None = None
    ) -> Tensor:
        result = paged_attention_reference(query, cache, rows, scores)
        return result if out is None else out.copy_(result)

    def copy_blocks(caches: Sequence[Tensor], block_pairs: Tensor) -> None:
        copy_blocks_reference(caches, (), block_pairs)

    for name, function in (
        ("paged_attention", attend),
        ("rotate_and_cache", rotate_and_cache_reference),
        ("reshape_and_cache", reshape_and_cache_reference),
        ("copy_blocks", copy_blocks),
    ):
        patch.setattr(f"paged_sdk.attention.triton_paged.{name}", function)
