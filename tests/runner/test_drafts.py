"""Drafts change how many steps a text takes, and nothing of the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_model_runner import PROMPTS as JUDGED_PROMPTS
from test_model_runner import Harness, build, continuation, reference

from paged_sdk.config.sampling import SamplingParams

PROMPTS = ([5, 9, 2, 7], [3] * 11, list(range(20, 50)))
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "drawn": SamplingParams(temperature=1.5, seed=11),
    "truncated": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=3),
    "penalized": SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.3, seed=0),
    "biased": SamplingParams(temperature=0.0, logits_bias={7: 5.0}, top_n_logprobs=2, min_tokens=4, seed=0),
}


def texts(sampling: SamplingParams, *, paged: bool, drafts: Sequence[Sequence[int]] | None = None) -> Harness:
    """Run the prompts side by side.

    :param drafts: whole texts, of which each next part is the draft, every fourth token of it wrong
    """
    harness = Harness(build(reference()), paged=paged)
    for prompt in PROMPTS:
        harness.add(prompt, sampling)
    while harness.scheduler.num_running or harness.scheduler.num_waiting:
        for sequence in harness.scheduler.decoding if drafts is not None else ():
            assert drafts is not None
            done = sequence.num_output_tokens
            guess = list(drafts[sequence.seq_id][done : done + 5])
            sequence.draft_token_ids = [
                token if (done + place) % 4 else (token + 1) % 512 for place, token in enumerate(guess)
            ]
        harness.num_steps += 1
        harness.step()
    return harness


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_text_with_drafts_is_the_text_without(name: str, *, paged: bool) -> None:
    plain = texts(SAMPLINGS[name], paged=paged)
    expected = [plain.texts[index, 0] for index in range(len(PROMPTS))]
    drafted = texts(SAMPLINGS[name], paged=paged, drafts=expected)
    assert [drafted.texts[index, 0] for index in range(len(PROMPTS))] == expected
    assert drafted.num_steps <= plain.num_steps * 2 // 3
    for seq_id, entries in plain.logprobs.items():
        for one, other in zip(entries, drafted.logprobs[seq_id], strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-9)


def test_the_greedy_text_is_transformers_own() -> None:
    harness = Harness(build(reference()))
    expected = [continuation("llama", index) for index in range(2)]
    for prompt in JUDGED_PROMPTS[:2]:
        harness.add(prompt)
    harness.step()
    while harness.scheduler.num_running:
        for sequence in harness.scheduler.decoding:
            sequence.draft_token_ids = expected[sequence.seq_id][sequence.num_output_tokens :][:3]
        harness.step()
    assert [harness.texts[index, 0] for index in range(2)] == expected
