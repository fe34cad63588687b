from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from attrs.exceptions import FrozenInstanceError
from chat_data import byte_level_metadata, gpt2_like, sentencepiece_metadata, smollm2_metadata, train_sentencepiece
from tokenizers import processors

from paged_sdk.chat.text_processor import load_text_processor, text_processor_from_gguf
from paged_sdk.config.sampling import GenerationDefaults
from paged_sdk.errors import CheckpointError, InvalidRequestError
from paged_sdk.types.messages import Message, TextMessageRole

HELLO = (Message(TextMessageRole.USER, "Hello, world!"),)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"


def write(directory: Path, config: dict[str, Any], **files: object) -> Path:
    backend = tokenizers.Tokenizer.from_str(gpt2_like().to_str())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    for name, content in {"tokenizer_config": {**names, **config}, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def judge_of(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_a_checkpoint_as_in_transformers(tmp_path: Path) -> None:
    generation = {"eos_token_id": [1, 9], "temperature": 0.5}
    write(tmp_path, {"chat_template": TEMPLATE, "model_max_length": 4096}, generation_config=generation)
    processor = load_text_processor(tmp_path)
    judge = judge_of(tmp_path)
    dicts = [{"role": "user", "content": "Hello, world!"}]
    assert processor.encode_chat(HELLO) == judge.apply_chat_template(dicts, return_dict=False)
    assert processor.encode_prompt("Hello, world!") == judge.encode("Hello, world!")
    assert processor.defaults == GenerationDefaults(temperature=0.5, eos_token_ids=(1, 9))
    assert processor.model_max_length == 4096
    # </s> is 1, <|im_end|> is 2: special, and what this template closes a turn with.
    assert processor.stop_token_ids == {1, 2, 9}
    with pytest.raises(FrozenInstanceError):
        processor.template = None  # type: ignore[misc]


def test_a_chat_begins_with_one_bos(tmp_path: Path) -> None:
    processor = load_text_processor(write(tmp_path, {"chat_template": TEMPLATE}))
    assert processor.encode_chat(HELLO)[:2].count(0) == 1
    assert processor.encode_prompt("<s>Hello").count(0) == 1
    assert processor.encode_prompt("Hello").count(0) == 1
    assert processor.encode_prompt("") == [0]


def test_marks_end_a_text_only_where_the_template_uses_them(tmp_path: Path) -> None:
    processor = load_text_processor(write(tmp_path, {"chat_template": "{{ messages[0].content }}<|end|>"}))
    assert processor.stop_token_ids == {1}
    assert load_text_processor(write(tmp_path, {})).stop_token_ids == {1}


def test_marks_that_are_plain_text_end_nothing() -> None:
    metadata = byte_level_metadata(gpt2_like(), "gpt-2")
    metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
    assert text_processor_from_gguf(metadata, chat_template=TEMPLATE).stop_token_ids == {1}


def test_without_a_template_chats_are_refused_and_completions_work(tmp_path: Path) -> None:
    processor = load_text_processor(write(tmp_path, {}))
    with pytest.raises(InvalidRequestError, match=r"with_chat_template.*send_completion_request"):
        processor.encode_chat(HELLO)
    assert processor.encode_prompt("Hello")


def test_which_template_wins(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": [{"name": "default", "template": "config"}, {"name": "rag", "template": "r"}]})
    assert load_text_processor(tmp_path).tokenizer.decode(load_text_processor(tmp_path).encode_chat(HELLO)) == "config"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    processor = load_text_processor(tmp_path)
    assert processor.tokenizer.decode(processor.encode_chat(HELLO)) == "file"
    processor = load_text_processor(tmp_path, chat_template="{{ 'given' }}")
    assert processor.tokenizer.decode(processor.encode_chat(HELLO)) == "given"


def test_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", {})
    (tmp_path / "model").mkdir()
    processor = load_text_processor(tmp_path / "model", tokenizer_json=tmp_path / "other" / "tokenizer.json")
    assert processor.encode_prompt("Hello") == load_text_processor(tmp_path / "other").encode_prompt("Hello")
    with pytest.raises(CheckpointError, match="No such file"):
        load_text_processor(tmp_path / "model", tokenizer_json=tmp_path / "none.json")


def test_a_checkpoint_without_tokenizer_json_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load_text_processor(tmp_path)


def test_a_prompt_of_no_tokens_is_refused() -> None:
    processor = text_processor_from_gguf(byte_level_metadata(gpt2_like(), "gpt-2"), chat_template="{{ '' }}")
    with pytest.raises(InvalidRequestError, match="prompt has no tokens"):
        processor.encode_prompt("")
    with pytest.raises(InvalidRequestError, match="makes no text") as caught:
        processor.encode_chat(HELLO)
    assert caught.value.field == "messages"


def test_smollm2() -> None:
    processor = text_processor_from_gguf(smollm2_metadata())
    assert processor.stop_token_ids == {2}
    assert processor.model_max_length == 8192
    assert processor.defaults == GenerationDefaults()
    ids = processor.encode_chat(HELLO)
    assert ids[0] == 1
    text = processor.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHello, world!<|im_end|>\n<|im_start|>assistant\n")


def test_thinking_reaches_the_template() -> None:
    source = "{{ 'unset' if enable_thinking is not defined else enable_thinking }}"
    processor = text_processor_from_gguf(byte_level_metadata(gpt2_like(), "gpt-2"), chat_template=source)
    for given, shown in ((None, "unset"), (True, "True"), (False, "False")):
        ids = processor.encode_chat(HELLO, enable_thinking=given)
        assert processor.tokenizer.decode(ids) == shown


def test_gguf_ends() -> None:
    metadata = byte_level_metadata(gpt2_like(), "gpt-2", eot_token_id=2, eom_token_id=7)
    metadata["tokenizer.chat_template"] = "{{ eos_token }}"
    processor = text_processor_from_gguf(metadata)
    assert processor.stop_token_ids == {1, 2, 7}
    assert processor.encode_chat(HELLO) == [1]
    assert processor.model_max_length is None


def test_gguf_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, {})
    metadata = sentencepiece_metadata(train_sentencepiece())
    processor = text_processor_from_gguf(metadata, tokenizer_json=tmp_path / "tokenizer.json")
    assert processor.encode_prompt("Hello") == load_text_processor(tmp_path).encode_prompt("Hello")
    assert processor.template is None


def test_gguf_without_a_template_has_that_of_its_other_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": "{{ 'beside it' }}"})
    metadata = sentencepiece_metadata(train_sentencepiece())

    def said(**given: str) -> str:
        processor = text_processor_from_gguf(metadata, tokenizer_json=tmp_path / "tokenizer.json", **given)
        return processor.tokenizer.decode(processor.encode_chat(HELLO))

    assert said() == "beside it"
    metadata["tokenizer.chat_template"] = "{{ 'its own' }}"
    assert said() == "its own"
    assert said(chat_template="{{ 'given' }}") == "given"
