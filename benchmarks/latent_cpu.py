"""Time latent attention on the CPU, of one layer between its projections: `python -m benchmarks.latent_cpu`.

Heads and latent vectors have DeepSeek-V2-Lite's sizes, all numbers are random, and times are CPU time of one thread,
which other load changes little. Ways alternate: the projections of latent vectors absorbed into queries and results, by
torch and packed; keys and values decompressed first; and, for comparison, kept for all heads, as transformers' class
keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final
from unittest.mock import patch

import torch
from attrs import evolve

from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.native.library import Workspace, load, why_not
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, native_paged_attention
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.quant.form import Place
from paged_sdk.quant.latent_heads import make_latent_heads
from paged_sdk.types.step import StepRow

__all__ = ["LatentLayer"]

_LITE: Final = LatentAttentionConfig(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
_HEADS: Final = 16
_BLOCK_SIZE: Final = 32
_CPU: Final = torch.device("cpu")


class LatentLayer:
    """Holds one layer's pages and its projections in several forms.

    :param max_context_len: the longest context to measure
    """

    def __init__(
        self,
        workspace: Workspace,
        sizes: LatentAttentionConfig = _LITE,
        num_heads: int = _HEADS,
        *,
        max_context_len: int,
    ) -> None:
        self._sizes, self._num_heads, self._workspace = sizes, num_heads, workspace
        config = DecoderConfig(
            model_type="none",
            vocab_size=1,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=sizes.key_dim,
            max_position=max_context_len,
            norm_eps=1e-6,
            ropes=(RopeConfig(rotary_dim=sizes.rope_dim),),
            sliding_windows=(None,),
            attention_scale=sizes.query_dim**-0.5,
            latent=sizes,
        )
        settings = PoolSettings(block_size=_BLOCK_SIZE, dtype=torch.bfloat16, device=_CPU)
        self._num_blocks = -(-max_context_len // _BLOCK_SIZE)
        self._backend = NativePagedBackend(
            config, settings, self._num_blocks, workspace=workspace, precision=Precision.INT8
        )
        self._backend.native_pages.caches[0].key.normal_()
        up = torch.randn(num_heads * (sizes.nope_dim + sizes.value_dim), sizes.rank) / 20
        place = Place(device=_CPU, dtype=torch.bfloat16, workspace=workspace, one_form=False)
        self._torch = make_latent_heads(up, sizes, evolve(place, workspace=None), is_quantized=False)
        self._dense, self._blocks = (
            make_latent_heads(up, sizes, place, is_quantized=is_quantized) for is_quantized in (False, True)
        )

    def ways(self, num_tokens: int, context_len: int) -> Mapping[str, Callable[[], float]]:
        """Return functions that compute the last tokens of a sequence in each way, and return the CPU seconds."""

        def over_latents(heads: LatentHeads, *, decompresses: bool) -> Callable[[], float]:
            return lambda: self._seconds(heads, num_tokens, context_len, decompresses=decompresses)

        found = {
            "absorbed, by torch": over_latents(self._torch, decompresses=False),
            "absorbed, bfloat16": over_latents(self._dense, decompresses=False),
            "absorbed, Q8_0": over_latents(self._blocks, decompresses=False),
        }
        if num_tokens > 1:
            found["decompressed, bfloat16"] = over_latents(self._dense, decompresses=True)
            found["decompressed, Q8_0"] = over_latents(self._blocks, decompresses=True)
            found["kept for all heads"] = lambda: self._seconds_of_kept(num_tokens, context_len)
        return found

    def _seconds(self, heads: LatentHeads, num_tokens: int, context_len: int, *, decompresses: bool) -> float:
        sizes, first = self._sizes, context_len - num_tokens
        query = torch.randn(num_tokens, self._num_heads, sizes.query_dim).bfloat16()
        key = torch.randn(num_tokens, sizes.key_dim).bfloat16()
        angles = torch.arange(first, context_len)[:, None] / torch.logspace(0, 4, sizes.rope_dim // 2)
        rotation = Rotation(angles.cos(), angles.sin())
        num_prompt_tokens = context_len if num_tokens > 1 else first
        row = StepRow(0, first, [0] * num_tokens, range(self._num_blocks), num_prompt_tokens, num_logits=1)
        with patch("paged_sdk.attention.native_paged.pays_to_decompress", return_value=decompresses):
            step = self._backend.prepare([row])
        rotated, unrotated = query[..., : sizes.rope_dim].clone(), query[..., sizes.rope_dim :]
        start = time.process_time()
        step.attend_over_latents(0, rotated, unrotated, key, heads, rotation)
        return time.process_time() - start

    def _seconds_of_kept(self, num_tokens: int, context_len: int) -> float:
        head_dim = self._sizes.query_dim
        query, key, value = (
            torch.randn(length, self._num_heads, head_dim).bfloat16()
            for length in (num_tokens, context_len, context_len)
        )
        batch = VarlenBatch(
            cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            context_lens=torch.tensor([context_len], dtype=torch.int32),
            in_chunks=torch.ones(1, dtype=torch.uint8),
        )
        shape = AttentionShape(self._num_heads, self._num_heads, head_dim, head_dim**-0.5, precision=Precision.INT8)
        start = time.process_time()
        native_paged_attention(self._workspace, query, LayerCache(key[None], value[None]), batch, shape)
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    library = load()
    if library is None:
        raise SystemExit(why_not())
    torch.set_num_threads(1)  # as in an engine
    layer = LatentLayer(Workspace(library, num_threads=1), max_context_len=4096)
    for num_tokens, context_len in ((512, 512), (512, 2048), (512, 4096), (128, 4096), (1, 1024)):
        ways = layer.ways(num_tokens, context_len)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, seconds in ways.items():
                times[name].append(seconds())
        print(f"{num_tokens} of {context_len} tokens, ms of one thread ({library.isa}):")
        for name, found in times.items():
            print(f"  {name}: {statistics.median(found) * 1e3:.1f}", flush=True)


if __name__ == "__main__":
    main()
