"""Tokenizers that know more tokens than their model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import tiny
from paged_sdk import (
    BlockingModel,
    CheckpointError,
    GgufModelBuilder,
    InvalidRequestError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.build.vocabulary import check_vocabulary
from paged_sdk.chat.tokenizer import SpecialTokens, Tokenizer

SHORT = SamplingParams(temperature=0, max_len=3)


def checkpoint_with(tmp_path: Path, *, post_processor: Any = None, added: str = "<|extra|>") -> TextModelBuilder:
    """Write a checkpoint whose tokenizer has one token more than the model."""
    directory = tiny.make_checkpoint("llama", tmp_path)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    beyond = {"id": tiny.VOCAB_SIZE, "content": added, "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append(beyond | flags)
    tokenizer["post_processor"] = post_processor
    path.write_text(json.dumps(tokenizer))
    return TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)


def test_one_request_with_an_unknown_token_is_refused_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paged_sdk"), BlockingModel(checkpoint_with(tmp_path).build()) as model:
        assert "1 tokens of" in caplog.text
        assert "are refused" in caplog.text
        before = model.send_completion_request("Hello", SHORT)
        with pytest.raises(InvalidRequestError, match=r"512 \('<\|extra\|>'\).*vocabulary of 512") as caught:
            model.send_completion_request("Hello <|extra|> there", SHORT)
        assert (caught.value.field, caught.value.value) == ("prompt", tiny.VOCAB_SIZE)
        assert caught.value.request_id
        with pytest.raises(InvalidRequestError, match="prompt = 512"):
            model.send_completion_request([tiny.VOCAB_SIZE], SHORT)
        assert model.send_completion_request("Hello", SHORT).choices == before.choices
        assert model.stats().blocks_used == 0


def test_a_chat_template_that_writes_an_unknown_token(tmp_path: Path) -> None:
    builder = checkpoint_with(tmp_path).with_chat_template("<|extra|>{{ messages[0].content }}")
    with BlockingModel(builder.build()) as model:
        with pytest.raises(InvalidRequestError, match="chat template") as caught:
            model.send_chat_request([{"role": "user", "content": "x"}])
        assert caught.value.field == "messages"
        assert model.send_completion_request("Hello", SHORT).choices


def test_an_unknown_token_around_every_text_is_refused_at_load(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|extra|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|extra|>": {"id": "<|extra|>", "ids": [tiny.VOCAB_SIZE], "tokens": ["<|extra|>"]}},
    }
    with pytest.raises(CheckpointError, match="token id 512 around every text"):
        BlockingModel(checkpoint_with(tmp_path, post_processor=template).build())


def test_a_gguf_file_with_more_tokens_than_embeddings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_token_list = gguf.GGUFWriter.add_token_list

    def longer(self: gguf.GGUFWriter, tokens: Any) -> None:
        add_token_list(self, [*tokens, "beyond"])

    for name in ("add_token_types", "add_token_scores"):
        add = getattr(gguf.GGUFWriter, name)
        monkeypatch.setattr(
            gguf.GGUFWriter, name, lambda self, values, add=add: add(self, [*np.asarray(values).tolist(), 1])
        )
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", longer)
    path = tiny.make_gguf(tmp_path)
    with pytest.raises(CheckpointError, match=r"1 tokens of .* beyond the model's vocabulary of 512"):
        BlockingModel(GgufModelBuilder(path.parent, [path.name]).with_num_threads(1).build())


def test_more_embeddings_than_tokens_are_usual() -> None:
    tokenizer = Tokenizer(tiny.tokenizer(), SpecialTokens())
    for size in (tiny.VOCAB_SIZE, tiny.VOCAB_SIZE + 64):
        check_vocabulary(tokenizer, size, Path("x.gguf"), is_own=True)
    assert tokenizer.num_beyond(tiny.VOCAB_SIZE - 10) == 10
