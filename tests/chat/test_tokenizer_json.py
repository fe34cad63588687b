"""tokenizer.json and tokenizer_config.json, judged by transformers on the same directory."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import tokenizers
from chat_data import TEXTS, gpt2_like, long_text
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from paged_sdk.chat.pieces import BYTE_LEVEL_ALPHABET, PieceDecoder
from paged_sdk.chat.tokenizer import SpecialTokens, Tokenizer
from paged_sdk.chat.tokenizer_config import TokenizerConfig
from paged_sdk.errors import CheckpointError, InvalidRequestError


def copy_of(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(backend.to_str())


def write(directory: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def load(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(directory / "tokenizer.json", TokenizerConfig.read(directory))


def judge_of(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend = copy_of(backend)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return backend


_FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
_ADDED = {
    "0": {"content": "<s>", **_FLAGS, "special": True},
    "600": {"content": "<tool>", **_FLAGS, "rstrip": True, "special": False},
    "601": {"content": "<|end|>", **_FLAGS, "lstrip": True, "special": True},
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    "objects": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", **_ADDED["0"]},
        "eos_token": "</s>",
    },
    "added": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "added_tokens_decoder": _ADDED,
        "extra_special_tokens": ["<|im_end|>", "<|more|>"],
    },
    "bos flags, which tokenizer.json overrides": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": False,
    },
}


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("config", _CONFIGS.values(), ids=_CONFIGS)
def test_as_in_transformers(tmp_path: Path, config: dict[str, Any], around: bool) -> None:
    directory = write(tmp_path, with_bos(gpt2_like()) if around else gpt2_like(), config)
    tokenizer, judge = load(directory), judge_of(directory)
    assert tokenizer.vocab_size == len(judge)
    assert tokenizer.special.bos == judge.bos_token_id
    assert tokenizer.special.eos == judge.eos_token_id
    for text in (*TEXTS, long_text(), "a <|end|> b<tool>  c<|im_end|> d<|more|></s>"):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == judge.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == judge.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == judge.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == judge.decode(ids)


def unigram() -> tokenizers.Tokenizer:
    """Return a vocabulary with Metaspace, as SentencePiece's unigram models become."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([*TEXTS, long_text()], trainer)
    return backend


def test_a_metaspace_vocabulary() -> None:
    backend = unigram()
    tokenizer = Tokenizer(copy_of(backend), SpecialTokens())
    assert tokenizer.strips_leading_space
    for text in ("Hello, world!", "  two spaces", "zero"):
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == backend.encode(text).ids
    ids = backend.encode("Hello, world! The quick brown fox").ids
    assert tokenizer.decode(ids) == backend.decode(ids) == "Hello, world! The quick brown fox"


def test_a_text_that_begins_with_bos_gets_no_second_one() -> None:
    tokenizer = Tokenizer(with_bos(gpt2_like()), SpecialTokens(bos=0, eos=1, prefix=(0,)))
    bare = tokenizer.encode("text", add_special_tokens=False)
    assert tokenizer.encode("text", add_special_tokens=True) == [0, *bare]
    assert tokenizer.encode("<s>text", add_special_tokens=True) == [0, *bare]
    assert tokenizer.encode("<s>text", add_special_tokens=False) == [0, *bare]


def test_truncation_and_padding_of_the_file_are_not_ours(tmp_path: Path) -> None:
    backend = copy_of(gpt2_like())
    backend.enable_truncation(4)
    backend.enable_padding(length=400)
    tokenizer = load(write(tmp_path, backend, {}))
    assert tokenizer.encode(TEXTS[1], add_special_tokens=True) == gpt2_like().encode(TEXTS[1]).ids


def test_added_tokens_are_literal_text() -> None:
    backend = copy_of(gpt2_like())
    backend.add_tokens([tokenizers.AddedToken("<é>", normalized=False)])
    tokenizer = Tokenizer(backend, SpecialTokens())
    assert tokenizer.decode(tokenizer.encode("a<é>b", add_special_tokens=False)) == "a<é>b"


