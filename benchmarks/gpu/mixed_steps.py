"""Time steps that decode texts and prefill a short prompt, as when short requests keep arriving."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
from attrs import evolve, frozen

from benchmarks.gpu.random_model import SHAPES, TINY_SHAPES, open_random_engine
from benchmarks.gpu.timing import Row, count_launches
from benchmarks.gpu.whole_engine import Prompts
from paged_sdk import Model, SamplingParams
from paged_sdk.kernels.triton.availability import why_not
from paged_sdk.runner.device_decoding import DeviceDecoding

__all__ = ["run"]

_SENDERS: Final = 4


@frozen(kw_only=True)
class Sizes:
    """Sets numbers and lengths.

    :ivar streams: number of generated texts
    :ivar prompt: tokens of each prompt
    :ivar output: tokens of each text
    :ivar counted: tokens of each text while launches are counted: the profiler keeps an event per kernel of a graph,
        450 per step of a model with 8 billion weights, and takes a minute to sort the events of 400 steps
    """

    streams: int = 31
    prompt: int = 64
    output: int = 160
    counted: int = 48


TINY: Final = Sizes(streams=3, prompt=8, output=48)


@frozen
class Window:
    """Holds the figures of the time in which all texts were running and prompts kept arriving.

    :ivar prompts: number of computed prompts
    """

    seconds: float
    steps: int
    prompts: int


def run(name: str, device: torch.device, *, dry: bool = False) -> Iterator[Row]:
    """Time steps of decodes and a prompt that fills the token budget: as recorded CUDA graphs, and launched eagerly."""
    shape, sizes = (TINY_SHAPES[name], TINY) if dry else (SHAPES[name], Sizes())
    prompts = Prompts(shape.config["vocab_size"])
    label, case = f"paged_sdk, {shape.name}", f"{sizes.streams} decodes beside a prompt of {sizes.prompt}"
    with open_random_engine(
        shape,
        device,
        max_model_len=1024,
        max_num_seqs=sizes.streams + _SENDERS,
        max_num_batched_tokens=sizes.streams + sizes.prompt,
    ) as opened:
        compiled = _compiled(device)
        model = opened.start()
        try:
            for way, changed in (("recorded", nullcontext()), ("launched", _without_recordings())):
                with changed:
                    _seen(model, prompts, sizes)  # warm-up
                    window = _seen(model, prompts, sizes)
                    launches: Counter[str] = Counter()
                    counted = _seen(model, prompts, evolve(sizes, output=sizes.counted), partial(_count_anew, launches))
                share = {"prompts per step": window.prompts / window.steps}
                each = {f"{name} per step": count / counted.steps for name, count in launches.most_common()}
                row: Row = {"kernel": label, "case": f"{case}, {way}", "us": window.seconds / window.steps * 1e6}
                yield row | {"tok_per_s": sizes.streams * window.steps / window.seconds, "reference": share | each}
            after = _compiled(device) - compiled
            yield {"kernel": label, "case": "kernels compiled since the model was built", "reference": {"count": after}}
        finally:
            asyncio.run(model.aclose())


def _seen(
    model: Model,
    prompts: Prompts,
    sizes: Sizes,
    watching: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Window:
    """Return a window with prompts in it; on a busy machine, texts may end before any prompt was computed."""
    while True:
        window = asyncio.run(_window(model, prompts, sizes, watching()))
        if window.prompts and window.steps:
            return window


def _count_anew(launches: Counter[str]) -> AbstractContextManager[object]:
    launches.clear()
    return count_launches(launches)


async def _window(model: Model, prompts: Prompts, sizes: Sizes, watching: AbstractContextManager[object]) -> Window:
    """Generate texts, and once all have begun, send prompts one after the other until the first text ends."""
    whole = evolve(SamplingParams.deterministic(), max_len=sizes.output, ignore_eos=True)
    first_token = evolve(whole, max_len=1)
    begun = [asyncio.Event() for _ in range(sizes.streams)]
    num_prompts = 0

    async def generate(event: asyncio.Event) -> None:
        async for _ in model.stream_completion_request(prompts.make(sizes.prompt).token_ids, whole):
            event.set()

    async def send() -> None:
        nonlocal num_prompts
        while True:
            await model.send_completion_request(prompts.make(sizes.prompt).token_ids, first_token)
            num_prompts += 1

    texts = [asyncio.create_task(generate(event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    with watching:
        start, steps = time.perf_counter(), model.stats().steps
        senders = [asyncio.create_task(send()) for _ in range(_SENDERS)]
        await asyncio.wait(texts, return_when=asyncio.FIRST_COMPLETED)
        window = Window(time.perf_counter() - start, model.stats().steps - steps, num_prompts)
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*texts, *senders, return_exceptions=True)
    return window


@contextmanager
def _without_recordings() -> Iterator[None]:
    """Within this context, launch steps with prompts eagerly, instead of replaying CUDA graphs."""
    with patch.object(DeviceDecoding, "_is_mixed", lambda *_: False):
        yield


def _compiled(device: torch.device) -> int:
    if why_not(device) is not None:
        return 0
    from paged_sdk.kernels.triton.compiled import CompiledKernels

    kernels: Any = CompiledKernels(device.index or 0)
    return int(kernels.total)
