"""Replay recorded texts through the proposer of drafts, with modelled step times: no model is needed.

python -m benchmarks.draft_replay                      edits, prose after them, and more, on machines of several kinds
python -m benchmarks.draft_replay --record qwen1.5b    record the texts again with that model

The texts are answers of Qwen2.5-Coder-1.5B to requests for edits and for prose. Scheduler, proposer and account of
drafts are the real ones. The model is replaced: tokens are the recorded ones, and a step's duration follows from its
number of tokens. The scheduler sees durations with random delays added; results are computed without these.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import typer
from attrs import asdict, evolve, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.code_edits import make_requests
from benchmarks.edits import EDITS
from benchmarks.models import benchmark_model
from paged_sdk import SamplingParams, SpeculativeConfig, TextModelBuilder
from paged_sdk.chat.text_processor import text_processor_from_gguf
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.scheduler.request import Request
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from paged_sdk.speculative.text_proposer import TextProposer
from paged_sdk.weights.checkpoint import open_checkpoint

__all__ = ["DISTURBED", "EVEN", "QUIET", "Noise", "RecordedText", "Replay", "read_recorded", "replay_sessions"]

RECORDED: Final = Path(__file__).parent / "recorded_texts.json"
COSTS: Final = (
    (1, 25.3),
    (2, 28.6),
    (3, 31.2),
    (4, 35.0),
    (5, 46.5),
    (8, 49.0),
    (9, 64.0),
    (12, 68.0),
    (13, 82.0),
    (16, 86.0),
    (17, 100.0),
)
"""Milliseconds of a step by its number of tokens, with linear interpolation: Qwen2.5-Coder-1.5B Q4_K_M on two cores of
Zen 4, otherwise idle, 22 November 2026; from 8 tokens on derived from the time of products with as many rows."""
_CHOOSING: Final = 0.09e-3
"""Seconds to choose the drafts of a step."""
_MAX_MODEL_LEN: Final = 2048
_GAMMA: Final = 16
_LENGTH: Final = 160


@frozen
class RecordedText:
    """Holds a request and the tokens of its answer.

    :ivar kind: "edits" or "prose"
    :ivar prediction: tokens of the predicted answer; empty: no prediction
    """

    kind: str
    prompt: tuple[int, ...]
    prediction: tuple[int, ...]
    answer: tuple[int, ...]


@frozen
class Noise:
    """Holds the random delays of steps.

    :ivar spread: standard deviation of a step's time, as a fraction of it
    :ivar interruptions: percentage of steps that take up to three times as long
    :ivar phases: mean number of steps between phases of competing load, in which about 40 steps take up to three times
        as long; 0: no such phases
    """

    spread: float = 0.0
    interruptions: float = 0.0
    phases: int = 0

    def factors(self, rng: random.Random) -> Iterator[float]:
        """Yield the factor by which each step is longer."""
        left, slow = 0, 1.0
        while True:
            if left:
                left -= 1
            elif self.phases and rng.random() * self.phases < 1:
                left, slow = round(rng.expovariate(1 / 40)), rng.uniform(1.3, 3)
            factor = (slow if left else 1.0) * (1 + abs(rng.gauss(0, self.spread)))
            yield factor * (rng.uniform(1.3, 3) if rng.random() * 100 < self.interruptions else 1.0)


EVEN: Final = Noise()
QUIET: Final = Noise(spread=0.03, interruptions=2)
DISTURBED: Final = Noise(spread=0.1, interruptions=5, phases=200)


def read_recorded() -> list[RecordedText]:
    """Return the recorded texts."""
    return [
        RecordedText(each["kind"], tuple(each["prompt"]), tuple(each["prediction"]), tuple(each["answer"]))
        for each in json.loads(RECORDED.read_text())
    ]


def step_seconds(num_tokens: int) -> float:
    """Return the duration of a step by its number of tokens."""
    (size, cost), *rest = COSTS
    slope = 0.0
    for next_size, next_cost in rest:
        slope = (next_cost - cost) / (next_size - size)
        if num_tokens <= next_size:
            break
        size, cost = next_size, next_cost
    return (cost + slope * max(num_tokens - size, 0)) * 1e-3


class Replay:
    """Replays texts on the real scheduler and proposer, and computes how long generating them takes.

    :param looks_back: whether speculation is on; otherwise only texts with predictions get drafts
    :param noise: random delays of steps
    :param seed: seed of the noise
    """

    def __init__(self, *, looks_back: bool = True, noise: Noise = QUIET, seed: int = 0) -> None:
        config = EngineConfig(paged=False, max_model_len=_MAX_MODEL_LEN, gamma=_GAMMA)
        kv = SequenceKvManager(max_sequence_tokens=_MAX_MODEL_LEN, max_num_seqs=config.max_num_seqs, num_kept=0)
        self._scheduler = Scheduler(config, kv)
        self._balance = self._scheduler.costs.drafts.open_balance()
        self._proposer = TextProposer(
            _GAMMA, looks_back=looks_back, shares_texts=True, times=self._scheduler.costs.times, balance=self._balance
        )
        self._factors = noise.factors(random.Random(seed))
        self._next_id = 0

    def run(self, texts: Sequence[RecordedText], *, predicts: bool = False) -> float:
        """Generate texts concurrently.

        :param predicts: pass the texts' predictions
        :returns: the speed-up by drafts
        """
        answers: dict[int, Sequence[int]] = {}
        for text in texts:
            request = Request(
                request_id=str(self._next_id),
                prompt_token_ids=text.prompt,
                prediction_token_ids=text.prediction if predicts else (),
                sampling=SamplingParams.deterministic(),
                max_tokens=len(text.answer),
                cache_keys=(CacheKey(b"%d" % self._next_id),),  # no drafts from earlier answers
            )
            answers[self._next_id] = text.answer
            self._scheduler.add(TokenSequence(self._next_id, request))
            self._next_id += 1
        seconds = 0.0
        while self._scheduler.num_running or self._scheduler.num_waiting:
            seconds += self._step(answers)
        lengths = [len(text.answer) for text in texts]
        plain = sum(step_seconds(sum(length > place for length in lengths)) for place in range(1, max(lengths)))
        return plain / seconds

    def _step(self, answers: dict[int, Sequence[int]]) -> float:
        """Run a step, and return its duration; 0 if it computes prompts."""
        sequences = self._scheduler.decoding
        for sequence, drafts in zip(sequences, self._proposer.propose(sequences), strict=True):
            sequence.draft_token_ids = drafts
        self._balance.claim(self._balance.seq_ids, _CHOOSING)
        output = self._scheduler.schedule()
        self._proposer.forget(output.finished_seq_ids)
        sampled = []
        for row in output.scheduled:
            first = row.known_end - row.sequence.num_prompt_tokens
            tokens = list(answers[row.sequence.seq_id][first : first + 1 + len(row.draft_token_ids)])
            agreeing = 0
            for token, draft in zip(tokens, row.draft_token_ids, strict=False):
                if token != draft:
                    break
                agreeing += 1
            sampled.append(tokens[: agreeing + 1] if row.num_samples else [])
        self._scheduler.update(output, sampled)
        computes_prompts = output.num_decodes < len(output.scheduled)
        seconds = step_seconds(sum(row.num_new_tokens for row in output.scheduled))
        self._scheduler.costs.note(output, seconds * next(self._factors), _CHOOSING)
        return 0.0 if computes_prompts else seconds + _CHOOSING


def replay_sessions(noise: Noise, seed: int) -> dict[str, list[float]]:
    """Replay sessions of several kinds, and return the speed-ups by drafts, by kind.

    :param seed: seed of the noise
    """
    recorded = read_recorded()
    edits, prose = ([text for text in recorded if text.kind == kind] for kind in ("edits", "prose"))
    after, alone, turns, predicted = (
        Replay(noise=noise, seed=seed, looks_back=looks_back) for looks_back in (True, True, True, False)
    )
    found = {
        "edits": [after.run([text]) for text in edits],
        "prose after edits": [after.run([text]) for text in prose],
        "edits after prose": [after.run([text]) for text in edits],
        "4 of prose after edits": [after.run(prose[:4])],
        "4 edits": [after.run(edits[:4])],
        "prose alone": [alone.run([text]) for text in prose],
        "edits, predicted": [predicted.run([text], predicts=True) for text in edits],
    }
    for edit, text in zip(edits, prose, strict=False):
        turns.run([edit])
        found.setdefault("prose in turns with edits", []).append(turns.run([text]))
    return found


def as_table(found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Return medians and minima, by noise and kind of session."""
    table = Table(title="times the rate without drafts: median (least)")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")
    for what in next(iter(found.values())):
        table.add_row(what, *(f"{median(of[what]):.3f} ({min(of[what]):.3f})" for of in found.values()))
    return table


