"""Tokenizers that are malformed, or meant to take all time or memory: a typed error, at load where it can be seen."""

from __future__ import annotations

import base64
import json
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from paged_sdk.chat.generation_config import read_generation_defaults
from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.chat.text_processor import load_text_processor, text_processor_from_gguf
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.errors import CheckpointError, InvalidRequestError


def write(directory: Path, **changes: Any) -> Path:
    """Write the tiny checkpoints' tokenizer.json with some sections replaced."""
    content = json.loads(tiny.tokenizer().to_str()) | changes
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory / "tokenizer.json"


def replacing(found: str, content: str, *, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: found}, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(*replacements: bytes) -> dict[str, Any]:
    data = struct.pack("<I", 4) + bytes(4) + b"\0".join(replacements) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


@pytest.mark.filterwarnings("ignore")
class TestTokenizerJson:
    @pytest.mark.parametrize(
        "changes",
        [
            {"normalizer": replacing("a", "b" * 20_000)},
            {"normalizer": sequence(*[replacing("a", "aa")] * 40)},
            {"normalizer": sequence(sequence(*[replacing("a", "aaaa")] * 5), sequence(*[replacing("a", "aaaa")] * 5))},
            {"normalizer": replacing("x*", "y" * 20_000, kind="Regex")},
            {"normalizer": sequence(*[{"type": "Prepend", "prepend": "ab"}] * 20)},
            {"normalizer": {"type": "Prepend", "prepend": "a" * 20_000}},
            {"normalizer": sequence(*[{"type": "NFKD"}] * 10)},
        ],
    )
    def test_normalizers_that_explode(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        started = time.thread_time()
        with pytest.raises(CheckpointError, match=r"its normalizer makes a text up to .* times longer"):
            Tokenizer.from_file(write(tmp_path, **changes))
        assert time.thread_time() - started < 10

    @pytest.mark.parametrize(
        "changes",
        [
            {"normalizer": replacing("", "b")},
            {"normalizer": replacing("", "b", kind="Regex")},
            {"normalizer": replacing("(", "b", kind="Regex")},
            {"normalizer": charsmap(b"a" * 20_000)},
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
            {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}},
            {"model": {"type": "Unigram", "vocab": [], "unk_id": 5}},
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"}},
            {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
            {"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}},
            {"decoder": None},
            {"added_tokens": [{"id": 5}]},
            {"version": None},
        ],
    )
    def test_what_cannot_encode(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError):
            Tokenizer.from_file(write(tmp_path, **changes))

    def test_a_vocabulary_that_is_not_unicode(self, tmp_path: Path) -> None:
        path = write(tmp_path, model={"type": "BPE", "vocab": {"\ud800": 0}, "merges": []})
        with pytest.raises(CheckpointError, match="hex escape"):
            Tokenizer.from_file(path)

    def test_marks_without_end(self, tmp_path: Path) -> None:
        mark = {"SpecialToken": {"id": "<x>", "type_id": 0}}
        text = [{"Sequence": {"id": which, "type_id": 0}} for which in "AB"]
        special = {"<x>": {"id": "<x>", "ids": [0] * 1000, "tokens": ["<x>"] * 1000}}
        path = write(
            tmp_path,
            post_processor={
                "type": "TemplateProcessing", "single": [mark, mark, text[0]], "pair": text, "special_tokens": special
            },
        )  # fmt: skip
        with pytest.raises(CheckpointError, match="puts 2000 tokens around a text"):
            Tokenizer.from_file(path)

    def test_a_normalizer_that_only_lengthens_long_texts_too_much(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_file(write(tmp_path, normalizer=replacing("x", "y" * 5000)))
        assert tokenizer.decode(tokenizer.encode("axb", add_special_tokens=False)) == f"a{'y' * 5000}b"
        with pytest.raises(InvalidRequestError, match="at most 838 are allowed"):
            tokenizer.encode("x" * 1000, add_special_tokens=False)

    def test_an_expression_that_takes_exponential_time(self, tmp_path: Path) -> None:
        split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
        tokenizer = Tokenizer.from_file(write(tmp_path, pre_tokenizer=split))
        started = time.thread_time()
        with pytest.raises(InvalidRequestError, match=r"tokenizer failed at this text: .*retry-limit"):
            tokenizer.encode("a" * 60 + "!", add_special_tokens=False)
        assert time.thread_time() - started < 10
        assert tokenizer.encode("b", add_special_tokens=False)

    @pytest.mark.parametrize(
        "config",
        [
            {"bos_token": "\ud800"},
            {"additional_special_tokens": ["\udc00"]},
            {"chat_template": "\ud800"},
            {"added_tokens_decoder": {"700": {"content": "\ud800"}}},
            {"added_tokens_decoder": {"x": {"content": "a"}}},
            {"added_tokens_decoder": {"x" * 5000: {"content": "a"}}},
            {"added_tokens_decoder": {"9000": {"content": "a" * 5000}}},
            {"added_tokens_decoder": [1]},
            {"model_max_length": float("nan")},
            {"model_max_length": -5},
            {"model_max_length": True},
            {"bos_token": 10**400},
            {"chat_template": [{"name": "x" * 5000, "template": ""}, {"name": "b", "template": ""}]},
        ],
    )
    def test_the_config_beside_it(self, tmp_path: Path, config: dict[str, Any]) -> None:
        write(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError) as caught:
            load_text_processor(tmp_path)
        assert len(str(caught.value)) < 600


GPT2: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<e>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}
LLAMA: dict[str, Any] = GPT2 | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, -1.0, -2.0, 0.0]}
ODD: tuple[Any, ...] = (
    None, True, -1, 4, 2**31, 2**63, 1.5, float("nan"), "", "x", [], [1], ["a"], [[1]], [None], ["a", 1], [1.5] * 4,
    [-1] * 4, [2**63] * 4, ["a"] * 4, ["", "", "", ""], np.zeros((2, 2)), np.array(["a", "b", "ab", "<e>"], object),
)  # fmt: skip
KEYS = (
    "model", "pre", "tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id", "unknown_token_id",
    "padding_token_id", "eot_token_id", "eom_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
)  # fmt: skip


