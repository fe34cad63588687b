"""Collect an importance matrix: run a text through a model, and accumulate the squared inputs of its matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.recurrent import StatefulBackend
from paged_sdk.build.assistant_fit import check_assistant
from paged_sdk.build.device_setup import loading_memory_errors, prepare_thread
from paged_sdk.chat.text_processor import TextProcessor, load_text_processor, text_processor_from_gguf
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedArchitectureError
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.attention_block import AttentionBlock
from paged_sdk.models.beside_block import BesideBlock, RecurrentBlock
from paged_sdk.models.checkpoint_layout import read_shape
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.gated_delta_block import GatedDeltaBlock
from paged_sdk.models.gated_mlp import GatedMlp
from paged_sdk.models.latent_attention_block import LatentAttentionBlock
from paged_sdk.models.loading import load_model
from paged_sdk.models.mamba2_block import Mamba2Block
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.models.plain_mlp import PlainMlp
from paged_sdk.models.short_conv_block import ShortConvBlock
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.system.files import read_text
from paged_sdk.types.step import StepRow
from paged_sdk.weights.checkpoint import Checkpoint, open_checkpoint
from paged_sdk.weights.gguf.config_export import gguf_architecture
from paged_sdk.weights.gguf.export_places import architecture_of
from paged_sdk.weights.gguf.export_recurrent import column_order
from paged_sdk.weights.importance import ImportanceMatrix

__all__ = ["CHUNK_TOKENS", "calibrate"]

_CPU: Final = torch.device("cpu")
CHUNK_TOKENS: Final = 512
"""Tokens per independent chunk of the text, as in llama.cpp's llama-imatrix."""


def calibrate(
    path: Path,
    text: Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    setting: str = "calibrate",
    num_threads: int | None = None,
) -> ImportanceMatrix:
    """Return the mean squared input of each column of a model's matrices, over a text.

    :param path: a directory or a GGUF file
    :param text: a text file
    :param on_progress: called with the number of chunks done and their total, also while the model is loaded; an
        exception that it raises stops the work
    :param dtype: dtype of activations, and of weights that are not stored quantized
    :param setting: the user's name for ``text``, for errors
    :param num_threads: threads per operation; None: the machine's default
    :raises ConfigError: the file cannot be read, or has too little text
    :raises ModelLoadError: the model cannot be loaded
    """
    try:
        content = read_text(text)
    except CheckpointError as error:
        raise ConfigError.of(setting, str(text), f"a file of text ({error})") from error
    checkpoint = open_checkpoint(path)
    try:
        _must_have_names(checkpoint)
        pieces = _pieces(checkpoint, content)
        if not pieces:
            raise ConfigError.of(setting, str(text), "a file with some text")
        with loading_memory_errors(path):
            is_of_torch = load() is None or _has_experts(checkpoint)
            loading = partial(on_progress, 0, len(pieces))
            model = _loaded(checkpoint, dtype, num_threads, loading, is_of_torch=is_of_torch)
    finally:
        checkpoint.source.close()
    collector = _Collector(model)

    def run() -> None:
        with torch.inference_mode():
            for done, token_ids in enumerate(pieces, 1):
                _run(model, token_ids)
                on_progress(done, len(pieces))

    # torch's threads would compete with those of the native kernels for the CPUs.
    threads = num_threads if is_of_torch else 1
    with ThreadPoolExecutor(1, initializer=partial(prepare_thread, _CPU, threads)) as alone:
        alone.submit(run).result()
    return collector.importance(text, len(pieces))


