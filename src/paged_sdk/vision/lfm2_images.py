"""Prepare images for LFM2-VL: whole, or as tiles with a thumbnail.

transformers' image processor needs torchvision, which scales images nearly as Pillow does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import fields_dict, frozen

from paged_sdk.errors import CheckpointError, shown

__all__ = ["Lfm2Images"]

_Pixels = npt.NDArray[np.uint8]

_NUMBERS: Final = ("max_pixels_tolerance", "rescale_factor")
_MOST_PIXELS: Final = 2**27
"""Of an image's tiles, each padded to the size of the largest: 23 times as many as the released models have."""
_FLAGS: Final = ("do_image_splitting", "use_thumbnail", "do_rescale", "do_normalize")
_CHANNELS: Final = ("image_mean", "image_std")
_LARGEST: Final = float(np.finfo(np.float32).max)


@frozen(kw_only=True)
class Lfm2Images:
    """Cuts images into patches for an encoder that takes any number of them (LFM2: 2025, arXiv 2511.23404).

    An image is scaled to whole tokens, each a square of ``downsample_factor`` by ``downsample_factor`` patches. If it
    has more than ``max_image_tokens * max_pixels_tolerance`` tokens, it is also scaled to a grid of square tiles, which
    come first, row by row; the image itself follows as a thumbnail.

    The names are those of preprocessor_config.json.

    :ivar tile_size: side of a tile in pixels
    :ivar max_pixels_tolerance: see above
    :ivar resample: Pillow's number of the filter that scales images
    """

    encoder_patch_size: int = 16
    downsample_factor: int = 2
    tile_size: int = 512
    min_tiles: int = 2
    max_tiles: int = 10
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    max_pixels_tolerance: float = 2.0
    do_image_splitting: bool = True
    use_thumbnail: bool = True
    resample: int = 2
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Lfm2Images:
        """Make the processor that a checkpoint describes.

        :param settings: content of preprocessor_config.json; fields that are not known are ignored
        :raises CheckpointError: a value has another type or is out of range
        """
        own = {name: settings[name] for name in fields_dict(cls) if settings.get(name) is not None}
        for name, value in own.items():
            if name in _CHANNELS:
                if not (isinstance(value, list) and len(value) == 3 and all(map(_is_finite, value))):
                    raise _error(name, value, "three numbers")
                own[name] = tuple(map(float, value))
            elif name in _FLAGS:
                if not isinstance(value, bool):
                    raise _error(name, value, "true or false")
            elif name in _NUMBERS:
                if not _is_finite(value) or value <= 0:
                    raise _error(name, value, "a number above 0")
            elif isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**16:
                raise _error(name, value, "a whole number from 1 to 65535")
        made = cls(**own)
        if made.tile_size % made._unit:
            raise _error("tile_size", made.tile_size, f"a multiple of {made._unit}, the side of a token")
        # _whole_size() allows twice as many tokens as a thumbnail should have.
        largest = max(made.tile_size**2, 2 * made.max_image_tokens * made._unit**2)
        if (pixels := (made.max_tiles + 1) * largest) > _MOST_PIXELS:
            raise CheckpointError(
                f"preprocessor_config.json: images become tiles of {pixels} pixels, padding included: expected at most "
                f"{_MOST_PIXELS}"
            )
        if made.min_tiles > made.max_tiles:
            raise _error("min_tiles", made.min_tiles, f"at most max_tiles = {made.max_tiles}")
        if made.min_image_tokens > made.max_image_tokens:
            raise _error("min_image_tokens", made.min_image_tokens, f"at most {made.max_image_tokens}")
        if not np.array(made.image_std, np.float32).all():
            raise _error("image_std", list(made.image_std), "numbers that are not 0 in float32")
        if made.resample > 5:
            raise _error("resample", made.resample, "one of Pillow's filters, 1 to 5")
        return made

    def __call__(self, *, images: Sequence[_Pixels], return_tensors: str) -> dict[str, Any]:
        """Return the encoder's inputs for images, and how each was cut.

        :param images: ``[height, width, 3]`` uint8 each
        :param return_tensors: "np" or "pt", as for transformers' processors
        :returns: ``pixel_values`` ``[num_tiles, num_patches, 3 * patch area]`` float32, ``pixel_attention_mask``
            ``[num_tiles, num_patches]``, which is 0 for padding, and ``spatial_shapes`` ``[num_tiles, 2]``, the patches
            of each tile in height and width; ``image_rows``, ``image_cols``: the grid of each image's tiles
        :raises ValueError: an image is too long and thin
        """
        cut = [self._cut(image) for image in images]
        tiles = [tile for own, _ in cut for tile in own]
        shapes = [
            (height // self.encoder_patch_size, width // self.encoder_patch_size)
            for height, width, _ in map(np.shape, tiles)
        ]
        counts = [height * width for height, width in shapes]
        # No more padding than the largest tile needs: attention does not see it.
        values = np.zeros((len(tiles), max(counts), 3 * self.encoder_patch_size**2), np.float32)
        for own, tile, count in zip(values, tiles, counts, strict=True):
            own[:count] = self._patches(tile)
        made: dict[str, Any] = {
            "pixel_values": values,
            "pixel_attention_mask": (np.arange(max(counts)) < np.array(counts)[:, None]).astype(np.int64),
            "spatial_shapes": np.array(shapes, np.int64),
            "image_rows": np.array([rows for _, (rows, _) in cut], np.int64),
            "image_cols": np.array([columns for _, (_, columns) in cut], np.int64),
        }
        if return_tensors == "pt":
            import torch

            return {name: torch.from_numpy(array) for name, array in made.items()}
        return made

    @property
    def _unit(self) -> int:
        """Return the side of a token in pixels."""
        return self.encoder_patch_size * self.downsample_factor

    def _cut(self, image: _Pixels) -> tuple[list[_Pixels], tuple[int, int]]:
        """Return an image's tiles, and the rows and columns of their grid, in which a thumbnail is not counted."""
        height, width = image.shape[:2]
        whole = self._whole_size(height, width)
        rows, columns = self._grid(height, width) if self._is_large(height, width) else (1, 1)
        if rows * columns == 1:
            return [self._scaled(image, *whole)], (1, 1)
        side = self.tile_size
        large = self._scaled(image, rows * side, columns * side)
        tiles = [
            large[top : top + side, left : left + side]
            for top in range(0, rows * side, side)
            for left in range(0, columns * side, side)
        ]
        if self.use_thumbnail:
            tiles.append(self._scaled(image, *whole))
        return tiles, (rows, columns)

    def _whole_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that an image is scaled to if it is not cut: whole tokens, of which there are as
        many as allowed, with nearly the same ratio of sides.
        """
        unit = self._unit
        own = tuple(max(unit, round(side / unit) * unit) for side in (height, width))
        area, fewest, most = math.prod(own), self.min_image_tokens * unit**2, self.max_image_tokens * unit**2
        if area > most:
            shrink = math.sqrt(height * width / most)
            own = tuple(max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif area < fewest:
            stretch = math.sqrt(fewest / (height * width))
            own = tuple(math.ceil(side * stretch / unit) * unit for side in (height, width))
        if math.prod(own) > 2 * most:  # a side of less than a token was widened to one
            raise ValueError(f"it would have {math.prod(own) // unit**2} tokens: at most {2 * self.max_image_tokens}")
        return own[0], own[1]

    def _is_large(self, height: int, width: int) -> bool:
        unit, patch = self._unit, self.encoder_patch_size
        area = math.prod(max(patch, round(side / unit) * unit) for side in (height, width))
        return self.do_image_splitting and area > self.max_image_tokens * unit**2 * self.max_pixels_tolerance

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the grid whose ratio of sides is closest to the image's. Of equally close ones
        it is the largest of which the image fills half, or the smallest.
        """
        grids = [
            (rows, columns)
            for rows in range(1, self.max_tiles + 1)
            for columns in range(1, self.max_tiles // rows + 1)
            if rows * columns >= self.min_tiles
        ]
        distance = {grid: abs(width / height - grid[1] / grid[0]) for grid in grids}
        least = min(distance.values())
        closest = sorted((grid for grid in grids if distance[grid] == least), key=math.prod)
        half_full = [grid for grid in closest if height * width > 0.5 * self.tile_size**2 * math.prod(grid)]
        return (half_full or closest[:1])[-1]

    def _scaled(self, image: _Pixels, height: int, width: int) -> _Pixels:
        import PIL.Image

        if image.shape[:2] == (height, width):
            return image
        return np.asarray(PIL.Image.fromarray(image).resize((width, height), self.resample))

    def _patches(self, tile: _Pixels) -> npt.NDArray[np.float32]:
        """Return a tile's patches, ``[num_patches, 3 * patch area]``, with the channels of each pixel side by side."""
        size = self.encoder_patch_size
        height, width = tile.shape[0] // size, tile.shape[1] // size
        values = tile.reshape(height, size, width, size, 3).swapaxes(1, 2).reshape(height * width, size * size, 3)
        scaled = values.astype(np.float32) * np.float32(self.rescale_factor if self.do_rescale else 1.0)
        if self.do_normalize:
            mean, deviation = np.array((self.image_mean, self.image_std), np.float32)
            scaled = (scaled - mean) / deviation
        return scaled.reshape(height * width, -1)


def _is_finite(value: object) -> bool:
    """Return whether a value is a number of which float32 has one of about that size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _error(name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"preprocessor_config.json: {name} = {shown(value)}: expected {expected}")
