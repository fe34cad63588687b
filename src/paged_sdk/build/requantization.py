"""Quantizes the weights of a loaded model again, to another type."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from attrs import evolve

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.build.device_setup import alone_on, memory_must_do, weights_must_fit
from paged_sdk.build.free_memory import return_free_memory
from paged_sdk.build.fusing import fuse
from paged_sdk.build.kv_storage import make_storage
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.build.progress import LoadingBar
from paged_sdk.build.weight_form import weight_policy
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import Environment
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import CheckpointError, ConfigError, ModelClosedError
from paged_sdk.guard import clear_frames
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.logs import get_logger
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.loading import reload_model
from paged_sdk.parallel.messages import REQUANTIZE
from paged_sdk.runner.device import return_cached_memory
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.model_runner import Requantized
from paged_sdk.weights.checkpoint import file_stamps, open_checkpoint

__all__ = ["WeightRequantizer"]

_log = get_logger(__name__)

_T = TypeVar("_T")


class WeightRequantizer:
    """Implements a :class:`~paged_sdk.runner.model_runner.Requantizer` over the files that a model was loaded from.

    What is held quantized is not what the new weights are made of: it would keep the errors of both types. Where
    several ranks hold the model, the first has the others do the same; what one of them cannot do is done by none.

    :param loaded: the model; only the caller, which lets go of it first, holds its layers otherwise
    :param make_device_decoding: makes what runs steps on the device, of the new weights
    """

    def __init__(
        self,
        loaded: LoadedModel,
        environment: Environment,
        config: EngineConfig,
        *,
        workspace: Workspace | None,
        make_device_decoding: Callable[[CausalModel, AttentionBackend], DeviceDecoding | None],
    ) -> None:
        self._loaded = loaded
        self._environment = environment
        self._config = config
        self._workspace = workspace
        self._make_device_decoding = make_device_decoding
        self._group = loaded.model.group if isinstance(loaded.model, DecoderModel) else None

    def __call__(self, isq: IsqType, go_on: Callable[[], None]) -> Requantized:
        """Do what :meth:`~paged_sdk.runner.model_runner.Requantizer.__call__` says."""
        old, start = self._loaded, time.monotonic()
        replaced: set[int] = set()
        if self._group is not None and self._group.rank == 0:
            self._group.tell((REQUANTIZE, isq.value))
        with alone_on(*old.placement.devices):
            try:
                made = self._requantized(isq, replaced.add, go_on)
            except ModelClosedError:  # nobody will use the weights
                raise
            except Exception as error:
                clear_frames(error)  # which may hold keys and values by now
                if replaced:
                    _log.warning("The weights are brought back to what they were: %s", error)
                self._together(lambda: replaced and self._reload(old, sorted(replaced), lambda part: None, go_on))
                made = evolve(self._parts(old), error=error)
            else:
                _log.info("%s: quantized to %s in %.1f s", old.path.name, isq.value, time.monotonic() - start)
        return_free_memory()
        return made

    def _requantized(self, isq: IsqType, on_replaced: Callable[[int], None], go_on: Callable[[], None]) -> Requantized:
        wanted = evolve(self._loaded, settings=evolve(self._loaded.settings, isq=isq))
        every = range(wanted.model.config.num_layers + 1)
        is_quantized = self._together(lambda: self._reload(wanted, every, on_replaced, go_on))
        loaded = evolve(wanted, is_quantized=is_quantized)
        made = self._parts(loaded)
        self._loaded = loaded
        return made

    def _together(self, do: Callable[[], _T]) -> _T:
        """Do what all ranks do, as far as none of them cannot.

        :raises Exception: what has gone wrong here, or a :class:`~paged_sdk.errors.ModelLoadError` of another rank's
        """
        if self._group is None:
            return do()
        try:
            made = do()
        except ModelClosedError:  # which ends the other ranks
            raise
        except Exception as error:
            self._group.first_error(error)
            raise
        if (error_of_another := self._group.first_error(None)) is not None:
            raise error_of_another
        return made

    def _parts(self, loaded: LoadedModel) -> Requantized:
        """Make what runs the weights; keys and values are stored as suits them."""
        storage = make_storage(loaded, self._config, self._workspace)
        return_cached_memory()  # of weights that went one by one, in pieces: the pool wants one
        backend = self._together(lambda: storage.make(self._config.num_blocks))
        fused = fuse(loaded.model, backend, loaded.settings)
        decoding = self._make_device_decoding(fused, backend)
        return Requantized(model=fused, backend=backend, device_decoding=decoding)

    def _reload(
        self, loaded: LoadedModel, parts: Iterable[int], on_replaced: Callable[[int], None], go_on: Callable[[], None]
    ) -> bool:
        """Load some parts of the model as its settings say; return whether matrices are quantized then."""
        path, workspace, model = loaded.path, self._workspace, loaded.model
        if not isinstance(model, DecoderModel):
            # Its layers are known to transformers alone.
            raise ConfigError.of("re_isq_model", model.config.model_type, "a model of a family that has a decoder here")
        with memory_must_do(path), weights_must_fit(path, loaded.placement.devices):
            if file_stamps(path) != loaded.files:
                raise CheckpointError(
                    f"{path} is not what it was when the model was loaded: build the model anew", path=path
                )
            checkpoint = open_checkpoint(path)
            try:
                policy = weight_policy(
                    checkpoint,
                    loaded.settings,
                    self._environment,
                    loaded.dtype,
                    loaded.placed,
                    workspace,
                    loaded.importance,
                )
                with LoadingBar(f"Quantizing {path.name}", visible=loaded.settings.logging) as bar:

                    def replaced(part: int) -> None:
                        on_replaced(part)
                        return_free_memory()  # else a third of a small model's size piles up on the heaps

                    def progress(done: int, total: int) -> None:
                        go_on()
                        bar.update(done, total)

                    reload_model(
                        model,
                        checkpoint.config,
                        checkpoint.source,
                        policy=policy,
                        parts=parts,
                        on_replaced=replaced,
                        on_progress=progress,
                        num_threads=1 if workspace is None else workspace.num_threads,
                    )
            finally:
                checkpoint.source.close()
            return policy.makes_quantized(checkpoint.is_quantized)
