"""Time decode of several loaded models in turns, so that other load on the machine affects all of them equally."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from benchmarks.inside import OpenEngine
from benchmarks.prompts import PromptMaker
from paged_sdk import SamplingParams

__all__ = ["decode_in_turns"]

_QUESTION = 16  # prompt tokens before the timed tokens


async def decode_in_turns(engines: Mapping[str, OpenEngine], *, output: int, rounds: int) -> dict[str, list[float]]:
    """Return each model's tokens per second with one stream, one number per round.

    Each model first generates a text that is not timed. Its worker sleeps while the others generate.

    :param output: generated tokens per text
    """
    sampling = evolve(SamplingParams.deterministic(), max_len=output, ignore_eos=True)
    models = {name: engine.start() for name, engine in engines.items()}
    prompts = {
        name: PromptMaker(engine.parts.text.tokenizer).make(_QUESTION, "Short").token_ids
        for name, engine in engines.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for number in range(1 + rounds):
            for name, model in models.items():
                usage = (await model.send_completion_request(prompts[name], sampling)).usage
                if number > 0:
                    speeds[name].append((usage.completion_tokens - 1) / usage.total_completion_time_sec)
    finally:
        for model in models.values():
            await model.aclose()
    return speeds
