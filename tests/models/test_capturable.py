"""A forward pass can be recorded in a CUDA graph: it waits for nothing, moves nothing between host and device, and has
no shape that depends on values.

Without a GPU, meta tensors stand for those on one: they have a shape and no values, so that torch itself refuses
whatever would look at them. Kernels are not launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from reference_decoding import DictSource, random_prompt
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")

from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.triton_paged import TritonPagedBackend
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.loading import load_model
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.parallel.group import Group
from paged_sdk.quant.embedding import TritonBlockEmbedding
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.quant.triton_block import TritonBlockLinear
from paged_sdk.quant.triton_block_experts import TritonBlockExperts
from paged_sdk.runner.decode_graphs import DecodeGraphs
from paged_sdk.runner.mixed_graphs import MixedGraphs
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import StepResults
from paged_sdk.weights.gguf.source import GgufSource
from spans import span
from tiny import FAMILIES, build_model, make_gguf

META: Final = torch.device("meta")
#: One launch for gate and up, products by tiles, and decoded matrices; few pairs of tokens and experts, and many.
NUM_TOKENS: Final = (1, 4, 40, 600)
WITHOUT_GPU: Final = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would be launched")
NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class _DeviceOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to take or make tensors on the host, but for numbers, which operations of the device take along."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim() > 0]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        assert all(each.is_meta for each in taken + made), f"{func} with tensors on the host"
        return result


class _NoValues(TorchFunctionMode):
    """Refuses to make tensors of the host's values, which for meta tensors is no operation at all."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor), "values of the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def device_only() -> Iterator[None]:
    """As while a graph is captured."""
    with torch.inference_mode(), _DeviceOnly(), _NoValues():  # type: ignore[no-untyped-call]
        yield


@pytest.fixture
def meta_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors take the way of those on a device that Triton serves."""
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta), raising=False)
    monkeypatch.setattr("paged_sdk.kernels.triton.availability.why_not", lambda _: None)


def check_steps(model: DecoderModel) -> None:
    """Check prompts, with indices made beforehand, decodes of as many tokens and rows of any lengths, which make theirs
    in the step.
    """
    settings = PoolSettings(block_size=16, dtype=model.dtype, device=META)
    pool = TritonPagedBackend(model.config, settings, 64, max_num_seqs=max(NUM_TOKENS))
    lengths = torch.empty(4, dtype=torch.int32, device=META)
    for num_tokens in NUM_TOKENS:
        tokens = torch.empty(num_tokens, dtype=torch.int64, device=META)
        prompt = pool.prepare([span(0, num_tokens, range(64))])
        with device_only():
            mixed = pool.mixed(lengths[:3].long(), lengths[:3], lengths, tokens, tokens, max_context_len=64)
            for step in (prompt, pool.decode(tokens, tokens, 64), mixed):
                logits = model.logits(model.forward(tokens, tokens, StepContext(attention=step)))
                assert logits.shape == (num_tokens, model.config.vocab_size)


@WITHOUT_GPU
@pytest.mark.usefixtures("meta_for_cuda")
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_models(family: str) -> None:
    reference = build_model(family)
    source = DictSource(reference.state_dict())
    check_steps(load_model(reference.config.to_dict(), source, dtype=torch.bfloat16, placement=META))


class _OtherDevices:
    """Stands for connections between devices: nothing waits for them on the host, and something comes."""

    def __init__(self) -> None:
        self.num_calls = 0

    def _pass(self, *_: object) -> _OtherDevices:
        self.num_calls += 1
        return self

    allreduce = _allgather_base = _pass

    def wait(self) -> None:
        """Let what is launched later wait."""


@WITHOUT_GPU
@pytest.mark.usefixtures("meta_for_cuda")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_ranks(family: str) -> None:
    """Sums, embeddings and logits of ranks on devices of their own are operations of the device alone."""
    reference = build_model(family)
    source = DictSource(reference.state_dict())
    for rank in range(2):
        group, others = Group(rank, 2), _OtherDevices()
        group._devices = others
        model = load_model(reference.config.to_dict(), source, dtype=torch.bfloat16, placement=META, group=group)
        with group.in_lockstep():
            check_steps(model)
        sums = 1 + 2 * model.config.num_layers  # of embeddings, attention and MLPs
        assert others.num_calls == 3 * len(NUM_TOKENS) * (sums + 1)


@WITHOUT_GPU
@pytest.mark.usefixtures("meta_for_cuda")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "qwen3_moe", "mixtral"])
def test_models_in_blocks(family: str, tmp_path: Path) -> None:
    source = GgufSource(make_gguf(tmp_path, family=family, quantization="Q8_0"))
    policy = WeightPolicy(keep_blocks=True)
    model = load_model(source.config, source, dtype=torch.bfloat16, placement=META, policy=policy)
    assert isinstance(model.embedding, TritonBlockEmbedding)
    assert isinstance(model.head, TritonBlockLinear)
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoeMlp)]
    assert len(mixtures) == (model.config.num_layers if model.config.moe else 0)
    assert all(isinstance(mixture.experts, TritonBlockExperts) for mixture in mixtures)
    check_steps(model)


@WITHOUT_GPU
@pytest.mark.usefixtures("meta_for_cuda")
def test_recorded_steps_with_their_logits_and_tokens() -> None:
    """All that is recorded of them."""
    reference = build_model("llama")
    model = load_model(
        reference.config.to_dict(), DictSource(reference.state_dict()), dtype=torch.bfloat16, placement=META
    )
    settings = PoolSettings(block_size=16, dtype=model.dtype, device=META)
    pool = TritonPagedBackend(model.config, settings, 64, max_num_seqs=8)
    layers = RecordableLayers(model, pool, StepResults(torch.empty(8, dtype=torch.int64, device=META), 32))
    num_recorded = 0

    def record(function: Callable[[], None]) -> Callable[[], None]:
        nonlocal num_recorded
        function()  # which makes the memory of the results
        with device_only():
            function()
        num_recorded += 1
        return function

    MixedGraphs(layers, counts=(16, 32), bounds=(64, 128), record=record)
    DecodeGraphs(layers, sizes=(1, 8), bounds=(64, 128), record=record)
    assert num_recorded == 8


@WITHOUT_GPU
@pytest.mark.usefixtures("meta_for_cuda")
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_what_launches_the_kernels_of_experts(num_tokens: int) -> None:
    """In whole models it is hidden behind the custom ops' fake kernels."""
    from paged_sdk.kernels.triton.fused_moe import fused_moe
    from paged_sdk.kernels.triton.routing import route

    with device_only():
        hidden = torch.empty(num_tokens, 64, device=META)
        weights, ids = route(torch.empty(num_tokens, 16, device=META), 2, renormalize=True)
        gate_up, down = torch.empty(16, 2 * 32, 64, device=META), torch.empty(16, 64, 32, device=META)
        assert fused_moe(hidden, gate_up, down, weights, ids).shape == hidden.shape


