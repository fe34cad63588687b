"""Tiny encoders with a tokenizer of word pieces."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import tokenizers
from benchmarks.encoder_table import tiny_encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, PreTrainedModel

__all__ = ["CLS", "SEP", "make_encoder", "make_ranker", "word_pieces"]

CLS, SEP = 2, 3


def word_pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer that splits words into letters, but for a few, and puts its tokens around a text."""
    letters = string.ascii_lowercase
    words = ("the", "tea", "kettle", "##ing", "boil")
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{each}" for each in letters),
        *words,
        *".,?",
    ]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab={piece: id for id, piece in enumerate(pieces)}))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def make_encoder(model_type: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint with random weights, saved as the class that predicts masked words, and return the model.

    :param changes: fields of its config
    """
    return _write(tiny_encoder(model_type, **changes), directory)


def make_ranker(model_type: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint with random weights of the class that makes a number of a text, and return the model."""
    changes = {"num_labels": 1, **changes}
    return _write(tiny_encoder(model_type, AutoModelForSequenceClassification, **changes), directory)


def _write(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    word_pieces().save(str(directory / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    settings = {"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]", "model_max_length": 100, **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return model
