from __future__ import annotations

from functools import cache

from chat_data import byte_level_metadata, gpt2_like, pieces_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.chat.output_text import OutputText
from paged_sdk.chat.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(gpt2_like(), "gpt-2"))


def up_to_a_stop_string(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the stop string that is complete first; the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 300), max_size=40),
    st.lists(st.text(alphabet="abe\n\ufffd", min_size=1, max_size=3), max_size=3),
    st.lists(st.integers(0, 4), max_size=20),
)
@example([159, 159], ["\ufffd\ufffd"], [1, 1])
def test_text_depends_on_the_tokens_alone(ids: list[int], stops: list[str], sizes: list[int]) -> None:
    output = OutputText(tokenizer(), stops)
    shown = ""
    for piece in pieces_of(ids, sizes):
        is_stopped = output.is_stopped
        text = output.push(piece)
        assert not (is_stopped and text)
        shown += text
    shown += output.flush()
    assert (shown, output.is_stopped) == up_to_a_stop_string(tokenizer().decode(ids), stops)


def test_only_the_end_completes_a_stop_string() -> None:
    """Half a character may still become a whole one; at the end it is a U+FFFD."""
    (half, *_) = tokenizer().encode("\U0001f9a9", add_special_tokens=False)
    output = OutputText(tokenizer(), ["\ufffd"])
    assert output.push([*tokenizer().encode("so", add_special_tokens=False), half]) == "so"
    assert not output.is_stopped
    assert output.flush() == ""
    assert output.is_stopped
