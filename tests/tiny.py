"""Tiny checkpoints with random weights, for every test that needs a whole model.

The weights are larger than a real model's at its start: logits spread over several units and greedy continuations
wander, so a wrong mask, position or block table changes the tokens.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

__all__ = ["CHAT_TEMPLATE", "FAMILIES", "SPECIAL_TOKENS", "VOCAB_SIZE", "build_model", "make_checkpoint", "tokenizer"]

VOCAB_SIZE: Final = 512
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2; the first is begin, padding and second end token, the last is the end token."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CLASSES: Final[dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}
FAMILIES: Final = tuple(_CLASSES)

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# What makes each family itself, small enough that a prompt of a few dozen tokens passes every window.
_OWN: Final[dict[str, dict[str, Any]]] = {
    "mistral": {"sliding_window": 32},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 32,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
}

_CORPUS: Final = """
The quick brown fox jumps over the lazy dog, and the dog does not mind. Once upon a time there was a small engine
that could read a long letter word by word and answer it before the kettle boiled. It kept its memory in pages, as a
library keeps its books: every page had a number, every reader had a table of numbers, and nobody ever moved a shelf.
When two readers asked for the same story, they shared the pages; when one of them wanted to write in the margin, he
was given a copy of that page alone. In the evening the pages that nobody had asked for went back to the heap, the
oldest first, and in the morning the work began again with the first letter in the box.
What is the capital of France? The capital of France is Paris. What is two plus two? Two plus two is four. Please
write a short poem about the sea, the wind and the winter; then explain how a bicycle stays upright.
def add(first, second): return first + second
for index in range(10): print(index, add(index, 1))
{"name": "value", "numbers": [1, 2, 3, 4.5, -6e7], "nested": {"true": true, "false": false, "null": null}}
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Le cœur déçu mais l'âme plutôt naïve.
0123456789 10 20 30 40 50 60 70 80 90 100 1000 user system assistant tool
"""


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """The byte-level BPE tokenizer of every tiny checkpoint: :data:`VOCAB_SIZE` tokens, the special ones first."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS.splitlines(keepends=True), trainer)
    assert bpe.get_vocab_size() == VOCAB_SIZE
    return bpe


def build_model(family: str, *, seed: int = 0, dtype: str = "float32", **config_overrides: Any) -> PreTrainedModel:
    """The model that :func:`make_checkpoint` saves.

    :param family: one of :data:`FAMILIES`
    :param dtype: the name of a torch dtype
    :param config_overrides: fields of the family's transformers config
    """
    config_class, model_class = _CLASSES[family]
    config = config_class(**(_COMMON | _OWN.get(family, {}) | config_overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = model_class(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms start at 1 (gemma: 0) and biases at 0, where leaving them out goes unseen
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith("q_norm.weight"):  # normed queries and keys attend to everything alike
                parameter.data.add_(4)
        if family.startswith("gemma"):
            # Gemma scales its (tied) embeddings by sqrt(hidden size), and at random weights each token would repeat
            # itself for ever: undo that in the embeddings and give the logits their spread back in the last norm.
            scale = config.hidden_size**0.5
            model.get_input_embeddings().weight.data.div_(scale)
            model.get_decoder().norm.weight.data.add_(scale - 1)
    model.generation_config = GenerationConfig.from_dict({"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": [2, 0]})
    built: PreTrainedModel = model.to(getattr(torch, dtype)).eval()
    return built


def make_checkpoint(
    family: str, directory: Path, *, seed: int = 0, dtype: str = "float32", **config_overrides: Any
) -> Path:
    """Write a checkpoint as found on the hub: config, safetensors weights, tokenizer, chat template, generation config.

    :returns: ``directory``, made if it was not there
    """
    build_model(family, seed=seed, dtype=dtype, **config_overrides).save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_text,
        "eos_token": end_of_turn,
        "pad_token": end_of_text,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2), encoding="utf-8")
    return directory
