"""Images of LFM2-VL are cut as by transformers' processor, which needs torchvision."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import PIL.Image
import pytest
from transformers import Siglip2ImageProcessorPil
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from paged_sdk import CheckpointError, InvalidRequestError, VisionMessages, VisionModelBuilder
from paged_sdk.vision.families.lfm2_vl import VISION
from paged_sdk.vision.family import ProcessedImage
from paged_sdk.vision.lfm2_images import Lfm2Images
from tiny_vision import make_vision_checkpoint, picture

SMALL: Final[dict[str, Any]] = {
    "encoder_patch_size": 7,
    "tile_size": 28,
    "min_image_tokens": 4,
    "max_image_tokens": 9,
    "max_tiles": 4,
}
# What transformers 5.23's processor gives with torchvision 0.29: the grid of tiles, how many there are with the
# thumbnail, and the last one's patches in height and width.
LAYOUTS: Final[tuple[tuple[dict[str, Any], tuple[int, int], tuple[int, int], int, tuple[int, int]], ...]] = (
    ({}, (512, 512), (1, 1), 1, (32, 32)),
    ({}, (100, 100), (1, 1), 1, (16, 16)),
    ({}, (20, 30), (1, 1), 1, (14, 20)),
    ({}, (480, 640), (1, 1), 1, (26, 36)),
    ({}, (900, 700), (3, 2), 7, (36, 28)),
    ({}, (1000, 1400), (2, 3), 7, (26, 36)),
    ({}, (1400, 1000), (3, 2), 7, (36, 26)),
    ({}, (1024, 1024), (2, 2), 5, (32, 32)),
    ({}, (2000, 2000), (3, 3), 10, (32, 32)),
    ({}, (700, 1800), (2, 5), 11, (18, 50)),
    ({}, (3000, 900), (3, 1), 4, (58, 16)),
    (SMALL, (84, 84), (2, 2), 5, (6, 6)),
    (SMALL, (40, 60), (1, 1), 1, (4, 6)),
    (SMALL, (70, 30), (1, 1), 1, (8, 2)),
    (SMALL, (60, 90), (2, 2), 5, (4, 6)),
    (SMALL, (120, 50), (2, 1), 3, (8, 2)),
)


@pytest.mark.parametrize(("settings", "size", "grid", "num_tiles", "last"), LAYOUTS)
def test_layouts_are_those_of_transformers(
    settings: dict[str, Any], size: tuple[int, int], grid: tuple[int, int], num_tiles: int, last: tuple[int, int]
) -> None:
    made = Lfm2Images.of(settings)(images=[np.zeros((*size, 3), np.uint8)], return_tensors="np")
    assert (made["image_rows"].tolist(), made["image_cols"].tolist()) == ([grid[0]], [grid[1]])
    shapes = made["spatial_shapes"]
    assert len(shapes) == num_tiles
    assert tuple(shapes[-1]) == last
    assert len({tuple(shape) for shape in shapes[:-1]}) <= 1
    assert made["pixel_attention_mask"].sum(1).tolist() == shapes.prod(1).tolist()


@pytest.mark.parametrize("size", [(64, 64), (32, 96)])
def test_patches_are_those_of_siglip2(size: tuple[int, int]) -> None:
    """Of an image that needs no scaling."""
    image, tokens = picture(*size), size[0] * size[1] // 32**2
    processor: Any = Siglip2ImageProcessorPil(patch_size=16, max_num_patches=4 * tokens)
    expected = processor(images=[image], return_tensors="np")
    own = Lfm2Images.of({"min_image_tokens": tokens})(images=[image], return_tensors="np")
    assert own["spatial_shapes"].tolist() == expected["spatial_shapes"].tolist()
    np.testing.assert_allclose(own["pixel_values"], expected["pixel_values"], rtol=0, atol=1e-6)


def test_tiles_are_parts_of_the_scaled_image() -> None:
    image = picture(60, 90)
    made = Lfm2Images.of(SMALL)(images=[image, picture(40, 60)], return_tensors="np")
    assert (made["image_rows"].tolist(), made["image_cols"].tolist()) == ([2, 1], [2, 1])
    assert made["pixel_values"].shape == (6, 24, 3 * 49)  # no tile has more patches than the thumbnails
    filter = PIL.Image.Resampling.BILINEAR
    large = np.asarray(PIL.Image.fromarray(image).resize((56, 56), filter), np.float64) / 127.5 - 1
    for tile, (row, column) in zip(made["pixel_values"], itertools.product((0, 28), (0, 28)), strict=False):
        patches = (
            large[row + y : row + y + 7, column + x : column + x + 7] for y in range(0, 28, 7) for x in range(0, 28, 7)
        )
        np.testing.assert_allclose(tile[:16], [patch.ravel() for patch in patches], rtol=0, atol=1e-6)
        assert not tile[16:].any()
    small = np.asarray(PIL.Image.fromarray(image).resize((42, 28), filter), np.float64) / 127.5 - 1
    np.testing.assert_allclose(made["pixel_values"][4][0], small[:7, :7].ravel(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("thumbnail", [True, False])
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("size", [(40, 60), (60, 90), (120, 50)])
def test_texts_are_those_of_transformers(size: tuple[int, int], *, marks: bool, thumbnail: bool) -> None:
    made = Lfm2Images.of(SMALL | {"use_thumbnail": thumbnail})(images=[picture(*size)], return_tensors="np")
    names = {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
    stand_in: Any = SimpleNamespace(**names, image_thumbnail_token="<|img_thumbnail|>")
    rows, columns = int(made["image_rows"][0]), int(made["image_cols"][0])
    whole = Lfm2Images.of(SMALL | {"do_image_splitting": False})(images=[picture(*size)], return_tensors="np")
    expected = Lfm2VlProcessor._build_image_tokens(
        stand_in, rows, columns, 4, int(whole["spatial_shapes"][0].prod()) // 4, thumbnail, marks
    )
    processor = {} if marks else {"use_image_special_tokens": False}
    assert VISION.expand(ProcessedImage(inputs=made, config={}, processor=processor, image_token="<image>")) == expected


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tile_size": 500}, "tile_size = 500: expected a multiple of 32"),
        ({"tile_size": "512"}, "tile_size = '512': expected a whole number"),
        ({"max_tiles": True}, "max_tiles = True: expected a whole number"),
        ({"encoder_patch_size": 0}, "encoder_patch_size = 0: expected a whole number"),
        ({"min_tiles": 11}, "min_tiles = 11: expected at most max_tiles = 10"),
        ({"min_image_tokens": 300}, "min_image_tokens = 300: expected at most 256"),
        ({"max_pixels_tolerance": float("nan")}, "max_pixels_tolerance = nan: expected a number above 0"),
        ({"rescale_factor": -1}, "rescale_factor = -1: expected a number above 0"),
        ({"use_thumbnail": 1}, "use_thumbnail = 1: expected true or false"),
        ({"image_mean": [0.5]}, r"image_mean = \[0.5\]: expected three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std = .*: expected numbers that are not 0"),
        ({"image_std": [0.5, 1e-60, 0.5]}, "image_std = .*: expected numbers that are not 0 in float32"),
        ({"image_mean": [0.5, 10**400, 0.5]}, "image_mean = .*: expected three numbers"),
        ({"rescale_factor": 10**400}, "rescale_factor = .*: expected a number above 0"),
        ({"rescale_factor": 1e300}, "rescale_factor = 1e[+]300: expected a number above 0"),
        ({"tile_size": 65504, "max_tiles": 60000}, "tiles of .* pixels, padding included: expected at most 134217728"),
        ({"max_image_tokens": 65535, "downsample_factor": 4, "tile_size": 640}, "tiles of 5905489920 pixels"),
        # Each tile is padded to the thumbnail's size: of 60 megapixels there would be 150 GB.
        ({"tile_size": 32, "max_tiles": 60000}, "tiles of 31457804288 pixels"),
        ({"resample": 9}, "resample = 9: expected one of Pillow's filters"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Lfm2Images.of(settings)


def test_settings_survive_pickling() -> None:
    made = Lfm2Images.of(SMALL | {"image_std": [0.1, 0.2, 0.3], "max_tiles": None, "size": {"height": 512}})
    assert made.max_tiles == 10
    assert pickle.loads(pickle.dumps(made)) == made
    assert pickle.loads(pickle.dumps(VISION)) == VISION


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_a_checkpoint_lacks_and_an_image_may_not_be(tmp_path: Path, anyio_backend: str) -> None:
    make_vision_checkpoint("lfm2_vl", tmp_path)
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    # Newer checkpoints have them in the processor's file.
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    path.write_text(json.dumps({**settings, "max_image_tokens": 100}))  # an older one, which is left beside it
    async with VisionModelBuilder(tmp_path).with_dtype("float32").build() as model:
        with pytest.raises(InvalidRequestError, match="refuses 1 x 900 pixels: it would have 90 tokens: at most 18"):
            await model.send_chat_request(
                VisionMessages().add_image_message("user", "What?", np.zeros((1, 900, 3), np.uint8))
            )
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {**settings, "max_tiles": 0}}))
    with pytest.raises(CheckpointError, match="max_tiles = 0"):
        await VisionModelBuilder(tmp_path).build()
    (tmp_path / "processor_config.json").unlink()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no preprocessor_config\.json"):
        await VisionModelBuilder(tmp_path).build()
