"""What is run for trial on CUDA devices beside the model's own steps: a draft model's, and an image encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from paged_sdk import TextModelBuilder, VisionModelBuilder
from paged_sdk.attention.backend import KvStorage
from paged_sdk.build import assembly, draft
from paged_sdk.build.draft import make_draft_model
from paged_sdk.build.encoder_trial import encode_for_trial
from paged_sdk.build.loaded_model import LoadedModel, load_weights
from paged_sdk.build.loading import Loading
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import read_environment
from paged_sdk.kernels.placement import Placement
from paged_sdk.scheduler.draft_account import DraftAccount
from paged_sdk.scheduler.step_times import StepTimes
from paged_sdk.vision.encoder import EncodedImage, ImageEncoder
from paged_sdk.vision.family import Inputs
from tiny_vision import make_vision_checkpoint

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def load(builder: TextModelBuilder | VisionModelBuilder, path: Path) -> LoadedModel:
    return load_weights(Loading(path=path, settings=builder.settings, environment=read_environment({}), devices=(CPU,)))


def test_a_picture_is_encoded_for_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_vision_checkpoint("qwen3_vl", tmp_path)
    vision = load(VisionModelBuilder(tmp_path).with_dtype("float32").with_force_cpu(), tmp_path).vision
    assert vision is not None
    made: list[EncodedImage] = []
    encode = ImageEncoder.encode

    def watched(self: ImageEncoder, inputs: Inputs, before_layer: Any) -> EncodedImage:
        made.append(encode(self, inputs, before_layer))
        return made[-1]

    monkeypatch.setattr(ImageEncoder, "encode", watched)
    monkeypatch.setattr(assembly, "prepare_thread", lambda device, num_threads: None)
    assembly._start_encoding(CPU, 1, vision)
    assert not made
    assembly._start_encoding(CUDA, 1, vision)
    assert len(made) == 1
    assert len(made[0].vectors)
    assert not caplog.records

    def failing(*_: object) -> EncodedImage:
        raise RuntimeError("no such convolution")

    monkeypatch.setattr(ImageEncoder, "encode", failing)
    encode_for_trial(vision)
    assert "no such convolution" in caplog.text


@pytest.mark.parametrize(("device", "paged"), [(CUDA, True), (CUDA, False), (CPU, True)])
def test_the_kernels_of_a_draft_models_steps_are_compiled(
    builder: TextModelBuilder,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    *,
    paged: bool,
) -> None:
    loaded = load(builder, tiny_checkpoint)
    placement = Placement.on(device, loaded.model.config.num_layers)
    loaded = evolve(loaded, placed=evolve(loaded.placed, placement=placement))
    backend: Any = object()
    compiled: list[tuple[object, object, EngineConfig]] = []
    monkeypatch.setattr(draft, "make_storage", lambda *_: KvStorage(make=lambda num_blocks: backend))
    monkeypatch.setattr(draft, "fuse", lambda model, backend, settings: model)
    monkeypatch.setattr(
        draft, "compile_steps", lambda model, backend, config, visible: compiled.append((model, backend, config))
    )
    argmaxes: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(draft, "compile_argmax", lambda vocab_size, device: argmaxes.append((vocab_size, device)))
    watch: Any = object()
    monkeypatch.setattr(draft, "live_compilations", lambda device: watch)
    config = EngineConfig(
        num_blocks=8, block_size=8, max_num_seqs=5, max_num_batched_tokens=20, max_model_len=64, max_queue=8
    )
    times = StepTimes()
    made = make_draft_model(
        loaded,
        evolve(config, paged=paged, gamma=4),
        target_vocab_size=512,
        times=times,
        balance=DraftAccount(times).open_balance(),
        workspace=None,
    )
    assert made.compilations is (watch if device == CUDA else None)
    assert argmaxes == ([(loaded.model.config.vocab_size, CUDA)] if device == CUDA else [])
    if device == CUDA and paged:
        ((model, used, own),) = compiled
        assert model is loaded.model
        assert used is backend
        assert own.max_num_batched_tokens == 20
    else:
        assert not compiled
