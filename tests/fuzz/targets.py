"""Say what is fuzzed: each target writes a damaged checkpoint from a seed, and loads it as a model is loaded."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from attrs import evolve, frozen
from safetensors.torch import save

import tiny
from fuzz.mutation import GgufContent, GgufEntry, GgufValue, mutated_bytes, mutated_gguf, mutated_json
from ggjt_files import write_ggjt
from paged_sdk.chat.generation_config import read_generation_defaults
from paged_sdk.chat.text_processor import TextProcessor, load_text_processor, text_processor_from_gguf
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS
from paged_sdk.models.family import read_config
from paged_sdk.models.loading import load_model
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.types.messages import TextMessageRole, TextMessages
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.importance import read_importance
from quantized_writers import WRITERS, pack_tensors, section_of

__all__ = ["Target", "targets"]

CPU: Final = torch.device("cpu")
_TEXT: Final = "Hello, w\u00f6rld \N{GRINNING FACE}\n 42 <|im_end|> aaaa"
_MESSAGES: Final = TextMessages().add_message(TextMessageRole.SYSTEM, "Be brief.").add_message("user", _TEXT)
_TEMPLATES: Final = (
    tiny.CHAT_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}[{{ m.role|upper }}] {{ m['content']|trim }}{{ loop.index }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'user' %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% elif m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}{{ ns.n }}",
    "{% macro show(x) %}<{{ x }}>{% endmacro %}{% for m in messages[1:] %}{{ show(m.content) ~ '|' }}{% endfor %}"
    "{{ messages|length }}{{ messages[0]['content']|tojson }}{{ range(3)|join(',') }}",
)
_TEMPLATE_WORDS: Final = (
    "{{", "}}", "{%", "%}", " * 9", "|join", "|tojson(indent=9)", "range(10**9)", "messages", "''", ".center(10**6)",
    "{% for x in messages %}", "{% endfor %}", "{% set x = x * 2 %}", "['a']", "~", "|list", "namespace(x=1)", "loop",
    "10**9", "x.__class__", "|replace('', x)", "{% include 'x' %}", "{#", "-%}", "[1:]", "is defined", "else", "\ud800",
    "(", "%s",
)  # fmt: skip


@frozen
class Target:
    """Fuzzes one kind of file.

    :ivar name: on the command line
    :ivar share: how many of a hundred cases it gets
    :ivar write: writes a damaged checkpoint into an empty directory
    :ivar load: loads it; anything but a typed error is a find
    """

    name: str
    share: int
    write: Callable[[random.Random, Path], None]
    load: Callable[[Path], None]


def targets(directory: Path) -> tuple[Target, ...]:
    """Return all targets.

    :param directory: where whole checkpoints to start from are made
    """
    seeds = _Seeds(directory)
    return (
        Target("gguf", 18, seeds.write_gguf, _load_gguf),
        Target("ggjt", 5, seeds.write_ggjt, _load_gguf),
        Target("imatrix", 4, seeds.write_imatrix, _load_imatrix),
        Target("safetensors", 8, seeds.write_safetensors, _load_directory),
        Target("index", 5, seeds.write_index, _load_directory),
        Target("quantized", 15, seeds.write_quantized, _load_directory),
        Target("config", 15, seeds.write_config, _load_directory),
        Target("tokenizer", 12, seeds.write_tokenizer, _load_text),
        Target("tokenizer-config", 6, seeds.write_tokenizer_config, _load_text),
        Target("generation-config", 6, seeds.write_generation_config, _load_generation_config),
        Target("template", 6, seeds.write_template, _load_text),
    )


_OWN: Final[Mapping[str, dict[str, Any]]] = {
    "gemma3_text": {"layer_types": None},
    "qwen3_moe": {"mlp_only_layers": []},
}


class _Seeds:
    """Holds whole checkpoints of one layer and few tokens, and damages copies."""

    def __init__(self, directory: Path) -> None:
        small: dict[str, Any] = {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "max_position_embeddings": 128,
        }
        self._configs: dict[str, dict[str, Any]] = {}
        self._weights: dict[str, dict[str, torch.Tensor]] = {}
        for family in tiny.FAMILIES:
            model: Any = tiny.build_model(family, vocab_size=64, **small, **_OWN.get(family, {}))
            self._configs[family] = json.loads(json.dumps(model.config.to_dict() | {"architectures": None}))
            tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
            self._weights[family] = {name: each for name, each in model.state_dict().items() if name not in tied}
        self._safetensors = {family: save(weights) for family, weights in self._weights.items()}
        self._quantized = {
            name: (pack_tensors(self._weights["llama"], write)[0], settings)
            for name, (write, settings) in WRITERS.items()
        }
        self._tokenizer = _small_tokenizer()
        small_types, wide_types = (0,), tuple(number for number, form in BLOCK_FORMATS.items() if form.elements > 1)
        half = len(wide_types) // 2
        self._gguf = [
            _gguf_content("gpt2", small_types, 32),
            _gguf_content("llama", wide_types[:half], 256),
            _gguf_content("gpt2", wide_types[half:], 256),
            _gguf_content("t5", small_types, 32),
        ]
        llama = tiny.build_model("llama", vocab_size=300, head_dim=8, **small)
        self._ggjt = [
            write_ggjt(directory / "model.bin", llama, kind, version=version, words=words).read_bytes()
            for version, kind, words in ((1, "F16", True), (2, "Q5_1", True), (3, "Q4_0", True), (3, "F32", False))
        ]

    def write_gguf(self, rng: random.Random, directory: Path) -> None:
        data = mutated_gguf(rng, rng.choice(self._gguf))
        (directory / "model.gguf").write_bytes(data)

    def write_ggjt(self, rng: random.Random, directory: Path) -> None:
        whole = rng.choice(self._ggjt)
        size = rng.choice((40, 2500, len(whole)))  # the numbers, the vocabulary, everything
        (directory / "model.gguf").write_bytes(mutated_bytes(rng, whole[:size]) + whole[size:])

    def write_imatrix(self, rng: random.Random, directory: Path) -> None:
        data = mutated_gguf(rng, _IMATRIX) if rng.random() < 0.7 else mutated_bytes(rng, _OLDER_IMATRIX)
        (directory / "imatrix").write_bytes(data)

    def write_safetensors(self, rng: random.Random, directory: Path) -> None:
        family = rng.choice(tiny.FAMILIES)
        self._write(directory, family)
        whole = self._safetensors[family]
        size = int.from_bytes(whole[:8], "little")
        if rng.random() < 0.6:
            header = mutated_json(rng, json.loads(whole[8 : 8 + size]))
            whole = len(header).to_bytes(8, "little") + header + whole[8 + size :]
        else:
            whole = mutated_bytes(rng, whole[: 8 + size]) + whole[8 + size :][: rng.choice((None, None, 0, 100))]
        (directory / "model.safetensors").write_bytes(whole)

    def write_index(self, rng: random.Random, directory: Path) -> None:
        self._write(directory, "llama")
        weights = self._weights["llama"]
        half = len(weights) // 2
        shards = {
            "a.safetensors": dict(list(weights.items())[:half]),
            "b.safetensors": dict(list(weights.items())[half:]),
        }
        index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}, "metadata": {}}
        (directory / "model.safetensors.index.json").write_bytes(mutated_json(rng, index))
        for shard, held in shards.items():
            if rng.random() < 0.9:
                data = save(held)
                (directory / shard).write_bytes(mutated_bytes(rng, data) if rng.random() < 0.2 else data)

    def write_quantized(self, rng: random.Random, directory: Path) -> None:
        """Damage what belongs together: the format's settings, or shapes, types and numbers of tensors that are read
        well one by one.
        """
        tensors, settings = self._quantized[rng.choice(list(self._quantized))]
        tensors = dict(tensors)
        config = json.dumps(self._configs["llama"])[:-1] + f', "{section_of(settings)}": '
        changed = mutated_json(rng, settings) if rng.random() < 0.4 else json.dumps(settings).encode()
        (directory / "config.json").write_bytes(config.encode() + changed + b"}")
        codes = sorted(name for name in tensors if name not in self._weights["llama"])
        for name in rng.sample(codes, rng.choice((0, 1, 1, 3))):
            tensors[name] = _damaged(rng, tensors[name])
            if rng.random() < 0.2:
                del tensors[name]
        (directory / "model.safetensors").write_bytes(save(tensors))

    def write_config(self, rng: random.Random, directory: Path) -> None:
        family = rng.choice(tiny.FAMILIES)
        self._write(directory, family)
        (directory / "model.safetensors").write_bytes(self._safetensors[family])
        config = json.loads(json.dumps(self._configs[family]))
        if rng.random() < 0.4:
            config["rope_scaling"] = rng.choice(_SCALINGS)
        (directory / "config.json").write_bytes(mutated_json(rng, config))

    def write_tokenizer(self, rng: random.Random, directory: Path) -> None:
        content = dict(self._tokenizer)
        for _ in range(rng.choice((0, 1, 2))):
            key, parts = rng.choice(list(_TOKENIZER_PARTS.items()))
            content[key] = rng.choice(parts)
        (directory / "tokenizer.json").write_bytes(mutated_json(rng, content))

    def write_tokenizer_config(self, rng: random.Random, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(json.dumps(self._tokenizer))
        name = rng.choice(("tokenizer_config.json", "tokenizer_config.json", "special_tokens_map.json"))
        (directory / name).write_bytes(mutated_json(rng, _TOKENIZER_CONFIG))

    def write_generation_config(self, rng: random.Random, directory: Path) -> None:
        (directory / "generation_config.json").write_bytes(mutated_json(rng, _GENERATION_CONFIG))
        if rng.random() < 0.3:
            (directory / "config.json").write_bytes(mutated_json(rng, {"eos_token_id": [1, 2]}))

    def write_template(self, rng: random.Random, directory: Path) -> None:
        (directory / "tokenizer.json").write_text(json.dumps(self._tokenizer))
        source = rng.choice(_TEMPLATES)
        for _ in range(rng.choice((1, 2, 4))):
            place = rng.randrange(len(source) + 1)
            end = place + rng.choice((0, 0, 1, 5))
            source = source[:place] + rng.choice(_TEMPLATE_WORDS) + source[end:]
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))

    def _write(self, directory: Path, family: str) -> None:
        (directory / "config.json").write_text(json.dumps(self._configs[family]))


def _damaged(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another shape or type, or with other numbers."""
    match rng.randrange(6):
        case 0:
            return tensor.flatten()
        case 1:
            return tensor[: rng.choice((0, 1, max(0, len(tensor) - 1)))].clone() if tensor.ndim else tensor[None]
        case 2:
            return tensor.t().contiguous() if tensor.ndim == 2 else tensor[None]
        case 3:
            return tensor.float().nan_to_num().to(rng.choice((torch.int8, torch.uint8, torch.int64, torch.float64)))
        case 4:
            return tensor.new_empty(*tensor.shape[:-1], 0) if tensor.ndim else tensor.new_empty(0)
        case _:
            raw = tensor.clone().flatten().view(torch.uint8)
            raw[rng.randrange(max(1, len(raw))) :] = rng.choice((0, 127, 128, 255))
            return raw.view(tensor.dtype).view(tensor.shape)


