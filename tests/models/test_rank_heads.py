"""Every family's class for the classification of sequences makes the numbers that transformers makes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from benchmarks.tiny_classes import tiny_model
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

import tiny
from paged_sdk.models.family import supported_families
from tiny_ranker import builder_of, logits_of, pair_logit

QUERY: Final = "Where is the sea?"
DOCUMENTS: Final = ("the quick brown fox", "x", "There is a small engine and a number")
FAMILIES: Final = sorted(
    name
    for name, family in supported_families().items()
    if family.architectures[0].endswith("ForCausalLM") and name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
)
# Layers and tensors of other names, and what lies around them.
FAST: Final = ("bloom", "falcon", "gptj", "mpt", "phi3")

# Its class takes rotated elements for a part of a head, which has to be a whole number, and has no groups of heads.
SIZES: Final[dict[str, dict[str, Any]]] = {
    "mistral4": {"num_key_value_heads": 4, "head_dim": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
}


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in FAMILIES]
)
async def test_numbers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    tiny.make_checkpoint("llama", tmp_path)
    changes: dict[str, Any] = {"num_labels": 1, "vocab_size": tiny.VOCAB_SIZE, "pad_token_id": 0}
    changes |= SIZES.get(family, {})
    reference: Any = tiny_model(family, AutoModelForSequenceClassification, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        reference.score.weight.data.normal_()
    reference.save_pretrained(tmp_path)
    expected = [pair_logit(reference, tiny.tokenizer().encode(QUERY, document).ids) for document in DOCUMENTS]
    async with builder_of(tmp_path).build() as model:
        assert model.ranks_texts
        found = logits_of(await model.rank(QUERY, DOCUMENTS))
    assert found == pytest.approx(expected, abs=1e-4 * max(map(abs, expected)))
    assert len({round(number, 3) for number in found}) == len(DOCUMENTS)
