"""Tokenizers of encoders in GGUF files: WordPiece as its files spell it, XLM-RoBERTa's Unigram, and pairs of texts.

The judges are the tokenizers package, and transformers' XLM-RoBERTa.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import pytest
import tokenizers
from chat_data import TEXTS, byte_level_metadata, gpt2_like, long_text, train_sentencepiece, unigram_metadata
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import XLMRobertaTokenizer

from gguf_encoder_files import word_piece_metadata
from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.errors import CheckpointError

_MARKS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_HARD: Final = (
    *TEXTS,
    long_text()[:2000],
    "a [MASK] b[SEP]c [UNK]",
    "x" * 100,
    "x" * 101,
    "a\u00adb\u200bc\u2028d\u2029e\u0085f",
    "don't—stop…“quotes” ‘x’ $5+3=8 ^~`|<>",
    "\u0300combining \u0344 e\u0301e\u0327",
    "İSTANBUL STRASSE ǅ ΣΊΣΥΦΟΣ ﬁ ＡＢＣ ㍿ ½",
    "中文字mixed日本語\U0002f800\U00020000x",
    "   ",
)


@cache
def trained(lowercase: bool, strip_accents: bool | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=list(_MARKS), limit_alphabet=300, show_progress=False
    )
    backend.train_from_iterator([*TEXTS, long_text()], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


def must_agree(judge: tokenizers.Tokenizer, metadata: dict[str, Any]) -> None:
    """Compare texts and pairs of texts with a tokenizer of that package."""
    tokenizer = tokenizer_from_gguf(metadata)
    for first, second in zip(_HARD, (*_HARD[1:], "x"), strict=True):
        assert tokenizer.encode(first, add_special_tokens=True) == judge.encode(first).ids, first
        pair, expected = tokenizer.encode_pair(first, second), judge.encode(first, second)
        assert pair.token_ids == expected.ids
        assert pair.second_part == next((place for place, kind in enumerate(expected.type_ids) if kind), None)
        own = [place for place, text in enumerate(expected.sequence_ids) if text == 1]
        assert list(pair.second) == own


@pytest.mark.parametrize(
    ("lowercase", "strip_accents", "own"),
    [
        # Older files say nothing of it, newer ones what the tokenizer.json says.
        (True, None, {}),
        (False, None, {}),
        (True, None, {"normalizer__lowercase": True}),
        (False, None, {"normalizer__lowercase": False}),
        (True, False, {"normalizer__lowercase": True, "normalizer__strip_accents": False}),
        (False, True, {"normalizer__lowercase": False, "normalizer__strip_accents": True}),
        # llama.cpp asks no flags.
        (True, None, {"add_bos_token": False, "add_eos_token": False}),
        (True, None, {"bos_token_id": None, "cls_token_id": 2}),
        (True, None, {"add_bos_token": None, "add_eos_token": None, "add_sep_token": None, "eos_token_id": None}),
    ],
)
def test_word_pieces_are_those_of_the_package(lowercase: bool, strip_accents: bool | None, own: dict[str, Any]) -> None:
    judge = trained(lowercase, strip_accents)
    must_agree(judge, word_piece_metadata(judge, judge.get_vocab_size() + 7, **own))


def test_word_pieces_are_decoded() -> None:
    judge = trained(True)
    tokenizer = tokenizer_from_gguf(word_piece_metadata(judge, judge.get_vocab_size()))
    ids = judge.encode("The quick brown fox jumps", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "the quick brown fox jumps"
    assert (tokenizer.special.prefix, tokenizer.special.suffix) == ((2,), (3,))
    assert tokenizer.special.names["unk_token"] == "[UNK]"
    assert tokenizer.token_id("##s") == judge.token_to_id("##s") is not None


def test_files_that_name_no_marks_have_googles() -> None:
    judge = trained(True)
    names = [token for token, _ in sorted(judge.get_vocab().items(), key=lambda each: each[1]) if token not in _MARKS]
    tokens = ["[PAD]", *(f"[unused{place}]" for place in range(99)), *_MARKS[1:], *names]
    backend = tokenizers.Tokenizer(models.WordPiece({token: id for id, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.add_special_tokens(list(_MARKS))
    backend.normalizer, backend.pre_tokenizer = judge.normalizer, judge.pre_tokenizer
    backend.decoder = judge.decoder
    backend.post_processor = processors.BertProcessing(("[SEP]", 102), ("[CLS]", 101))
    ids = ("bos_token_id", "eos_token_id", "unknown_token_id", "seperator_token_id", "padding_token_id")
    must_agree(backend, word_piece_metadata(backend, len(tokens), **dict.fromkeys(ids)))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"unknown_token_id": None}, "which token stands for unknown words"),
        ({"bos_token_id": None}, "before and after a text"),
        ({"seperator_token_id": None}, "before and after a text"),
        ({"seperator_token_id": 5000}, "seperator_token_id = 5000 is not a token id"),
        ({"normalizer__lowercase": 3}, r"normalizer\.lowercase = 3: expected true or false"),
        ({"tokens": ["▁a", "[UNK]", "##a", "[SEP]", "##"], "token_type": [1, 3, 3, 3, 3]}, None),
        ({"tokens": ["a", "[UNK]", "##a", "[SEP]"], "token_type": [1, 3, 3, 3]}, "'##a' more than once"),
    ],
)
def test_malformed_word_pieces(own: dict[str, Any], message: str | None) -> None:
    small: dict[str, Any] = {"tokens": ["[CLS]", "[UNK]", "▁a", "[SEP]", "a"], "token_type": [3, 3, 1, 3, 1]}
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 3, "padding_token_id": None, "mask_token_id": None}
    metadata = word_piece_metadata(trained(True), 5, **(small | ids | {"unknown_token_id": 1} | own))
    if message is None:
        assert tokenizer_from_gguf(metadata).encode("a", add_special_tokens=False) == [0]
        return
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("remove_extra_whitespaces", [True, False])
def test_xlm_robertas_pieces_are_those_of_transformers(remove_extra_whitespaces: bool) -> None:
    """Its converter writes what the tokenizer does not do with white space, and older ones no add_sep_token."""
    ways = {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "byte_fallback": False}
    processor = train_sentencepiece(model_type="unigram", hard_vocab_limit=False, **ways)
    found = unigram_metadata(processor)
    pieces = list(zip(found["tokenizer.ggml.tokens"][3:], found["tokenizer.ggml.scores"][3:].tolist(), strict=True))
    vocabulary = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces, ("<mask>", 0.0)]
    charsmap: Any = found["tokenizer.ggml.precompiled_charsmap"]
    judge: Any = XLMRobertaTokenizer(vocab=vocabulary, _spm_precompiled_charsmap=charsmap)
    values = {
        "model": "t5",
        "tokens": [token for token, _ in vocabulary],
        "scores": [score for _, score in vocabulary],
        "token_type": [3, 3, 3, 2, *[1] * len(pieces), 3],
        "precompiled_charsmap": charsmap,
        "add_space_prefix": True,
        "remove_extra_whitespaces": remove_extra_whitespaces,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "seperator_token_id": 2,
        "padding_token_id": 1,
    }
    must_agree(
        judge.backend_tokenizer,
        {"general.architecture": "bert", **{f"tokenizer.ggml.{key}": value for key, value in values.items()}},
    )


def test_robertas_pairs_have_two_marks_between_them() -> None:
    judge = tokenizers.Tokenizer.from_str(gpt2_like().to_str())
    judge.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=False)
    flags = dict.fromkeys(("add_bos_token", "add_eos_token", "add_sep_token"), True)
    must_agree(judge, byte_level_metadata(gpt2_like(), "roberta-bpe", **flags))


def test_modern_berts_pairs_have_one_and_its_characters_are_composed() -> None:
    judge = tokenizers.Tokenizer.from_str(gpt2_like().to_str())
    judge.normalizer = normalizers.NFC()
    judge.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    flags = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": False}
    must_agree(judge, byte_level_metadata(gpt2_like(), "modern-bert", **flags))


def test_sentencepieces_vocabulary_is_no_word_pieces() -> None:
    """As llama.cpp's converter writes multilingual-e5-small, a BERT with XLM-RoBERTa's tokenizer."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(f"▁▁{word}" for word in ("a", "pot", "of", "tea")), "▁s", "▁t"]
    own = {"tokens": tokens, "token_type": [3] * 4 + [1] * 6, "unknown_token_id": 3}
    with pytest.raises(CheckpointError, match="are SentencePiece's, which a converter has taken for word pieces"):
        tokenizer_from_gguf(word_piece_metadata(trained(True), 10, **own))
