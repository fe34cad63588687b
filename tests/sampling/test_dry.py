"""DRY against its plain description."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_sampler import naive_dry

import tiny
from paged_sdk.config.sampling import DryParams
from paged_sdk.sampling.dry import breaker_tokens, dry_penalties


def penalties(tokens: list[int], params: DryParams, breakers: tuple[tuple[int, ...], ...]) -> dict[int, float]:
    found, amounts = dry_penalties(np.array(tokens), params, breakers)
    assert len(set(found.tolist())) == len(found)
    return dict(zip(found.tolist(), amounts.tolist(), strict=True))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.builds(
        DryParams,
        multiplier=st.floats(0.1, 5.0),
        base=st.sampled_from([1.0, 1.1, 1.75, 4.0]),
        allowed_length=st.integers(0, 5),
    ),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
@example([1, 1, 1, 1, 1, 1], DryParams(multiplier=1.0), ())
@example([0, 1, 2, 3, 0, 1, 2], DryParams(multiplier=1.0), ((1, 2),))
@example([0, 1, 2, 3, 0, 1, 2], DryParams(multiplier=1.0), ((3, 0),))
def test_penalties_are_those_of_the_description(
    tokens: list[int], params: DryParams, breakers: tuple[tuple[int, ...], ...]
) -> None:
    expected = naive_dry(tokens, params, breakers)
    assert penalties(tokens, params, breakers) == pytest.approx(expected, rel=1e-6)


def test_a_long_repetition_stays_finite() -> None:
    passage = np.random.default_rng(0).integers(0, 50_000, 3000).tolist()
    for base, multiplier in ((1.75, 1.0), (1e308, 1e308), (1.0001, 1.0)):
        params = DryParams(multiplier=multiplier, base=base)
        found = penalties([*passage, *passage[:2000]], params, ())
        assert found[passage[2000]] == pytest.approx(
            min(multiplier * min(1.0001**1998, 1e38), 1e38) if base < 1.1 else 1e38
        )


def test_one_token_repeats_nothing() -> None:
    assert penalties([5], DryParams(multiplier=1.0, allowed_length=0), ()) == {}


def test_breakers_are_the_tokens_they_have_inside_a_text() -> None:
    def encode(text: str) -> list[int]:
        return tiny.tokenizer().encode(text, add_special_tokens=False).ids

    (newline,), (colon,), (quote,), (star,) = (encode(text) for text in ("\n", ":", '"', "*"))
    assert breaker_tokens(DryParams().sequence_breakers, encode) == ((newline,), (colon,), (quote,), (star,))
    assert breaker_tokens(["漢"], encode) == (tuple(encode("漢")),)
    assert len(encode("漢")) == 3


def test_breakers_of_a_tokenizer_that_marks_the_start_of_words() -> None:
    def encode(text: str) -> list[int]:
        return [ord(character) for character in "▁" + text]

    assert breaker_tokens(["\n", "::"], encode) == ((10,), (58, 58))


def test_a_breaker_that_merges_with_the_letter_before_it() -> None:
    vocabulary = {"ab": [7], "a": [1], "b": [2], "": []}
    assert breaker_tokens(["b"], vocabulary.__getitem__) == ((2,),)


def test_a_breaker_without_tokens_is_none() -> None:
    assert breaker_tokens(["\u200b"], lambda text: [1] if "a" in text else []) == ()
