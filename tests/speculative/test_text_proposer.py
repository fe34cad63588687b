"""What is proposed for sequences, and what stays of them."""

from __future__ import annotations

from drafting import drafting
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.speculative.text_proposer import INDEXED_PER_STEP, MOST_INDEXED
from sequences import make_sequence

LINE = [11, 12, 13, 14, 15, 16, 17, 18, 19]
SALT = (CacheKey(b"salt:a"),)


def running(seq_id: int, prompt: list[int], output: list[int], *, keys: tuple[CacheKey, ...] = ()) -> Sequence:
    sequence = make_sequence(seq_id, prompt, cache_keys=keys, max_tokens=100)
    sequence.token_ids += output
    return sequence


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    found = drafting(2).propose([running(0, [*LINE, 1], [12, 13]), running(1, [1, 2, 3], [4])])
    assert found == [[14, 15], []]


def test_a_text_gets_no_drafts_beyond_its_end() -> None:
    sequence = running(0, [*LINE, 1], [12, 13])
    sequence.max_length = len(sequence.token_ids) + 3
    assert drafting(4).propose([sequence]) == [[14, 15]]


def test_texts_of_the_same_salt_alone_are_guessed_from_each_other() -> None:
    speculation = drafting(2)
    speculation.propose([running(0, [1], LINE, keys=SALT)])
    assert speculation.propose([running(1, [5], [12, 13], keys=SALT)]) == [[]]  # the other has not ended
    speculation.forget([0, 99])
    assert speculation.propose([running(2, [5], [12, 13], keys=SALT)]) == [[14, 15]]
    assert speculation.propose([running(3, [5], [12, 13])]) == [[]]
    assert speculation.propose([running(4, [5], [12, 13], keys=(CacheKey(b"salt:b"),))]) == [[]]


def test_without_a_prefix_cache_no_text_is_guessed_from_another() -> None:
    speculation = drafting(4, shares_texts=False)
    speculation.propose([running(0, [1], LINE)])
    speculation.forget([0])
    assert speculation.propose([running(1, [5], [12, 13])]) == [[]]


def test_long_prompts_are_indexed_one_per_step() -> None:
    speculation = drafting(4)
    long = [running(seq_id, [*LINE, *range(100, 100 + INDEXED_PER_STEP // 2), 1], [12, 13]) for seq_id in range(3)]
    followed = []
    for _ in range(4):
        speculation.propose(long)
        followed.append(speculation.num_followed)
    assert followed == [1, 2, 3, 3]


def test_of_a_prompt_beyond_all_bounds_the_end_is_searched() -> None:
    prompt = [*LINE, *range(100, 100 + MOST_INDEXED), 21, 22, 23, 24, 1]
    assert drafting(2).propose([running(0, prompt, [12, 13])]) == [[]]
    assert drafting(2).propose([running(0, prompt, [21, 22])]) == [[23, 24]]


def test_it_learns_from_tokens_that_it_did_not_draft() -> None:
    class DearSteps(StepTimes):
        def expected(self, num_tokens: int) -> float:
            return float(num_tokens)

    speculation = drafting(4, times=DearSteps())
    sequence = running(0, [*range(1000), 1], [12])
    for token in range(13, 120):
        assert speculation.propose([sequence]) == [[]]
        sequence.token_ids.append(token)
    assert max(speculation.rates) > 0.97
