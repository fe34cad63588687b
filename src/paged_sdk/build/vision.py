"""Loads a model's image support: processor and encoder."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve, frozen

from paged_sdk.build.processor_prompts import ProcessorPrompts
from paged_sdk.build.weight_form import encoder_policy
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.config.images import ImageLimits
from paged_sdk.config.topology import Topology
from paged_sdk.errors import CheckpointError, InvalidRequestError, shown
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.logs import get_logger
from paged_sdk.models.checkpoint_layout import names_in
from paged_sdk.models.family import NestedFamily, find_family, supported_families
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.types.image import Image
from paged_sdk.types.messages import Message
from paged_sdk.vision.encoder import ImageEncoder, load_encoder, with_whole_encoder
from paged_sdk.vision.family import find_vision_family, vision_families
from paged_sdk.vision.processor import ImagePrompts, make_image_processor
from paged_sdk.weights.checkpoint import Checkpoint
from paged_sdk.weights.mmproj.source import Mmproj

__all__ = ["LoadedVision", "load_encoder_file", "load_vision"]

_log = get_logger(__name__)


@frozen(eq=False)
class LoadedVision:
    """Holds a model's image support.

    :ivar prompts: inserts images into prompts
    :ivar encoder: encodes images as vectors
    :ivar is_bidirectional: whether tokens of an image attend to one another in both directions
    """

    prompts: ImagePrompts
    encoder: ImageEncoder
    is_bidirectional: bool = False


def load_vision(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    limits: ImageLimits,
    policy: WeightPolicy,
    *,
    topology: Topology | None,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedVision:
    """Load a checkpoint's image processor and encoder.

    :param policy: the text decoder's, of which the encoder gets its own
    :raises UnsupportedArchitectureError: the model's family has no image support
    :raises CheckpointError: the checkpoint is a GGUF file, or lacks something that images need
    :raises ConfigError: a package that reads images is not installed
    """
    path = checkpoint.path
    if checkpoint.metadata is not None:
        raise CheckpointError(
            f"{path} is a GGUF file, whose image encoder is in a file of its own: give that too, "
            "GgufModelBuilder(...).with_mmproj(...) (--mmproj)",
            path=path,
        )
    model_type = str(checkpoint.config.get("model_type"))
    is_nested = isinstance(supported_families().get(model_type), NestedFamily)
    # A family may have a decoder in models/ and use transformers' whole processor for images.
    family = None if is_nested and model_type not in vision_families() else find_vision_family(checkpoint.config)
    prompts = None
    if family is not None:
        prompts = ImagePrompts(family, path, with_whole_encoder(path, checkpoint.config), tokenizer, limits)
    names = names_in(checkpoint.source, find_family(checkpoint.config))
    own = [name for name in checkpoint.source.names() if names.is_encoders(name)]
    encoder = load_encoder(
        path,
        checkpoint.config,
        {name: checkpoint.source.tensor(name, dtype, torch.device("cpu")) for name in own},
        policy=_own_policy(policy, topology, device),
        dtype=dtype,
        device=device,
    )
    if prompts is None or family is None:
        through = ProcessorPrompts(path, model_type, encoder.model, tokenizer)
        return LoadedVision(through.make(through.limited(limits), is_bidirectional=False), encoder)
    return LoadedVision(prompts, encoder, family.is_bidirectional)


def load_encoder_file(
    encoder: Mmproj,
    text: TextProcessor,
    limits: ImageLimits,
    policy: WeightPolicy,
    *,
    topology: Topology | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[LoadedVision, TextProcessor]:
    """Load the image encoder of a GGUF model; other parameters are those of :func:`load_vision`.

    :returns: also the text processor, with a chat template that renders images if possible
    :raises CheckpointError: the file lacks something, or the tokenizer has no image token
    :raises UnsupportedArchitectureError: the file holds something that this kind of encoder does not have
    """
    path, family = encoder.path, vision_families()[encoder.config["model_type"]]
    tokenizer = text.tokenizer
    ids = [id for each in encoder.tokens if (id := tokenizer.token_id(each)) is not None]
    if not ids:
        raise CheckpointError(
            f"the tokenizer has no token {' or '.join(encoder.tokens)}, for which {path} has images", path=path
        )
    config = {**encoder.config, family.image_token_fields[0]: ids[0]}
    processor = make_image_processor(*encoder.processor)
    prompts = ImagePrompts(family, path, config, tokenizer, limits, processor, settings={})
    own = _own_policy(policy, topology, device)
    loaded = load_encoder(path, encoder.config, encoder.tensors(dtype), policy=own, dtype=dtype, device=device)
    vision = LoadedVision(prompts, loaded, family.is_bidirectional)
    return vision, _showing_images(text, prompts.placeholder_id, encoder.after)


def _showing_images(text: TextProcessor, placeholder: int, after: str) -> TextProcessor:
    """Return a text processor whose chat template writes a token for each image, if possible. Templates of GGUF files
    often accept text only: llama.cpp replaces images by a marker before it renders them.

    :param after: text to insert after the token if the template does not support images
    """
    if text.template is None or _shows_images(text, placeholder):
        return text
    mark = text.tokenizer.decode([placeholder], skip_special_tokens=False)
    changed = evolve(text, template=text.template.showing_images_as(mark + after))
    if not _shows_images(changed, placeholder):
        return text
    _log.info("The chat template takes texts alone: %s stands in them for an image.", shown(mark))
    return changed


def _shows_images(text: TextProcessor, placeholder: int) -> bool:
    picture = Image.parse(np.zeros((1, 1, 3), np.uint8))
    try:
        ids = text.encode_chat([Message.of_parts("user", [picture, {"type": "text", "text": "What?"}])])
    except InvalidRequestError:  # the template accepts text only, or expects another conversation
        return False
    return ids.count(placeholder) == 1


def _own_policy(policy: WeightPolicy, topology: Topology | None, device: torch.device) -> WeightPolicy:
    workspace = policy.workspace if device.type == "cpu" else None  # serves one call at a time: make another
    if workspace is not None:
        workspace = Workspace(workspace.library, num_threads=workspace.num_threads)
    return evolve(encoder_policy(policy, topology), workspace=workspace)
