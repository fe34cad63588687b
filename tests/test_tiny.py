"""The tiny checkpoints are what the other tests take them for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

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


def read_gguf(path: Path, family: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what transformers makes of a GGUF file (of mixtral's nothing): config fields, and tensors under its own
    names.
    """
    # Mistral's files say llama, and so do transformers' name maps.
    reader_model = tiny.build_gguf_model("llama" if family == "mistral" else family)
    load: Any = load_gguf_checkpoint  # it has no annotations
    content = load(str(path), return_tensors=True, model_to_load=reader_model)
    return content["config"], content["tensors"]


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "mixtral"])
def test_gguf_holds_the_same_model(family: str, tmp_path: Path) -> None:
    model = tiny.build_gguf_model(family, seed=5)
    config, tensors = read_gguf(tiny.make_gguf(tmp_path, family=family, seed=5), family)
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)  # gemma's norms come back from 1 + w
    for field in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "vocab_size"):
        assert config[field] == getattr(model.config, field)


@pytest.mark.parametrize("quantization", ["F16", "Q4_0", "Q5_1", "Q8_0"])
def test_gguf_quantizes_every_matrix(quantization: str, tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, quantization=quantization)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert {kind for name, kind in types.items() if "norm" not in name} == {quantization}
    assert {kind for name, kind in types.items() if "norm" in name} == {"F32"}
    _, tensors = read_gguf(path, "llama")
    expected = tiny.build_gguf_model("llama").state_dict()
    step = {"F16": 1e-3, "Q4_0": 1 / 8, "Q5_1": 1 / 31, "Q8_0": 1 / 127}[quantization]
    for name, tensor in tensors.items():
        assert (tensor - expected[name]).abs().max() <= step * expected[name].abs().max()


def test_gguf_carries_the_tokenizer_and_template(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = 'Zwölf "Boxkämpfer": 漢字 🦊<|im_end|>\n'
    assert tokenizer.encode(text) == tiny.tokenizer().encode(text).ids
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
