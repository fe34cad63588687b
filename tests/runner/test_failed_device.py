"""An engine whose device has failed ends with an error, and lets go of no pinned memory that the device has used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from device_rig import Rig
from test_decode_graphs import graphs, step
from test_model_runner import PROMPTS, build, reference

from failing_device import FailingDevice
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.guard import clear_frames
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.types.reading import PooledVector, PromptScores

NUM_WAITS: Final = 12


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FailingDevice:
    return FailingDevice(monkeypatch)


@pytest.mark.parametrize("failing_wait", range(1, NUM_WAITS, 2))
def test_an_engine_dies_of_a_failed_device(
    smollm2_text: TextProcessor, device: FailingDevice, monkeypatch: pytest.MonkeyPatch, failing_wait: int
) -> None:
    """As on the worker's thread, with a step under way, and results that are gathered over several steps."""
    rig = Rig(smollm2_text.tokenizer, build(reference()))
    device.let_copy(monkeypatch)
    device.failing_wait = failing_wait
    rig.ask("text", PROMPTS[0])
    rig.ask("logprobs", PROMPTS[1], prompt_logprobs=2, top_n_logprobs=2)
    rig.ask("scores", PROMPTS[3] * 2, PromptScores(1))
    rig.ask("vector", PROMPTS[2], PooledVector("mean"))
    with pytest.raises(torch.AcceleratorError) as caught:
        rig.run()
    clear_frames(caught.value)
    rig.engine.close()
    del rig
    assert device.has_failed
    assert not device.freed_late


def test_pinned_memory_goes_where_nothing_fails(
    smollm2_text: TextProcessor, device: FailingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(smollm2_text.tokenizer, build(reference()))
    device.let_copy(monkeypatch)
    rig.ask("text", PROMPTS[0])
    rig.ask("scores", PROMPTS[3] * 2, PromptScores(1))
    assert len(rig.run()["text"]["tokens"][0]) > NUM_WAITS
    assert device.num_freed >= device.num_waits > NUM_WAITS


def test_a_replay_that_finds_a_failed_device(device: FailingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of the step has gone before, and not with the frames of what raised."""

    def record(function: Callable[[], None]) -> Callable[[], None]:
        function()

        def replay() -> None:
            device.has_failed = True
            device.check()

        return replay

    def host_input(self: RecordableLayers, *shape: int) -> Any:
        return device.pinned(shape, dtype=torch.int64)

    monkeypatch.setattr(RecordableLayers, "host_input", host_input)
    made = graphs(record)
    num_freed = device.num_freed
    with pytest.raises(torch.AcceleratorError) as caught:
        step(made, [3, 4])
    clear_frames(caught.value)
    assert device.num_freed == num_freed + 1
    assert not device.freed_late
