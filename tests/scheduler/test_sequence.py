from __future__ import annotations

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.manager import KvTable
from paged_sdk.scheduler.sequence import Sequence, SequenceStatus
from sequences import make_sequence


def test_a_new_sequence() -> None:
    prompt = [1, 2, 3]
    sequence = make_sequence(7, prompt, SamplingParams(prompt_logprobs=0), cache_keys=(CacheKey(b"a"),))
    prompt.append(4)
    assert sequence.token_ids == [1, 2, 3]
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.output_token_ids) == (3, 0, [])
    assert sequence.status is SequenceStatus.WAITING
    assert sequence.finish_reason is None
    assert sequence.table.cache_keys == (CacheKey(b"a"),)
    assert sequence.table.most_shared == 0
    assert repr(sequence) == "Sequence(7, 'request-7', waiting, 0/3 tokens)"


def test_a_fork_has_the_same_past_and_its_own_future() -> None:
    sequence = make_sequence(7, [1, 2], num_choices=3)
    sequence.token_ids.append(5)
    sequence.num_computed_tokens, sequence.num_cached_tokens = 2, 1
    sequence.status, sequence.first_scheduled_at, sequence.times_passed = SequenceStatus.RUNNING, 3.5, 4
    table = KvTable()
    child = sequence.fork(2, table)
    for name in Sequence.__slots__:
        if name not in ("seq_id", "choice_index", "num_choices", "table"):
            assert getattr(child, name) == getattr(sequence, name)
    assert (child.seq_id, child.choice_index, child.num_choices) == (9, 2, 1)
    assert child.table is table
    child.token_ids.append(6)
    assert (sequence.output_token_ids, child.output_token_ids) == ([5], [5, 6])
