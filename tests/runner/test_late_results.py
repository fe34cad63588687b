"""What a device computes beside tokens comes late, and is what it would be if it were waited for.

The way for devices is taken on CPU tensors.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve
from device_rig import Found, Rig
from test_model_runner import PROMPTS, build, reference
from torch import Tensor

from arrivals import gather
from paged_sdk import MemoryGpuConfig, Model, PagedAttentionMeta, SamplingParams, TextModelBuilder
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.config.pooling import POOLINGS
from paged_sdk.errors import NumericalError, RequestFailedError
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.transfer import HostCopies
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.runner import step_runner
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.runner.prompt_reader import PromptReader, _Pool, _Scores
from paged_sdk.runner.sampled_step import SampledStep
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.request import Request
from paged_sdk.types.reading import PooledVector, PromptScores
from recorded_steps import Recorder, let_record, let_torch_attend
from sequences import make_sequence

BROKEN: Final = 511
"""Stands for a token whose embedding is not finite."""

NOT_FINITE: Final = "the logits hold NaN or Inf"
BAD: Final = "the hidden states hold NaN or Inf"
BAD_LOGITS: Final = ("bad logprobs", "bad logprobs of the host's", "bad scores")
BAD_STATES: Final = ("bad mean", "bad last")


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what has runners from then on wait for every result within ``submit``. Logprobs are computed by torch, as
    on a device, so that they may be compared in every bit.
    """
    monkeypatch.setattr("paged_sdk.sampling.logprobs.load", lambda: None)

    def waits(scheduled: Any, output: RunnerOutput, *, waits: bool) -> LateResults:
        return LateResults(scheduled, output, waits=True)

    return lambda: monkeypatch.setattr(step_runner, "LateResults", waits)


def model() -> DecoderModel:
    embeddings = reference().state_dict()["model.embed_tokens.weight"].clone()
    embeddings[BROKEN] = torch.nan
    return build(reference(), **{"model.embed_tokens.weight": embeddings})


def spoiled(index: int) -> list[int]:
    """Return a prompt that holds the broken token."""
    return [*PROMPTS[index][:-2], BROKEN, *PROMPTS[index][-1:]]


def ask_for_everything(rig: Rig, *, is_sound: bool = False) -> None:
    """Ask for texts of the device's and the host's, prompt logprobs, scores and vectors, in prompts of several chunks.

    :param is_sound: whether everything is finite
    """
    rig.ask("greedy", PROMPTS[0])
    rig.ask("sampled", PROMPTS[4], temperature=0.9, top_n_logprobs=2)
    rig.ask("logprobs", PROMPTS[3], prompt_logprobs=3)
    rig.ask("logprobs of the host's", PROMPTS[2], prompt_logprobs=1, logits_bias={7: 1.0})
    rig.ask("logprobs of choices", PROMPTS[4], prompt_logprobs=0, n_choices=2, temperature=0.8)
    rig.ask("scores", PROMPTS[2], PromptScores(1))
    rig.ask("last scores", PROMPTS[3], PromptScores(60))
    rig.ask("no scores", PROMPTS[0], PromptScores(3))
    for pooling in POOLINGS:
        rig.ask(pooling, PROMPTS[1], PooledVector(pooling))
    if not is_sound:
        rig.ask("bad logprobs", spoiled(1), prompt_logprobs=2)
        rig.ask("bad logprobs of the host's", spoiled(4), prompt_logprobs=2, logits_bias={7: 1.0})
        rig.ask("bad scores", spoiled(3), PromptScores(1))
        rig.ask("bad mean", spoiled(2), PooledVector("mean"))
        rig.ask("bad last", spoiled(2), PooledVector("last"))


