"""Watch what layers beside a model draft, and decide which of it is right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, Final
from unittest.mock import patch

from attrs import define, field

from arrivals import wait_for_requests
from paged_sdk import Model, SamplingParams
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.runner.drafted_text import DraftedText
from paged_sdk.runner.layer_drafts import LayerDrafts
from paged_sdk.speculative.several_proposers import SeveralProposers

__all__ = ["PROMPTS", "Watched", "texts_of", "verified", "watching", "without_drafts"]

PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5, [9] * 50, list(range(100, 133)))


@define
class Watched:
    """Notes what the layers find likeliest, and puts tokens of known texts in place of some of it.

    :ivar texts: the tokens after each prompt
    :ivar found: the text before each draft, the drafts before it, and what the layers found
    """

    texts: dict[tuple[int, ...], list[int]] = field(factory=dict)
    found: list[tuple[list[int], list[int], int]] = field(factory=list)
    chance: random.Random = field(factory=lambda: random.Random(3))

    def put(self, text: DraftedText, token: int) -> int:
        sequence, drafts = text.sequence, text.drafts
        self.found.append((list(sequence.token_ids), list(drafts), token))
        known = self.texts.get(tuple(sequence.token_ids[: sequence.num_prompt_tokens]), [])
        place = sequence.num_output_tokens + len(drafts)
        return known[place] if place < len(known) and self.chance.random() < 0.7 else token


@contextmanager
def watching(texts: Mapping[tuple[int, ...], list[int]]) -> Iterator[Watched]:
    """Let layers beside a model draft whatever they can, beside no other proposer."""
    watched, add = Watched(dict(texts)), DraftedText.add
    asked = SeveralProposers.propose

    def put(self: DraftedText, token: int, vocab_size: int) -> None:
        add(self, watched.put(self, token), vocab_size)

    def alone(self: SeveralProposers, sequences: Any) -> list[list[int]]:
        _, layers = self._proposers
        assert isinstance(layers, LayerDrafts)
        return layers.propose(sequences)

    def all_of_them(chances: Sequence[Sequence[float]], *others: Any) -> list[int]:
        return [len(each) for each in chances]

    with (
        patch.object(DraftedText, "add", put),
        patch.object(SeveralProposers, "propose", alone),
        patch("paged_sdk.runner.layer_drafts.draft_counts", all_of_them),
        patch("paged_sdk.scheduler.draft_account.DraftBalance.allows", True),
    ):
        yield watched
    assert asked is SeveralProposers.propose


def verified(
    draft: Callable[[list[int], list[int]], int], prompt: list[int], tokens: list[int], *, most: int, max_tokens: int
) -> tuple[int, int]:
    """Return how many tokens are drafted, and how many of these are right, on the way to a text.

    :param draft: returns the next draft after a text and the drafts after it
    :param tokens: what comes after the prompt
    :param most: drafts per step
    :param max_tokens: after which the text ends: none is drafted beyond
    """
    done, num_drafted, num_right = 1, 0, 0  # the first token comes from the prompt
    while done < len(tokens):
        drafts: list[int] = []
        for _ in range(min(most, max_tokens - done - 1)):
            drafts.append(draft(prompt + tokens[:done], drafts))
        pairs = zip(drafts, tokens[done:], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_drafted, num_right, done = num_drafted + len(drafts), num_right + right, done + right + 1
    return num_drafted, num_right


async def texts_of(model: Model, sampling: SamplingParams, prompts: Any = PROMPTS) -> list[str]:
    """Return the texts after prompts that share steps."""
    wait_for_requests(model, len(prompts))
    got = await asyncio.gather(*(model.send_completion_request(prompt, sampling) for prompt in prompts))
    return [choice.text for each in got for choice in each.choices]


async def without_drafts(builder: Any, sampling: SamplingParams) -> tuple[list[str], dict[tuple[int, ...], list[int]]]:
    """Return the texts after the prompts, and the tokens after each prompt, of a model that nothing drafts for."""
    parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=(seen := _Seen()))
    async with Model(parts) as model:
        texts = await texts_of(model, sampling)
    return texts, {tuple(each.prompt): each.tokens for each in seen.found()}


@define
class _Text:
    prompt: list[int]
    tokens: list[int]


class _Seen:
    def __init__(self) -> None:
        self._sequences: dict[int, Any] = {}

    def propose(self, sequences: Any) -> list[list[int]]:
        self._sequences |= {sequence.seq_id: sequence for sequence in sequences}
        return [[] for _ in sequences]

    def forget(self, seq_ids: Any) -> None:
        pass

    def reset(self) -> None:
        pass

    def found(self) -> list[_Text]:
        return [
            _Text(each.token_ids[: each.num_prompt_tokens], each.output_token_ids) for each in self._sequences.values()
        ]
