"""Every processor's states: however they got to a position, they do what a new one does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import encode, make_grammar, make_request, make_row
from torch import Tensor

from paged_sdk.chat.thoughts import ThoughtLimit, ThoughtMarks
from paged_sdk.chat.token_healing import Healing, TokenPrefixes
from paged_sdk.config.sampling import DryParams, SamplingParams
from paged_sdk.sampling.failures import NO_FAILURES, Failures
from paged_sdk.sampling.processor import ALL_TOKENS, ConstantState, Processor, ProcessorState
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.sampling.text_state import TextState
from paged_sdk.scheduler.request import Request
from paged_sdk.types.constraint import Constraint
from paged_sdk.types.request_options import RequestOptions

CPU = torch.device("cpu")
VOCAB_SIZE: Final = 12
PROCESSORS: Final = default_processors(VOCAB_SIZE, encode)

EVERYTHING: Final = SamplingParams(
    temperature=0.0,
    logits_bias={3: 1.5, 4: -math.inf},
    min_tokens=4,
    repetition_penalty=1.5,
    frequency_penalty=0.5,
    presence_penalty=0.25,
    dry_params=DryParams(multiplier=1.0, allowed_length=1),
)
TOKENS: Final = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)


TOKEN_BYTES: Final = [b"a", b"b", b"", b"c", b"ab", b"ba", b"abc", b"d", b"aa", b"bb", b"cab", b"e"]
PREFIXES: Final = TokenPrefixes(enumerate(TOKEN_BYTES))
GRAMMAR: Final = make_grammar(Constraint.regex("(ab*c?|(ba|c)+d)*"), TOKEN_BYTES)

LIMIT = ThoughtLimit(ThoughtMarks("<", ">"), 3, (1, 2), True, lambda token_ids: bytes(len(token_ids)))


def needs_everything(prompt: Sequence[int] = (7, 8)) -> Request:
    """Return a request that needs every processor."""
    request = make_request(EVERYTHING, prompt)
    options = RequestOptions(logits_processors=(lower_last,))
    return evolve(request, options=options, healing=Healing(b"abc", 2, PREFIXES), thought_limit=LIMIT, grammar=GRAMMAR)


def lower_last(token_ids: Sequence[int], logits: Tensor) -> None:
    logits[token_ids[-1]] -= len(token_ids)


def apply_alone(processor: Processor[Any], logits: Tensor, change: Any) -> Tensor:
    """Apply a change to one row, and return the row: zeros if its request would end."""
    processor.prepare([(0, change)])
    return logits.zero_() if processor.apply(logits, [(0, change)]) else logits


def applied(processor: Processor[Any], state: ProcessorState[Any]) -> Tensor:
    """Return what a processor makes of some logits at a state's position."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    change = state.change()
    return logits if change is None else apply_alone(processor, logits, change)


def check(processor: Processor[Any], request: Request, state: ProcessorState[Any], output: Sequence[int]) -> None:
    fresh = processor.begin(request)
    fresh.advance(output)
    assert torch.equal(applied(processor, state), applied(processor, fresh))


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: type(processor).__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_states_are_those_that_are_made_anew(processor: Processor[Any], data: st.DataObject) -> None:
    request = needs_everything(data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)))
    assert processor.applies_until(request) > 0
    texts: list[tuple[ProcessorState[Any], list[int]]] = [(processor.begin(request), [])]
    for _ in range(data.draw(st.integers(1, 8), label="operations")):
        state, output = texts[data.draw(st.integers(0, len(texts) - 1), label="text")]
        match data.draw(st.sampled_from(["advance", "advance", "roll back", "fork"]), label="then"):
            case "advance":
                gained = data.draw(TOKENS)
                state.advance(gained)
                output += gained
            case "roll back":
                num_tokens = data.draw(st.integers(0, len(output)))
                state.roll_back(num_tokens)
                del output[len(output) - num_tokens :]
            case "fork":
                texts.append((state.fork(), output.copy()))
        for each, its_output in texts:
            check(processor, request, each, its_output)


