"""gpt-oss as it is published, with experts in MXFP4, says what the decoded experts do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from paged_sdk import SamplingParams, TextModelBuilder
from quantized_writers import mxfp4

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0.0, max_len=16, ignore_eos=True, top_n_logprobs=1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def with_packed_experts(checkpoint: Path, packed: Path, decoded: Path) -> None:
    """Write a checkpoint twice: with its experts in MXFP4, and with what these stand for."""
    tensors = load_file(checkpoint / "model.safetensors")
    of_decoded = dict(tensors)
    of_packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        written = [mxfp4(expert.T.contiguous().float()) for expert in of_packed.pop(name)]
        for part in ("_blocks", "_scales"):
            of_packed[name + part] = torch.stack([each.tensors[f".weight{part}"] for each in written])
        of_decoded[name] = torch.stack([each.values.T.contiguous() for each in written])
    for directory, made in ((packed, of_packed), (decoded, of_decoded)):
        shutil.copytree(checkpoint, directory)
        save_file(made, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))


async def test_experts_in_mxfp4(tmp_path: Path) -> None:
    checkpoint = tiny.make_other_checkpoint("gpt_oss", tmp_path / "whole", num_local_experts=4, num_experts_per_tok=2)
    with_packed_experts(checkpoint, tmp_path / "packed", tmp_path / "decoded")
    said = {}
    for name in ("packed", "decoded"):
        async with TextModelBuilder(tmp_path / name).with_dtype("float32").with_force_cpu().build() as model:
            response = await model.send_completion_request(list(range(5, 45)), GREEDY)
            assert response.choices[0].logprobs is not None
            said[name] = response.choices[0].logprobs.content
    assert [each.token_id for each in said["packed"]] == [each.token_id for each in said["decoded"]]
    for one, other in zip(said["packed"], said["decoded"], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=0.02)
