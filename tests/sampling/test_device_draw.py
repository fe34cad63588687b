"""Draws that stay on the device against the sampler on the host and naive float64 sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from naive_sampler import naive_distribution
from rows import make_row
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.device_draw import DeviceDraw
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.sampling.sequence_settings import SequenceSettings

CPU = torch.device("cpu")

MIXED = [
    SamplingParams.deterministic(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, min_p=0.02),
    SamplingParams(temperature=2.0, seed=10, top_k=100),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(seed=5, top_k=1),
    SamplingParams(temperature=1.3, seed=2**80, top_k=30, top_p=0.95, min_p=0.01),
]


def random_logits(num_rows: int, vocab_size: int = 300, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sample_row(params: SamplingParams, choice_index: int, num_output_tokens: int) -> SampleRow:
    return make_row(params, [2] * num_output_tokens, prompt=[1], choice_index=choice_index)


@pytest.mark.parametrize("params", MIXED)
def test_frequencies_are_those_of_naive_float64(params: SamplingParams) -> None:
    """Chi-square over the tokens of a text."""
    logits, num_steps, num_texts = random_logits(1, vocab_size=50) / 2, 40, 100
    rows = [SequenceSettings(params, choice_index) for choice_index in range(num_texts)]
    draws = DeviceDraw(CPU, 50)
    steps = [draws.draw(logits.expand(num_texts, -1), rows, [step] * num_texts) for step in range(num_steps)]
    tokens = torch.cat(steps)
    if rows[0].is_greedy:
        assert (tokens == logits.argmax()).all()
        return
    distribution = naive_distribution(logits[0].double().numpy(), sample_row(params, 0, 0))
    expected = np.zeros(50)
    expected[distribution.tokens] = distribution.probabilities * num_steps * num_texts
    observed = tokens.bincount(minlength=50).numpy()
    assert observed[expected == 0].sum() == 0
    likely = expected >= 5
    expected, observed = (
        np.append(expected[likely], expected[~likely].sum()),
        np.append(observed[likely], observed[~likely].sum()),
    )
    expected, observed = expected[expected > 0], observed[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < len(expected) - 1 + 5 * np.sqrt(2 * len(expected))


@pytest.mark.usefixtures("every_draw")
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "min_p": 0.1}, {"temperature": 0.0}])
def test_tokens_are_the_host_samplers_without_top_k_and_top_p(settings: dict[str, Any]) -> None:
    logits = random_logits(40)
    params = [SamplingParams(seed=index, **settings) for index in range(40)]
    positions = list(range(40))
    drawn = DeviceDraw(CPU, 300).draw(logits, [SequenceSettings(each, 1) for each in params], positions)
    rows = [sample_row(each, 1, position) for each, position in zip(params, positions, strict=True)]
    sampler = Sampler(300, CPU, ())
    on_host = sampler.sample(logits.clone(), sampler.prepare(rows))
    assert [[token] for token in drawn.tolist()] == on_host.token_ids


def test_batches_and_pauses_do_not_matter() -> None:
    """Rows come, go, move and rest; each gets the tokens that it gets alone."""
    rows = [SequenceSettings(params, choice_index=0) for params in MIXED]
    logits = torch.stack([random_logits(len(rows), seed=step) for step in range(6)])
    alone = [
        [
            DeviceDraw(CPU, 300).draw(step[index : index + 1], [row], [position]).item()
            for position, step in enumerate(logits)
        ]
        for index, row in enumerate(rows)
    ]
    draws = DeviceDraw(CPU, 300)
    lengths = [0] * len(rows)
    everyone = list(range(len(rows)))
    for batch in ([0], [0, 5], everyone, everyone, everyone, everyone[::-1], [4], [4], [6, 3], [3], [6, 3], [0, 5]):
        going = [index for index in batch if lengths[index] < len(logits)]
        given = torch.stack([logits[lengths[index], index] for index in going])
        tokens = draws.draw(given, [rows[index] for index in going], [lengths[index] for index in going])
        assert tokens.tolist() == [alone[index][lengths[index]] for index in going]
        for index in going:
            lengths[index] += 1


def test_settings_are_sent_only_when_the_batch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_sdk.sampling import device_draw

    uploads: list[list[int]] = []
    upload = device_draw._upload

    def counted(rows: Any, positions: list[int], device: torch.device) -> Any:
        uploads.append(positions)
        return upload(rows, positions, device)

    monkeypatch.setattr(device_draw, "_upload", counted)
    draws = DeviceDraw(CPU, 300)
    first, second, greedy = (SequenceSettings(params, 0) for params in (MIXED[1], MIXED[4], MIXED[0]))
    logits = random_logits(2)
    for positions in ([3, 7], [4, 8], [5, 9]):
        draws.draw(logits, [first, second], positions)
    assert uploads == [[3, 7]]
    draws.draw(logits, [first, second], [5, 9])  # again, as after preemption
    draws.draw(logits, [first, second], [6, 10])
    draws.draw(logits, [second, first], [11, 7])
    assert uploads == [[3, 7], [5, 9], [11, 7]]
    draws.draw(logits, [greedy, greedy], [0, 0])
    assert len(uploads) == 3


def test_rows_without_a_choice() -> None:
    logits = random_logits(len(MIXED))
    logits[::2] = torch.nan
    tokens = DeviceDraw(CPU, 300).draw(logits, [SequenceSettings(params, 0) for params in MIXED], [0] * len(MIXED))
    assert (tokens == NOT_DRAWN).tolist() == [True, False] * 3 + [True]


def test_no_rows_are_no_work() -> None:
    assert DeviceDraw(CPU, 5).draw(torch.empty(0, 5), [], []).shape == (0,)
