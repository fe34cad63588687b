"""Every number of config.json is finite and within reason before anything is computed from it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any, Final

import attrs
import pytest
import torch

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import CheckpointError, ModelLoadError
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.family import read_config
from tiny import FAMILIES, build_model

INF, NAN = math.inf, math.nan
YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3: Final = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 512}
LONG: Final = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}


@functools.cache
def _config_json(family: str) -> str:
    return json.dumps(build_model(family).config.to_dict() | {"architectures": None})


def config_of(family: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(_config_json(family))
    return config


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"num_hidden_layers": 10**400}),
        ("llama", {"hidden_size": 2**40}),
        ("llama", {"vocab_size": 10**400}),
        ("llama", {"max_position_embeddings": 10**12}),
        ("llama", {"rms_norm_eps": NAN}),
        ("llama", {"rms_norm_eps": -1e-5}),
        ("llama", {"rms_norm_eps": 10**400}),
        *(("gemma2", {"query_pre_attn_scalar": value}) for value in (-16, 0, 0.0, NAN, INF, 1e-300, 10**400)),
        ("gemma3_text", {"query_pre_attn_scalar": -16}),
        ("gemma2", {"attn_logit_softcapping": 0.0}),
        ("gemma2", {"final_logit_softcapping": -30.0}),
        ("mixtral", {"num_local_experts": 10**9}),
        *(("llama", {"rope_parameters": YARN | {"beta_fast": value}}) for value in (0, -1.0, NAN, INF)),
        *(("llama", {"rope_parameters": YARN | {"beta_slow": value}}) for value in (0, -1, 10**400)),
        *(("llama", {"rope_parameters": YARN | {"attention_factor": value}}) for value in (NAN, INF, 0)),
        *(("llama", {"rope_parameters": YARN | {"factor": value}}) for value in (NAN, INF, 0, -4, 1e300)),
        ("llama", {"rope_parameters": YARN | {"mscale": NAN, "mscale_all_dim": 1.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": INF}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": NAN}}),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": NAN}}),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": INF}}),
        *(("phi3", {"rope_parameters": LONG | {"long_factor": [1.0] * 7 + [value]}}) for value in (NAN, INF, 0, True)),
        *(("phi3", {"rope_parameters": LONG | {"short_factor": [value] * 8}}) for value in (-1.0, 1e-300, 10**400)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_numbers_that_no_model_has_are_refused_by_name(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        read_config(config_of(family) | changes)
    (name,) = changes
    fields = changes[name] if isinstance(changes[name], dict) else changes
    assert any(field in str(caught.value) for field in fields)
    assert len(str(caught.value)) < 400


HOSTILE: Final[tuple[Any, ...]] = (
    0, -1, 1, 2, 10**9, 2**31, 2**63, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e38, 1e300, INF, -INF, NAN,
    True, None, "", "8", [], [0], [NAN], {}, {"rope_type": "yarn"},
)  # fmt: skip


def mutated(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return copies of a config, each with one value replaced, in nested sections too."""
    for key, value in config.items():
        for hostile in HOSTILE:
            yield config | {key: hostile}
        if isinstance(value, dict):
            yield from (config | {key: section} for section in mutated(value))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_accepted_gives_finite_numbers(family: str) -> None:
    rotary: set[Any] = set()
    for config in mutated(config_of(family)):
        try:
            shape = read_config(config)
        except ModelLoadError as error:
            assert len(str(error)) < 1500  # the names of all families alone are 800
            continue
        assert numbers_are_finite(shape)
        rotary |= set(shape.ropes)
    for rope in rotary:
        for is_long in (False, True):
            rotation = RotaryEmbedding(rope, device=torch.device("cpu")).at(
                torch.arange(16), torch.full((16,), is_long)
            )
            assert rotation.cosines.isfinite().all()


def numbers_are_finite(shape: DecoderConfig) -> bool:
    values = attrs.asdict(shape, recurse=False).values()
    return shape.num_layers <= 10_000 and all(math.isfinite(value) for value in values if isinstance(value, float))
