"""Make tiny checkpoints with random weights, for every test that needs a whole model.

The weights are larger than a real model's at its start: logits spread over several units and greedy continuations
wander, so a wrong mask, position or block table changes the tokens.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

__all__ = [
    "CHAT_TEMPLATE",
    "COMMON",
    "FAMILIES",
    "GGUF_OVERRIDES",
    "SPECIAL_TOKENS",
    "VOCAB_SIZE",
    "build_gguf_model",
    "build_model",
    "make_checkpoint",
    "make_gguf",
    "make_other_checkpoint",
    "tokenizer",
]

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
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}
FAMILIES: Final = tuple(_CLASSES)

COMMON: Final[dict[str, Any]] = {
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
    "mixtral": {"sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    # One layer has a plain MLP.
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 32,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
}

_GGUF_ARCHITECTURES: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
# What the files cannot say: GGUF's llama has no window, its qwen3moe no layer without experts, its gemma3 one fixed
# pattern of six layers.
GGUF_OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": []},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": None},
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
    """Return the byte-level BPE tokenizer of every tiny checkpoint: :data:`VOCAB_SIZE` tokens, the special ones
    first.
    """
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
    """Build the model that :func:`make_checkpoint` saves.

    :param family: one of :data:`FAMILIES`
    :param dtype: the name of a torch dtype
    :param config_overrides: fields of the family's transformers config
    """
    config_class, model_class = _CLASSES[family]
    config = config_class(**(COMMON | _OWN.get(family, {}) | config_overrides))
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

    :returns: ``directory``, which is made if it was not there
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


def make_other_checkpoint(model_type: str, directory: Path, *, dtype: str = "float32", **config: Any) -> Path:
    """Write a checkpoint of any family that transformers knows, with the same tokenizer.

    :param config: fields of its config beside :data:`COMMON`
    :returns: ``directory``
    """
    make_checkpoint("llama", directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        read = AutoConfig.for_model(model_type, **(COMMON | config))
        model: Any = AutoModelForCausalLM.from_config(read, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    return directory


def build_gguf_model(family: str, *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """Build the model that :func:`make_gguf` writes: :func:`build_model`'s, but for settings that a GGUF file cannot
    hold.
    """
    return build_model(family, seed=seed, **(GGUF_OVERRIDES.get(family, {}) | config_overrides))


def make_gguf(
    directory: Path,
    *,
    family: str = "llama",
    quantization: str = "F32",
    seed: int = 0,
    ranks_by: tuple[Sequence[int], str | None] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does, with its tokenizer and chat template.

    :param quantization: the type of every matrix, one that the gguf package can write: F32, F16, BF16, Q4_0 ... Q8_0
    :param ranks_by: as the converter writes rerankers: the tokens whose rows of the output projection are kept, and the
        template for a query and a document
    :returns: the file
    """
    model: Any = build_gguf_model(family, seed=seed, **config_overrides)
    architecture = _GGUF_ARCHITECTURES[family]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"tiny-{family}.{quantization}.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_config(writer, model.config)
    _add_tokenizer(writer)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    matrix_type = gguf.GGMLQuantizationType[quantization]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    if ranks_by is not None:
        _add_rank_head(writer, model.lm_head.weight[list(ranks_by[0])].detach().numpy(), ranks_by[1], matrix_type)
    for name, tensor in _gguf_tensors(model.state_dict()):
        if name == "lm_head.weight" and (model.config.tie_word_embeddings or ranks_by is not None):
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        array = _gguf_array(name, tensor.numpy(), architecture, model.config)
        is_quantized = array.ndim > 1 and "ffn_gate_inp" not in gguf_name
        tensor_type = matrix_type if is_quantized else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name, gguf.quants.quantize(array, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rank_head(
    writer: gguf.GGUFWriter, rows: npt.NDArray[np.float32], template: str | None, matrix_type: gguf.GGMLQuantizationType
) -> None:
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"][: len(rows)])
    if template is not None:
        writer.add_array("tokenizer.chat_templates", ["rerank"])
        writer.add_string("tokenizer.chat_template.rerank", template)
    writer.add_tensor("cls.output.weight", gguf.quants.quantize(rows, matrix_type), raw_dtype=matrix_type)


def _gguf_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors as GGUF has them: transformers merges experts' gate and up, GGUF stacks each on its own."""
    for name, tensor in tensors.items():
        block, is_experts, projection = name.partition(".experts.")
        if projection == "gate_up_proj":
            for part, values in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield f"{block}.experts.{part}.weight", values.contiguous()
        else:
            yield f"{name}.weight" if is_experts else name, tensor


def _gguf_array(
    name: str, array: npt.NDArray[np.float32], architecture: gguf.MODEL_ARCH, config: Any
) -> npt.NDArray[np.float32]:
    """Return a tensor's values in GGUF's conventions, which follow llama.cpp's kernels."""
    if architecture is gguf.MODEL_ARCH.LLAMA and (".q_proj." in name or ".k_proj." in name):
        # Rotary pairs lie side by side instead of half a head apart.
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
    if architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
        return array + 1
    return array


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_name(f"tiny {config.model_type}")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    bpe = json.loads(tokenizer().to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
