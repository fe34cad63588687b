"""Which rows the device samples, and that batches of them go on as they would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import encode, make_request, make_row
from torch import Tensor

from paged_sdk.config.sampling import DryParams, SamplingParams
from paged_sdk.sampling import device_draw, penalties
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler

CPU = torch.device("cpu")
PROCESSORS = default_processors(50, encode)

SERVED = [
    SamplingParams.deterministic(),
    SamplingParams(temperature=2.0, seed=10, top_k=100),
    SamplingParams(repetition_penalty=1.1, seed=1),
    SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5, top_n_logprobs=3),
    SamplingParams(temperature=0.8, seed=2, min_p=0.02, frequency_penalty=-0.5),
]


def make_sampler() -> DeviceSampler:
    return DeviceSampler(PROCESSORS, 4, 50, CPU)


@pytest.mark.parametrize("vocab_size", [48, 67])
def test_kernels_are_warmed_up_for_rows_that_begin_anywhere(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    """Triton compiles them anew for pointers that are aligned to less than 16 bytes."""
    launched: dict[str, set[bool]] = {"argmax": set(), "draw": set(), "penalize": set()}

    def noting(name: str, function: Any) -> Any:
        def note(logits: Tensor, *args: Any) -> Any:
            launched[name].add(logits.data_ptr() % 16 == 0)
            return function(logits, *args)

        return note

    for module, name in ((device_draw, "argmax"), (device_draw, "draw"), (penalties, "penalize")):
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    logits = torch.randn(3, vocab_size)
    DeviceSampler(PROCESSORS, 4, vocab_size, CPU).warm_up(torch.randn(1, vocab_size))
    places = {logits[first:].data_ptr() % 16 == logits.data_ptr() % 16 for first in range(3)}
    assert launched == dict.fromkeys(launched, places)


@pytest.mark.parametrize("params", SERVED)
def test_what_is_served(params: SamplingParams) -> None:
    sampler = make_sampler()
    assert sampler.serves(make_row(params))
    assert not sampler.serves(make_row(params, num_samples=2))


@pytest.mark.parametrize("settings", [{"logits_bias": {1: 1.0}}, {"dry_params": DryParams(multiplier=1.0)}])
def test_what_is_not_served(settings: dict[str, Any]) -> None:
    assert not make_sampler().serves(make_row(SamplingParams(temperature=0.0, **settings), [3] * 100))


def test_stop_tokens_are_banned_on_the_host() -> None:
    params = SamplingParams(min_tokens=3)
    assert [make_sampler().serves(make_row(params, [3] * length)) for length in (0, 2, 3)] == [False, False, True]


def test_drafts_are_verified_on_the_host() -> None:
    sampler, row = make_sampler(), make_row(SERVED[0])
    assert sampler.serves(row)
    row.num_drafts = 2
    assert not sampler.serves(row)


@pytest.mark.usefixtures("every_draw")
def test_batches_go_on_as_on_the_host() -> None:
    """Penalties count what was sampled, without being told of it."""
    params = [SERVED[0], SERVED[3], SERVED[2], SERVED[4]]
    params = [params[0], params[1], SamplingParams(repetition_penalty=2.0, seed=3), params[3]]
    requests = [make_request(each, [index, 3, 3]) for index, each in enumerate(params)]
    sampler, host = make_sampler(), Sampler(50, CPU, PROCESSORS)
    rows = [make_row(request, seq_id=index) for index, request in enumerate(requests)]
    assert all(sampler.serves(row) for row in rows)
    batch = sampler.begin(rows)
    outputs: list[list[int]] = [[] for _ in rows]
    for step in range(12):
        logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(step))
        expected_rows = [make_row(request, outputs[index], seq_id=index) for index, request in enumerate(requests)]
        expected = host.sample(logits.clone(), host.prepare(expected_rows))
        drawn = sampler.sample(logits, batch)
        assert drawn.tokens.tolist() == [tokens[0] for tokens in expected.token_ids]
        assert drawn.logprobs is not None
        of_rows, tensors = drawn.logprobs
        (entry,) = of_rows.entries([int(drawn.tokens[1])], tensors)
        assert expected.logprobs[1] is not None
        assert entry.logprob == pytest.approx(expected.logprobs[1][0].logprob, abs=1e-5)
        for output, token in zip(outputs, drawn.tokens.tolist(), strict=True):
            output.append(token)


@pytest.mark.usefixtures("every_draw")
def test_warming_up_leaves_no_trace() -> None:
    sampler = make_sampler()
    sampler.warm_up(torch.randn(2, 50))
    row = make_row(SERVED[2], prompt=[4, 4])
    assert sampler.serves(row)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    host = Sampler(50, CPU, PROCESSORS)
    expected = host.sample(logits.clone(), host.prepare([row])).token_ids[0]
    assert sampler.sample(logits, sampler.begin([row])).tokens.tolist() == expected


def test_forgotten_sequences_leave_nothing_behind() -> None:
    sampler = make_sampler()
    for seq_id in range(20):  # more than there are seats
        row = make_row(SERVED[2], seq_id=seq_id)
        assert sampler.serves(row)
        sampler.begin([row])
        sampler.forget([seq_id, 99])
    assert not sampler._rows


def test_bytes_are_those_of_the_processors_and_of_the_logits_copies() -> None:
    """The processors keep one table of counts."""
    assert DeviceSampler.num_bytes(PROCESSORS, 4, 50) == (1 + 4) * 4 * 50 * 4
