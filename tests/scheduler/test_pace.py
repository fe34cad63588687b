from __future__ import annotations

import math
import random
from statistics import median

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.scheduler.chunk_cost import ChunkCost
from paged_sdk.scheduler.pace import FIRST_CHUNK, LEAST_CHUNK, PROBE_INTERVAL, Pace
from paged_sdk.scheduler.step_times import StepTimes

NUM_STREAMS = 8
BUDGET = 512


@define
class Machine:
    """Computes steps in a time that follows from what they hold, and from the load of the machine.

    :ivar plain: seconds of a step of 8 generated tokens
    :ivar chunk: seconds of a chunk by itself; ``chunk_depth`` more for each token before it
    :ivar token: seconds of each of its tokens; ``pair`` more for each token before it
    """

    plain: float = 0.012
    chunk: float = 0.0
    chunk_depth: float = 0.0
    token: float = 0.3e-3
    pair: float = 0.1e-6
    load: float = 1.0
    noise: float = 0.03
    random: random.Random = field(factory=lambda: random.Random(3))

    def step(self, num_decodes: int, num_tokens: int, start: int) -> float:
        seconds = self.plain * num_decodes / NUM_STREAMS
        if num_tokens:
            depth = start + num_tokens / 2
            seconds += self.chunk + self.chunk_depth * depth + num_tokens * (self.token + self.pair * depth)
        return seconds * self.load * self.random.gauss(1, self.noise)


def generate(pace: Pace, machine: Machine, num_steps: int = 30) -> float:
    """Generate without prompts, and return the median time of a step."""
    times = [machine.step(NUM_STREAMS, 0, 0) for _ in range(num_steps)]
    for seconds in times:
        pace.note_plain(seconds, NUM_STREAMS)
    return median(times)


def alone(pace: Pace, machine: Machine, num_tokens: int) -> float:
    """Compute a prompt with nothing beside it."""
    total = 0.0
    for start in range(0, num_tokens, BUDGET):
        count = min(BUDGET, num_tokens - start)
        total += (seconds := machine.step(0, count, start))
        pace.note_mixed(seconds, 0, count, start + count / 2)
    return total


def beside(pace: Pace, machine: Machine, num_tokens: int, num_prompts: int = 1) -> list[float]:
    """Compute a prompt beside the streams, and return the times of its steps."""
    times, start = [], 0
    while start < num_tokens:
        allowed = pace.prompt_seconds(NUM_STREAMS, num_prompts)
        count = min(pace.tokens(allowed, start), num_tokens - start, BUDGET - NUM_STREAMS) if allowed else 0
        times.append(machine.step(NUM_STREAMS, count, start))
        if count:
            pace.note_mixed(times[-1], NUM_STREAMS, count, start + count / 2)
        else:
            pace.note_plain(times[-1], NUM_STREAMS)
        start += count
    return times


@pytest.mark.parametrize(("slowdown", "later"), [(2.0, 2.0), (3.0, 1.5), (5.0, 1.25)])
def test_streams_and_prompts_share_time(slowdown: float, later: float) -> None:
    pace, machine = Pace(slowdown, StepTimes()), Machine()
    alone(pace, machine, 2000)
    for _ in range(3):
        plain, by_itself, times = generate(pace, machine), alone(pace, machine, 2000), beside(pace, machine, 2000)
        assert median(times) / plain == pytest.approx(slowdown, rel=0.2)
        assert sum(times) / by_itself == pytest.approx(later, rel=0.2)


def test_what_a_chunk_costs_for_itself_is_borne_by_both() -> None:
    """As the time of a plain step is: both take a third longer than without it, and neither three times as long."""
    pace, machine = Pace(3.0, StepTimes()), Machine(chunk=0.012)
    alone(pace, machine, 4000)
    plain = generate(pace, machine)
    beside(pace, machine, 2000)
    by_itself, times = alone(pace, machine, 2000), beside(pace, machine, 2000)
    assert 3.3 < median(times) / plain < 5
    assert 1.6 < sum(times) / by_itself < 2.4


