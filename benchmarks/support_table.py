"""Test every class of transformers that generates text on this engine: ``make support-table``.

A class passes if tiny models of it with random weights give the greedy tokens of transformers' ``generate``, for two
concurrent texts, one of them prefilled in chunks. A class that does not run must be refused, with the reason.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from benchmarks.encoder_table import ENCODER_MODEL_TYPES, encoder_class_of, judge_encoder
from benchmarks.image_table import judge_images
from benchmarks.tiny_classes import MODEL_TYPES, VOCAB_SIZE, tiny_config, tiny_model
from benchmarks.tiny_image_classes import IMAGE_MODEL_TYPES, image_class_of
from benchmarks.verdicts import Outcome, Verdict
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.family import supported_families
from paged_sdk.models.transformers_door.loading import TransformersDoor, open_door
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.types.step import StepRow
from paged_sdk.vision.family import vision_families
from paged_sdk.weights.safetensors.source import SafetensorsSource

__all__ = ["PROMPTS", "encoder_table", "greedy", "greedy_of_transformers", "image_table", "judge", "share", "table"]

PAGE: Final = Path(__file__).parents[1] / "docs" / "architectures.md"
BEGIN: Final = "<!-- table of classes: make support-table -->"
IMAGES: Final = "<!-- table of classes that take images: make support-table -->"
ENCODERS: Final = "<!-- table of encoders: make support-table -->"
END: Final = "<!-- end of the table -->"

_ASSISTANTS: Final = ("gemma4_assistant", "gemma4_unified_assistant")
_CPU: Final = torch.device("cpu")
_NEW_TOKENS: Final = 12
PROMPTS: Final = ((5, 9, 33, 120, 77, 41, 8, 250, 16, 93, 11, 61, 28), (100, 7, 7, 64, 19))
_CHUNK: Final = 4
_BLOCK: Final = 8
_BLOCKS_PER_TEXT: Final = 8


def judge(model_type: str) -> Outcome:
    """Test one class."""
    try:
        content = tiny_config(model_type).to_dict()
    except Exception as error:  # configs validate themselves with errors of many classes
        return Outcome(model_type, Verdict.REFUSED, f"no config of it can be made here ({str(error).splitlines()[0]})")
    try:
        door = open_door(content, torch.float32)
        reference = tiny_model(model_type)
        model = load(reference, door)
    except UnsupportedArchitectureError as error:
        return Outcome(model_type, Verdict.REFUSED, str(error).rpartition("transformers' classes: ")[2])
    expected = [greedy_of_transformers(reference, prompt) for prompt in PROMPTS]
    found = greedy(model, PROMPTS)
    return Outcome(
        model_type,
        Verdict.RUNS if found == expected else Verdict.WRONG,
        "" if found == expected else f"{found} {expected}",
    )


def load(reference: PreTrainedModel, door: TransformersDoor) -> TransformersModel:
    """Write a model as a checkpoint, and load the checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        source = SafetensorsSource(Path(directory))
        try:
            return door.load(source, dtype=torch.float32, placement=Placement.on(_CPU, door.config.num_layers))
        finally:
            source.close()


