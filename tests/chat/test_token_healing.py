"""Taking the end of a prompt back, and the tokens that fit in its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_sdk.chat.token_healing import TokenPrefixes

TOKENS = [b"", b"a", b"b", b":", b"://", b"/", b"http", b" th", b"ab", b"aba", b"\xff", b"\xff\xff", b"a"]
A, B, COLON, SLASH, HTTP, TH, AB, FF = 1, 2, 3, 5, 6, 7, 8, 10


@pytest.mark.parametrize(
    ("prompt", "left", "data"),
    [
        ([HTTP, COLON], [HTTP], b":"),
        ([HTTP, COLON, SLASH], [HTTP], b":/"),  # "/" alone is in no longer token, both together are
        ([HTTP, A, B], [HTTP], b"ab"),
        ([HTTP, B, A, B], [HTTP, B], b"ab"),
        ([HTTP, FF], [HTTP], b"\xff"),
    ],
)
def test_as_much_is_taken_back_as_a_longer_token_begins_with(prompt: list[int], left: list[int], data: bytes) -> None:
    healed = TokenPrefixes(enumerate(TOKENS)).heal(prompt)
    assert healed.healing is not None
    assert (healed.token_ids, healed.healing.data) == (left, data)
    assert healed.healing.num_tokens == len(prompt) - len(left)


@pytest.mark.parametrize("prompt", [[COLON], [A, TH], [A, B, SLASH], [HTTP, 0], [HTTP, 99]])
def test_other_prompts_stay_as_they_are(prompt: list[int]) -> None:
    for tokens in TOKENS, []:
        healed = TokenPrefixes(enumerate(tokens)).heal(prompt)
        assert (healed.token_ids, healed.healing) == (prompt, None)


_TEXTS = st.text("ab", max_size=4).map(str.encode) | st.binary(max_size=2)


@given(st.lists(_TEXTS, max_size=30), _TEXTS.filter(bool))
def test_the_tokens_that_fit_are_found(tokens: list[bytes], data: bytes) -> None:
    found = TokenPrefixes(enumerate(tokens)).fitting(data).tolist()
    right = [
        place for place, token in enumerate(tokens) if token and (token.startswith(data) or data.startswith(token))
    ]
    assert sorted(found) == right
