"""Requantizes the weights of a loaded model to another type."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from attrs import evolve

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.build.device_setup import alone_on, loading_memory_errors, weights_must_fit
from paged_sdk.build.free_memory import return_free_memory
from paged_sdk.build.fusing import fuse
from paged_sdk.build.kv_storage import make_storage
from paged_sdk.build.layer_drafts import code_beside
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.build.progress import LoadingBar
from paged_sdk.build.weight_form import weight_policy
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import Environment
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import CheckpointError, ModelClosedError
from paged_sdk.guard import clear_frames
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.logs import get_logger
from paged_sdk.models.any_model import AnyModel
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.loading import reload_model
from paged_sdk.parallel.messages import REQUANTIZE
from paged_sdk.runner.beside_layers import BesideLayers
from paged_sdk.runner.block_files import BlockFiles
from paged_sdk.runner.device import return_cached_memory
from paged_sdk.runner.device_decoding import DeviceDecoding
from paged_sdk.runner.model_runner import Requantized
from paged_sdk.weights.checkpoint import file_stamps, open_checkpoint

__all__ = ["WeightRequantizer"]

_log = get_logger(__name__)

_T = TypeVar("_T")


class WeightRequantizer:
    """Implements :class:`~paged_sdk.runner.model_runner.Requantizer` by reading the model's files again.

    New weights are not made from the quantized ones in memory, since they would have the errors of both types. Layers
    that draft from hidden states stay as they are, but for what they share with the model: they decide no text. With
    several ranks, rank 0 makes the others do the same; if a rank fails, all ranks restore their old weights.

    :param loaded: the model; the caller must drop its own references to the layers before calling
    :param make_device_decoding: makes the device decoding for the new weights
    :param open_block_files: opens the directory of stored KV for the new weights
    :param make_beside: makes layers that draft from the hidden states of the new weights, if there are any
    """

    def __init__(
        self,
        loaded: LoadedModel,
        environment: Environment,
        config: EngineConfig,
        *,
        workspace: Workspace | None,
        make_device_decoding: Callable[[CausalModel, AttentionBackend], DeviceDecoding | None],
        open_block_files: Callable[[LoadedModel, bytes], BlockFiles | None] = lambda loaded, code: None,
        make_beside: Callable[[LoadedModel, CausalModel, AttentionBackend], BesideLayers | None] = lambda *parts: None,
    ) -> None:
        self._loaded = loaded
        self._environment = environment
        self._config = config
        self._workspace = workspace
        self._make_device_decoding = make_device_decoding
        self._open_block_files = open_block_files
        self._make_beside = make_beside
        self._group = loaded.model.group if isinstance(loaded.model, DecoderModel) else None

    def __call__(self, isq: IsqType, check_cancelled: Callable[[], None]) -> Requantized:
        """Implement :meth:`~paged_sdk.runner.model_runner.Requantizer.__call__`."""
        old, start = self._loaded, time.monotonic()
        replaced: set[int] = set()
        if self._group is not None and self._group.rank == 0:
            self._group.send_message((REQUANTIZE, isq.value))
        with alone_on(*old.placement.devices):
            try:
                made = self._requantized(isq, replaced.add, check_cancelled)
            except ModelClosedError:  # the weights are not needed any more
                raise
            except Exception as error:
                clear_frames(error)  # its frames may hold the new KV pool
                if replaced:
                    _log.warning("The weights are brought back to what they were: %s", error)
                self._together(
                    lambda: replaced and self._reload(old, sorted(replaced), lambda part: None, check_cancelled)
                )
                made = evolve(self._parts(old, check_cancelled), error=error)
            else:
                _log.info("%s: quantized to %s in %.1f s", old.path.name, isq.value, time.monotonic() - start)
        return_free_memory()
        return made

    def _requantized(
        self, isq: IsqType, on_replaced: Callable[[int], None], check_cancelled: Callable[[], None]
    ) -> Requantized:
        wanted = evolve(self._loaded, settings=evolve(self._loaded.settings, isq=isq))
        every = range(wanted.model.config.num_layers + 1)
        is_quantized = self._together(lambda: self._reload(wanted, every, on_replaced, check_cancelled))
        loaded = evolve(wanted, is_quantized=is_quantized)
        made = self._parts(loaded, check_cancelled)
        self._loaded = loaded
        return made

    def _together(self, do: Callable[[], _T]) -> _T:
        """Call a function that all ranks call, and raise on all of them if it fails on one.

        :raises Exception: this rank's error, or a :class:`~paged_sdk.errors.ModelLoadError` for another rank's
        """
        if self._group is None:
            return do()
        try:
            made = do()
        except ModelClosedError:  # closing ends the other ranks
            raise
        except Exception as error:
            self._group.first_error(error)
            raise
        if (error_of_another := self._group.first_error(None)) is not None:
            raise error_of_another
        return made

    def _parts(self, loaded: LoadedModel, check_cancelled: Callable[[], None]) -> Requantized:
        """Make KV storage, layers and device decoding for the weights."""
        backend = self._together(partial(self._backend, loaded, check_cancelled))
        fused = fuse(loaded.model, backend, loaded.settings)
        decoding = self._make_device_decoding(fused, backend)
        beside = self._make_beside(loaded, fused, backend)
        files = self._open_block_files(loaded, code_beside(backend, beside))
        return Requantized(model=fused, backend=backend, device_decoding=decoding, block_files=files, beside=beside)

    def _backend(self, loaded: LoadedModel, check_cancelled: Callable[[], None]) -> AttentionBackend:
        storage = make_storage(loaded, self._config, self._workspace, check_cancelled)
        return_cached_memory()  # the old weights left it in pieces, and the pool needs contiguous memory
        return storage.make(self._config.num_blocks)

    def _reload(
        self,
        loaded: LoadedModel,
        parts: Iterable[int],
        on_replaced: Callable[[int], None],
        check_cancelled: Callable[[], None],
    ) -> bool:
        """Load some parts of the model again by its settings; return whether the matrices are then quantized."""
        path, workspace, model = loaded.path, self._workspace, loaded.model
        with loading_memory_errors(path), weights_must_fit(path, loaded.placement.devices):
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
                        return_free_memory()  # otherwise free heap memory grows to a third of a small model's size

                    def progress(done: int, total: int) -> None:
                        check_cancelled()
                        bar.update(done, total)

                    _reloader(model, images=loaded.settings.images is not None)(
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


def _reloader(model: AnyModel, *, images: bool) -> Callable[..., None]:
    """Return the function that reloads a model's weights, by its kind.

    :param images: whether the model accepts images
    """
    if isinstance(model, DecoderModel):
        return reload_model
    from paged_sdk.models.transformers_door.loading import reload_door  # imports transformers, which takes 1.8 s

    return partial(reload_door, images=images)
