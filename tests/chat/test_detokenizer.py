from __future__ import annotations

import time
from functools import cache

import pytest
from chat_data import TEXTS, byte_level_metadata, gpt2_like, pieces_of, sentencepiece_metadata, train_sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.chat.detokenizer import Detokenizer
from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.chat.tokenizer import Tokenizer


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "gpt2":
        return tokenizer_from_gguf(byte_level_metadata(gpt2_like(), "gpt-2"))
    return tokenizer_from_gguf(sentencepiece_metadata(train_sentencepiece()))


_kinds = st.sampled_from(["gpt2", "llama"])
_ids = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1200)), max_size=60)
_sizes = st.lists(st.integers(0, 4), max_size=40)


@settings(deadline=None, derandomize=True)
@given(_kinds, _ids, _sizes)
def test_the_pieces_are_the_whole(kind: str, ids: list[int], sizes: list[int]) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.append(piece) for piece in pieces_of(ids, sizes)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


@settings(deadline=None, derandomize=True)
@given(_kinds, st.text(max_size=60))
def test_whole_characters_appear_at_once_and_halves_never(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = ""
    for count, id in enumerate(ids, start=1):
        shown += detokenizer.append([id])
        data = tokenizer.decode_bytes(ids[:count], skip_special_tokens=True)
        whole = data.decode("utf-8", "ignore")  # ids are those of a text: only its end can be unfinished
        assert shown == (whole.removeprefix(" ") if tokenizer.strips_leading_space else whole)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(detokenizer.append([id]) for id in ids) + detokenizer.flush() == text


def test_an_emoji_waits_for_its_last_byte() -> None:
    tokenizer = tokenizer_of("llama")
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.append([id]) for id in ids if id is not None] == ["", "", "", "😀"]


def test_an_unfinished_character_is_flushed_as_one_replacement() -> None:
    tokenizer = tokenizer_of("gpt2")
    (first, *_) = tokenizer.encode("\U0001f9a9", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.append([first]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_have_no_text() -> None:
    tokenizer = tokenizer_of("gpt2")
    ids = tokenizer.encode("a<|im_end|>b</s>", add_special_tokens=False)
    assert Detokenizer(tokenizer).append(ids) == "ab" == tokenizer.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b</s>"


def test_the_space_of_a_first_word_stays_where_a_prompt_goes_on() -> None:
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode("world", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[0]).startswith(b" ")
    assert Detokenizer(tokenizer).append(ids) == "world"
    assert Detokenizer(tokenizer, continues_prompt=True).append(ids) == " world"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_time_is_linear_for_endless_unfinished_characters(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    id = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\x9f")
    detokenizer = Detokenizer(tokenizer)
    start = time.thread_time()
    text = "".join(detokenizer.append([id]) for _ in range(50_000))
    assert text == "\ufffd" * 50_000
    assert time.thread_time() - start < 20
