"""Tiny encoders with a tokenizer of word pieces."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
from benchmarks.encoder_table import tiny_encoder
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    Gemma3TextConfig,
    Gemma3TextModel,
    PreTrainedModel,
)

__all__ = ["CLS", "DEBERTA_V3", "SEP", "make_embedding_gemma", "make_encoder", "make_ranker", "word_pieces"]

CLS, SEP = 2, 3
# As published checkpoints have it, but for the number of buckets.
DEBERTA_V3: Final[dict[str, Any]] = {
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
}


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

    T5 and its like are saved as the class of their encoder.

    :param changes: fields of its config
    """
    auto = AutoModelForTextEncoding if model_type.endswith("t5") else AutoModelForMaskedLM
    return _write(tiny_encoder(model_type, auto, **changes), directory)


def make_embedding_gemma(directory: Path) -> PreTrainedModel:
    """Write a checkpoint of a Gemma 3 whose tokens attend in both directions, and return the model."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    config = Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=128,
        sliding_window=16,
        use_bidirectional_attention=True,
        rope_parameters={"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 300.0}},
        pad_token_id=0,
        bos_token_id=CLS,
        eos_token_id=SEP,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model: Any = Gemma3TextModel(config)
    return _write(model.eval(), directory)


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
