"""What can be added to the engine from outside: classes of this file, of which the package knows nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Texts

import pytest

from paged_sdk import Model, SamplingParams, TextModelBuilder
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.scheduler.sequence import Sequence

PROMPTS = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5, list(range(60, 90)))
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_len=24, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_len=24, ignore_eos=True, n_choices=2),
    "penalized": SamplingParams(temperature=0.0, repetition_penalty=1.3, max_len=24, ignore_eos=True),
}


class Remembers:
    """Proposes what followed the last two tokens when they were last seen, in any text."""

    def __init__(self, most: int = 4) -> None:
        self.forgotten: list[int] = []
        self._most = most
        self._seen: dict[tuple[int, int], list[int]] = {}

    def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
        drafts = [self._seen.get((s.token_ids[-2], s.token_ids[-1]), [])[: self._most] for s in sequences]
        for sequence in sequences:
            token_ids = list(sequence.token_ids)
            for place in range(max(len(token_ids) - 2 * self._most, 0), len(token_ids) - 2):
                self._seen[token_ids[place], token_ids[place + 1]] = token_ids[place + 2 :]
        return drafts

    def forget(self, seq_ids: Iterable[int]) -> None:
        self.forgotten += seq_ids

    def reset(self) -> None:
        self._seen.clear()


async def texts(
    builder: TextModelBuilder, proposer: Proposer | None, sampling: SamplingParams
) -> tuple[list[list[str]], int]:
    """Return every prompt's texts, asked for twice, and the steps that they took."""
    parts = load_parts(builder.source, builder.settings, read_environment(), proposer=proposer)
    async with Model(parts) as model:
        responses = [await model.send_completion_request(prompt, sampling) for prompt in PROMPTS * 2]
        num_steps = model.stats().steps
    return [[choice.text for choice in response.choices] for response in responses], num_steps


@pytest.mark.thinned("name", "paged", of=1)
@pytest.mark.anyio
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("paged", [True, False])
async def test_a_proposer_changes_no_text_and_saves_steps(builder: TextModelBuilder, name: str, *, paged: bool) -> None:
    proposer = Remembers()
    builder = builder if paged else builder.without_paged_attn()
    expected, num_steps = await texts(builder, None, SAMPLINGS[name])
    found, num_steps_with_drafts = await texts(builder, proposer, SAMPLINGS[name])
    assert found == expected
    assert num_steps_with_drafts < num_steps * 0.8
    assert proposer.forgotten


@pytest.mark.anyio
async def test_a_proposer_that_raises_is_done_without(builder: TextModelBuilder) -> None:
    class Raises(Remembers):
        def propose(self, sequences: Texts[Sequence]) -> list[list[int]]:
            raise KeyError("a proposer's own")

    sampling = SAMPLINGS["greedy"]
    assert (await texts(builder, Raises(), sampling))[0] == (await texts(builder, None, sampling))[0]
