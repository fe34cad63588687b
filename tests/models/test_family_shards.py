"""Every family gives the same logits whether one rank computes it or several do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_configs import FAMILIES, draw_config, reference_of
from reference_decoding import CPU, DictSource, logits
from torch import Tensor
from transformers import PreTrainedModel

from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.errors import ConfigError
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.family import read_config
from paged_sdk.models.loading import load_model
from paged_sdk.models.sharded import SharedHead
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import logits_rows
from rank_threads import run_ranks

PROMPT = [3, 17, 8, 90, 41, 41, 5, 22, 63, 12, 3, 8]
# Norms, biases, windows, mixtures, parallel branches, rows in groups, and what the ranks' norms have to add up.
SHORT = (
    *("llama", "qwen2_moe", "gpt_oss", "codegen", "bloom", "olmo2", "cohere", "phimoe", "falcon", "mixtral"),
    *("glm4_moe", "granitemoeshared", "afmoe"),
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def usual(family: str) -> dict[str, Any]:
    """Return the content of a usual config.json, whose heads and neurons three ranks cannot divide evenly."""
    return {"model_type": family, **SHAPE, **FAMILIES[family][0]}


# The layers of others keep states, which are not divided: test_recurrent_models.py asks for it.
DIVIDED = [family for family in FAMILIES if not read_config(usual(family)).recurrent_layers]


def said(model: DecoderModel) -> Tensor:
    """Return the logits of a prompt in two chunks."""
    settings = PoolSettings(block_size=8, dtype=model.dtype, device=CPU)
    backend = PagedBackend(model.config, settings, 4)
    (first,) = logits(model, backend, [(PROMPT[:7], 0, [2, 1])], num_prompt_tokens={0: len(PROMPT)})
    (second,) = logits(model, backend, [(PROMPT[7:], 7, [2, 1])], num_prompt_tokens={0: len(PROMPT)})
    return torch.cat([first, second])


def said_by(config: Mapping[str, Any], tensors: Mapping[str, Tensor], size: int) -> Tensor:
    """Return the same of several ranks, each of which loads its part."""

    def run(group: Group) -> Tensor:
        model = load_model(config, DictSource(tensors), dtype=torch.float64, placement=CPU, group=group)
        if group.rank:
            head = model.head
            assert isinstance(head, SharedHead)
            model.logits = lambda hidden, adapted=None: help_with(head, group)  # type: ignore[method-assign]
        return said(model)

    return run_ranks(size, run)[0]


def help_with(head: SharedHead, group: Group) -> Tensor:
    """Compute a rank's part of logits that the first rank asks for, and return as many rows."""
    hidden = logits_rows(group.receive_message())
    head.help(hidden)
    return hidden


def check(reference: PreTrainedModel, sizes: tuple[int, ...]) -> None:
    config, tensors = reference.config.to_dict(), reference.state_dict()
    whole = said(load_model(config, DictSource(tensors), dtype=torch.float64, placement=CPU))
    for size in sizes:
        parts = said_by(config, tensors, size)
        assert parts.argmax(-1).tolist() == whole.argmax(-1).tolist()
        assert (parts - whole).abs().max() < 1e-6 * whole.abs().max(), size  # logits are float32


@pytest.mark.parametrize("family", SHORT)
def test_two_and_three_ranks(family: str, tmp_path: Path) -> None:
    config = usual(family)
    check(reference_of(config, tmp_path), (2, 3))


@pytest.mark.long
@pytest.mark.parametrize("family", DIVIDED)
def test_every_family_by_two_to_four_ranks(family: str, tmp_path: Path) -> None:
    check(reference_of(usual(family), tmp_path), (2, 3, 4))


@pytest.mark.long
@pytest.mark.parametrize("family", DIVIDED)
def test_odd_configs(family: str, tmp_path: Path) -> None:
    for seed in range(5):
        try:
            reference = reference_of(draw_config(family, seed), tmp_path)
            load_model(
                reference.config.to_dict(), DictSource(reference.state_dict()), dtype=torch.float64, placement=CPU
            )
        except Exception:  # transformers has no such model, or it is none of this package's: other tests say which
            continue
        if reference.config.num_attention_heads > 1:
            check(reference, (2,))
        else:
            with pytest.raises(ConfigError, match="query heads"):
                check(reference, (2,))
