"""What is left of sequences for which drafts were proposed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_model import MOST_DRAFTS, VOCAB, Harness

from drafting import drafting
from paged_sdk.config.engine import EngineConfig


@pytest.mark.parametrize("paged", [True, False])
def test_nothing_is_left_behind(paged: bool) -> None:
    """Preemption, choices, cancelling and the end of a text: the last steps forget them all."""
    harness = Harness(
        EngineConfig(
            paged=paged, num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64
        )
    )
    speculation = drafting(4)

    def step(after: Callable[[], object] = lambda: None) -> None:
        sequences = harness.scheduler.decoding
        for sequence, drafts in zip(sequences, speculation.propose(sequences), strict=True):
            sequence.draft_token_ids = drafts
        after()
        speculation.forget(harness.step().finished_seq_ids)

    sequences = [harness.add([1, 2, 3] * 3, max_tokens=14, num_choices=1 + index % 2) for index in range(5)]
    for _ in range(6):
        step()
    assert speculation.num_followed > 1
    step(lambda: harness.scheduler.finish(sequences[0], "canceled"))
    while harness.has_work:
        step()
    assert harness.scheduler.costs.drafts.num_accepted > 0
    harness.check_end()
    harness.add([1], max_tokens=3)
    step()  # a step after the last text has ended tells of it
    assert speculation.num_followed == 0


@pytest.mark.parametrize("paged", [True, False])
def test_states_stay_behind_drafts(paged: bool) -> None:
    """Of a model with recurrent layers: right and wrong drafts, texts that go on from earlier ones, and preemption."""
    num_behind = num_hits = num_preemptions = num_cut = 0
    for seed in range(60):
        chosen = random.Random(seed)
        harness = Harness(
            EngineConfig(
                paged=paged,
                num_blocks=chosen.choice((16, 24, 60)),
                block_size=3,
                prefix_cache_n=4 if paged else 0,
                max_num_seqs=4,
                max_num_batched_tokens=32,
                max_model_len=44,
            ),
            has_states=True,
        )

        def guess(follows: list[int], chosen: random.Random = chosen) -> list[int]:
            return follows[: chosen.randint(0, 5)] + [VOCAB] * chosen.randint(0, 3)

        for _ in range(6):
            ended = [sequence.token_ids for sequence in harness.sequences.values()]
            for _ in range(chosen.randint(1, 4)):
                prompt = [chosen.randrange(2) for _ in range(chosen.randint(1, 8))]
                if ended and chosen.random() < 0.6:
                    earlier = chosen.choice(ended)
                    prompt = [*earlier[: chosen.randint(1, len(earlier))], *prompt][:28]
                harness.add(prompt, max_tokens=chosen.randint(1, 16), num_choices=chosen.choice((1, 1, 2)))
            while harness.has_work or harness.flight is not None:
                if chosen.random() < 0.9:
                    harness.draft(guess)
                    num_cut += any(len(each.draft_token_ids) > MOST_DRAFTS for each in harness.scheduler.decoding)
                harness.step(ahead=chosen.random() < 0.5, host=range(1000) if chosen.random() < 0.5 else None)
        harness.check_end()
        num_behind += harness.states.num_behind
        num_hits += harness.manager.prefix_hits
        num_preemptions += harness.scheduler.num_preemptions
    assert num_behind > 200
    assert num_cut > 100
    assert not paged or (num_hits > 200 and num_preemptions > 10)