def compare(found: Mapping[str, Found], expected: Mapping[str, Found], *, atol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        own = found[name]
        assert own.keys() == wanted.keys(), name
        for each in ("tokens", "end", "likeliest"):
            assert own.get(each) == wanted.get(each), name
        for each in ("scores", "vector"):
            if each in wanted:
                np.testing.assert_allclose(own[each], wanted[each], rtol=0, atol=atol, err_msg=name)
        for (token, logprob, top), (other, expected_logprob, expected_top) in zip(
            own.get("prompt", ()), wanted.get("prompt", ()), strict=True
        ):
            assert token == other
            assert logprob == pytest.approx(expected_logprob, rel=0, abs=atol)
            assert [entry[0] for entry in top] == [entry[0] for entry in expected_top]
            assert [entry[1] for entry in top] == pytest.approx([entry[1] for entry in expected_top], rel=0, abs=atol)


@pytest.mark.parametrize("num_blocks", [96, 24, 18])
@pytest.mark.parametrize("is_sound", [True, False])
def test_late_results_are_those_that_are_waited_for(
    smollm2_text: TextProcessor, waiting: Callable[[], None], num_blocks: int, *, is_sound: bool
) -> None:
    """Sequences are preempted where memory is little. What is not finite is known a step later, which the other rows of
    that step are in, too.
    """
    found: list[Mapping[str, Found]] = []
    for overlaps in (True, True, False):
        rig = Rig(smollm2_text.tokenizer, model(), num_blocks=num_blocks, overlaps=overlaps)
        ask_for_everything(rig, is_sound=is_sound)
        found.append(rig.run())
        assert (rig.engine.stats().preemptions > 0) == (num_blocks < 96)
        waiting()
    late, waited, on_cpu = found
    compare(late, waited, atol=0.0 if is_sound else 1e-5)
    compare(late, on_cpu, atol=1e-5)
    assert len(late["logprobs"]["prompt"]) == len(PROMPTS[3]) - 1
    assert len(late["scores"]["scores"]) == len(PROMPTS[2]) - 1
    assert len(late["last scores"]["scores"]) == len(PROMPTS[3]) - 60
    assert len(late["no scores"]["scores"]) == 0
    failed = {name: each["end"].partition(": ")[2] for name, each in late.items() if len(each) == 1}
    assert failed == ({} if is_sound else dict.fromkeys(BAD_LOGITS, NOT_FINITE) | dict.fromkeys(BAD_STATES, BAD))


@pytest.mark.parametrize("num_steps", range(6))
def test_requests_that_end_while_results_are_under_way(smollm2_text: TextProcessor, num_steps: int) -> None:
    rig = Rig(smollm2_text.tokenizer, model())
    ask_for_everything(rig)
    expected = rig.run()
    rig = Rig(smollm2_text.tokenizer, model())
    ask_for_everything(rig)
    for _ in range(num_steps):
        rig.step()
    ended = [name for name in ("logprobs", "logprobs of the host's", "scores", "mean") if not rig.heard[name].has_ended]
    for name in ended:
        rig.engine.abort(name)
    found = rig.run()
    assert "logprobs" in ended
    for name in ended:
        assert found[name]["end"] == "canceled"
        assert not {"scores", "vector"} & found[name].keys()
    kept = expected.keys() - set(ended)
    compare({name: found[name] for name in kept}, {name: expected[name] for name in kept}, atol=1e-5)


@pytest.mark.parametrize("num_steps", range(1, 10))
def test_prompts_that_are_computed_anew_while_results_are_under_way(
    smollm2_text: TextProcessor, num_steps: int
) -> None:
    """What comes late of the chunks before is not mixed into what is gathered since."""
    found = []
    for is_preempted in (False, True):
        rig = Rig(smollm2_text.tokenizer, model())
        ask_for_everything(rig)
        for _ in range(num_steps if is_preempted else 0):
            rig.step()
        if is_preempted:
            rig.scheduler.preempt_all()
        found.append(rig.run())
    compare(found[1], found[0], atol=1e-5)


@pytest.mark.parametrize("number", range(1, 9))
def test_steps_without_memory(smollm2_text: TextProcessor, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """All begins anew, and nothing of the lost step is left in what is gathered of prompts."""
    rig = Rig(smollm2_text.tokenizer, model())
    ask_for_everything(rig)
    expected, read, count = rig.run(), PromptReader.read, 0

    def failing(self: PromptReader, *args: Any) -> None:
        nonlocal count
        count += 1
        read(self, *args)
        if count == number:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(PromptReader, "read", failing)
    rig = Rig(smollm2_text.tokenizer, model())
    ask_for_everything(rig)
    compare(rig.run(), expected, atol=1e-5)
    assert count > number
    assert rig.engine.stats().preemptions > 0


def test_what_raises_for_one_request_fails_it_alone(
    smollm2_text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(smollm2_text.tokenizer, model())
    ask_for_everything(rig)
    expected = rig.run()
    add, end = _Scores.add, _Pool.end

    def failing_add(self: _Scores, copies: HostCopies, own: slice, targets: Any, request: Request) -> None:
        if request.request_id == "scores":
            raise ZeroDivisionError("a late result")
        add(self, copies, own, targets, request)

    def failing_end(self: _Pool, request_id: str) -> Any:
        if request_id == "max":
            raise ZeroDivisionError("a launch")
        return end(self, request_id)

    monkeypatch.setattr(_Scores, "add", failing_add)
    monkeypatch.setattr(_Pool, "end", failing_end)
    rig = Rig(smollm2_text.tokenizer, model())
    ask_for_everything(rig)
    found = rig.run()
    assert "a late result" in found.pop("scores")["end"]
    assert "a launch" in found.pop("max")["end"]
    compare(found, {name: expected[name] for name in found}, atol=1e-5)


def test_early_rows_have_what_was_late(smollm2_text: TextProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host samples most texts, their results are taken in before the device's."""
    early_result, early = SampledStep.early_result, []

    def watched(self: SampledStep) -> RunnerOutput:
        result = early_result(self)
        early.append((list(self.early_rows), dict(result.prompt_logprobs)))
        return result

    def ask(rig: Rig) -> None:
        for place in (0, 4, 0):
            rig.ask(f"host {place} {len(rig.heard)}", PROMPTS[place][:6], prompt_logprobs=2, logits_bias={7: 1.0})
        rig.ask("device", PROMPTS[0], prompt_logprobs=2)

    expected = Rig(smollm2_text.tokenizer, model(), overlaps=False)
    ask(expected)
    monkeypatch.setattr(SampledStep, "early_result", watched)
    rig = Rig(smollm2_text.tokenizer, model())
    ask(rig)
    compare(rig.run(), expected.run(), atol=1e-5)
    rows, entries = early[0]
    assert len(rows) == 3
    assert entries.keys() == set(rows)  # and not the device's row


def test_steps_whose_tokens_are_all_the_hosts_come_after_those_before(smollm2_text: TextProcessor) -> None:
    """The host has their tokens when they are submitted, and then the step before is still under way."""
    found = []
    for overlaps in (True, False):
        rig = Rig(smollm2_text.tokenizer, model(), overlaps=overlaps)
        rig.ask("scores", PROMPTS[2], PromptScores(1))
        rig.ask("logprobs", PROMPTS[1], num_tokens=1, prompt_logprobs=1)
        rig.step()
        rig.ask("host", PROMPTS[0], logits_bias={7: 1.0})
        found.append(rig.run())
    compare(*found, atol=1e-5)


def test_one_tile_of_logits_goes_before_the_next_comes(
    smollm2_text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step reads thousands of tokens, and the memory that steps leave free is for one tile."""
    logits, tile = DecoderModel.logits, 8
    made: list[weakref.ref[Tensor]] = []

    def watched(self: DecoderModel, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        if len(hidden) == tile:
            assert not any(each() is not None for each in made)
        result = logits(self, hidden, adapted)
        if len(hidden) == tile:
            made.append(weakref.ref(result))
        return result

    for name in ("prompt_logprobs", "prompt_reader"):
        monkeypatch.setattr(f"paged_sdk.runner.{name}.LOGITS_TILE", tile)
    monkeypatch.setattr(DecoderModel, "logits", watched)
    rig = Rig(smollm2_text.tokenizer, model())
    rig.ask("logprobs", PROMPTS[3], prompt_logprobs=2)
    rig.ask("scores", PROMPTS[3], PromptScores(1))
    rig.run()
    assert len(made) >= 2 * (len(PROMPTS[3]) // (2 * tile))


def scheduled(num_rows: int) -> list[ScheduledSequence]:
    sequences = [make_sequence(seq_id) for seq_id in range(num_rows)]
    return [ScheduledSequence(each, 0, 1, 1, [0], each.epoch) for each in sequences]


def test_what_becomes_of_rows() -> None:
    rows, output = scheduled(5), RunnerOutput([[]] * 5, [None] * 5)
    late = LateResults(rows, output, waits=False)
    done: list[int] = []

    def fail(error: Exception) -> None:
        raise error

    for index in range(5):
        late.add(index, partial(done.append, index))
        late.add(index, partial(done.append, 10 + index))
    late.add(2, partial(fail, ValueError("two")))
    late.add(2, partial(done.append, 20))
    late.add(4, partial(fail, NumericalError("four")))
    assert not done
    output.failed[1] = NumericalError("one")
    late.finish((0, 1))
    assert done == [0, 10]
    rows[3].sequence.epoch += 1
    late.finish()
    assert done == [0, 10, 2, 12, 4, 14]
    assert str(output.failed[4]) == "four"
    assert isinstance(output.failed[2], RequestFailedError)
    late.finish()
    assert output.failed.keys() == {1, 2, 4}
    assert len(done) == 6


def test_what_is_waited_for_comes_at_once() -> None:
    rows, output = scheduled(2), RunnerOutput([[]] * 2, [None] * 2)
    late = LateResults(rows, output, waits=True)
    done: list[int] = []
    late.add(0, partial(done.append, 0))
    output.failed[1] = NumericalError("one")
    late.add(1, partial(done.append, 1))
    assert done == [0]


GREEDY: Final = SamplingParams(temperature=0.0, max_len=4, ignore_eos=True)
SHORT_PROMPTS: Final = tuple([(7 * i * i + 3 * length) % 500 for i in range(length)] for length in (3, 20, 9, 14))


async def everything(model: Model) -> list[Any]:
    """Ask a model for much at once, and return numbers, by request."""
    host = evolve(GREEDY, logits_bias={7: 1.0}, prompt_logprobs=2)
    samplings = [
        GREEDY,
        evolve(GREEDY, prompt_logprobs=3),
        host,
        evolve(GREEDY, prompt_logprobs=0, temperature=0.8, seed=1),
    ]
    texts = gather(model, *map(model.send_completion_request, SHORT_PROMPTS, samplings))
    *vectors, scores = await gather(
        model,
        *(model.embed(SHORT_PROMPTS[:2], pooling=pooling) for pooling in POOLINGS),
        model.score(["What is paging? It is", "So it is"]),
    )
    found: list[Any] = [each.embeddings for each in vectors]
    found += [score.logprobs for score in scores.scores]
    for response in await texts:
        found.append([ord(letter) for letter in response.choices[0].text])
        if response.prompt_logprobs is not None:
            tokens = response.prompt_logprobs.content
            found.append([token.logprob for token in tokens])
            found.append([each.logprob for token in tokens for each in token.top_logprobs])
    return found


@pytest.mark.parametrize("context", [512, 64])
def test_recorded_steps(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch, waiting: Callable[[], None], context: int
) -> None:
    """The next step overwrites what they leave."""
    paging = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(context))
    small = builder.with_paged_attn(paging).with_max_num_batched_tokens(13).with_max_num_seqs(4).with_max_model_len(64)

    async def run() -> list[Any]:
        async with small.with_prefix_cache_n(None).build() as model:
            found = await everything(model)
            assert model.stats().blocks_used == 0
            return found

    on_cpu = asyncio.run(run())
    recorder = Recorder()
    recorder.counts = (4, 9, 13)
    let_record(monkeypatch, torch.device("cpu"), recorder)
    let_torch_attend(monkeypatch)
    late = asyncio.run(run())
    assert recorder.mixed
    waiting()
    waited = asyncio.run(run())
    assert len(late) == len(waited) == len(on_cpu) == len(POOLINGS) + 2 + 4 + 6
    for own, other, expected in zip(late, waited, on_cpu, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
        np.testing.assert_allclose(own, expected, atol=1e-3)