def _must_have_names(checkpoint: Checkpoint) -> None:
    """Check that GGUF names the model's matrices, before the model is loaded, which may take minutes.

    :raises UnsupportedArchitectureError: it does not, or the model cannot read a text by itself
    """
    config, _ = read_shape(checkpoint.config, checkpoint.source)
    check_assistant(config, checkpoint.path)
    try:
        gguf_architecture(config)
    except UnsupportedArchitectureError as error:
        raise UnsupportedArchitectureError(
            f"{checkpoint.path}: importance is collected by GGUF's names of matrices, which those of a "
            f"{error.architecture} model do not have; with_isq (--isq) quantizes it without importance",
            path=checkpoint.path,
            architecture=error.architecture,
            supported=error.supported,
        ) from error


def _pieces(checkpoint: Checkpoint, content: str) -> list[list[int]]:
    processor = _text_processor(checkpoint)
    try:
        before = processor.tokenizer.encode("", add_special_tokens=True)
        token_ids = processor.tokenizer.encode(content, add_special_tokens=False)
    finally:
        processor.close()
    if len(token_ids) < 2:
        return []
    size = CHUNK_TOKENS - len(before)
    return [[*before, *token_ids[first : first + size]] for first in range(0, len(token_ids), size)]


def _text_processor(checkpoint: Checkpoint) -> TextProcessor:
    if checkpoint.metadata is None:
        return load_text_processor(checkpoint.path)
    return text_processor_from_gguf(checkpoint.metadata)


def _has_experts(checkpoint: Checkpoint) -> bool:
    return any(".experts." in name for name in checkpoint.source.names())


def _loaded(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    num_threads: int | None,
    check_cancelled: Callable[[], None],
    *,
    is_of_torch: bool,
) -> DecoderModel:
    """Load a model to run layer by layer.

    :param check_cancelled: called after each tensor; an exception that it raises stops loading
    :param is_of_torch: True: decode all weights and multiply with torch, as observing the inputs of experts' down
        projections requires; False: quantized weights stay quantized
    """
    library = None if is_of_torch else load()
    workspace = None if library is None else Workspace(library, num_threads=num_threads)
    policy = WeightPolicy(forms=()) if workspace is None else WeightPolicy(keep_blocks=True, workspace=workspace)
    threads = 1 if workspace is None else workspace.num_threads
    return load_model(
        checkpoint.config,
        checkpoint.source,
        dtype=dtype,
        placement=_CPU,
        policy=policy,
        on_progress=lambda done, total: check_cancelled(),
        num_threads=threads,
    )


def _run(model: DecoderModel, token_ids: Sequence[int]) -> None:
    shape = model.config
    attending = ContiguousBackend(shape.of_layers(shape.attention_layers), dtype=model.dtype, device=_CPU)
    backend = StatefulBackend(attending, shape, num_slots=1, dtype=model.dtype, device=_CPU)
    row = StepRow(0, 0, token_ids, [0], len(token_ids))
    context = StepContext(attention=backend.prepare([row]))
    hidden = model.forward(torch.tensor(token_ids), torch.arange(len(token_ids)), context)
    if not model.config.tie_embeddings:
        model.logits(hidden)


class _Squares:
    """Sums the squared inputs of one matrix, or of each of several, by column.

    :ivar sums: float64 ``[matrices, columns]``
    :ivar counts: float64 ``[matrices]``: number of input rows
    """

    def __init__(self, num_matrices: int, cols: int) -> None:
        self.sums = torch.zeros(num_matrices, cols, dtype=torch.float64)
        self.counts = torch.zeros(num_matrices, dtype=torch.float64)

    def add(self, x: Tensor, matrix: int = 0) -> None:
        self.sums[matrix] += x.float().square().sum(0)
        self.counts[matrix] += len(x)


