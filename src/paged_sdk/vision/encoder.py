"""Encode images by a checkpoint's encoder: transformers' modules, with this package's matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from logging import LogRecord, getLogger
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from paged_sdk.errors import CheckpointError, ModelLoadError, shown
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.vision.family import Inputs
from paged_sdk.vision.own_products import OwnProducts, take_matrices
from paged_sdk.weights.quantized.format import as_decoded

__all__ = ["EncodedImage", "ImageEncoder", "config_of_model", "load_encoder", "with_whole_encoder"]

_TEXT = ("language_model", "text_model", "lm_head")
"""Names of the modules of transformers' model that are the text decoder."""


@frozen(eq=False)
class EncodedImage:
    """Holds the vectors of one image.

    :ivar vectors: ``[n, hidden_size]``, in the order of the image's tokens
    :ivar later: for each of the decoder's first layers, vectors to add to the layer's output, shaped like ``vectors``
        (DeepStack)
    """

    vectors: Tensor
    later: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return the size of all vectors in bytes."""
        return sum(tensor.nbytes for tensor in (self.vectors, *self.later))


class ImageEncoder:
    """Runs an image encoder, from the image processor's output to vectors of the decoder's hidden size.

    :param model: transformers' model, whose text decoder is not used
    :param products: computes the layers whose weights were taken out of the model; None: the model has all its weights
    :param others: modules of the model that are not part of the encoder
    """

    def __init__(
        self,
        model: Any,
        products: OwnProducts | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        others: Container[nn.Module] = (),
    ) -> None:
        self._model = model
        self._products = products
        self._dtype = dtype
        self._device = device
        self._before_layer: Callable[[], None] = lambda: None
        streams: Any = torch.cuda  # streams have no annotations
        self._stream = streams.Stream(device) if device.type == "cuda" else None
        for layers in model.modules():
            for layer in layers if isinstance(layers, nn.ModuleList) else ():
                if layer in others:
                    continue
                layer.register_forward_pre_hook(lambda module, given: self._before_layer())

    @property
    def model(self) -> Any:
        """Return transformers' model."""
        return self._model

    def encode(self, inputs: Inputs, before_layer: Callable[[], None]) -> EncodedImage:
        """Return the vectors of one image, in memory of the current stream, and wait for them. Not reentrant.

        :param inputs: the encoder's inputs, as in :class:`~paged_sdk.types.media.ImageSpan`
        :param before_layer: called before each of the encoder's layers; an exception from it ends the computation
        """
        self._before_layer = before_layer
        if self._stream is None:
            return self._encode(inputs)
        with torch.cuda.stream(self._stream):  # concurrently with the kernels of a step
            made = self._encode(inputs)
        self._stream.synchronize()
        # Copy to memory of the current stream, which is the steps' own: it may be freed at any time. Memory of another
        # stream would need record_stream(), and freeing such memory after a device failure ends the process.
        own = EncodedImage(made.vectors.clone(), tuple(each.clone() for each in made.later))
        torch.cuda.current_stream(self._device).record_event().synchronize()  # then the originals may be freed
        return own

    def _encode(self, inputs: Inputs) -> EncodedImage:
        given = {name: self._to_device(torch.from_numpy(array)) for name, array in inputs.items()}
        with self._products or nullcontext():
            made = self._model.get_image_features(**given, return_dict=True)
        later = getattr(made, "deepstack_features", None) or ()
        return EncodedImage(_joined(made.pooler_output), tuple(map(_joined, later)))

    def _to_device(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self._device, dtype=dtype)