class TestGguf:
    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("base", [GPT2, LLAMA], ids=["gpt2", "llama"])
    def test_metadata_of_wrong_types(self, base: Mapping[str, Any], key: str) -> None:
        for value in ODD:
            try:
                text_processor_from_gguf({**base, f"tokenizer.ggml.{key}": value})
            except CheckpointError as error:
                assert len(str(error)) < 1000

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("tokens", [1, 2, 3, 4], "holds int: expected an array of str"),
            ("tokens", [], "one token or more"),
            ("token_type", ["1", "1", "1", "3"], "token_type holds str: expected an array of int"),
            ("token_type", [1.0, 1.0, 1.0, 3.0], "token_type holds float"),
            ("merges", [["a", "b"]], "merges holds list: expected an array of str"),
            ("merges", "a b", "merges holds str: expected an array of str"),
            ("eos_token_id", "3", "eos_token_id = '3' is not a token id"),
            ("eos_token_id", [3], r"eos_token_id = \[3\] is not a token id"),
            ("eos_token_id", 4, "eos_token_id = 4 is not a token id"),
            ("add_bos_token", "yes", "add_bos_token = 'yes': expected true or false"),
            ("eot_token_id", "x", "eot_token_id = 'x': expected a 32-bit int"),
        ],
    )
    def test_what_is_said_of_them(self, key: str, value: object, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            text_processor_from_gguf({**GPT2, f"tokenizer.ggml.{key}": value})

    def test_tokens_whose_parts_nobody_could_look_up(self) -> None:
        for tokens in (["a" * 10**6, "b", "c", "d"], [f"{number:04000}" for number in range(5000)]):
            size = len(tokens)
            metadata = LLAMA | {
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [1] * size,
                "tokenizer.ggml.scores": [0.0] * size,
            }
            with pytest.raises(CheckpointError, match="of up to 4096 characters"):
                tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": 10**400},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "1"},
        {"top_k": 2**31},
        {"top_k": 10**400},
        {"top_k": -1},
        {"top_k": True},
        {"top_p": 0},
        {"min_p": 10**400},
        {"repetition_penalty": 0},
        {"eos_token_id": 2**31},
        {"eos_token_id": [1, 10**400]},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": [[1]]},
    ],
)
def test_a_generation_config_with_odd_values(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is not allowed") as caught:
        read_generation_defaults(tmp_path)
    assert len(str(caught.value)) < 500
