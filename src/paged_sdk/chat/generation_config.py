"""Read generation_config.json: the recommended sampling parameters of a checkpoint, and its end tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paged_sdk.config.checks import is_finite
from paged_sdk.config.sampling import GenerationDefaults
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.system.files import read_json_if_there

__all__ = ["read_generation_defaults"]

_MAX_INT: Final = 2**31 - 1


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read the defaults of generation_config.json in a directory; without the file, none.

    ``do_sample`` is ignored: a request without sampling parameters is greedy anyway, and a request with them asks to
    sample. ``top_k`` 0 means off. If generation_config.json has no end tokens, they are taken from config.json.

    :raises CheckpointError: a value is not allowed
    """
    path = directory / "generation_config.json"
    content = read_json_if_there(path)
    eos_path = path if content.get("eos_token_id") is not None else directory / "config.json"
    eos = content if eos_path == path else read_json_if_there(eos_path)
    return GenerationDefaults(
        temperature=_number(path, content, "temperature", low=0.0),
        top_k=_top_k(path, content),
        top_p=_number(path, content, "top_p", low=0.0, high=1.0, low_open=True),
        min_p=_number(path, content, "min_p", low=0.0, high=1.0),
        repetition_penalty=_number(path, content, "repetition_penalty", low=0.01, high=100.0),
        eos_token_ids=_token_ids(eos_path, eos),
    )


def _number(
    path: Path, content: Mapping[str, Any], key: str, *, low: float, high: float = math.inf, low_open: bool = False
) -> float | None:
    value = content.get(key)
    if value is None:
        return None
    if not is_finite(value) or not (low < value if low_open else low <= value) or value > high:
        allowed = f"a number {'>' if low_open else '>='} {low:g}" + ("" if math.isinf(high) else f" and <= {high:g}")
        raise CheckpointError(f"{path}: {key} = {shown(value)} is not allowed: expected {allowed}", path=path)
    return float(value)


def _top_k(path: Path, content: Mapping[str, Any]) -> int | None:
    value = content.get("top_k")
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INT:
        raise CheckpointError(f"{path}: top_k = {shown(value)} is not allowed: expected a 32-bit int >= 0", path=path)
    return value


def _token_ids(path: Path, content: Mapping[str, Any]) -> tuple[int, ...]:
    value = content.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) and 0 <= id <= _MAX_INT for id in ids):
        raise CheckpointError(
            f"{path}: eos_token_id = {shown(value)} is not allowed: expected a token id or a list of them", path=path
        )
    return tuple(ids)