class _Collector:
    """Wraps a model's matrices to observe their inputs, and keeps the squares by GGUF tensor name."""

    def __init__(self, model: DecoderModel) -> None:
        architecture = gguf_architecture(model.config)
        known = architecture_of(model.config)
        self._own_names = {*known.block_names, *(stem for stems in known.joined.values() for stem in stems)}
        self._config = model.config
        self._squares: dict[str, _Squares] = {}
        for index, layer in enumerate(model.layers):
            self._watch_layer(f"blk.{index}.", layer, architecture)
        if model.layer_inputs is not None:
            inputs = model.layer_inputs
            squares = self._of(["per_layer_model_proj.weight"], inputs.projection.in_features)
            inputs.projection = _WatchedLinear(inputs.projection, squares)
        if not model.config.tie_embeddings:
            model.head = _WatchedLinear(model.head, self._of(["output.weight"], model.head.in_features))

    def importance(self, text: Path, num_chunks: int) -> ImportanceMatrix:
        """Return the importance matrix of a text.

        :param num_chunks: number of chunks of the text
        :raises CheckpointError: activations are not finite
        """
        source = f"calibration on {text.name}"
        sums = {name: self._in_order(name, squares.sums.float()) for name, squares in self._squares.items()}
        bad = next((name for name, each in sums.items() if not bool(each.isfinite().all())), None)
        if bad is not None:
            raise CheckpointError(f"{source}: what tensor {bad} multiplies is not finite")
        counts = {name: squares.counts.float() for name, squares in self._squares.items()}
        return ImportanceMatrix(source=source, sums=sums, counts=counts, texts=(str(text),), num_chunks=num_chunks)

    def _in_order(self, name: str, sums: Tensor) -> Tensor:
        """Return sums by column in the order in which GGUF has a tensor's columns."""
        order = column_order(self._config, name)
        return sums if order is None else sums[:, order]

    def _watch_layer(self, prefix: str, layer: DecoderLayer, architecture: str) -> None:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, BesideBlock):
            self._watch_attention(prefix, mixer.attention)
            self._watch_recurrent(prefix, mixer.recurrent)
        elif isinstance(mixer, ShortConvBlock | GatedDeltaBlock | Mamba2Block):
            self._watch_recurrent(prefix, mixer)
        elif isinstance(mixer, LatentAttentionBlock):
            self._watch_latent(prefix, mixer)
        elif mixer is not None:
            self._watch_attention(prefix, layer.attention)
        if layer.layer_input is not None:
            layer.layer_input.gate = self._watched(prefix, ("inp_gate",), layer.layer_input.gate)
            layer.layer_input.output = self._watched(prefix, ("proj",), layer.layer_input.output)
        if layer.expert_branch is not None:
            what = type(layer.expert_branch).__name__
            raise UnsupportedArchitectureError(f"importance cannot be collected in a {what}", architecture=architecture)
        if mlp is None:
            return
        if isinstance(mlp, GatedMlp | PlainMlp):
            self._watch_mlp(prefix, mlp, "")
        elif isinstance(mlp, MoeMlp) and isinstance(mlp.experts, DenseExperts):
            self._watch_experts(prefix, mlp, mlp.experts)
        else:
            raise UnsupportedArchitectureError(
                f"importance cannot be collected in a {type(mlp).__name__}", architecture=architecture
            )

    def _watch_attention(self, prefix: str, attention: AttentionBlock) -> None:
        apart = ("attn_q", "attn_k", "attn_v")
        own = apart[: 1 + attention.shape.num_kv_projections]
        names = own if self._own_names.issuperset(apart) else ("attn_qkv",)
        attention.qkv = self._watched(prefix, names, attention.qkv)
        attention.output = self._watched(prefix, ("attn_output",), attention.output)

    def _watch_latent(self, prefix: str, attention: LatentAttentionBlock) -> None:
        query = ("attn_q",) if attention.query_up is None else ("attn_q_a",)
        attention.query = self._watched(prefix, query, attention.query)
        if attention.query_up is not None:
            attention.query_up = self._watched(prefix, ("attn_q_b",), attention.query_up)
        attention.latent = self._watched(prefix, ("attn_kv_a_mqa",), attention.latent)
        attention.output = self._watched(prefix, ("attn_output",), attention.output)

    def _watch_recurrent(self, prefix: str, block: RecurrentBlock) -> None:
        inputs, output = "ssm_in", "ssm_out"
        if isinstance(block, ShortConvBlock):
            inputs, output = "shortconv.in_proj", "shortconv.out_proj"
        elif isinstance(block, GatedDeltaBlock):
            block.rates = self._watched(prefix, ("ssm_beta", "ssm_alpha", "ssm_ba"), block.rates)
        is_delta = isinstance(block, GatedDeltaBlock)
        block.input = self._watched(prefix, ("attn_qkv", "attn_gate") if is_delta else (inputs,), block.input)
        block.output = self._watched(prefix, (output,), block.output)

    def _watch_mlp(self, prefix: str, mlp: GatedMlp | PlainMlp, suffix: str) -> None:
        if isinstance(mlp, PlainMlp):
            mlp.up = self._watched(prefix, (f"ffn_up{suffix}",), mlp.up)
        else:
            mlp.gate_up = self._watched(prefix, (f"ffn_gate{suffix}", f"ffn_up{suffix}"), mlp.gate_up)
        mlp.down = self._watched(prefix, (f"ffn_down{suffix}",), mlp.down)

    def _watch_experts(self, prefix: str, mlp: MoeMlp, experts: DenseExperts) -> None:
        count, hidden_size, size = experts.down.shape
        stems = ("ffn_gate_exps", "ffn_up_exps") if experts.is_gated else ("ffn_up_exps",)
        gate_up = self._of([f"{prefix}{stem}.weight" for stem in stems], hidden_size, count)
        down = self._of([f"{prefix}ffn_down_exps.weight"], size, count)
        mlp.experts = _WatchedExperts(experts, gate_up, down)
        if mlp.shared is not None:
            self._watch_mlp(prefix, mlp.shared.mlp, "_shexp")
        if mlp.latent is not None:
            to, of = mlp.latent
            mlp.latent = self._watched(prefix, ("ffn_latent_down",), to), self._watched(prefix, ("ffn_latent_up",), of)

    def _watched(self, prefix: str, stems: Sequence[str], linear: Linear) -> Linear:
        names = [f"{prefix}{stem}.weight" for stem in stems if stem in self._own_names]
        return _WatchedLinear(linear, self._of(names, linear.in_features))

    def _of(self, names: Sequence[str], cols: int, num_matrices: int = 1) -> _Squares:
        """Return new sums for matrices that share an input."""
        squares = _Squares(num_matrices, cols)
        self._squares.update(dict.fromkeys(names, squares))
        return squares


