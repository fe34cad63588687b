"""The tiny checkpoints are what the other tests take them for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_checkpoint_loads_in_transformers_and_wanders(family: str, tmp_path: Path) -> None:
    directory = tiny.make_checkpoint(family, tmp_path / family)

    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.model_type == family
    assert model.config.vocab_size == tiny.VOCAB_SIZE
    assert model.generation_config.eos_token_id == [2, 0]
    prompt = torch.tensor([tiny.tokenizer().encode("The quick brown fox jumps over the lazy dog. " * 4).ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=48, min_new_tokens=48
    )
    assert len(set(output[0, prompt.shape[1] :].tolist())) > 24
    with torch.no_grad():
        logits = model(prompt).logits
    assert 1 < float(logits.std()) < 5


def test_checkpoint_is_the_model_that_was_built(tmp_path: Path) -> None:
    directory = tiny.make_checkpoint("llama", tmp_path, seed=3, hidden_size=32, tie_word_embeddings=True)
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    built = tiny.build_model("llama", seed=3, hidden_size=32, tie_word_embeddings=True).state_dict()
    assert loaded.keys() == built.keys()
    assert all(torch.equal(loaded[name], built[name]) for name in built)


def test_seeds_differ_and_repeat_without_touching_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (tiny.build_model("qwen2", seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_checkpoint_takes_a_dtype(tmp_path: Path) -> None:
    directory = tiny.make_checkpoint("qwen3", tmp_path, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(directory).dtype == torch.bfloat16


def test_tokenizer_round_trips_and_knows_its_special_tokens(tmp_path: Path) -> None:
    directory = tiny.make_checkpoint("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == tiny.VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(list(tiny.SPECIAL_TOKENS)) == [0, 1, 2]
    text = 'Zwölf "Boxkämpfer": 漢字 🦊\n\ttabs'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
