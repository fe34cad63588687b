"""Measure what formats of a KV cache would cost in quality, before a kernel is written for them.

python -m benchmarks.kv_study --model smollm2
python -m benchmarks.kv_study --formats "f8e4m3; 4 bits" --chat "Why is the sky blue?"

The model computes in float32 on the paged KV cache of this engine; keys and values are rounded to a format before they
are written. So the divergence from the same model without rounding is the format's alone. The cache types of the engine
that are named like ``PagedCacheType.Q4`` are not simulated: their own pools store the codes.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from attrs import asdict, evolve
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.divergence import Divergence, divergence
from benchmarks.inside import OpenEngine, open_engine
from benchmarks.kv_formats import FORMATS, KvFormat, Offsets, Stored
from benchmarks.machine import describe_machine
from benchmarks.models import model_path
from benchmarks.paths import cache_directory
from benchmarks.prompts import prose
from paged_sdk import TextMessageRole, TextMessages, TextModelBuilder
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.paged import PagedBackend, new_positions
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.build.kv_statistics import measure_kv
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.key_offsets import KEY_SPAN
from paged_sdk.kernels.step import AttentionStep
from paged_sdk.models.key_offsets import key_offsets
from paged_sdk.system.processors import usable_processors
from paged_sdk.types.step import StepRow

__all__ = ["KvStudy"]

_CHAT_CHARACTERS: Final = 400


class KvStudy:
    """Computes a model's logits with keys and values rounded to a format.

    :param engine: a model that computes in float32; its runner is changed, and rounds from then on as :attr:`format`
        says
    :ivar format: the format; None: keys and values stay as they are
    :ivar engine: computes with this rounding
    """

    def __init__(self, engine: OpenEngine) -> None:
        self.format: KvFormat | Stored | None = None
        self.engine: OpenEngine = engine.with_backend(_RoundingBackend(self))
        decoder, max_tokens = self.engine.decoder, engine.parts.config.max_model_len
        measured = measure_kv(decoder, max_tokens, num_threads=torch.get_num_threads())
        self._offsets = {
            Offsets.NONE: (),
            Offsets.BIAS: key_offsets(decoder, max_tokens),
            Offsets.MEASURED: measured.key_offsets,
        }
        self._factors = [basis.factors for basis in measured.bases]
        self._unrounded = engine.backend
        assert isinstance(self._unrounded, PagedBackend)
        plain = PoolSettings(block_size=engine.parts.config.block_size, dtype=decoder.dtype, device=torch.device("cpu"))
        settings = {
            PagedCacheType.F8E4M3: evolve(plain, key_offsets=measured.key_offsets),
            PagedCacheType.Q4: evolve(plain, key_offsets=measured.offsets_in_bases, bases=measured.bases),
        }
        self._pools = {
            kind: PagedBackend(decoder.config, evolve(each, cache_type=kind), self._unrounded.num_blocks)
            for kind, each in settings.items()
        }

    @property
    def backend(self) -> AttentionBackend:
        """Return the pool of the format."""
        return self._pools[self.format.kind] if isinstance(self.format, Stored) else self._unrounded

    def logits(self, token_ids: Sequence[int], kv_format: KvFormat | Stored | None) -> Tensor:
        """Compute the logits after every token of a text, as a prompt."""
        self.format = kv_format
        return self.engine.logits(token_ids, chunk=self.engine.parts.config.max_num_batched_tokens)

    def rounded(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention would read back."""
        if not isinstance(self.format, KvFormat):
            return key, value
        every = self._offsets[self.format.offsets]
        offsets = every[layer].index_select(0, positions // KEY_SPAN) if every else torch.zeros(())
        factors = self._factors[layer] if self.format.balanced else torch.ones(())
        return self.format.keys((key - offsets) * factors) / factors + offsets, self.format.values(value)


class _RoundingBackend(AttentionBackend):
    def __init__(self, study: KvStudy) -> None:
        self._study = study

    @property
    def num_bytes(self) -> int:
        return self._study.backend.num_bytes

    @property
    def windows(self) -> Sequence[int | None]:
        return self._study.backend.windows

    def prepare(self, rows: Sequence[StepRow]) -> AttentionStep:
        return _RoundingStep(self._study.backend.prepare(rows), self._study, torch.from_numpy(new_positions(rows)))

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        self._study.backend.copy(copies)

    def release(self, kv_ids: Iterable[int]) -> None:
        self._study.backend.release(kv_ids)


class _RoundingStep(AttentionStep):
    def __init__(self, step: AttentionStep, study: KvStudy, positions: Tensor) -> None:
        self._step = step
        self._study = study
        self._positions = positions

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._step.write(layer, *self._study.rounded(layer, key, value, self._positions))

    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        return self._step.attend(layer, query, learned)


def _texts() -> tuple[str, ...]:
    """Return prose and code, two each, that any installation of one version of Python has."""
    words = prose()
    return words, inspect.getsource(tarfile), words[len(words) // 2 :], inspect.getsource(argparse)


def _chosen(names: str | None) -> Mapping[str, KvFormat | Stored]:
    if names is None:
        return FORMATS
    chosen = [name.strip() for name in names.split(";")]
    if unknown := [name for name in chosen if name not in FORMATS]:
        raise typer.BadParameter(f"{unknown[0]!r}: expected some of {'; '.join(FORMATS)}")
    return {name: FORMATS[name] for name in chosen}


def _mean(rows: Sequence[Divergence]) -> Divergence:
    """Average the divergences of texts that have as many positions each."""
    mean_kl, p99_kl, top1 = (
        sum(getattr(row, name) for row in rows) / len(rows) for name in ("mean_kl", "p99_kl", "top1")
    )
    return Divergence(mean_kl=mean_kl, p99_kl=p99_kl, top1=top1)


def _as_table(rows: dict[str, Divergence], bits: Mapping[str, float], title: str) -> Table:
    table = Table(title=title)
    for heading in ("", "bits", "mean KL", "p99 KL", "top-1 agreement"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in rows.items():
        table.add_row(name, f"{bits[name]:.2f}", f"{row.mean_kl:.4f}", f"{row.p99_kl:.3f}", f"{row.top1:.1%}")
    return table


async def _answers(study: KvStudy, question: str, formats: Mapping[str, KvFormat | Stored]) -> dict[str, str]:
    """Return the beginnings of the greedy answers."""
    messages = TextMessages().add_message(TextMessageRole.USER, question)
    answers = {}
    async with study.engine.start() as model:
        for name, kv_format in {"unrounded": None, **formats}.items():
            study.format = kv_format
            await model.reset_prefix_cache()
            text = ""
            async with model.stream_chat_request(messages) as stream:
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if len(text) > _CHAT_CHARACTERS:
                        break
            answers[name] = text
    return answers


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=2, help="Length of each text")] = 2000,
    skip: Annotated[int, typer.Option(min=0, help="Tokens at the start of each text that are not compared")] = 500,
    texts: Annotated[int, typer.Option(min=1, max=4, help="Number of texts: prose, code, prose, code")] = 2,
    formats: Annotated[str | None, typer.Option(help="Names with ';' between them; default: all formats")] = None,
    chat: Annotated[str | None, typer.Option(help="A question to answer in each format, without sampling")] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
) -> None:
    """Measure mean KL and top-1 agreement of KV formats against KV in float32."""
    chosen, path, num_threads = _chosen(formats), model_path(model), threads or usable_processors()
    if skip >= tokens:
        raise typer.BadParameter(f"--skip {skip}: expected fewer than --tokens {tokens}")
    torch.set_num_threads(num_threads)
    engine = open_engine(TextModelBuilder(path).with_num_threads(num_threads).with_dtype("float32"))
    study = KvStudy(engine)
    tokenizer, console = engine.parts.text.tokenizer, Console()
    found: dict[str, list[Divergence]] = {name: [] for name in chosen}
    for text in _texts()[:texts]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)[:tokens]
        expected = study.logits(token_ids, None)[skip:]
        for name, kv_format in chosen.items():
            found[name].append(divergence(expected, study.logits(token_ids, kv_format)[skip:]))
            console.print(f"{name}: {found[name][-1].mean_kl:.4f}")
    rows = {name: _mean(each) for name, each in found.items()}
    bits = {name: each.bits(study.engine.decoder.config.head_dim) for name, each in chosen.items()}
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.kv_study", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": path.name,
        "tokens": tokens,
        "skip": skip,
        "formats": {name: {"bits": bits[name], **asdict(row)} for name, row in rows.items()},
        "texts": {name: [asdict(row) for row in each] for name, each in found.items()},
    }
    console.print(_as_table(rows, bits, f"{path.name}: {texts} texts, tokens {skip} to {tokens}, against float32 KV"))
    if chat is not None:
        report["answers"] = asyncio.run(_answers(study, chat, chosen))
        for name, answer in report["answers"].items():
            console.print(f"[bold]{name}[/bold]: {answer}\n", highlight=False)
    target = output or cache_directory("results") / f"{path.stem}-kv-study.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)