@settings(max_examples=40, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=6))
def test_a_text_moves_to_any_position(outputs: list[list[int]]) -> None:
    """Forward, back and sideways; and so does another choice that was forked off on the way."""
    request = needs_everything()
    texts = [TextState.begin(request, PROCESSORS)]
    for output in outputs:
        expected = TextState.begin(request, PROCESSORS)
        expected.move_to(make_row(request, output))
        for text in texts:
            text.move_to(make_row(request, output))
            for (place, change), (its_place, its_change) in zip(text.changes(), expected.changes(), strict=True):
                assert place == its_place
                logits, its_logits = torch.randn(2, 1, VOCAB_SIZE).fill_(0.5)
                found = apply_alone(PROCESSORS[place], logits, change)
                assert torch.equal(found, apply_alone(PROCESSORS[place], its_logits, its_change))
        texts.append(texts[0].fork())


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: type(processor).__name__)
def test_changes_stay_when_their_state_moves_on(processor: Processor[Any]) -> None:
    """They are worked out before the logits are there, at several positions of a text."""
    state = processor.begin(needs_everything([5, 6, 5]))
    expected = applied(processor, state)
    change = state.change()
    if change is not None:
        processor.prepare([(0, change)])
    state.advance([6, 5, 6, 5])
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    if change is not None:
        processor.apply(logits, [(0, change)])
    assert torch.equal(logits, expected)


def test_nothing_applies_to_a_plain_request() -> None:
    request = make_request(SamplingParams.deterministic())
    assert [processor.applies_until(request) for processor in PROCESSORS] == [0] * len(PROCESSORS)


def test_choices_fork_what_the_first_has_worked_out() -> None:
    class Counting(Processor[int]):
        """Counts how often it begins."""

        num_begun = 0

        def applies_until(self, request: Request) -> int:
            return ALL_TOKENS

        def begin(self, request: Request) -> ConstantState[int]:
            self.num_begun += 1
            return ConstantState(0)

        def apply(self, logits: Tensor, changes: Sequence[tuple[int, int]]) -> Failures:
            return NO_FAILURES

    processor = Counting()
    sampler = Sampler(VOCAB_SIZE, CPU, [processor])
    request = make_request(EVERYTHING)
    sampler.prepare([make_row(request, seq_id=4, num_samples=3)])
    rows = [make_row(request, [choice], seq_id=4 + choice, choice_index=choice) for choice in range(3)]
    sampler.prepare(rows)
    assert processor.num_begun == 1
    sampler.prepare([make_row(make_request(EVERYTHING), seq_id=5)])
    assert processor.num_begun == 2


def test_a_processor_of_ones_own_in_the_list() -> None:
    """Nothing but the list knows of it."""

    class EvenTokens(Processor[bool]):
        """Bans odd tokens, and even ones after an even output."""

        def applies_until(self, request: Request) -> int:
            return 2

        def begin(self, request: Request) -> ProcessorState[bool]:
            return ConstantState(True)

        def apply(self, logits: Tensor, changes: Sequence[tuple[int, bool]]) -> Failures:
            logits[[row for row, _ in changes], 1::2] = -math.inf
            return NO_FAILURES

    sampler = Sampler(VOCAB_SIZE, CPU, [*PROCESSORS, EvenTokens()])
    request = make_request(SamplingParams.deterministic())
    logits = torch.arange(float(VOCAB_SIZE))[None]
    for length, expected in ((0, 10), (1, 10), (2, 11)):
        prepared = sampler.prepare([make_row(request, [0] * length)])
        assert prepared.is_plain == (length == 2)
        assert sampler.sample(logits.clone(), prepared).token_ids == [[expected]]


def test_a_part_of_mixed_rows_is_plain_if_its_rows_are() -> None:
    sampler = Sampler(VOCAB_SIZE, CPU, PROCESSORS)
    greedy, drawing = (
        make_request(SamplingParams.deterministic()),
        make_request(SamplingParams(temperature=1.0, seed=0)),
    )
    prepared = sampler.prepare([make_row(greedy, seq_id=0), make_row(drawing, seq_id=1), make_row(greedy, seq_id=2)])
    assert not prepared.is_plain
    assert prepared.part([0, 2]).is_plain
    assert not prepared.part([1]).is_plain
    assert not prepared.part([1, 2]).is_plain
