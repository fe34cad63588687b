"""Penalties counted on the device against those counted on the host, while texts come, go, rest and lose tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.sampling.penalties import DevicePenalties, Penalties
from paged_sdk.sampling.row import SampleRow
from paged_sdk.scheduler.sequence import Sequence
from sequences import make_sequence

CPU = torch.device("cpu")
VOCAB_SIZE = 12

PARAMS = [
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(),
    SamplingParams(repetition_penalty=0.5, frequency_penalty=0.25, presence_penalty=1.0),
    SamplingParams(frequency_penalty=-0.5),
    SamplingParams(presence_penalty=0.5),
]


def text(seq_id: int, prompt: list[int] | None = None) -> Sequence:
    params = PARAMS[seq_id % len(PARAMS)]
    return make_sequence(seq_id, prompt or [seq_id % 5, 3, 3], params, max_tokens=1000)


def row_of(sequence: Sequence, num_tokens: int) -> SampleRow:
    return SampleRow(sequence.seq_id, sequence.request, sequence.token_ids, num_tokens)


def lower_on_host(logits: torch.Tensor, rows: list[SampleRow]) -> None:
    """Apply the penalties of texts whose tokens the host knows."""
    processor, changes = Penalties(), []
    for index, row in enumerate(rows):
        if processor.applies_until(row.request):
            state = processor.begin(row.request)
            state.advance(row.token_ids[row.num_prompt_tokens : row.num_tokens])
            changes.append((index, state.change()))
    if changes:
        processor.apply(logits, changes)


def check_step(penalties: DevicePenalties, rows: list[SampleRow], tokens: list[int], seed: int) -> None:
    """Check one step: what it lowers, and then what it samples.

    :param rows: their sequences hold all tokens, whether or not the host were to know them
    """
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    expected = logits.clone()
    lower_on_host(expected, rows)
    step = penalties.begin(rows)
    if step is not None:
        penalties.apply(logits, step)
        penalties.advance(step, torch.tensor(tokens))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_texts_come_and_go(data: st.DataObject) -> None:
    """More texts than seats; of a step's tokens some are lost, as in a preemption, and others come in their place."""
    penalties = DevicePenalties(3, VOCAB_SIZE, CPU)
    texts: dict[int, Sequence] = {}
    next_id = 0
    for step in range(data.draw(st.integers(1, 20), label="steps")):
        while len(texts) < data.draw(st.integers(1, 6), label="texts"):
            texts[next_id] = text(next_id)
            next_id += 1
        chosen = data.draw(st.lists(st.sampled_from(sorted(texts)), min_size=1, max_size=3, unique=True), label="rows")
        tokens = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=len(chosen), max_size=len(chosen)))
        rows = [row_of(texts[seq_id], len(texts[seq_id].token_ids)) for seq_id in chosen]
        check_step(penalties, rows, tokens, seed=step)
        for seq_id, token in zip(chosen, tokens, strict=True):
            match data.draw(st.sampled_from(["goes on", "goes on", "loses it", "ends"]), label="then"):
                case "goes on":
                    texts[seq_id].token_ids.append(token)
                case "ends":
                    penalties.forget(seq_id)
                    del texts[seq_id]


def test_tokens_that_the_host_has_not_seen() -> None:
    """The next step is submitted before they are known."""
    penalties, sequence = DevicePenalties(1, VOCAB_SIZE, CPU), text(2, prompt=[1, 2])
    on_device = [4, 4, 7]
    for number in range(len(on_device) + 1):
        step = penalties.begin([row_of(sequence, 2 + number)])
        assert step is not None
        logits = torch.ones(1, VOCAB_SIZE)
        penalties.apply(logits, step)
        expected = torch.ones(1, VOCAB_SIZE)
        seen = [*sequence.token_ids, *on_device[:number]]
        lower_on_host(expected, [SampleRow(2, sequence.request, seen, len(seen))])
        torch.testing.assert_close(logits, expected)
        penalties.advance(step, torch.tensor(on_device[number : number + 1] or [0]))


def test_steps_without_penalties_have_none() -> None:
    penalties = DevicePenalties(2, VOCAB_SIZE, CPU)
    assert penalties.begin([row_of(text(1), 3), row_of(text(6), 3)]) is None


def test_warming_up_leaves_no_trace() -> None:
    penalties, logits = DevicePenalties(2, VOCAB_SIZE, CPU), torch.randn(2, VOCAB_SIZE)
    expected = logits.clone()
    penalties.warm_up(logits)
    assert torch.equal(logits, expected)
    assert not penalties._occurrences.any()