def test_the_alphabet_is_gpt2s() -> None:
    assert set(BYTE_LEVEL_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_LEVEL_ALPHABET.values()) == list(range(256))
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("Ā \n€😀")
    decoder = PieceDecoder(byte_level=True)
    assert b"".join(decoder.to_bytes(piece, literal=False) for piece, _ in pieces) == "Ā \n€😀".encode()


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    tokenizer = Tokenizer(copy_of(gpt2_like()), SpecialTokens())
    assert tokenizer.token_bytes(10_000) == b""
    assert tokenizer.decode([10_000]) == ""
    assert tokenizer.token_id("no such token") is None


def test_lone_surrogates_are_refused() -> None:
    tokenizer = Tokenizer(copy_of(gpt2_like()), SpecialTokens())
    with pytest.raises(InvalidRequestError, match="Unicode"):
        tokenizer.encode("\ud800", add_special_tokens=False)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", left=2)]),
    ],
)
def test_decoders_of_other_kinds_are_refused(decoder: decoders.Decoder | None) -> None:
    backend = copy_of(gpt2_like())
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="decoder"):
        Tokenizer(backend, SpecialTokens())


def test_word_pieces_are_joined_by_spaces() -> None:
    """As WordPiece's decoder joins them, but for the spaces around punctuation, which it takes away."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "un", "##believ", "##able", "tea", ".", "é"]
    backend = tokenizers.Tokenizer(models.WordPiece({piece: id for id, piece in enumerate(pieces)}))
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = Tokenizer(backend, SpecialTokens())
    for ids in ([3, 4, 5, 6, 7], [6, 8], [5, 6], [1, 3, 4, 2], []):
        assert tokenizer.decode(ids) == backend.decode(ids).removeprefix("##")


def test_a_decoder_that_strips_nothing() -> None:
    backend = copy_of(gpt2_like())
    backend.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()])
    backend.normalizer = normalizers.Replace(" ", "▁")
    assert not Tokenizer(backend, SpecialTokens()).strips_leading_space


def test_older_checkpoints_name_special_tokens_in_a_map(tmp_path: Path) -> None:
    write(tmp_path, gpt2_like(), {"eos_token": "<|im_end|>"})
    names = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names), encoding="utf-8")
    special = load(tmp_path).special
    assert special.names == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(("given", "read"), [(2048, 2048), (1e30, None), (None, None)])
def test_context_without_a_limit(tmp_path: Path, given: float | None, read: int | None) -> None:
    write(tmp_path, gpt2_like(), {"model_max_length": given})
    assert TokenizerConfig.read(tmp_path).model_max_length == read


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 5},
        {"bos_token": {"text": "<s>"}},
        {"added_tokens_decoder": {"first": {"content": "<s>"}}},
        {"added_tokens_decoder": ["<s>"]},
        {"model_max_length": "long"},
    ],
)
def test_a_malformed_config_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, gpt2_like(), config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is malformed"):
        TokenizerConfig.read(tmp_path)


def test_tokens_whose_ids_cannot_be_kept(tmp_path: Path) -> None:
    write(tmp_path, gpt2_like(), {"added_tokens_decoder": {"700": {"content": "<far>"}}})
    with pytest.raises(CheckpointError, match="'<far>' the id 700"):
        load(tmp_path)


def test_tokenizer_json_wins_where_ids_differ(tmp_path: Path) -> None:
    write(tmp_path, gpt2_like(), {"added_tokens_decoder": {"7": {"content": "</s>", "special": False}}})
    tokenizer = load(tmp_path)
    assert tokenizer.token_id("</s>") == 1
    assert tokenizer.is_special(1)


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_a_missing_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_chat_needs_neither_torch_nor_transformers() -> None:
    code = """
import sys
import paged_sdk.chat.detokenizer, paged_sdk.chat.text_processor
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    result = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_other_threads_get_on_while_long_pairs_are_encoded() -> None:
    backend = gpt2_like()
    tokenizer = Tokenizer(backend, SpecialTokens())
    ended, ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        start, first = time.monotonic(), ticks
        pair = tokenizer.encode_pair("a question", "some text, and 1 more. " * 20_000)
        own, took = ticks - first, time.monotonic() - start
    finally:
        ended.set()
        thread.join()
    assert len(pair.second) > 20_000
    assert own > took / 0.02
