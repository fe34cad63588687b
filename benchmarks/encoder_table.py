"""Test encoders of transformers, for benchmarks.support_table.

An encoder passes if a tiny checkpoint of it with random weights, saved as the masked-language class, gives the same
hidden states as transformers in float32, for several texts in one step as for each alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from benchmarks.tiny_classes import tiny_config, tiny_model
from benchmarks.verdicts import Outcome, Verdict
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.transformers_door.loading import open_door
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.types.step import StepRow
from paged_sdk.weights.safetensors.source import SafetensorsSource

__all__ = ["ENCODER_MODEL_TYPES", "TEXTS", "encoder_class_of", "hidden_states", "judge_encoder", "tiny_encoder"]

ENCODER_MODEL_TYPES: Final = tuple(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
TEXTS: Final = ((5, 9, 33, 120, 77, 41, 8, 250, 16, 93, 11, 61, 28, 31), (100,), (7, 7, 64, 19, 3))

_CPU: Final = torch.device("cpu")
_BLOCK: Final = 8
_ALIKE: Final = 1e-4


def judge_encoder(model_type: str, **changes: Any) -> Outcome:
    """Test one encoder.

    :param changes: fields of its config
    """
    try:
        content = tiny_config(model_type, is_decoder=False, **changes).to_dict() | {
            "architectures": [MODEL_FOR_MASKED_LM_MAPPING_NAMES[model_type]]
        }
    except Exception as error:  # configs validate themselves with errors of many classes
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Outcome(model_type, Verdict.REFUSED, f"no config of it can be made here ({reason})")
    try:
        open_door(content, torch.float32)  # before making the model: some stay large even with a tiny text config
        reference = tiny_encoder(model_type, **changes)
        model = _load(reference, content)
    except UnsupportedArchitectureError as error:
        return Outcome(model_type, Verdict.REFUSED, str(error).rpartition("transformers' classes: ")[2])
    found, expected = hidden_states(model, TEXTS), [_of_transformers(reference, text) for text in TEXTS]
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
    return Outcome(model_type, Verdict.RUNS if worst < _ALIKE else Verdict.WRONG, "" if worst < _ALIKE else str(worst))


def encoder_class_of(model_type: str) -> Any:
    """Return transformers' class of an encoder."""
    return getattr(transformers, MODEL_FOR_MASKED_LM_MAPPING_NAMES[model_type])


def tiny_encoder(model_type: str, auto: Any = AutoModelForMaskedLM, **changes: Any) -> PreTrainedModel:
    """Make a tiny masked-language model.

    :param auto: the Auto class that finds the model's class
    :param changes: fields of its config
    """
    return tiny_model(model_type, auto, is_decoder=False, **changes)


@torch.inference_mode()
def hidden_states(model: CausalModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Compute the hidden states of texts in one step."""
    assert isinstance(model, TransformersModel)
    blocks = -(-max(map(len, texts)) // _BLOCK)
    settings = PoolSettings(block_size=_BLOCK, dtype=model.dtype, device=_CPU)
    backend = PagedBackend(model.config, settings, blocks * len(texts))
    rows = [
        StepRow(index, 0, list(text), range(blocks * index, blocks * (index + 1)), len(text), num_logits=0)
        for index, text in enumerate(texts)
    ]
    tokens = torch.tensor([token for text in texts for token in text])
    positions = torch.tensor([position for text in texts for position in range(len(text))])
    hidden = model.forward(tokens, positions, StepContext(attention=backend.prepare(rows)))
    return list(torch.split(model.normed(hidden), [len(text) for text in texts]))


def _load(reference: PreTrainedModel, content: Mapping[str, Any]) -> TransformersModel:
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        source = SafetensorsSource(Path(directory))
        try:
            door = open_door(content, torch.float32)
            return door.load(source, dtype=torch.float32, placement=Placement.on(_CPU, door.config.num_layers))
        finally:
            source.close()


@torch.inference_mode()
def _of_transformers(reference: PreTrainedModel, text: Sequence[int]) -> Tensor:
    encoder: Any = reference.base_model
    ids = torch.tensor([text])
    states: Tensor = encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    return states[0]