def _joined(vectors: Tensor | Sequence[Tensor]) -> Tensor:
    parts = [vectors] if isinstance(vectors, Tensor) else vectors
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def load_encoder(
    path: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    *,
    policy: WeightPolicy,
    dtype: torch.dtype,
    device: torch.device,
) -> ImageEncoder:
    """Load the image encoder of a checkpoint, with the projector to the decoder's hidden size.

    :param path: the checkpoint, for error messages
    :param config: config.json's content
    :param tensors: the encoder's tensors by name, in its dtype; emptied by this call
    :param policy: chooses the form of each matrix; its workspace must not be used by other threads
    :raises CheckpointError: a tensor is missing or has another shape, or transformers does not know the model
    :raises ModelLoadError: transformers is not installed
    """
    settings = config_of_model(path, config)
    _check_depth(path, settings, len(tensors))
    try:
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        _shrink_text(settings.get_text_config())
        kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(settings)]
        with _quiet():
            model, report = kind.from_pretrained(
                None, config=settings, state_dict=tensors, dtype=dtype, output_loading_info=True
            )
    except Exception as error:  # transformers raises anything for a config or tensors that do not fit
        raise CheckpointError(f"{path}: its image encoder cannot be loaded: {error}", path=path) from error
    missing = [name for name in report["missing_keys"] if not set(_TEXT) & set(name.split("."))]
    wrong = [each[0] if isinstance(each, tuple) else each for each in report["mismatched_keys"]]
    if missing or wrong:
        what = f"lacks {shown(sorted(missing)[:4])}" if missing else f"has other shapes of {shown(sorted(wrong)[:4])}"
        raise CheckpointError(f"{path} {what}, which its image encoder needs", path=path)
    inner = model.model
    for name in _TEXT:
        if hasattr(inner, name):
            setattr(inner, name, None)
    inner = inner.eval().to(device).requires_grad_(False)
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()} if device.type == "cpu" else {}
    tensors.clear()  # so that each matrix is freed once it is packed
    layers = take_matrices(inner, policy, names, dtype=dtype, device=device)
    return ImageEncoder(inner, OwnProducts(layers, policy.workspace), dtype=dtype, device=device)


def config_of_model(path: Path, config: Mapping[str, Any]) -> Any:
    """Return a config.json's content as transformers' config object, with defaults for fields that the file lacks.

    :param path: the checkpoint, for error messages
    :raises CheckpointError: transformers refuses the config
    :raises ModelLoadError: transformers is not installed
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ModelLoadError(f"images need transformers, which cannot be loaded: {error}") from error
    try:
        return AutoConfig.for_model(**as_decoded(config))
    except Exception as error:  # transformers raises anything for a config that does not fit
        raise CheckpointError(f"{path}: its config cannot be used: {error}", path=path) from error


def with_whole_encoder(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json's content with a complete section of the encoder: transformers writes there only values that
    differ from its defaults.

    The parameters and errors are those of :func:`config_of_model`.
    """
    whole = config_of_model(path, config).vision_config.to_dict()
    return {**config, "vision_config": {**whole, **(config.get("vision_config") or {})}}


def _check_depth(path: Path, settings: Any, num_tensors: int) -> None:
    """Refuse more layers than the checkpoint has tensors: transformers would build them all before it misses any.

    :raises CheckpointError: the encoder has such a number of layers
    """
    vision = getattr(settings, "vision_config", None)
    for name in ("num_hidden_layers", "depth"):
        count = getattr(vision, name, None)
        if isinstance(count, int) and count > num_tensors:
            what = f"vision_config.{name} = {shown(count)}: expected at most the number of its tensors, {num_tensors}"
            raise CheckpointError(f"{path}: {what}", path=path)


def _shrink_text(text: Any) -> None:
    """Make a config's text decoder small: transformers builds one, which is discarded."""
    text.num_hidden_layers = 1
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if getattr(text, name, None):
            setattr(text, name, getattr(text, name)[:1])
    text.vocab_size = 8
    # A layer of Qwen 3.5's experts has 0.8 billion weights.
    small = {"intermediate_size": 16, "moe_intermediate_size": 16, "num_experts": 1, "num_experts_per_tok": 1}
    # Gemma 4's: layers that share keys need another one, and the second table of embeddings has a row per token.
    small |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 8}
    for name, value in small.items():
        if hasattr(text, name):
            setattr(text, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' warning about missing text decoder tensors, and its progress bar.

    Only this thread's log records are hidden: other threads may load models meanwhile.
    """
    from transformers.utils import logging

    reports: Any = logging  # parts of it have no annotations
    logger = getLogger("transformers.modeling_utils")
    thread = get_ident()

    def is_of_others(record: LogRecord) -> bool:
        return get_ident() != thread

    logger.addFilter(is_of_others)
    shows = reports.is_progress_bar_enabled()
    reports.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)
        if shows:
            reports.enable_progress_bar()
