"""Tokenizers made of tiktoken.model: tokens are those of tiktoken's algorithm."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import tokenizers

from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.chat.gguf_tokenizer_export import gguf_from_text_processor
from paged_sdk.chat.text_processor import load_text_processor
from paged_sdk.chat.tiktoken_file import backend_from_tiktoken
from paged_sdk.errors import CheckpointError

TEXT: Final = (
    f"{json.__doc__}{random.__doc__}漢字と仮名、ひらがな。Größe, naïve café 12345 67 😀😀 aaaaaaaaaaa bananabanana\n\n"
)
ADDED: Final[dict[int, dict[str, Any]]] = {
    0: {"content": "[BOS]", "special": True},
    1: {"content": "[EOS]", "special": True},
    2: {"content": "<|im_end|>", "special": True},
    5: {"content": "<|tool|>", "special": False},
}


def merged(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Return a word's tokens as tiktoken makes them: the pair with the lowest rank is merged first, the leftmost of
    equals.
    """
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        found = [(ranks[left + right], at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in ranks]
        if not found:
            return [ranks[part] for part in parts]
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@cache
def vocabulary() -> dict[bytes, int]:
    """Return all bytes, and then the commonest pairs of tokens, one after the other."""
    words, tokens = [[bytes([byte]) for byte in word.encode()] for word in TEXT.split(" ")], []
    for _ in range(200):
        counts: dict[bytes, int] = {}
        for word in words:
            for left, right in pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        tokens.append(best)
        for word in words:
            at = 0
            while at < len(word) - 1:
                if word[at] + word[at + 1] == best:
                    word[at : at + 2] = [best]
                at += 1
    return {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *tokens])}


def write(directory: Path, ranks: Mapping[bytes, int], name: str = "TikTokenTokenizer") -> Path:
    """Write a checkpoint's tokenizer, with the added tokens after the vocabulary."""
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    path = directory / "tiktoken.model"
    path.write_text("\n".join(lines) + "\n")
    added = {str(len(ranks) + place): token for place, token in ADDED.items()}
    config = {"tokenizer_class": name, "bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_tokens_are_tiktokens(tmp_path: Path) -> None:
    ranks = vocabulary()
    write(tmp_path, ranks)
    tokenizer = load_text_processor(tmp_path).tokenizer
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    rng = random.Random(0)
    texts = [TEXT, *("".join(rng.choices(TEXT, k=60)) for _ in range(50))]
    texts += ["".join(rng.choices("aabn", k=30)) for _ in range(50)]
    for text in texts:
        words = [text[slice(*at)] for _, at in backend.pre_tokenizer.pre_tokenize_str(text)]
        expected = [token for word in words for token in merged(word.encode(), ranks)]
        assert "".join(words) == text
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        assert tokenizer.decode(expected) == text


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    ranks = vocabulary()
    write(tmp_path, ranks)
    tokenizer = load_text_processor(tmp_path).tokenizer
    text = "<|im_end|><|tool|><|reserved_token_460|>"
    assert tokenizer.encode(text, add_special_tokens=True) == [len(ranks) + 2, len(ranks) + 5, 460]
    assert tokenizer.special.bos == len(ranks)
    assert tokenizer.vocab_size == len(ranks) + 6


def test_gguf_files_have_the_same_tokenizer(tmp_path: Path) -> None:
    """llama.cpp merges Kimi's words without looking them up first, which makes a difference for odd vocabularies."""
    ranks = vocabulary()
    write(tmp_path, ranks)
    text = load_text_processor(tmp_path)
    metadata = gguf_from_text_processor(text, "deepseek2", len(ranks) + 6)
    assert metadata["tokenizer.ggml.pre"] == "kimi-k2"
    read = tokenizer_from_gguf({"general.architecture": "deepseek2"} | metadata)
    for each in (TEXT, *TEXT.split()):
        assert read.encode(each, add_special_tokens=False) == text.tokenizer.encode(each, add_special_tokens=False)
    write(tmp_path, {**ranks, b"qqq": len(ranks)})  # nothing merges to it
    with pytest.raises(CheckpointError, match="no name for its pre-tokenizer"):
        gguf_from_text_processor(load_text_processor(tmp_path), "deepseek2", len(ranks) + 7)


def test_a_class_that_is_not_known(tmp_path: Path) -> None:
    write(tmp_path, vocabulary(), "QWenTokenizer")
    with pytest.raises(CheckpointError, match="tokenizer_class = 'QWenTokenizer', and known is TikTokenTokenizer"):
        load_text_processor(tmp_path)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["YQ== 0", "Yg== 2"], "line 2 is 'Yg== 2'"),
        (["Y 0"], "line 1 is 'Y 0'"),
        (["YQ== 0", "Yg== 1"], "lacks one of the 256 bytes"),
        ([*(f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)), "YQ== 256"], "token twice"),
        ([""], "line 1 is ''"),
    ],
)
def test_malformed_files(lines: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError, match=told):
        backend_from_tiktoken(tmp_path / "tiktoken.model", "kimi-k2")
