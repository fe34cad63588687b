"""Read vocabularies from GGUF metadata.

The judges: transformers for the real file, the tokenizers package and SentencePiece for vocabularies trained here.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from chat_data import (
    TEXTS,
    byte_level_metadata,
    gpt2_like,
    long_text,
    sentencepiece_metadata,
    smollm2_file,
    smollm2_metadata,
    train_byte_level,
    train_sentencepiece,
    unigram_metadata,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from paged_sdk import Constraint
from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.chat.gguf_tokenizer_export import gguf_from_text_processor
from paged_sdk.chat.pre_tokenizers import PRE_TOKENIZERS
from paged_sdk.chat.text_processor import load_text_processor
from paged_sdk.chat.tokenizer import Tokenizer
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.vocabulary import Vocabulary
from paged_sdk.errors import CheckpointError

_SMOLLM2_TEXTS = (*TEXTS, "<|im_start|>user\nhi <|im_end|>\n<|endoftext|> <|im_end|", long_text())


@cache
def smollm2() -> Tokenizer:
    return tokenizer_from_gguf(smollm2_metadata())


@cache
def smollm2_of_transformers() -> Any:
    from transformers import PreTrainedTokenizerFast

    judge: Any = PreTrainedTokenizerFast.from_pretrained(smollm2_file().parent, gguf_file=smollm2_file().name)
    # transformers leaves out what SmolLM2's own tokenizer.json does with digits; it shows in " ½".
    judge.backend_tokenizer.pre_tokenizer = _digits_gpt2()
    return judge


@pytest.mark.parametrize("text", _SMOLLM2_TEXTS)
def test_smollm2_is_as_in_transformers(text: str) -> None:
    judge = smollm2_of_transformers()
    ids = smollm2().encode(text, add_special_tokens=True)
    assert ids == judge.encode(text)
    assert smollm2().decode(ids, skip_special_tokens=False) == judge.decode(ids) == text
    assert smollm2().decode(ids) == judge.decode(ids, skip_special_tokens=True)


def test_smollm2_knows_its_special_tokens() -> None:
    judge = smollm2_of_transformers()
    tokenizer = smollm2()
    assert tokenizer.vocab_size == len(judge) == 49152
    assert (tokenizer.special.bos, tokenizer.special.eos) == (judge.bos_token_id, judge.eos_token_id)
    assert tokenizer.special.names == judge.special_tokens_map | {"unk_token": "<|endoftext|>"}
    assert tokenizer.special.prefix == ()
    specials = {id for id in range(tokenizer.vocab_size) if tokenizer.is_special(id)}
    assert specials == set(range(17)) == {id for id, token in judge.added_tokens_decoder.items() if token.special}


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=100))
def test_smollm2_round_trip(text: str) -> None:
    ids = smollm2().encode(text, add_special_tokens=False)
    # Its vocabulary lacks some bytes that its training data never held; they have no token, here as in transformers.
    known = smollm2_bytes()
    expected = bytes(byte for byte in text.encode() if byte in known)
    assert b"".join(map(smollm2().token_bytes, ids)) == expected
    assert smollm2().decode(ids, skip_special_tokens=False) == expected.decode("utf-8", "replace")


@cache
def smollm2_bytes() -> frozenset[int]:
    pieces = map(smollm2().token_bytes, range(smollm2().vocab_size))
    return frozenset(piece[0] for piece in pieces if len(piece) == 1)


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _qwen2_split() -> pre_tokenizers.PreTokenizer:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return _split(PRETOKENIZE_REGEX)


def _qwen35_split() -> pre_tokenizers.PreTokenizer:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    return _split(PRETOKENIZE_REGEX)


def _transformers_split(name: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        return _split(GGUF_PRE_TOKENIZER_SPLITS[name])

    return build


def _digits_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


@pytest.mark.parametrize(
    ("pre", "judge_split", "nfc"),
    [
        ("gpt-2", lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), False),
        ("default", lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), False),
        ("olmo", lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), True),
        ("smollm", _digits_gpt2, False),
        ("starcoder", _digits_gpt2, False),
        ("command-r", _digits_gpt2, True),
        ("qwen2", _qwen2_split, True),
        ("qwen35", _qwen35_split, True),
        ("llama-bpe", _transformers_split("llama-bpe"), False),
        ("dbrx", _transformers_split("dbrx"), False),
        ("tekken", _transformers_split("tekken"), False),
        ("gpt-4o", _transformers_split("gpt-4o"), False),
    ],
)
def test_words_are_cut_as_the_models_own_tokenizers_do(
    pre: str, judge_split: Callable[[], pre_tokenizers.PreTokenizer], nfc: bool
) -> None:
    # Trained without any cutting, so that merges cross every boundary that a cut could be missing at.
    backend = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), vocab_size=2000)
    tokenizer = tokenizer_from_gguf(byte_level_metadata(backend, pre, add_bos_token=False))
    model = json.loads(backend.to_str())["model"]
    ignore_merges = pre in ("llama-bpe", "tekken")
    judge = tokenizers.Tokenizer(
        models.BPE(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], ignore_merges=ignore_merges)
    )
    judge.pre_tokenizer = judge_split()
    judge.decoder = decoders.ByteLevel()
    if nfc:
        judge.normalizer = normalizers.NFC()
    for text in (*TEXTS, long_text()):
        assert tokenizer.encode(text, add_special_tokens=True) == judge.encode(text).ids


def test_qwens_nasty_texts_are_the_models_own_tokens() -> None:
    """Neither llama.cpp nor transformers' reader of GGUF composes characters, but the models' own tokenizer does, and
    it is what the models have learned.
    """
    from transformers import Qwen2Tokenizer

    backend = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), vocab_size=2000)
    metadata = byte_level_metadata(backend, "qwen2", add_bos_token=False)
    model = json.loads(backend.to_str())["model"]
    merges: Any = [tuple(pair) for pair in model["merges"]]
    judge: Any = Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
    tokenizer = tokenizer_from_gguf(metadata)
    draw = random.Random(0)
    # Letters and marks apart, syllables in parts, singletons that compose to another letter, marks out of order, marks
    # without a letter, and what looks like them.
    pieces = [
        *"aeioucnsAEO \n.1'",
        *(chr(code) for code in (*range(0x300, 0x316), 0x323, 0x327, 0x328, 0x331, 0x345)),
        *"\u1100\u1161\u11a8\u1112\u1175\u212b\u2126\u0374\u037e\u0958\ufb1d\ufb01\u1e9b\u0344\u2adc",
        *("\u200d", "\ufeff", "\U0001f468", "\U0001d15e", "\u0e33", "\u09c7\u09be", "\u3099", "\u304b", "'s", "  "),
    ]
    texts = ["".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(2000)]
    assert sum(normalizers.NFC().normalize_str(text) != text for text in texts) > 1000
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == judge.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("deepseek-llm", "Hello World 12 你好ok!\n", ["Hello", " World", " ", "1", "2", " ", "你好", "ok", "!", "\n"]),
        ("deepseek-coder", "int x=12; 你好\n", ["int", " x", "=", "1", "2", ";", " ", "你好", "\n"]),
        ("deepseek-v3", "x=1234; .foo 你好!!\n", ["x", "=", "123", "4", ";", " .", "foo", " ", "你好", "!!\n"]),
    ],
)
def test_deepseeks_words(pre: str, text: str, words: list[str]) -> None:
    split = _split(*PRE_TOKENIZERS[pre].splits)
    found = [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)]
    assert found == words


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_way_of_cutting_loses_nothing(name: str) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(gpt2_like(), name))
    normal = normalizers.NFC() if PRE_TOKENIZERS[name].nfc else None
    for text in TEXTS:
        wanted = normal.normalize_str(text) if normal else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == wanted


def test_a_whole_word_ignores_merges_where_the_model_does() -> None:
    metadata = byte_level_metadata(gpt2_like(), "llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zyx"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    new = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer_from_gguf(metadata).encode("zyx", add_special_tokens=False) == [new]
    assert new not in tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "dbrx"}).encode(
        "zyx", add_special_tokens=False
    )


def test_marks_and_user_defined_tokens_outside_the_byte_alphabet() -> None:
    metadata = byte_level_metadata(gpt2_like(), "gpt-2")
    marks = {"<｜end▁of▁sentence｜>": 3, "<think>": 4, "    é": 4, "": 1}
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], *marks]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], *marks.values()]
    tokenizer = tokenizer_from_gguf(metadata)
    base = len(metadata["tokenizer.ggml.tokens"]) - len(marks)
    text = "a<think>b</think>    éc<｜end▁of▁sentence｜>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert {base, base + 1, base + 2} <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.removesuffix("<｜end▁of▁sentence｜>")
    assert [tokenizer.is_special(base + offset) for offset in range(4)] == [True, False, False, False]
    assert tokenizer.vocab_size == base + 4


@pytest.mark.parametrize(
    ("pre", "flags", "around"),
    [
        ("gpt-2", {}, ([], [])),
        ("llama-bpe", {}, ([0], [])),
        ("tekken", {}, ([0], [])),
        ("llama-bpe", {"add_bos_token": False}, ([], [])),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
    ],
)
def test_tokens_around_a_text(pre: str, flags: dict[str, bool], around: tuple[list[int], list[int]]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(gpt2_like(), pre, **flags))
    bare = tokenizer.encode("text", add_special_tokens=False)
    assert tokenizer.encode("text", add_special_tokens=True) == [*around[0], *bare, *around[1]]


@cache
def llama_like() -> sentencepiece.SentencePieceProcessor:
    return train_sentencepiece()


@cache
def gemma_like() -> sentencepiece.SentencePieceProcessor:
    return train_sentencepiece(add_dummy_prefix=False, user_defined_symbols=list(_GEMMA_SYMBOLS))


_GEMMA_SYMBOLS = ("▁▁", "▁▁▁▁", "\t\t", "<b>", "</b>", "<unused0>")
# Special tokens in a text are parsed here, and are plain text to SentencePiece; all of them hold a "<".
# (Hypothesis tries literals of the modules that it sees, "<unk>" among them.)
_no_nul = st.text(st.characters(exclude_characters="\0<", exclude_categories=["Cs"]), max_size=80)


@cache
def llama_tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata(llama_like()))


@cache
def gemma_tokenizer() -> Tokenizer:
    metadata = sentencepiece_metadata(gemma_like(), user_defined=_GEMMA_SYMBOLS, add_space_prefix=False)
    return tokenizer_from_gguf(metadata)


def _same_as_sentencepiece(tokenizer: Tokenizer, judge: sentencepiece.SentencePieceProcessor, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == judge.encode(text)
    assert tokenizer.decode(ids) == judge.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("text", [text.replace("\0", "") for text in TEXTS] + ["a <0x41> b", "▁x"])
def test_sentencepiece_texts(text: str) -> None:
    _same_as_sentencepiece(llama_tokenizer(), llama_like(), text)
    _same_as_sentencepiece(gemma_tokenizer(), gemma_like(), text)


@settings(deadline=None, derandomize=True)
@given(_no_nul)
def test_sentencepiece_any_text(text: str) -> None:
    _same_as_sentencepiece(llama_tokenizer(), llama_like(), text)
    _same_as_sentencepiece(gemma_tokenizer(), gemma_like(), text)


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet="ab h\t", max_size=60))
def test_sentencepiece_repetitions(text: str) -> None:
    _same_as_sentencepiece(llama_tokenizer(), llama_like(), text)
    _same_as_sentencepiece(gemma_tokenizer(), gemma_like(), text)


def test_sentencepiece_long_text() -> None:
    text = long_text().replace("\0", "")
    _same_as_sentencepiece(llama_tokenizer(), llama_like(), text)
    _same_as_sentencepiece(gemma_tokenizer(), gemma_like(), text)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 899), max_size=40))
def test_sentencepiece_any_tokens_decode_alike(ids: list[int]) -> None:
    text = llama_tokenizer().decode(ids)
    # Never generated from text: the unknown token, which SentencePiece shows as a sign, and a space as a byte.
    unusual = {llama_like().unk_id(), llama_like().piece_to_id("<0x20>")}
    if "\ufffd" not in text and unusual.isdisjoint(ids):
        assert text == llama_like().decode(ids)


def test_a_llama_text_begins_with_bos_unless_the_file_says_otherwise() -> None:
    judge = llama_like()
    tokenizer = llama_tokenizer()
    assert tokenizer.encode("hello", add_special_tokens=True) == [judge.bos_id(), *judge.encode("hello")]
    assert tokenizer.encode("<s>hello", add_special_tokens=True) == [judge.bos_id(), *judge.encode("hello")]
    assert tokenizer.encode("", add_special_tokens=True) == [judge.bos_id()]
    without = tokenizer_from_gguf(sentencepiece_metadata(judge, add_bos_token=False))
    assert without.encode("hello", add_special_tokens=True) == judge.encode("hello")


def test_sentencepiece_token_bytes() -> None:
    tokenizer = llama_tokenizer()
    assert [tokenizer.token_bytes(id) for id in range(3, 259)] == [bytes([byte]) for byte in range(256)]
    word = tokenizer.encode("a", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, word)) == b" a"
    assert tokenizer.token_bytes(10_000) == b""


def test_without_byte_tokens_unknown_characters_are_the_unknown_token() -> None:
    judge = train_sentencepiece(byte_fallback=False)
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(judge))
    for text in ("hello", "ᚠᚡᚢ hello ᚣ", "ᚠ ᚣ"):
        assert tokenizer.encode(text, add_special_tokens=False) == judge.encode(text)


@pytest.mark.parametrize(
    "options",
    [
        {
            "normalization_rule_name": "nmt_nfkc",
            "remove_extra_whitespaces": True,
            "allow_whitespace_only_pieces": False,
        },
        {"normalization_rule_name": "nfkc", "byte_fallback": True, "add_dummy_prefix": False},
        {"byte_fallback": True},
    ],
)
def test_unigram_is_as_in_sentencepiece(options: dict[str, Any]) -> None:
    judge = train_sentencepiece(
        **{"model_type": "unigram", "hard_vocab_limit": False, "byte_fallback": False, "pad_id": 3, **options}
    )
    tokenizer = tokenizer_from_gguf(unigram_metadata(judge, padding_token_id=3))
    for text in (*TEXTS, long_text(), "a <0x41> b", "▁x", "   ", "ﬁ ½ ㎏ ｆｕｌｌ \u3000 wide"):
        text = text.replace("\0", "")
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == judge.encode(text), text
        assert tokenizer.encode(text, add_special_tokens=True) == [*ids, judge.eos_id()]
        if judge.unk_id() not in ids:  # which SentencePiece shows as a sign
            assert tokenizer.decode(ids) == judge.decode(ids)


def test_unigram_goes_to_a_tokenizer_json_and_back(tmp_path: Path) -> None:
    judge = train_sentencepiece(
        model_type="unigram", hard_vocab_limit=False, normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True
    )
    metadata = unigram_metadata(judge, add_bos_token=False, add_eos_token=False)
    (tmp_path / "tokenizer.json").write_text(tokenizer_from_gguf(metadata).to_json(), encoding="utf-8")
    text = load_text_processor(tmp_path)
    try:
        written = gguf_from_text_processor(text, "llama", judge.get_piece_size())
    finally:
        text.close()
    for key in (
        "model",
        "tokens",
        "token_type",
        "add_space_prefix",
        "remove_extra_whitespaces",
        "precompiled_charsmap",
    ):
        expected = metadata[f"tokenizer.ggml.{key}"]
        assert written[f"tokenizer.ggml.{key}"] == (expected.tolist() if key == "token_type" else expected), key
    tokenizer = tokenizer_from_gguf(written)
    assert tokenizer.encode(long_text(), add_special_tokens=False) == judge.encode(long_text())


def test_malformed_unigram_metadata() -> None:
    judge = train_sentencepiece(model_type="unigram", hard_vocab_limit=False)
    metadata = unigram_metadata(judge)
    wrong: list[tuple[str, object, str]] = [
        ("scores", [float("nan")] * judge.get_piece_size(), "not finite"),
        ("precompiled_charsmap", [1, 2, 3], "describes no tokenizer"),
        ("precompiled_charsmap", ["a"], "precompiled_charsmap holds str"),
        ("unknown_token_id", 10**6, "unknown_token_id = 1000000"),
    ]
    for key, value, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            tokenizer_from_gguf({**metadata, f"tokenizer.ggml.{key}": value})


def test_phi3_marks_swallow_the_space_after_them() -> None:
    metadata = sentencepiece_metadata(train_sentencepiece(control_symbols=["<|user|>", "<|end|>"]))
    text = "<|user|>\nhello <|end|>\n"
    phi3 = tokenizer_from_gguf({**metadata, "general.architecture": "phi3"})
    llama = tokenizer_from_gguf(metadata)
    assert phi3.decode(phi3.encode(text, add_special_tokens=False)) == "hello "
    assert llama.decode(llama.encode(text, add_special_tokens=False), skip_special_tokens=False).count("\n") == 2


def test_a_missing_pre_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata(gpt2_like(), "gpt-2")
    expected = tokenizer_from_gguf(metadata).encode(TEXTS[1], add_special_tokens=False)
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING, logger="paged_sdk"):
        assert tokenizer_from_gguf(metadata).encode(TEXTS[1], add_special_tokens=False) == expected
    assert "tokenizer.ggml.pre" in caplog.text


def _without(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != f"tokenizer.ggml.{key}"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model = 'rwkv'"),
        ({"model": None}, "tokenizer.ggml.model = None"),
        ({"pre": "brand-new"}, "tokenizer.ggml.pre = 'brand-new'"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' more than once"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["never seen"]}, "tokenizer.ggml.merges do not fit"),
        ({"token_type": [1]}, "1 entries"),
        ({"eos_token_id": 100_000}, "tokenizer.ggml.eos_token_id = 100000"),
    ],
)
def test_malformed_byte_level_metadata(change: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(gpt2_like(), **{"pre": "gpt-2", **change})
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(("scores", "message"), [(None, "no tokenizer.ggml.scores"), (np.zeros(3), "3 entries")])
def test_malformed_sentencepiece_metadata(scores: object, message: str) -> None:
    metadata = _without(sentencepiece_metadata(llama_like()), "scores")
    if scores is not None:
        metadata["tokenizer.ggml.scores"] = scores
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(metadata)


def test_token_types_may_be_missing() -> None:
    metadata = _without(byte_level_metadata(gpt2_like(), "gpt-2"), "token_type")
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.is_special(0)
    assert not tokenizer.is_special(2)


@pytest.mark.parametrize("make", [llama_tokenizer, gemma_tokenizer])
def test_forced_text_is_made_of_the_tokens_of_a_text_that_goes_on(make: Callable[[], Tokenizer]) -> None:
    """SentencePiece begins a text with a space that is not in it; within a text there is none."""
    tokenizer, num_tokens = make(), llama_like().vocab_size()
    vocabulary = Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(num_tokens)],
        special_ids=[token for token in range(num_tokens) if tokenizer.is_special(token)],
        end_ids=(2,),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )
    grammar = GrammarCompiler(lambda: vocabulary).compile(Constraint.regex("the quick brown fox(es)? jumps"))
    text = grammar.begin((), num_tokens)
    while forced := text.forced():
        text.tokens += forced[:1]
        assert not text.move_to(len(text.tokens))
    assert b"".join(vocabulary.tokens[token] for token in text.tokens).startswith(b"the quick brown f")


def _gemma4_json() -> tokenizers.Tokenizer:
    """Train a tokenizer of Gemma 4's kind: characters are merged by rank, and spaces are signs."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|\n+"), behavior="isolated")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    made.train_from_iterator([*TEXTS, "one two\n\n\nthree  four\n" * 4], trainer)
    content = json.loads(made.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["id"] < 4
    content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return made


def test_gemma4_goes_to_gguf_and_back(tmp_path: Path) -> None:
    judge = _gemma4_json()
    judge.save(str(tmp_path / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    with_text = load_text_processor(tmp_path)
    metadata = gguf_from_text_processor(with_text, "gemma4", judge.get_vocab_size())
    with_text.close()
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    made = tokenizer_from_gguf(metadata)
    for text in (*TEXTS, "a  b\n\n\n c\n", "\n", "☃ and <0x41>"):
        ids = made.encode(text, add_special_tokens=False)
        assert ids == judge.encode(text, add_special_tokens=False).ids
        assert made.decode(ids) == judge.decode(ids)
    assert made.encode("one", add_special_tokens=True)[0] == made.token_id("<bos>")
