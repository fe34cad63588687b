"""Ranks that share memory give the same bits as one process, with fused layers of every kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_configs import FAMILIES, reference_of
from reference_decoding import CPU, DictSource, logits
from test_family_shards import help_with, usual
from torch import Tensor
from transformers import PreTrainedModel

from native_weights import needs_library
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.native.ranks import make_shared_memory
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.loading import load_model
from paged_sdk.models.sharded import SharedHead
from paged_sdk.parallel.group import Group
from paged_sdk.quant.policy import WeightPolicy
from rank_threads import run_ranks

pytestmark = needs_library

# Three ranks cannot divide heads and outputs evenly, and two of them share a key-value head.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
# Its heads are those of its state, which have to be all of twice the hidden size; queries that grow within the prompt;
# sizes that the projections of latent vectors are packed in.
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "youtu": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
    },
}
PROMPT = [3, 17, 8, 90, 41, 41, 5, 22, 63, 12, 3, 8, 77, 30, 2, 9]
# Of ranks, norms over all heads run one operation at a time.
NORMED_TOGETHER = ("olmo2", "olmo3")
# Biases and an MLP without a gate; attention beside the MLP; norms of what layers give; a scaled stream; latent
# attention.
SHORT = ("llama", "starcoder2", "cohere", "gemma2", "granite", "youtu")


def said(tensors: Mapping[str, Tensor], reference: PreTrainedModel, isq: IsqType | None, group: Group | None) -> Tensor:
    """Return the logits of a prompt in two chunks, and of one more token.

    :raises LookupError: the layers are not fused, or have experts, which test_expert_ranks.py tests
    """
    library = load()
    assert library is not None
    workspace = Workspace(library, num_threads=1)
    model = load_model(
        reference.config.to_dict(),
        DictSource(tensors),
        dtype=torch.float32,
        placement=CPU,
        policy=WeightPolicy(isq=isq, workspace=workspace),
        group=group,
    )
    if model.config.moe is not None:
        raise LookupError("it has experts")
    settings = PoolSettings(block_size=8, dtype=model.dtype, device=CPU)
    backend = NativePagedBackend(model.config, settings, 4, workspace=workspace)
    if (reason := why_not_fused(model, backend)) is not None:
        raise LookupError(reason)
    fused = FusedDecoderModel(model, backend)
    if group is not None and group.rank:
        head = model.head
        assert isinstance(head, SharedHead)
        fused.logits = lambda hidden, adapted=None: help_with(head, group)  # type: ignore[method-assign]
    parts = [(PROMPT[:7], 0, [2, 1, 3]), (PROMPT[7:], 7, [2, 1, 3]), ([5], len(PROMPT), [2, 1, 3])]
    return torch.cat([logits(fused, backend, [part], num_prompt_tokens={0: len(PROMPT)})[0] for part in parts])


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in SHORT else pytest.mark.long) for family in FAMILIES]
)
@pytest.mark.parametrize("isq", [None, IsqType.Q8_0])
def test_the_same_bits(family: str, isq: IsqType | None, tmp_path: Path) -> None:
    reference = reference_of(usual(family) | SHAPE | FAMILIES[family][0] | OWN.get(family, {}), tmp_path)
    tensors = reference.state_dict()
    try:
        whole = said(tensors, reference, isq, None)
    except LookupError:
        assert family not in SHORT
        return
    if family in NORMED_TOGETHER:
        return
    library = load()
    assert library is not None
    for size in (2, 3):
        file = make_shared_memory(library, size)
        assert file is not None

        def run(group: Group, file: int = file) -> Tensor:
            group.share(library, file)
            return said(tensors, reference, isq, group)

        assert torch.equal(run_ranks(size, run)[0], whole), size
        os.close(file)
