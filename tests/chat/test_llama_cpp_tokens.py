"""llama.cpp encodes texts as the tokenizers that are built here of the same metadata."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chat_data import (
    TEXTS,
    byte_level_metadata,
    long_text,
    sentencepiece_metadata,
    train_byte_level,
    train_sentencepiece,
    unigram_metadata,
)
from test_gguf_word_pieces import trained
from tokenizers import pre_tokenizers

from gguf_encoder_files import word_piece_metadata
from llamacpp import LlamaCpp
from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.chat.pre_tokenizers import PRE_TOKENIZERS
from paged_sdk.weights.gguf.writer import GgufValue, PlannedTensor, write_gguf_file

pytest.importorskip("xllamacpp", reason="it has wheels for Linux on x86-64 alone")

#: llama.cpp's expressions know no case of letters but ASCII's, and no marks, where the models' own do.
NO_MARKS = ("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "kimi-k2")
ONE_CASE = ("tiny_aya", "cohere2moe", "youtu", "kimi-k2")
#: It does otherwise: digits of deepseek-llm in runs, two spaces before afmoe's digits, and "default" as Falcon.
OTHERWISE = ("default", "deepseek-llm", "afmoe")


@cache
def texts() -> list[str]:
    """Return texts of composed characters, since llama.cpp composes none."""
    return [unicodedata.normalize("NFC", text).replace("\0", "") for text in (*TEXTS, long_text()[:2000])]


@cache
def uncut_words() -> Mapping[str, Any]:
    """Return a vocabulary whose merges cross every boundary that a cut could be missing at."""
    uncut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level_metadata(train_byte_level(uncut, vocab_size=2000), "default", add_bos_token=False)


def zeros(shape: tuple[int, ...]) -> Iterator[npt.NDArray[np.uint8]]:
    yield np.zeros(shape, np.float32).view(np.uint8).reshape(-1)


def judge_of(vocabulary: Mapping[str, Any], path: Path) -> LlamaCpp:
    """Return llama.cpp with a tiny model of a vocabulary."""
    shape = {"context_length": 512, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    shape |= {"attention.head_count": 1, "attention.head_count_kv": 1}
    metadata: dict[str, Any] = {f"llama.{key}": value for key, value in shape.items()}
    metadata |= {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in vocabulary.items():
        metadata[key] = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.{name}.weight": (32, 32) for name in matrices}
    shapes |= dict.fromkeys(("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"), (32,))
    shapes["token_embd.weight"] = (len(metadata["tokenizer.ggml.tokens"]), 32)
    values = {key: GgufValue.of(value) for key, value in metadata.items()}
    tensors = [
        PlannedTensor(name=name, shape=shape, type=0, parts=partial(zeros, shape)) for name, shape in shapes.items()
    ]
    write_gguf_file(path, values, tensors)
    judge = LlamaCpp(path)
    path.unlink()
    return judge


def names() -> Iterator[Any]:
    """Return every name, of which one for each way is short enough for the ordinary suite."""
    seen = set()
    for name, way in PRE_TOKENIZERS.items():
        if name not in OTHERWISE:
            yield pytest.param(name, marks=[pytest.mark.long] if way in seen else [])
            seen.add(way)


@pytest.mark.parametrize("pre", list(names()))
def test_words_are_cut_alike(pre: str, tmp_path: Path) -> None:
    metadata = {**uncut_words(), "tokenizer.ggml.pre": pre}
    tokenizer, judge = tokenizer_from_gguf(metadata), judge_of(metadata, tmp_path / "m.gguf")
    compared = 0
    for text in texts():
        has_marks = any(unicodedata.category(sign).startswith("M") for sign in text)
        has_cases = any(first.islower() and second.isupper() for first, second in pairwise(text))
        if not (has_marks and pre in NO_MARKS) and not (has_cases and pre in ONE_CASE):
            assert tokenizer.encode(text, add_special_tokens=False) == judge.encode(text), text
            compared += 1
    assert compared >= len(TEXTS) // 2


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}])
def test_sentencepieces_merges(options: dict[str, Any], tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(train_sentencepiece(**options), add_space_prefix=not options)
    tokenizer, judge = tokenizer_from_gguf(metadata), judge_of(metadata, tmp_path / "m.gguf")
    for text in (*texts(), "a <0x41> b", "<s>hi</s>"):
        assert tokenizer.encode(text, add_special_tokens=False) == judge.encode(text), text
        assert tokenizer.encode(text, add_special_tokens=True)[:1] == judge.encode(text, add_special=True)[:1]


def test_unigrams_pieces(tmp_path: Path) -> None:
    ways = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "byte_fallback": False}
    trained = train_sentencepiece(model_type="unigram", hard_vocab_limit=False, **ways)
    metadata = unigram_metadata(trained)
    tokenizer, judge = tokenizer_from_gguf(metadata), judge_of(metadata, tmp_path / "m.gguf")
    for text in texts():
        for special in (True, False):
            assert tokenizer.encode(text, add_special_tokens=special) == judge.encode(text, add_special=special), text


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces(lowercase: bool, tmp_path: Path) -> None:
    """It takes all marks for accents, and Korean syllables apart in another way."""
    pieces = trained(lowercase)
    spelled = word_piece_metadata(pieces, pieces.get_vocab_size(), normalizer__lowercase=lowercase)
    metadata = {"general.architecture": "llama", **spelled}
    tokenizer, judge = tokenizer_from_gguf(metadata), judge_of(metadata, tmp_path / "m.gguf")
    compared = 0
    for text in texts():
        if not any(unicodedata.category(sign) == "Mc" or "가" <= sign <= "힣" for sign in text):
            for special in (True, False):
                assert tokenizer.encode(text, add_special_tokens=special) == judge.encode(text, add_special=special), (
                    text
                )
            compared += 1
    assert compared >= len(TEXTS) // 2