def _load_gguf(directory: Path) -> None:
    checkpoint = open_checkpoint(directory / "model.gguf")
    read_config(checkpoint.config)
    assert checkpoint.metadata is not None
    _use(text_processor_from_gguf(checkpoint.metadata))
    _build(checkpoint)


def _load_imatrix(directory: Path) -> None:
    matrix = read_importance(directory / "imatrix")
    for name, sums in matrix.sums.items():
        found = matrix.column_weights(name, len(sums), sums.shape[1])
        assert found is not None
        assert bool((found.isfinite() & (found > 0)).all())
    matrix.check_model({name: squares.shape for name, squares in _SQUARES.items()}, list(_SQUARES))
    matrix.plus(matrix)


def _load_directory(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    read_config(checkpoint.config)
    _build(checkpoint)


def _build(checkpoint: Any) -> None:
    try:
        library = load()
        workspace = None if library is None else Workspace(library, num_threads=1)
        policy = WeightPolicy(keep_blocks=True, workspace=workspace)
        load_model(checkpoint.config, checkpoint.source, dtype=torch.bfloat16, placement=CPU, policy=policy)
    finally:
        checkpoint.source.close()


def _load_text(directory: Path) -> None:
    _use(load_text_processor(directory))


def _use(text: TextProcessor) -> None:
    ids = text.tokenizer.encode(_TEXT, add_special_tokens=True)
    text.tokenizer.decode(ids[:1000])
    if text.template is not None:
        text.encode_chat(_MESSAGES.messages)


def _load_generation_config(directory: Path) -> None:
    read_generation_defaults(directory)


def _imatrix() -> GgufContent:
    metadata: dict[str, Any] = {
        "general.type": "imatrix",
        "imatrix.datasets": ["text"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 512,
    }
    table, data = [], b""
    for name, squares in _SQUARES.items():
        for suffix, values in ((".in_sum2", squares), (".counts", squares[:, :1] + 1)):
            raw = values.tobytes()
            table.append(GgufEntry((name + suffix).encode(), values.shape[::-1], 0, len(data)))
            data += raw + bytes(-len(raw) % 32)
    return GgufContent(
        metadata=tuple((key.encode(), GgufValue.of(value)) for key, value in metadata.items()),
        table=tuple(table),
        data=data,
    )


def _older_imatrix() -> bytes:
    parts = [struct.pack("<i", len(_SQUARES))]
    for name, squares in _SQUARES.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", 3, squares.size), squares.tobytes()]
    return b"".join(parts)


_SQUARES: Final = {
    "blk.0.attn_q.weight": np.arange(4, dtype=np.float32)[None],
    "blk.0.ffn_up_exps.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
}
_IMATRIX: Final = _imatrix()
_OLDER_IMATRIX: Final = _older_imatrix()
_SCALINGS: Final[tuple[Mapping[str, Any], ...]] = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0},
)  # fmt: skip
_TOKENIZER_PARTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "normalizer": (
        {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
        {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "},
        {"type": "Sequence",
         "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "_"}, {"type": "Lowercase"}]},
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
         "lowercase": True},
        {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAABhAA=="},
    ),
    "pre_tokenizer": (
        {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\d| ?[^\\s]+"}, "behavior": "Isolated", "invert": False},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "Whitespace"}]},
    ),
    "post_processor": (
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}},
        },
    ),
    "decoder": (
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
         {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    ),
    "model": (
        {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
        {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.5]], "unk_id": 0, "byte_fallback": False},
        {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##b": 2}, "unk_token": "[UNK]",
         "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    ),
    "truncation": ({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},),
    "padding": (
        {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
         "pad_token": "a"},
    ),
}  # fmt: skip
_TOKENIZER_CONFIG: Final[Mapping[str, Any]] = {
    "bos_token": "<|endoftext|>",
    "eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False, "special": True},
    "pad_token": None,
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}, "279": {"content": "<new>"}},
    "model_max_length": 2048,
    "chat_template": [{"name": "default", "template": tiny.CHAT_TEMPLATE}, {"name": "tool_use", "template": "{{ x }}"}],
    "extra_special_tokens": {"image": "<image>"},
}
_GENERATION_CONFIG: Final[Mapping[str, Any]] = {
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "eos_token_id": [1, 2],
    "do_sample": True,
}


