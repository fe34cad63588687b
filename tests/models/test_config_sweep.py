"""Odd configurations: logits are transformers', or an error names the field that is not supported."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from odd_configs import FAMILIES, NEEDED, draw_config, reference_of
from reference_decoding import CPU, DictSource, logits, paged
from transformers import AutoConfig

from paged_sdk.errors import CheckpointError, PagedError, UnsupportedArchitectureError
from paged_sdk.models.family import read_config
from paged_sdk.models.loading import load_model

NAMED = r"config\.json: (\w+\.)*\w+ = "
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
"""Lists what no usable config leaves out; where transformers has a default, a tensor's shape contradicts it."""


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """Keep transformers from warning of each odd value."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def compare(config: dict[str, Any], directory: Path) -> str:
    """Compare the logits of one configuration with transformers'.

    :returns: "equal", "refused", or "impossible", where transformers cannot build or run the model
    """
    # A prompt is never longer than the model's context.
    length = min(40, config.get("text_config", config).get("max_position_embeddings", 40))
    tokens = [(7 * i * i + 3 * i) % 93 for i in range(length)]
    try:
        with torch.inference_mode():
            reference: Any = reference_of(config, directory)
            expected = reference(torch.tensor([tokens]), use_cache=False).logits[0].float()
    except Exception:  # whatever transformers raises
        return "impossible"
    if not expected.isfinite().all():
        return "impossible"
    try:
        model = load_model(config, DictSource(reference.state_dict()), dtype=torch.float32, placement=CPU)
    except (CheckpointError, UnsupportedArchitectureError) as error:
        with pytest.raises(type(error), match=NAMED):
            raise
        return "refused"
    (own,) = logits(model, paged(16)(model), [(tokens, 0, list(range(32)))])
    # The worst of 4,000 configurations was off by 3e-5; a wrong reading changes logits by 10 % and more.
    assert (own - expected).abs().max() < 1e-3 * expected.abs().max(), config
    return "equal"


def sweep(model_type: str, seeds: Iterable[int], directory: Path) -> Counter[str]:
    """Compare configurations of one family, and count the results."""
    return Counter(compare(draw_config(model_type, seed), directory) for seed in seeds)


@pytest.mark.parametrize("model_type", [*FAMILIES, "gemma3"])
def test_odd_configurations(model_type: str, tmp_path: Path) -> None:
    found = sweep(model_type, range(4), tmp_path)
    assert found["equal"] >= 1, found


@pytest.mark.long
@pytest.mark.parametrize("model_type", [*FAMILIES, "gemma3"])
def test_many_odd_configurations(model_type: str, tmp_path: Path) -> None:
    found = sweep(model_type, range(4, 400), tmp_path)
    assert found["equal"] > found["impossible"] > 0, found


def fields_of(model_type: str) -> list[str]:
    """List the fields of a family's class of configurations in transformers."""
    return [field.name for field in dataclasses.fields(type(AutoConfig.for_model(model_type)))]


def config_of(model_type: str) -> dict[str, Any]:
    """Return a family's config.json with every field at transformers' default."""
    config: dict[str, Any] = AutoConfig.for_model(model_type, **NEEDED.get(model_type, {})).to_dict()
    return config


def check_without(full: dict[str, Any], left_out: Iterable[str]) -> None:
    """Check that a config which leaves fields out is read as transformers fills it in, or that an error names one of
    the fields as what is missing.
    """
    left_out, needed = set(left_out) - {"model_type"}, REQUIRED | NEEDED.get(full["model_type"], {}).keys()
    part = {key: value for key, value in full.items() if key not in left_out}
    try:
        own = read_config(part)
    except PagedError:
        missing = "|".join(left_out & needed) or "none may be missing"
        errors = (CheckpointError, UnsupportedArchitectureError)
        with pytest.raises(errors, match=rf"config\.json: ({missing}) (is missing|= None: )"):
            raise
        return
    assert own == read_config(AutoConfig.for_model(**part).to_dict()), left_out


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(model_type: str) -> None:
    fields, full = fields_of(model_type), config_of(model_type)
    assert len(fields) > 20
    for field in fields:
        check_without(full, [field])
    check_without(full, set(fields) - REQUIRED)


@pytest.mark.long
@pytest.mark.parametrize("model_type", FAMILIES)
def test_leaving_out_two_fields(model_type: str) -> None:
    full = config_of(model_type)
    for pair in itertools.combinations(fields_of(model_type), 2):
        check_without(full, pair)
