"""The calculator of docs/memory.md says what the engine computes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

import tiny
from paged_sdk import IsqType, MemoryGpuConfig, PagedAttentionMeta, PagedCacheType, TextModelBuilder, plan_memory
from paged_sdk.build.planning import weight_bits
from paged_sdk.kv.pool_size import (
    BlockLayout,
    DeviceMemory,
    auto_cpu_blocks,
    blocks_for,
    fp8_scale_bytes,
    q4_scale_bytes,
)

ROOT: Final = Path(__file__).parents[1]
SCRIPT: Final = ROOT / "docs" / "assets" / "memory.js"
GIB: Final = 2**30
BYTES: Final = {"bfloat16": 2, "float32": 4, "f8e4m3": 1, "q4": 0.5}

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the calculator, and is not there")


def in_node(expression: str) -> Any:
    program = f"const c = require({json.dumps(str(SCRIPT))}); console.log(JSON.stringify({expression}))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def calculated(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = in_node(f"{json.dumps(cases)}.map(c.memoryPlan)")
    assert isinstance(found, list)
    return found


def layout_of(shape: dict[str, Any], cache: str, block_size: int) -> BlockLayout:
    layers, kv_heads = shape["layers"], shape["kvHeads"]
    elements = 2 * layers * kv_heads * shape["headDim"]
    scales = {"f8e4m3": fp8_scale_bytes(2 * layers * kv_heads), "q4": q4_scale_bytes(elements)}
    return BlockLayout(
        block_size=block_size,
        elements_per_token=elements,
        bytes_per_element=BYTES[cache],
        scale_bytes_per_token=scales.get(cache, 0),
    )


@needs_node
def test_blocks_are_those_of_the_engine() -> None:
    total, weights = 16 * GIB, 3 * GIB
    device = DeviceMemory(total=total, free=total - weights)
    pools: dict[str, Any] = {
        "tokens": ({"value": 5000}, MemoryGpuConfig.ContextSize(5000)),
        "mib": ({"value": 700}, MemoryGpuConfig.MB(700)),
        "share": ({"value": 0.7}, MemoryGpuConfig.Fraction(0.7)),
        "automatic": ({"value": 3000, "sequences": 32}, None),
    }
    cases: list[dict[str, Any]] = []
    expected: list[tuple[int, int]] = []
    for shape in in_node("c.MODELS").values():
        for cache, block_size in (("bfloat16", 32), ("float32", 16), ("f8e4m3", 48), ("q4", 16)):
            layout = layout_of(shape, cache, block_size)
            for kind, (given, setting) in pools.items():
                pool = {"kind": kind, **given}
                settings = {"cache": cache, "blockSize": block_size, "totalBytes": total, "weightBytes": weights}
                cases.append({**shape, **settings, "pool": pool})
                blocks = (
                    auto_cpu_blocks(layout, device, max_num_seqs=32, max_model_len=3000)
                    if setting is None
                    else blocks_for(setting, layout, device)
                )
                expected.append((blocks, blocks * layout.block_bytes))
    plans = calculated(cases)
    assert [(plan["numBlocks"], plan["kvBytes"]) for plan in plans] == expected
    assert all(plan["fits"] for plan in plans)


@needs_node
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_it_says_what_a_plan_says(family: str, tmp_path: Path) -> None:
    model = tiny.make_checkpoint(family, tmp_path, hidden_size=128, head_dim=32)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    shape = {
        "layers": config["num_hidden_layers"],
        "kvHeads": config["num_key_value_heads"],
        "headDim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    }
    builder = TextModelBuilder(model).with_force_cpu().with_dtype("bfloat16")
    plans, cases = [], []
    for cache, kind in (
        ("bfloat16", PagedCacheType.AUTO),
        ("f8e4m3", PagedCacheType.F8E4M3),
        ("q4", PagedCacheType.Q4),
    ):
        meta = PagedAttentionMeta(block_size=16, gpu_memory=MemoryGpuConfig.ContextSize(1000), cache_type=kind)
        plans.append(plan_memory(builder.with_paged_attn(meta)))
        settings = {"cache": cache, "blockSize": 16, "totalBytes": GIB, "weightBytes": plans[-1].weight_bytes}
        cases.append({**shape, **settings, "pool": {"kind": "tokens", "value": 1000}})
    for plan, found in zip(plans, calculated(cases), strict=True):
        assert found["numBlocks"] == plan.num_blocks
        assert found["kvBytes"] == plan.kv_bytes
        assert found["kvTokens"] == plan.kv_tokens
        assert found["bytesPerToken"] == plan.bytes_per_token


@needs_node
def test_what_does_not_fit_is_said() -> None:
    shape = {"layers": 2, "kvHeads": 2, "headDim": 64, "cache": "bfloat16", "blockSize": 32}
    pool = {"kind": "mib", "value": 4096}
    small, large = calculated(
        [
            {**shape, "pool": pool, "totalBytes": 4 * GIB, "weightBytes": GIB},
            {**shape, "pool": pool, "totalBytes": 6 * GIB, "weightBytes": GIB},
        ]
    )
    assert not small["fits"]
    assert large["fits"]


@needs_node
def test_bits_of_weights_are_those_of_the_engine() -> None:
    bits = in_node("c.WEIGHT_BITS")
    dense = {"float32": 32, "bfloat16": 16}
    types = {name: weight_bits(IsqType.parse(name), 4096) for name in bits.keys() - dense.keys()}
    assert bits == dense | types


def test_the_table_is_what_the_engine_takes() -> None:
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    script = SCRIPT.read_text(encoding="utf-8")
    shapes = {
        name: {"layers": int(layers), "kvHeads": int(heads), "headDim": int(size)}
        for name, layers, heads, size in re.findall(
            r'"([^"]+)": \{ layers: (\d+), kvHeads: (\d+), headDim: (\d+)', script
        )
    }
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|$", page, flags=re.MULTILINE)
    assert {name for name, *_ in rows} == shapes.keys()
    for name, bfloat16, fp8, q4, mib in rows:
        plain = layout_of(shapes[name], "bfloat16", 32)
        for shown, cache in ((bfloat16, "bfloat16"), (fp8, "f8e4m3"), (q4, "q4")):
            assert shown == f"{layout_of(shapes[name], cache, 32).block_bytes / 32 / 1024:.1f}"
        assert mib == f"{8192 // 32 * plain.block_bytes / 2**20:,.0f}"