@pytest.mark.parametrize("load", [0.5, 3.0])
def test_a_change_of_the_load_is_followed_while_prompts_never_end(load: float) -> None:
    pace, machine = Pace(3.0, StepTimes()), Machine()
    alone(pace, machine, 2000)
    generate(pace, machine)
    beside(pace, machine, 4000)
    machine.load = load
    for _ in range(12):
        times = beside(pace, machine, 2000)
    assert 2 < median(times) / (machine.plain * load) < 5


def test_without_measurements_there_is_a_plain_step_and_then_a_small_chunk() -> None:
    pace = Pace(3.0, StepTimes())
    assert pace.prompt_seconds(4, 1) == 0
    assert pace.prompt_seconds(4, 1) == math.inf  # nobody said how long that step took: prompts go on all the same
    assert pace.tokens(math.inf, 0) == FIRST_CHUNK
    pace.note_plain(0.01, 4)
    assert pace.prompt_seconds(4, 1) == pytest.approx(0.02)
    assert pace.tokens(0.02, 0) == FIRST_CHUNK
    pace.note_mixed(0.01 + 32 * 1e-4, 4, 32, 0)
    assert pace.tokens(0.02, 0) == pytest.approx(200, rel=0.05)


def test_a_number_of_texts_that_was_not_seen_takes_as_long_as_the_nearest() -> None:
    pace = Pace(3.0, StepTimes())
    pace.note_plain(0.01, 4)
    pace.note_plain(0.02, 16)
    assert pace.prompt_seconds(5, 1) == 0
    assert pace.prompt_seconds(5, 1) == pytest.approx(0.02)
    assert pace.prompt_seconds(17, 1) == pytest.approx(0.04)  # 16 to 19 count as one


def test_one_of_many_mixed_steps_is_a_plain_one() -> None:
    pace = Pace(3.0, StepTimes())
    pace.note_plain(0.01, 1)
    probes = []
    for step in range(4 * PROBE_INTERVAL):
        if not pace.prompt_seconds(1, 1):
            probes.append(step)
            pace.note_plain(0.01, 1)
        pace.note_mixed(0.03, 1, 20, 0)
    assert probes == [PROBE_INTERVAL * count for count in range(1, 4)]


def test_an_interrupted_step_changes_nothing() -> None:
    pace = Pace(3.0, StepTimes())
    for seconds in (0.01, 0.01, 0.01, 0.5, 0.01):
        pace.note_plain(seconds, 1)
    pace.prompt_seconds(1, 1)
    assert pace.prompt_seconds(1, 1) == pytest.approx(0.02)


def test_many_prompts_beside_few_texts_get_more() -> None:
    pace = Pace(3.0, StepTimes())
    pace.note_plain(0.01, 2)
    assert [pace.prompt_seconds(2, count) for count in (0, 1, 2, 8)] == pytest.approx([0.02, 0.02, 0.02, 0.08])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e6), st.integers(0, 40), st.integers(1, 512), st.floats(0, 1e6), st.sampled_from([0, 0, 1])
        ),
        max_size=60,
    )
)
def test_prompts_go_on_whatever_the_times(steps: list[tuple[float, int, int, float, int]]) -> None:
    pace = Pace(3.0, StepTimes())
    for seconds, num_decodes, num_tokens, depth, is_plain in steps:
        if is_plain and num_decodes:
            pace.note_plain(seconds, num_decodes)
        else:
            pace.note_mixed(seconds, num_decodes, num_tokens, depth)
        pace.prompt_seconds(3, 1)  # which may ask for a plain step
        allowed = pace.prompt_seconds(3, 1)
        assert allowed > 0
        assert pace.tokens(allowed, int(depth)) >= LEAST_CHUNK


def test_the_parts_of_a_chunks_time_are_told_apart() -> None:
    cost, rng = ChunkCost(), random.Random(0)
    for _ in range(300):
        count, depth = rng.choice([16, 40, 512]), rng.randrange(4000)
        cost.note(count, depth, 0.004 + count * (1e-3 + 5e-7 * depth))
    for depth in (0, 1000, 4000):
        assert cost.per_token(depth) == pytest.approx(1e-3 + 5e-7 * depth, rel=0.05)
