"""Loads the shard of a model on a rank other than 0, and computes the steps that rank 0 sends."""

from __future__ import annotations

from attrs import evolve, frozen

from paged_sdk.attention.backend import KvStorage
from paged_sdk.build.adapters import make_bank
from paged_sdk.build.device_setup import prepare_thread
from paged_sdk.build.device_steps import make_device_decoding
from paged_sdk.build.free_memory import return_free_memory
from paged_sdk.build.fusing import fuse, unfused
from paged_sdk.build.kv_memory import size_pools
from paged_sdk.build.kv_storage import make_storage
from paged_sdk.build.loaded_model import LoadedModel, load_weights
from paged_sdk.build.loading import Loading
from paged_sdk.build.requantization import WeightRequantizer
from paged_sdk.build.sizing import resolve_engine_config
from paged_sdk.build.step_memory import activations_of
from paged_sdk.config.engine import EngineConfig
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import fused_spans
from paged_sdk.models.sharded import SharedHead
from paged_sdk.parallel.group import Group
from paged_sdk.runner.follower import follow

__all__ = ["ModelPart"]


@frozen
class ModelPart:
    """Holds a rank's loaded shard."""

    loading: Loading
    loaded: LoadedModel
    config: EngineConfig

    @classmethod
    def load(cls, loading: Loading, group: Group) -> ModelPart:
        """Load a rank's shard; see :func:`~paged_sdk.build.loaded_model.load_weights`."""
        loaded = load_weights(loading, group=group)
        config = resolve_engine_config(
            loaded.model.config,
            loading.settings,
            loading.environment,
            devices=loaded.placement.devices,
            max_model_len=loaded.max_model_len,
        )
        part = cls(loading, loaded, config)
        return_free_memory()
        return part

    def follow(self, group: Group) -> None:
        """Compute this rank's part of every step, until rank 0 ends it.

        :param group: the ranks, already connected
        :raises EngineDeadError: another rank has ended
        """
        model, settings, workspace = self.loaded.model, self.loading.settings, self.loading.workspace
        assert isinstance(model, DecoderModel)
        assert isinstance(model.head, SharedHead)
        prepare_thread(self.loading.device, settings.num_threads if workspace is None else 1)
        # When rank 0 does: all may run the model.
        storage = make_storage(self.loaded, self.config, workspace, self.loading.check_cancelled)
        if group.is_on_devices:
            config = self._sized(group, storage)
        else:
            (num_blocks,) = group.receive_message()
            config = evolve(self.config, num_blocks=num_blocks)
        backend = storage.make(config.num_blocks)
        del storage  # it holds key offsets up to the longest context, of which the pool may need few
        fused = fuse(model, backend, settings)
        path = None
        if group.is_on_devices:
            path = make_device_decoding(
                fused,
                backend,
                config,
                processors=(),
                vocab_size=model.config.vocab_size,
                placement=self.loaded.placement,
                visible=False,
                make_slots=None,
                group=group,
            )
        bank = make_bank(self.loaded, fused)
        requantize = WeightRequantizer(
            self.loaded,
            self.loading.environment,
            config,
            workspace=workspace,
            make_device_decoding=lambda model, backend: None,
        )
        while (isq := follow(fused, model.head, backend, group, bank, path)) is not None:
            assert path is None, "recorded steps would read the old weights"
            del fused, backend  # so that old weights are freed while new ones are made
            made = requantize(isq, lambda: None)
            fused, backend = made.model, made.backend
            del made
            bank.hold(fused_spans(fused))

    def _sized(self, group: Group, storage: KvStorage) -> EngineConfig:
        """Agree with the other ranks on the number of KV blocks: the largest that fits on every rank's device."""
        model, placement = self.loaded.model, self.loaded.placement
        activations = activations_of(
            unfused(model),
            storage,
            self.config,
            processors=(),
            vocab_size=model.config.vocab_size,
            placement=placement,
            group=group,
        )
        placed = [(model.config, placement)]
        config = size_pools(self.config, placed, dtype=self.loaded.dtype, activations=activations)
        return evolve(config, num_blocks=group.smallest(config.num_blocks))