class _WatchedLinear(Linear):
    """Wraps a linear layer, and accumulates its squared inputs."""

    def __init__(self, linear: Linear, squares: _Squares) -> None:
        super().__init__(in_features=linear.in_features, out_features=linear.out_features, num_bytes=linear.num_bytes)
        self._linear = linear
        self._squares = squares

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Compute the wrapped layer."""
        self._squares.add(x)
        return self._linear.forward(x, ctx)


class _WatchedExperts(Experts):
    """Computes a layer's experts one after the other, and accumulates the squared inputs of each."""

    def __init__(self, experts: DenseExperts, gate_up: _Squares, down: _Squares) -> None:
        assert experts.extras is None, "forward() computes experts without biases"
        self._experts = experts
        self._gate_up = gate_up
        self._down = down

    @property
    def num_bytes(self) -> int:
        """Return the size of the experts."""
        return self._experts.num_bytes

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Implement :meth:`Experts.forward`."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in sorted(set(topk_ids.flatten().tolist())):
            tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
            chosen = x[tokens]
            self._gate_up.add(chosen, expert)
            inner = self._experts.inner(chosen, expert)
            self._down.add(inner, expert)
            values = F.linear(inner, self._experts.down[expert]).float()
            out.index_add_(0, tokens, values * topk_weights[tokens, places, None])
        return out.to(x.dtype)