REFUSED: Final[dict[str, Callable[[Tensor], object]]] = {
    "a number": lambda x: x.sum().item(),
    "a condition": lambda x: bool(x.isnan().any()),
    "values": lambda x: x.cpu(),
    "a list": lambda x: x.tolist(),
    "a shape that depends on values": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "the host's values": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "the host's number": lambda x: x.new_tensor(2.0),
    "a tensor of the host": lambda x: torch.ones(4).to(x.device),
}


@WITHOUT_GPU
@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_captured_is_seen(refused: str) -> None:
    with device_only(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        REFUSED[refused](torch.empty(4, device=META))


@pytest.mark.thinned("quantization", "family", of=1)
@NEEDS_GPU
@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "qwen3_moe", "mixtral"])
def test_a_replayed_step_is_the_step(family: str, quantization: str, tmp_path: Path) -> None:
    """Captured with some tokens and replayed with others, whose logits are nowhere near."""
    cuda = torch.device("cuda", 0)
    source = GgufSource(make_gguf(tmp_path, family=family, quantization=quantization))
    policy = WeightPolicy(keep_blocks=quantization != "F32")
    model = load_model(source.config, source, dtype=torch.bfloat16, placement=cuda, policy=policy)
    settings = PoolSettings(block_size=16, dtype=torch.bfloat16, device=cuda)
    pool = TritonPagedBackend(model.config, settings, max(NUM_TOKENS), max_num_seqs=max(NUM_TOKENS))
    for num_tokens in NUM_TOKENS:
        seats = torch.from_numpy(
            pool.seats(range(num_tokens), [0] * num_tokens, [[block] for block in range(num_tokens)])
        ).to(cuda)
        texts = [torch.tensor(random_prompt(num_tokens, seed=seed), device=cuda) for seed in (1, 2)]
        tokens = texts[0].clone()
        with torch.inference_mode():
            logits_of_first_tokens(model, pool, tokens, seats)  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = logits_of_first_tokens(model, pool, tokens, seats)
            for text in reversed(texts):
                expected = logits_of_first_tokens(model, pool, text, seats)
                tokens.copy_(text)
                graph.replay()
                assert (captured - expected).norm() < 1e-2 * expected.norm()


def logits_of_first_tokens(model: DecoderModel, pool: TritonPagedBackend, tokens: Tensor, seats: Tensor) -> Tensor:
    positions = torch.zeros_like(tokens)
    step = pool.decode(seats, positions, 64)
    return model.logits(model.forward(tokens, positions, StepContext(attention=step)))