def greedy_of_transformers(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return the tokens that transformers generates after a prompt."""
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model.generation_config.eos_token_id = None  # otherwise it replaces the None above
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    with torch.inference_mode():
        out: Tensor = generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return [int(token) for token in out[0, len(prompt) :]]


def greedy(model: TransformersModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Continue texts in one batch. The first one's prompt is prefilled in chunks, beside decodes of the others."""
    settings = PoolSettings(block_size=_BLOCK, dtype=model.dtype, device=_CPU)
    backend = PagedBackend(model.config, settings, _BLOCKS_PER_TEXT * len(prompts))
    texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    lengths = [len(prompt) + _NEW_TOKENS for prompt in prompts]
    while any(len(text) < length for text, length in zip(texts, lengths, strict=True)):
        rows = [
            StepRow(
                index,
                done[index],
                text[done[index] :][: _CHUNK if index == 0 else None],
                range(_BLOCKS_PER_TEXT * index, _BLOCKS_PER_TEXT * (index + 1)),
                len(prompts[index]),
                num_logits=1,
            )
            for index, text in enumerate(texts)
            if len(text) < lengths[index]
        ]
        for row, scores in zip(rows, _last_logits(model, backend, rows), strict=True):
            done[row.seq_id] = row.end
            if row.end == len(texts[row.seq_id]):
                texts[row.seq_id].append(int(scores.argmax()))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@torch.inference_mode()
def _last_logits(model: CausalModel, backend: PagedBackend, rows: Sequence[StepRow]) -> Tensor:
    token_ids = torch.tensor([token for row in rows for token in row.token_ids])
    positions = torch.tensor([position for row in rows for position in range(row.start, row.end)])
    hidden = model.forward(token_ids, positions, StepContext(attention=backend.prepare(rows)))
    ends = torch.tensor([row.num_new_tokens for row in rows]).cumsum(0) - 1
    logits = model.logits(hidden[ends])
    assert logits.shape == (len(rows), VOCAB_SIZE)
    return logits


def class_of(model_type: str) -> Any:
    """Return transformers' class of a model type."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def share(outcomes: Iterable[Outcome]) -> tuple[int, int]:
    """Return how many classes pass, and out of how many: text classes that declare to use transformers' attention
    interface, and whose only state is keys and values.
    """
    runs = of = 0
    for outcome in outcomes:
        excused = any(reason in outcome.reason for reason in ("more than text", "other states"))
        if class_of(outcome.model_type)._supports_attention_backend and not excused:
            of += 1
            runs += outcome.verdict is Verdict.RUNS
    return runs, of


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the part of docs/architectures.md about text classes."""
    runs, of = share(outcomes)
    lines = [
        f"With transformers {transformers.__version__}: {len(outcomes)} classes generate text. {of} are for text",
        "alone, use transformers' attention interface and keep nothing of a text but keys and values:",
        f"{runs} of these run through it ({100 * runs / of:.0f} %).",
        "",
        *_rows(outcomes, class_of),
    ]
    return "\n".join(lines)


def image_table(outcomes: Sequence[Outcome]) -> str:
    """Return the part of docs/architectures.md about classes that take images."""
    count = Counter(outcome.verdict for outcome in outcomes)
    lines = [
        f"With transformers {transformers.__version__}: {len(outcomes)} classes take images and generate text.",
        f"{count[Verdict.RUNS]} run, {count[Verdict.REFUSED]} are refused, and {count[Verdict.UNTRIED]} could not be "
        "tried with tiny models.",
        "",
        *_rows(outcomes, image_class_of, of_images=True),
    ]
    return "\n".join(lines)


def encoder_table(outcomes: Sequence[Outcome]) -> str:
    """Return the part of docs/architectures.md about encoders."""
    count = Counter(outcome.verdict for outcome in outcomes)
    lines = [
        f"With transformers {transformers.__version__}: {len(outcomes)} classes predict masked words.",
        f"{count[Verdict.RUNS]} of their encoders run, and {count[Verdict.REFUSED]} are refused.",
        "",
        *_rows(outcomes, encoder_class_of),
    ]
    return "\n".join(lines)


def _rows(outcomes: Sequence[Outcome], class_of: Callable[[str], Any], *, of_images: bool = False) -> list[str]:
    """Return the table of outcomes, one row per class.

    :param of_images: whether the outcomes are those of prompts with images
    """
    native = supported_families()
    rows = ["| `model_type` | class | runs |", "|---|---|---|"]
    for outcome in outcomes:
        verdict = outcome.verdict
        how = "through transformers' class" if verdict is Verdict.RUNS else f"{verdict.value}: {outcome.reason}"
        if outcome.model_type in native:
            how = "own decoder" + ", to draft for its target" * (outcome.model_type in _ASSISTANTS)
            if of_images and verdict is not Verdict.RUNS and outcome.model_type not in vision_families():
                how = "own decoder, for text alone"
        rows.append(f"| `{outcome.model_type}` | {class_of(outcome.model_type).__name__} | {how} |")
    return rows


def _write(begin: str, text: str) -> None:
    before, _, after = PAGE.read_text().partition(begin)
    PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after.partition(END)[2]}")


def main(kinds: Sequence[str]) -> None:
    """Test all classes of some kinds, and write their tables."""
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tables: dict[str, tuple[Sequence[str], Any, str, Any]] = {
        "text": (MODEL_TYPES, judge, BEGIN, table),
        "images": (IMAGE_MODEL_TYPES, judge_images, IMAGES, image_table),
        "encoders": (ENCODER_MODEL_TYPES, judge_encoder, ENCODERS, encoder_table),
    }
    for kind in kinds:
        model_types, judge_one, begin, write = tables[kind]
        outcomes: list[Outcome] = []
        for model_type in model_types:
            outcomes.append(judge_one(model_type))
            print(model_type, outcomes[-1].verdict.value, outcomes[-1].reason, flush=True)
        _write(begin, write(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:] or ("text", "images", "encoders"))