def _small_tokenizer() -> dict[str, Any]:
    """Return the tiny checkpoints' tokenizer.json, with single bytes and a few merges only."""
    content: dict[str, Any] = json.loads(tiny.tokenizer().to_str())
    content["model"]["merges"] = content["model"]["merges"][:20]
    made = {"".join(merge) for merge in content["model"]["merges"]}
    vocabulary = [token for token in content["model"]["vocab"] if len(token) == 1 or token in made]
    marks = list(tiny.SPECIAL_TOKENS)
    content["model"]["vocab"] = {token: id for id, token in enumerate([*marks, *vocabulary])}
    return content


def _gguf_content(kind: str, quantizations: Sequence[int], hidden_size: int) -> GgufContent:
    """Return a llama of two layers.

    :param kind: of its tokenizer
    :param quantizations: ggml's numbers of its matrices' types, which they take in turn
    """
    model: Any = tiny.build_gguf_model(
        "llama",
        vocab_size=64,
        num_hidden_layers=2,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        head_dim=(head_dim := max(16, hidden_size // 4)),
        tie_word_embeddings=kind == "gpt2",
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tied = model.config.tie_word_embeddings
    table, data = [], b""
    types, generator = itertools.cycle(quantizations), np.random.default_rng(0)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        type_ = next(types) if tensor.ndim > 1 else 0
        table.append(GgufEntry(stored.encode(), tuple(tensor.shape)[::-1], type_, len(data)))
        raw = tensor.float().numpy().tobytes()
        if type_:  # any bytes are blocks; without their upper bits every scale is a finite number
            form = BLOCK_FORMATS[type_]
            raw = generator.integers(0, 64, tensor.numel() // form.elements * form.num_bytes, np.uint8).tobytes()
        data += raw + bytes(-len(raw) % 32)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(29)), *(chr(97 + i) for i in range(26))]
    tokens += ["ab", "abc", "\u2581", "\u2581a", "\u0120", "\u010a"]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "llama.embedding_length": hidden_size,
        "llama.block_count": 2,
        "llama.feed_forward_length": hidden_size,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 64,
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(id) for id in range(64)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 29, *[1] * 32],
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
    }
    entries = tuple((key.encode(), GgufValue.of(value)) for key, value in metadata.items())
    content = GgufContent(entries, tuple(table), data)
    return evolve(content, version=3)
