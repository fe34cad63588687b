"""Count what is compiled for steps of requests after those for trial: `live_compilations.py GGUF CACHE WINDOWS DTYPE`.

Nothing is compiled and no kernel runs: a stand-in for Triton's compiler notes what it is asked for, for a GPU
of compute capability 9.0. Around the kernels a model's steps run as they are, on the CPU, over what memory holds, but
for torch's own products, which a GPU's library would compute: they were two thirds of the time.

It runs in a process of its own, because Triton reads at its first import whether it is to interpret kernels.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import threading
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.triton_paged import TritonPagedBackend
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.triton import availability
from paged_sdk.kernels.triton.tile_choices import MatrixUnits
from paged_sdk.models.loading import load_model
from paged_sdk.quant.forms.triton_blocks import TritonBlocks
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.runner.live_compilations import LiveCompilations
from paged_sdk.runner.prompt_logprobs import LOGITS_TILE
from paged_sdk.runner.warm_up import run_for_trial, trial_steps
from paged_sdk.sampling.device_sampler import DeviceSampler
from paged_sdk.sampling.penalties import Penalties
from paged_sdk.types.step import StepRow
from paged_sdk.weights.gguf.source import GgufSource

CPU: Final = torch.device("cpu")
BLOCK_SIZE: Final = 16
MAX_TOKENS: Final = 600
MAX_ROWS: Final = 32
MAX_DRAFTS: Final = 17
MAX_MODEL_LEN: Final = 32_768
MULTIPROCESSORS: Final = 132
# Rows of so many logits are no multiple of 16 bytes.
VOCAB_SIZE: Final = 67
# So many rows, because settings lie side by side on the CPU: four of each are 16 bytes.
SAMPLED_ROWS: Final = 4
_MOST_SECONDS: Final = 0.5


class EverywhereTritonBlocks(TritonBlocks):
    """Is chosen on any device."""

    def is_for(self, device: torch.device) -> bool:
        return True


class Compiler:
    """Stands in for Triton's compiler and for the driver that says what it is to compile for.

    :ivar asked: the kernels that it was asked for, each as often as it was
    :ivar most_at_once: for how many kernels it was asked at once
    """

    def __init__(self) -> None:
        backends: Any = importlib.import_module("triton.backends.compiler")
        self._target = backends.GPUTarget("cuda", 90, 32)
        self.asked: list[str] = []
        self.most_at_once = 0
        self._asking = 0
        self._changed = threading.Condition()

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def let_launch(self, stack: ExitStack) -> None:
        """Have kernels that are launched be asked for here, if they were not before."""
        jit: Any = importlib.import_module("triton.runtime.jit")
        driver: Any = importlib.import_module("triton.runtime.driver")
        driver.driver.set_active(self)
        launch = jit.JITFunction.run

        def launch_nothing(function: Any, *args: Any, **kwargs: Any) -> None:
            launch(function, *args, **kwargs | {"warmup": True})

        def note(function: Any, key: Any, *args: Any) -> object:
            self.asked.append(function.__name__)
            if threading.current_thread() is not threading.main_thread():
                self._wait_for_another()
            kernels = function.device_caches[0][0]
            kernels[key] = object()
            return kernels[key]

        stack.enter_context(patch.object(jit.JITFunction, "run", launch_nothing))
        stack.enter_context(patch.object(jit.JITFunction, "_do_compile", note))

    def _wait_for_another(self) -> None:
        """Wait a little for another thread to ask for a kernel, too, until that was seen once. There is none while the
        step of this one takes all the room that steps have.
        """
        with self._changed:
            self._asking += 1
            self.most_at_once = max(self.most_at_once, self._asking)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most_at_once > 1, _MOST_SECONDS)
            self._asking -= 1


def steps_of_requests() -> list[list[StepRow]]:
    """Make steps as requests bring them: decodes, chunks of prompts of any length at any place, both, and drafts."""
    random.seed(0)

    def row(index: int, count: int, start: int) -> StepRow:
        blocks = [0] * -(-(start + count) // BLOCK_SIZE)
        return StepRow(index, start, [0] * count, blocks, num_prompt_tokens=start + count, num_logits=1)

    def start(count: int) -> int:
        return random.choice((0, random.randrange(600), random.randrange(MAX_MODEL_LEN - count)))

    edges = [edge + more for edge in (16, 32, 64, 128, 256, 384, 512) for more in (-1, 0, 1)]
    steps = [[row(0, count, start(count))] for count in (*range(1, 12), *edges, *range(20, MAX_TOKENS, 37))]
    for _ in range(40):
        num_decodes, num_chunks = random.randrange(MAX_ROWS - 3), random.randrange(4)
        rows = [row(index, 1, start(1)) for index in range(num_decodes)]
        left = MAX_TOKENS - num_decodes
        for index in range(num_chunks):
            count = min(left, random.choice((random.randint(2, 20), random.randint(2, 300), random.randint(2, left))))
            rows.append(row(num_decodes + index, count, start(count)))
            left -= count
            if left < 2:
                break
        if rows:
            steps.append(rows)
    for num_rows, num_drafts in product((2, 7, MAX_ROWS), (1, 2, 5, 9, MAX_DRAFTS)):
        steps.append([row(index, 1 + num_drafts, start(1 + num_drafts)) for index in range(num_rows)])
    return steps


def multiply_nothing(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def sample(sampler: DeviceSampler) -> None:
    """Choose tokens of rows that come after one which the host samples: their logits are a view of the step's."""
    sampler._launch_all(torch.zeros(1 + SAMPLED_ROWS, VOCAB_SIZE)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("cache_type", type=PagedCacheType)
    parser.add_argument("windows", type=json.loads)
    parser.add_argument("dtype", nargs="?", default="bfloat16")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    units = MatrixUnits.THREADS if dtype is torch.float32 else MatrixUnits.SHARED_MEMORY
    compiler = Compiler()
    with ExitStack() as stack:
        compiler.let_launch(stack)
        for module in ("availability", "paged_attention", "paged_decode", "quantized_linear"):
            kernels = importlib.import_module(f"paged_sdk.kernels.triton.{module}")
            stack.enter_context(patch.object(kernels, "num_multiprocessors", lambda device: MULTIPROCESSORS))
        for module in ("quantized_linear", "quantized_experts"):
            kernels = importlib.import_module(f"paged_sdk.kernels.triton.{module}")
            stack.enter_context(patch.object(kernels, "matrix_units", return_value=units))
        stack.enter_context(patch.object(availability, "why_not", lambda device: None))
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", True, create=True))
        stack.enter_context(patch.object(F, "linear", multiply_nothing))
        stack.enter_context(torch.inference_mode())
        source = GgufSource(arguments.model)
        policy = WeightPolicy(keep_blocks=True, forms=[EverywhereTritonBlocks()])
        model = load_model(source.config, source, dtype=dtype, placement=CPU, policy=policy)
        pool = PoolSettings(block_size=BLOCK_SIZE, dtype=dtype, device=CPU, cache_type=arguments.cache_type)
        config = evolve(model.config, sliding_windows=tuple(arguments.windows))
        backend = TritonPagedBackend(config, pool, 4, max_num_seqs=MAX_ROWS, max_model_len=MAX_MODEL_LEN)
        limits = {"max_num_tokens": MAX_TOKENS, "max_num_rows": MAX_ROWS, "max_model_len": MAX_MODEL_LEN}
        steps = list(trial_steps(block_size=BLOCK_SIZE, windows=backend.windows, **limits))
        run_for_trial(model, backend, steps, num_threads=4, most_logits=MAX_ROWS * (MAX_DRAFTS + 1))
        sampler = DeviceSampler([Penalties()], MAX_ROWS, VOCAB_SIZE, CPU)
        sampler.warm_up(torch.zeros(SAMPLED_ROWS, VOCAB_SIZE))
        before, compiler.asked = compiler.asked, []
        kernels = importlib.import_module("paged_sdk.kernels.triton.compiled").CompiledKernels(0)
        live = LiveCompilations(kernels)
        with live.watching():
            run_for_trial(model, backend, steps_of_requests())
            # As prompt logprobs and scores ask for them, and drafts of several rows.
            for count in (1, 2, 9, 20, 40, LOGITS_TILE, 65, 130, 200, 260, 400, 511, 512, MAX_ROWS * (MAX_DRAFTS + 1)):
                model.logits(torch.zeros(count, model.config.hidden_size, dtype=dtype))
            backend.copy([(0, 1, BLOCK_SIZE), (2, 3, BLOCK_SIZE)])
            sample(sampler)
        found = {
            "for trial": before,
            "at once": compiler.most_at_once,
            "counted": kernels.total,
            "for requests": compiler.asked,
            "noticed": live.count,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