async def record(name: str) -> list[RecordedText]:
    """Let a model answer every second edit, and all requests for prose."""
    chosen = benchmark_model(name)
    checkpoint = open_checkpoint(chosen.source)
    assert checkpoint.metadata is not None, "only GGUF files have their tokenizer inside"
    checkpoint.source.close()
    text = text_processor_from_gguf(checkpoint.metadata)
    requests = make_requests(text, edits=len(EDITS), prose=8)
    builder = TextModelBuilder(chosen.source).with_max_model_len(_MAX_MODEL_LEN)
    found = []
    async with builder.with_speculation(SpeculativeConfig(_GAMMA)).build() as model:
        for asked in [*requests[: len(EDITS) : 2], *requests[len(EDITS) :]]:
            sampling = evolve(SamplingParams.deterministic(), max_len=_LENGTH)
            response = await model.send_completion_request(asked.prompt.token_ids, sampling)
            prediction, answer = (
                tuple(text.tokenizer.encode(each, add_special_tokens=False))
                for each in (asked.prediction, response.choices[0].text)
            )
            found.append(RecordedText(asked.kind, tuple(asked.prompt.token_ids), prediction, answer))
    return found


def main(
    record_with: Annotated[str | None, typer.Option("--record", help="Record the texts with this model")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many times each session is replayed")] = 5,
) -> None:
    """Replay recorded texts through the proposer of drafts."""
    if record_with is not None:
        texts = [asdict(text) for text in asyncio.run(record(record_with))]
        RECORDED.write_text("[\n" + ",\n".join(json.dumps(text, separators=(",", ":")) for text in texts) + "\n]\n")
        return
    found: dict[str, dict[str, list[float]]] = {}
    for name, noise in (("even", EVEN), ("quiet", QUIET), ("disturbed", DISTURBED)):
        of = found[name] = {}
        for seed in range(seeds if noise is not EVEN else 1):
            for what, rates in replay_sessions(noise, seed).items():
                of.setdefault(what, []).extend(rates)
    Console().print(as_table(found))


if __name__ == "__main__":
    typer.run(main)
