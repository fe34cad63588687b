"""NaN that comes up amid a prompt ends that request alone, before others find what it has computed."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from device_rig import Rig
from test_model_runner import PROMPTS, build, reference

from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.types.reading import PooledVector, Reading

BROKEN: Final = 511
"""Stands for a token whose embedding is not finite."""

SAME: Final = PROMPTS[3][:17]
"""Begins two prompts: two blocks and more, of a step of three."""


def model() -> DecoderModel:
    embeddings = reference().state_dict()["model.embed_tokens.weight"].clone()
    embeddings[BROKEN] = torch.nan
    return build(reference(), **{"model.embed_tokens.weight": embeddings})


@pytest.mark.parametrize("reading", [None, PooledVector("last")])
@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_what_begins_alike_finds_nothing_of_it(
    smollm2_text: TextProcessor, num_steps: int, reading: Reading | None, *, overlaps: bool
) -> None:
    """The tokens before the broken one have NaN, too, once they were computed in one chunk with it."""
    alone = Rig(smollm2_text.tokenizer, model(), overlaps=overlaps)
    alone.ask("other", [*SAME, 9, 8], reading)
    expected = alone.run()["other"]
    rig = Rig(smollm2_text.tokenizer, model(), overlaps=overlaps)
    rig.ask("broken", [*SAME, BROKEN, *PROMPTS[3]])
    for _ in range(num_steps):
        rig.step()
    rig.ask("other", [*SAME, 9, 8], reading)
    found = rig.run()
    assert found["broken"] == {"end": "request broken: the hidden states hold NaN"}
    assert str(found["other"]) == str(expected)
    assert rig.engine.stats().prefix_hits == 0


def test_the_request_ends_with_the_chunk(smollm2_text: TextProcessor) -> None:
    rig = Rig(smollm2_text.tokenizer, model(), overlaps=False)
    rig.ask("broken", [*PROMPTS[3][:30], BROKEN, *PROMPTS[3]])
    rig.step()
    assert not rig.heard["broken"].has_ended
    assert rig.engine.stats().blocks_cached + rig.engine.stats().blocks_used > 0
    rig.step()
    assert rig.heard["broken"].has_ended
    assert rig.engine.stats().blocks_used == 0


def test_what_is_infinite_after_the_last_layer_is_in_no_keys(
    smollm2_text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models have tokens that are so large there in float16; texts go on after them."""
    alone = Rig(smollm2_text.tokenizer, model(), overlaps=False)
    alone.ask("text", PROMPTS[3])
    expected, forward = alone.run(), DecoderModel.forward

    def overflowing(self: DecoderModel, *args: Any) -> torch.Tensor:
        hidden = forward(self, *args)
        hidden[: len(hidden) if len(hidden) == 24 else 0, 0] = torch.inf
        return hidden

    monkeypatch.setattr(DecoderModel, "forward", overflowing)
    rig = Rig(smollm2_text.tokenizer, model(), overlaps=False)
    rig.ask("text", PROMPTS[3])
    assert rig.run() == expected
