"""The fake runner under the real scheduler."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Sequence as Tokens

import pytest

from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import ConfigError, ModelClosedError
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.runner.output import Runner, RunnerOutput
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.scheduler.sequence import Sequence
from paged_sdk.testing.fake_runner import FakeRunner
from paged_sdk.testing.next_token import HashedTokens, NextToken, ScriptedTokens
from sequences import make_sequence

END = 9
HASHED = HashedTokens(range(10, 100))


def sequence(
    seq_id: int, prompt: Tokens[int], sampling: SamplingParams | None = None, *, max_tokens: int = 12
) -> Sequence:
    params = SamplingParams.deterministic() if sampling is None else sampling
    return make_sequence(seq_id, prompt, params, max_tokens=max_tokens, stop_token_ids=frozenset({END}))


def run(
    runner: Runner, sequences: list[Sequence], *, num_blocks: int = 64, budget: int = 16
) -> tuple[dict[tuple[str, int], list[int]], list[RunnerOutput], Scheduler]:
    """Return every choice's output, and the runner's results, after the scheduler is done with all."""
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=128)
    kv = KvCacheManager(num_blocks, 4, prefix_caching=True, sliding_window=None)
    scheduler = Scheduler(config, kv)
    for each in sequences:
        scheduler.add(each)
    texts: dict[tuple[str, int], list[int]] = {}
    results = []
    while scheduler.num_running or scheduler.num_waiting:
        output = scheduler.schedule()
        result = runner.submit(output).result()
        results.append(result)
        for row in result.failed:
            scheduler.finish(output.scheduled[row].sequence, "canceled")
        new_tokens = scheduler.update(output, result.token_ids)
        for each, token_ids in zip(new_tokens.sequences, new_tokens.token_ids, strict=True):
            texts.setdefault((each.request.request_id, each.choice_index), []).extend(token_ids)
    return texts, results, scheduler


def test_a_script_is_said_to_everyone_and_ends() -> None:
    runner = FakeRunner(ScriptedTokens([4, 5, 6], END), vocab_size=10)
    texts, _, _ = run(runner, [sequence(0, [1, 2]), sequence(1, range(20)), sequence(2, [3], max_tokens=2)])
    assert texts == {
        ("request-0", 0): [4, 5, 6, END],
        ("request-1", 0): [4, 5, 6, END],
        ("request-2", 0): [4, 5],
    }


def test_hashed_texts_do_not_depend_on_the_batch_nor_on_preemption() -> None:
    prompts = [list(range(start, start + 9)) for start in range(20, 26)]
    alone = [run(FakeRunner(HASHED, vocab_size=100), [sequence(0, prompt)])[0]["request-0", 0] for prompt in prompts]
    assert len({tuple(text) for text in alone}) == len(alone)
    sequences = [sequence(index, prompt) for index, prompt in enumerate(prompts)]
    together, _, scheduler = run(FakeRunner(HASHED, vocab_size=100), sequences, num_blocks=12)
    assert scheduler.num_preemptions > 0
    assert [together[f"request-{index}", 0] for index in range(len(prompts))] == alone


def test_choices_differ() -> None:
    sampling = SamplingParams(seed=0, n_choices=3)
    texts, _, _ = run(FakeRunner(HASHED, vocab_size=100), [sequence(0, range(9), sampling)])
    assert set(texts) == {("request-0", 0), ("request-0", 1), ("request-0", 2)}
    assert len({tuple(text) for text in texts.values()}) == 3


def test_logprobs_are_one_distribution() -> None:
    sampling = SamplingParams(temperature=0.0, top_n_logprobs=40)
    texts, results, _ = run(FakeRunner(HASHED, vocab_size=100), [sequence(0, [1, 2, 3], sampling), sequence(1, [4])])
    entries = [entry for result in results for row in result.logprobs for entry in row or []]
    assert [entry.token_id for entry in entries] == texts["request-0", 0]
    for entry in entries:
        assert entry.top[0] == (entry.token_id, entry.logprob)
        assert len({token for token, _ in entry.top}) == 40
    everything = SamplingParams(temperature=0.0, top_n_logprobs=1000)
    _, results, _ = run(FakeRunner(HASHED, vocab_size=100), [sequence(0, [1, 2, 3], everything)])
    for result in results:
        for entry in result.logprobs[0] or []:
            assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1)


def test_prompt_logprobs_cover_the_prompt_chunk_by_chunk() -> None:
    prompt = [*range(30, 50)]
    prompt[8] = HASHED(prompt[:8], [], 0)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1)
    _, results, _ = run(FakeRunner(HASHED, vocab_size=100), [sequence(0, prompt, sampling)], budget=6)
    entries: list[RawLogprobs] = [entry for result in results for entry in result.prompt_logprobs.get(0, [])]
    assert [entry.token_id for entry in entries] == prompt[1:]
    said = [HASHED(prompt[:length], [], 0) for length in range(1, len(prompt))]
    assert [entry.top for entry in entries] == [((token, math.log(0.5)),) for token in said]
    assert [entry.logprob == math.log(0.5) for entry in entries] == [
        token == follower for token, follower in zip(said, prompt[1:], strict=True)
    ]
    assert entries[7].logprob == math.log(0.5)


def test_failing_rows_fail_alone() -> None:
    def fails(prompt: Tokens[int], output: Tokens[int]) -> str | None:
        return "too many" if prompt[0] == 2 and len(output) == 3 else None

    runner = FakeRunner(ScriptedTokens([4] * 6, END), vocab_size=10, row_failure=fails)
    texts, results, _ = run(runner, [sequence(1, [1, 1]), sequence(2, [2, 2])])
    assert texts == {("request-1", 0): [4] * 6 + [END], ("request-2", 0): [4] * 3}
    assert [str(error) for result in results for error in result.failed.values()] == ["request request-2: too many"]


def test_a_crash_comes_in_its_step() -> None:
    runner = FakeRunner(HASHED, vocab_size=100, crashes={2: RuntimeError("device lost")})
    with pytest.raises(RuntimeError, match="device lost"):
        run(runner, [sequence(0, [1])])
    assert runner.num_steps == 3


def test_every_step_takes_its_time() -> None:
    runner = FakeRunner(ScriptedTokens([4, 5], END), vocab_size=10, delay=0.01)
    start = time.monotonic()
    run(runner, [sequence(0, [1])])
    assert runner.num_steps == 3
    assert time.monotonic() - start >= 0.03


def test_a_closed_runner_refuses() -> None:
    runner = FakeRunner(HASHED, vocab_size=100)
    assert not runner.is_closed
    runner.close()
    runner.close()
    assert runner.is_closed
    with pytest.raises(ModelClosedError):
        run(runner, [sequence(0, [1])])


@pytest.mark.parametrize("next_token", [ScriptedTokens([10], END), ScriptedTokens([-1], END)])
def test_tokens_beyond_the_vocabulary_are_refused(next_token: NextToken) -> None:
    with pytest.raises(ConfigError, match="vocab_size = 10"):
        run(FakeRunner(next_token, vocab_size=10), [sequence(0, [1])])


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        FakeRunner(HASHED, vocab_size=1)
    for delay in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="delay"):
            FakeRunner(HASHED, vocab_size=10, delay=delay)
    with pytest.raises(ConfigError, match="token_ids"):
        HashedTokens([])


def test_it_needs_no_torch() -> None:
    code = "import sys, paged_sdk.testing.fake_runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
