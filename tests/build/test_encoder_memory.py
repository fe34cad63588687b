"""What images need of a device's memory, by a stand-in for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from paged_sdk import ImageLimits, VisionModelBuilder
from paged_sdk.build import assembly, encoder_memory, kv_memory
from paged_sdk.build.encoder_memory import encoder_bytes, largest_inputs
from paged_sdk.build.loaded_model import load_weights
from paged_sdk.build.loading import Loading
from paged_sdk.build.vision import LoadedVision
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import read_environment
from paged_sdk.errors import InvalidRequestError
from paged_sdk.kv.pool_size import DeviceMemory
from paged_sdk.runner.image_queue import MOST_BYTES
from paged_sdk.types.image import Image
from paged_sdk.vision.encoder import EncodedImage
from paged_sdk.vision.family import Inputs
from tiny_vision import VISION_FAMILIES, make_vision_checkpoint

CPU: Final = torch.device("cpu")
MIB: Final = 2**20
LIMITS: Final = ImageLimits(max_pixels=1_000_000)


def load(directory: Path, family: str) -> LoadedVision:
    make_vision_checkpoint(family, directory)
    settings = VisionModelBuilder(directory).with_dtype("float32").with_force_cpu().settings
    loading = Loading(path=directory, settings=settings, environment=read_environment({}), devices=(CPU,))
    vision = load_weights(loading).vision
    assert vision is not None
    return vision


@pytest.mark.parametrize("family", sorted(VISION_FAMILIES))
def test_no_image_that_may_be_sent_is_larger(family: str, tmp_path: Path) -> None:
    prompts = load(tmp_path, family).prompts
    largest = largest_inputs(prompts, LIMITS, 4096)
    assert largest is not None
    most = sum(array.nbytes for array in largest.values())
    for height, width in ((1000, 1000), (700, 1400), (40, 60), (1200, 800), (333, 444)):
        num_tokens, inputs = prompts.measure(Image.parse(np.zeros((height, width, 3), np.uint8)))
        assert num_tokens > 4096 or sum(array.nbytes for array in inputs.values()) <= most * 1.25


class PatchPrompts:
    """Has a token for each 28 x 28 pixels, of which the encoder takes all, and refuses images of a million pixels."""

    def measure(self, image: Image) -> tuple[int, Inputs]:
        assert image.shape is not None
        height, width = image.shape[:2]
        if height * width >= 1_000_000:
            raise InvalidRequestError("too large", field="image")
        return height * width // 784, {"pixel_values": np.zeros(height * width, np.uint8)}


@pytest.mark.parametrize(("most", "tokens"), [(4096, 668), (668, 668), (667, 334), (84, 83), (81, None)])
def test_images_for_which_no_prompt_has_room_do_not_count(most: int, tokens: int | None) -> None:
    prompts: Any = PatchPrompts()
    found = largest_inputs(prompts, ImageLimits(), most)
    assert (None if found is None else found["pixel_values"].size // 784) == tokens


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU stand in for a CUDA device, on which encoding takes 30 MiB; return how many bytes are free on it."""
    free = [2000 * MIB]

    def peak(run: Callable[[], None]) -> int:
        run()
        return 30 * MIB

    monkeypatch.setattr(encoder_memory, "cuda_peak_bytes", lambda _: peak)
    monkeypatch.setattr(encoder_memory, "device_memory", lambda _: DeviceMemory(total=4000 * MIB, free=free[0]))
    monkeypatch.setattr(encoder_memory, "workspace_bytes", lambda: 40 * MIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return free


def test_the_largest_image_is_encoded(tmp_path: Path, device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak, the vectors that are kept, and a workspace are reserved."""
    vision, encoded = load(tmp_path, "qwen2_vl"), list[Inputs]()
    encode = vision.encoder.encode

    def watched(inputs: Inputs, before_layer: Callable[[], None]) -> EncodedImage:
        encoded.append(inputs)
        return encode(inputs, before_layer)

    monkeypatch.setattr(vision.encoder, "encode", watched)
    assert encoder_bytes(CPU, vision, LIMITS, max_tokens=4096) == 30 * MIB + MOST_BYTES + 40 * MIB
    ((inputs),) = encoded
    largest = largest_inputs(vision.prompts, LIMITS, 4096)
    assert largest is not None
    assert len(inputs["pixel_values"]) == len(largest["pixel_values"])


def test_images_get_half_of_what_is_free_at_most(
    tmp_path: Path, device: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vision = load(tmp_path, "llava")
    device[0] = 500 * MIB
    assert encoder_bytes(CPU, vision, LIMITS, max_tokens=4096, reserved=100 * MIB) == 200 * MIB
    assert "needs 326.0 MiB on cpu, for which 200.0 are left free" in caplog.text

    def none_left(run: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(encoder_memory, "cuda_peak_bytes", lambda _: none_left)
    assert encoder_bytes(CPU, vision, LIMITS, max_tokens=4096, reserved=100 * MIB) == 200 * MIB
    assert "needs more memory than there is" in caplog.text


def test_an_encoder_that_fails_needs_nothing(
    tmp_path: Path, device: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vision = load(tmp_path, "llava")

    def failing(inputs: Inputs, before_layer: Callable[[], None]) -> EncodedImage:
        raise RuntimeError("no such convolution")

    monkeypatch.setattr(vision.encoder, "encode", failing)
    assert encoder_bytes(CPU, vision, LIMITS, max_tokens=4096) == 0
    assert "no such convolution" in caplog.text


@pytest.mark.anyio
async def test_the_pool_leaves_it_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a pool is what neither steps nor images need."""
    asked: list[tuple[int, int]] = []
    pools: list[Mapping[torch.device, int]] = []
    size_pools = kv_memory.size_pools

    def needed(
        device: torch.device, vision: LoadedVision, limits: ImageLimits, *, max_tokens: int, reserved: int
    ) -> int:
        asked.append((max_tokens, reserved))
        return 3 * MIB

    def sized(*args: Any, activations: Mapping[torch.device, int], **options: Any) -> EngineConfig:
        pools.append(activations)
        return size_pools(*args, activations=activations, **options)

    monkeypatch.setattr(assembly, "activations_of", lambda *_, **__: {CPU: 5 * MIB})
    monkeypatch.setattr(assembly, "encoder_bytes", needed)
    monkeypatch.setattr(assembly, "size_pools", sized)
    make_vision_checkpoint("llava", tmp_path)
    async with VisionModelBuilder(tmp_path).with_dtype("float32").with_force_cpu().with_max_model_len(128).build():
        pass
    assert asked == [(128, 5 * MIB)]
    assert pools == [{CPU: 8 * MIB}]
