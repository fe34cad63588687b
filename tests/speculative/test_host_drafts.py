"""On a device no text depends on drafts, which the host judges, where it may choose other tokens than the device."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from arrivals import gather
from drafting import NoDrafts
from paged_sdk import MemoryGpuConfig, Model, PagedAttentionMeta, SamplingParams, TextModelBuilder
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.speculative.host_drafts import HostDrafts
from recorded_steps import Recorder, let_record, let_torch_attend
from sequences import make_sequence

PROMPT: Final = [5, 6, 7, 8] * 6
DRAWN: Final = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_len=16, ignore_eos=True)
SETTINGS: Final[tuple[SamplingParams, ...]] = (
    evolve(DRAWN, min_tokens=5),  # the first five need the host
    evolve(DRAWN, n_choices=2),  # so do the first of each, after which nothing is under way
    evolve(DRAWN, logits_bias={7: 1.0}),  # all do
    evolve(DRAWN, top_p=1.0, top_k=0, min_tokens=5),  # it chooses the same ones
)


class Counts:
    """Proposes ten tokens, whatever a text says, and notes for which sequences."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        self.asked = [each.seq_id for each in sequences]
        return [list(range(10)) for _ in sequences]

    def forget(self, seq_ids: object) -> None:
        pass

    def reset(self) -> None:
        pass


async def texts(builder: TextModelBuilder, proposer: Proposer) -> tuple[list[str], int]:
    """Return the texts, and how many drafts there were."""
    parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
    async with Model(parts) as model:
        asked = [evolve(each, seed=seed) for each in SETTINGS for seed in range(3)]
        found = await gather(model, *(model.send_completion_request(PROMPT, each) for each in asked))
        return [choice.text for response in found for choice in response.choices], model.stats().drafted_tokens


def test_drafts_change_no_text_that_the_device_goes_on_with(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    let_record(monkeypatch, torch.device("cpu"), Recorder())
    let_torch_attend(monkeypatch)
    pool = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(2048))
    builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    builder = builder.with_paged_attn(pool).with_max_num_seqs(16).with_max_model_len(64)
    expected, no_drafts = asyncio.run(texts(builder, NoDrafts()))
    found, num_drafts = asyncio.run(texts(builder, Counts()))
    assert found == expected
    assert num_drafts > no_drafts == 0


def test_the_token_after_the_drafts_is_the_host_s_too() -> None:
    most = {0: 0, 1: 4, 2: 5, 3: 100}
    sequences = [make_sequence(seq_id, [1, 2]) for seq_id in most]
    for sequence in sequences:
        sequence.token_ids += [3, 3, 3]
    proposer = Counts()
    drafts = HostDrafts(proposer, lambda request: most[int(request.request_id.removeprefix("request-"))])
    assert drafts.propose(sequences) == [[], [], [0], list(range(10))]
    assert proposer.asked == [2, 3]
    assert drafts.propose(sequences[:2]) == [[], []]
