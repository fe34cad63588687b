"""Where a step samples, and what a sampler knows there."""

from __future__ import annotations

import torch

from paged_sdk import SamplingParams
from paged_sdk.runner.targets import targets_of
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.output import ScheduledSequence
from sequences import make_sequence


def test_rows_of_drafts_share_their_tokens_and_see_those_before_them() -> None:
    """A copy for each draft takes longer than the step does, where texts are long."""
    sequence = make_sequence(0, [1, 2, 3], sampling=SamplingParams(temperature=0.0, frequency_penalty=2.0))
    sequence.token_ids.append(4)
    targets = targets_of([ScheduledSequence(sequence, 3, 4, 1, [0], 0, [4, 5, 6])])
    assert [target.row.num_tokens for target in targets] == [4, 5, 6, 7]
    assert len({id(target.row.token_ids) for target in targets}) == 1
    sampler = Sampler(16, torch.device("cpu"), default_processors(16, lambda text: []))
    logits = torch.zeros(4, 16)
    logits[:, 4], logits[:, 5], logits[:, 6] = 5.0, 4.0, 2.5  # each occurrence takes 2 away
    sampled = sampler.sample(logits, sampler.prepare([target.row for target in targets]))
    assert sampled.token_ids == [[5], [5], [6], [5]]
