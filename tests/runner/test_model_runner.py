"""The runner under a real scheduler, judged by transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import SamplingParams
from paged_sdk.errors import ModelClosedError
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.kv.manager import KvManager
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.loading import load_model
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.scheduler.scheduler import Scheduler
from sequences import make_sequence
from tiny import build_model

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, seed=0)
PROMPTS = tuple([(7 * i * i + 3 * length) % 512 for i in range(length)] for length in (3, 40, 41, 90, 17))
NUM_TOKENS = 12


class StateSource:
    """Gives the tensors of a transformers model."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._tensors[name].to(device, dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def matrix(self, name: str) -> StoredMatrix:
        return DenseMatrix(self._tensors[name])

    def close(self) -> None:
        """Do nothing: nothing is open."""


def build(reference: PreTrainedModel, **changes: Tensor) -> DecoderModel:
    tensors = {name: tensor.clone() for name, tensor in reference.state_dict().items()} | changes
    return load_model(reference.config.to_dict(), StateSource(tensors), dtype=torch.float64, placement=CPU)


@functools.cache
def reference(family: str = "llama") -> PreTrainedModel:
    model: Any = build_model(family)
    model.set_attn_implementation("eager")
    built: PreTrainedModel = model
    return built


@functools.cache
def continuation(family: str, index: int) -> list[int]:
    """Generate greedy tokens without any cache."""
    text = list(PROMPTS[index])
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            text.append(int(reference(family)(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[-NUM_TOKENS:]


class Harness:
    """Holds scheduler, KV and runner, as the engine does."""

    def __init__(self, model: DecoderModel, *, paged: bool = True, num_blocks: int = 64, **settings: Any) -> None:
        config = EngineConfig(paged=paged, block_size=8, **settings)
        self.kv: KvManager
        if paged:
            self.kv = KvCacheManager(num_blocks, 8, sliding_window=model.config.window)
            pool = PoolSettings(block_size=8, dtype=model.dtype, device=CPU)
            self.backend: PagedBackend | ContiguousBackend = PagedBackend(model.config, pool, num_blocks)
        else:
            self.kv = SequenceKvManager(max_sequence_tokens=512, max_num_seqs=config.max_num_seqs, num_kept=4)
            self.backend = ContiguousBackend(model.config, dtype=model.dtype, device=CPU)
        self.scheduler = Scheduler(config, self.kv)
        vocab_size = model.config.vocab_size
        processors = default_processors(vocab_size, lambda text: [ord(letter) % 512 for letter in text])
        sampler = Sampler(vocab_size, CPU, processors)
        self.runner = ModelRunner(model, self.backend, sampler)
        self.num_added = 0
        self.texts: dict[tuple[int, int], list[int]] = {}
        self.prompt_logprobs: dict[int, list[RawLogprobs]] = {}
        self.logprobs: dict[int, list[RawLogprobs]] = {}
        self.failed: dict[int, str] = {}
        self.num_steps = 0

    def add(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, num_choices: int = 1) -> int:
        """Queue a request, and return its id."""
        seq_id, self.num_added = self.num_added, self.num_added + num_choices
        self.scheduler.add(make_sequence(seq_id, prompt, sampling, max_tokens=NUM_TOKENS, num_choices=num_choices))
        return seq_id

    def step(self) -> None:
        output = self.scheduler.schedule()
        result = self.runner.submit(output).result()
        for index, error in result.failed.items():
            self.failed[output.scheduled[index].sequence.seq_id] = str(error).partition(": ")[2]
            self.scheduler.finish(output.scheduled[index].sequence, "stop")
        for index, entries in result.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(output.scheduled[index].sequence.seq_id, []).extend(entries)
        for index, entries_or_none in enumerate(result.logprobs):
            self.logprobs.setdefault(output.scheduled[index].sequence.seq_id, []).extend(entries_or_none or [])
        new_tokens = self.scheduler.update(output, result.token_ids)
        for sequence, token_ids in zip(new_tokens.sequences, new_tokens.token_ids, strict=True):
            self.texts.setdefault((sequence.seq_id, sequence.choice_index), []).extend(token_ids)

    def run(self) -> None:
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.step()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("budget", [13, 512])
def test_prompts_in_chunks_beside_decodes(family: str, budget: int, *, paged: bool) -> None:
    harness = Harness(build(reference(family)), paged=paged, max_num_batched_tokens=budget)
    for prompt in PROMPTS[:3]:
        harness.add(prompt)
    harness.step()
    harness.step()
    for prompt in PROMPTS[3:]:
        harness.add(prompt)
    harness.run()
    assert [harness.texts[i, 0] for i in range(5)] == [continuation(family, i) for i in range(5)]
    assert not harness.failed


def test_preempted_texts_go_on_as_if_nothing_had_been() -> None:
    num_preemptions = 0
    for num_blocks in (13, 14, 16):  # the longest text needs 13; who is preempted when is the scheduler's affair
        harness = Harness(build(reference()), num_blocks=num_blocks)
        for prompt in PROMPTS:
            harness.add(prompt)
        harness.run()
        num_preemptions += harness.scheduler.num_preemptions
        assert [harness.texts[i, 0] for i in range(5)] == [continuation("llama", i) for i in range(5)]
    assert num_preemptions > 0


@pytest.mark.parametrize("paged", [True, False])
def test_a_cached_prefix(*, paged: bool) -> None:
    harness = Harness(build(reference()), paged=paged)
    for _ in range(2):
        harness.add(PROMPTS[3])
        harness.run()
    assert harness.kv.prefix_hits >= 80
    assert harness.texts[0, 0] == harness.texts[1, 0] == continuation("llama", 3)


@pytest.mark.parametrize("paged", [True, False])
def test_choices_share_a_prompt_and_part(*, paged: bool) -> None:
    """Each choice is the text that a request of its own would have been given with that choice's random numbers."""
    sampling = SamplingParams(temperature=1.5, seed=11)
    harness = Harness(build(reference()), paged=paged)
    harness.add(PROMPTS[1], sampling, num_choices=3)
    harness.add(PROMPTS[1])
    harness.run()
    choices = [harness.texts[i, i] for i in range(3)]
    assert len({tuple(choice) for choice in choices}) == 3
    assert all(len(choice) == NUM_TOKENS for choice in choices)
    assert harness.texts[3, 0] == continuation("llama", 1)
    alone = Harness(build(reference()), paged=not paged)
    alone.add(PROMPTS[1], sampling)
    alone.run()
    assert alone.texts[0, 0] == choices[0]


@pytest.mark.parametrize("budget", [7, 512])
def test_prompt_logprobs(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.runner.prompt_logprobs.LOGITS_TILE", 16)
    harness = Harness(build(reference()), max_num_batched_tokens=budget)
    harness.add(PROMPTS[4])
    harness.add(PROMPTS[3], SamplingParams(temperature=0.0, seed=0, prompt_logprobs=2, top_n_logprobs=0))
    harness.run()
    with torch.inference_mode():
        scores = reference()(torch.tensor([PROMPTS[3]])).logits[0].log_softmax(-1)
    entries = harness.prompt_logprobs[1]
    assert [entry.token_id for entry in entries] == PROMPTS[3][1:]
    expected = [float(scores[i, token]) for i, token in enumerate(PROMPTS[3][1:])]
    assert [entry.logprob for entry in entries] == pytest.approx(expected, abs=1e-3)
    assert [[token for token, _ in entry.top] for entry in entries] == scores[:-1].topk(2).indices.tolist()
    assert 0 not in harness.prompt_logprobs
    assert [entry.token_id for entry in harness.logprobs[1]] == continuation("llama", 3)


@pytest.mark.parametrize("paged", [True, False])
def test_a_text_with_nan_fails_alone(*, paged: bool) -> None:
    """One token's embedding is broken: texts that hold it fail, the others in the batch are what they were."""
    embeddings = reference().state_dict()["model.embed_tokens.weight"].clone()
    broken = next(
        token for token in range(512) if all(token not in [*PROMPTS[i], *continuation("llama", i)] for i in range(5))
    )
    embeddings[broken] = torch.nan
    model = build(reference(), **{"model.embed_tokens.weight": embeddings})
    harness = Harness(model, paged=paged, max_num_batched_tokens=64)
    harness.add(PROMPTS[0])
    harness.add([1, 2, broken, 3])
    harness.add(PROMPTS[3])
    harness.add([broken] * 5, SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0))
    harness.add([broken], SamplingParams(temperature=1.0, seed=0))
    harness.run()
    assert harness.failed == dict.fromkeys((1, 3, 4), "the logits hold NaN or Inf")
    assert (harness.texts[0, 0], harness.texts[2, 0]) == (continuation("llama", 0), continuation("llama", 3))
    assert 3 not in harness.prompt_logprobs


def test_a_text_whose_every_token_is_banned_fails_alone() -> None:
    harness = Harness(build(reference()))
    harness.add(PROMPTS[0], SamplingParams(temperature=0.0, seed=0, logits_bias=dict.fromkeys(range(512), -torch.inf)))
    harness.add(PROMPTS[1])
    harness.run()
    assert harness.failed == {0: "every token is banned"}
    assert harness.texts[1, 0] == continuation("llama", 1)


def test_an_empty_step() -> None:
    harness = Harness(build(reference()))
    result = harness.runner.submit(SchedulerOutput([], [], [], [], [3])).result()
    assert (result.token_ids, result.logprobs, result.failed) == ([], [], {})


def test_closing_twice() -> None:
    harness = Harness(build(reference()))
    harness.runner.close()
    harness.runner.close()
    with pytest.raises(ModelClosedError):
        harness.runner.submit(SchedulerOutput([], [], [], [], [])).result()
