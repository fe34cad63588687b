"""What mistral.rs's examples show runs here, with tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from programs import EXAMPLES, PROGRAMS

import tiny
from adapter_files import write_adapter
from paged_sdk import BlockingModel
from paged_sdk.mistralrs import runner as runner_module
from paged_sdk.testing import fake_model
from tiny_vision import make_vision_checkpoint, picture

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
THAT_CALLS = "a model that calls tools"


def gguf_file(directory: Path) -> dict[str, str]:
    path = tiny.make_gguf(directory, quantization="Q8_0")
    tiny.tokenizer().save(str(directory / "tokenizer.json"))
    return {"DIRECTORY": str(directory), "FILE": path.name}


def vision_model(directory: Path) -> dict[str, str]:
    make_vision_checkpoint("llava", directory / "llava")
    PIL.Image.fromarray(picture(40, 60)).save(directory / "picture.png")
    return {"THAT_SEES": str(directory / "llava"), "PICTURE": str(directory / "picture.png")}


def adapters(directory: Path) -> dict[str, str]:
    model = tiny.build_model("llama")
    names = ("ADAPTER", "REPLACEMENT")
    for seed, name in enumerate(names):
        write_adapter(directory / name, model, seed=seed)
    return {name: str(directory / name) for name in names}


def embedding_models(directory: Path) -> dict[str, str]:
    gemma = tiny.make_checkpoint("gemma3_text", directory / "gemma", use_bidirectional_attention=True)
    return {
        "THAT_EMBEDS": str(tiny.make_checkpoint("qwen3", directory / "qwen3")),
        "GEMMA_THAT_EMBEDS": str(gemma),
    }


def topology(directory: Path) -> dict[str, str]:
    (directory / "isq.yml").write_text("0-1:\n  isq: Q3K\n'/down_proj/':\n  isq: Q8_0\n")
    return {"TOPOLOGY": str(directory / "isq.yml")}


def calibration(directory: Path) -> dict[str, str]:
    (directory / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return {"CALIBRATION": str(directory / "text.txt")}


MAKES: dict[str, Callable[[Path], dict[str, str]]] = {
    "DIRECTORY": gguf_file,
    "THAT_SEES": vision_model,
    "ADAPTER": adapters,
    "THAT_EMBEDS": embedding_models,
    "TOPOLOGY": topology,
    "CALIBRATION": calibration,
    "MISTRAL": lambda directory: {"MISTRAL": str(tiny.make_checkpoint("mistral", directory))},
    "MIXTURE": lambda directory: {"MIXTURE": str(tiny.make_checkpoint("mixtral", directory))},
    "THAT_CALLS": lambda directory: {"THAT_CALLS": THAT_CALLS},
}
"""Name that programs use -> what makes it, with others."""


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Callable[[str], dict[str, str]]:
    """Return what makes the models and files that a program names, once."""
    made: dict[str, dict[str, str]] = {}

    def give(program: str) -> dict[str, str]:
        names = {"MODEL": str(tiny_checkpoint)}
        for name, make in MAKES.items():
            if name in program:
                if name not in made:
                    made[name] = make(tmp_path_factory.mktemp(name.lower()))
                names |= made[name]
        return names

    return give


@pytest.fixture
def calling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model of that name call a tool before each answer."""

    class FakeModels(BlockingModel):
        def __init__(self, building: Any) -> None:
            is_fake = building._source.location == THAT_CALLS
            super().__init__(fake_model(*[CALL, "It is warm."] * 2) if is_fake else building)

    monkeypatch.setattr(runner_module, "BlockingModel", FakeModels)


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the runners that programs leave open, as the interpreter's end does."""
    made: list[Any] = []
    make = runner_module.Runner.__init__

    def init(self: Any, *values: Any, **settings: Any) -> None:
        made.append(self)
        make(self, *values, **settings)

    monkeypatch.setattr(runner_module.Runner, "__init__", init)
    yield
    for runner in made:
        runner.close()


@pytest.mark.usefixtures("calling", "closing")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name: str, named: Callable[[str], dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    program = PROGRAMS[name]
    code = compile(program, name, "exec", dont_inherit=True)  # annotations of this file are texts
    exec(code, {"__name__": "program", **named(program)})
    printed = capsys.readouterr().out
    assert printed.strip()
    if "THAT_CALLS" in program:
        assert "It is warm." in printed


def test_every_example_of_mistral_rs_has_its_program() -> None:
    assert {program for program in EXAMPLES.values() if program} <= set(PROGRAMS)
    assert len(EXAMPLES) > 70
    shown = {program for program in EXAMPLES.values() if program}
    assert set(PROGRAMS) - shown == {"plain text", "guesses of a smaller model"}, "which no example of there shows"
