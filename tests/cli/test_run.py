"""``paged-sdk run`` on a tiny checkpoint: in this process, as a program in a pipe, and at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import PIL.Image
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import tiny
from adapter_files import write_adapter
from paged_sdk import (
    BlockingModel,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.cli.app import app
from tiny_vision import make_vision_checkpoint, picture

PROGRAM = (sys.executable, "-c", "from paged_sdk.cli import main; main()", "run")
SLOWLY = """
import time
from paged_sdk.engine.engine import Engine
step = Engine.step
Engine.step = lambda engine: (time.sleep(0.05), step(engine))[1]
"""
"""Is run before the program, whose answers then take minutes, so that none ends before a test has ended it."""

SLOW_PROGRAM = (*PROGRAM[:2], f"{SLOWLY}{PROGRAM[2]}", *PROGRAM[3:])
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--pa-context-len", "4096", "--pa-block-size", "8")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose greedy texts never end: among logits of several units, those of its end tokens are 0."""
    directory = tiny.make_checkpoint("llama", tmp_path_factory.mktemp("endless"))
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][[0, 2]] = 0
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def reference(endless: Path) -> Iterator[BlockingModel]:
    """Return the same model through the API."""
    with BlockingModel(TextModelBuilder(endless).with_dtype("float32").with_num_threads(1).build()) as model:
        yield model


def answers(model: BlockingModel, *says: str, system: str | None = None, max_len: int = 8) -> list[str]:
    """Return the answers to a chat's turns."""
    request = RequestBuilder().with_sampling(SamplingParams(temperature=0, max_len=max_len))
    if system is not None:
        request = request.add_message("system", system)
    texts = []
    for text in says:
        request = request.add_message("user", text)
        texts.append(model.send_chat_request(request).choices[0].message.content)
        request = request.add_message("assistant", texts[-1])
    return texts


def run(model: Path, *arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["run", "-m", str(model), *FLAGS, *arguments], input=stdin)


def test_one_answer(endless: Path, reference: BlockingModel) -> None:
    result = run(endless, "Hello!", "--max-tokens", "8")
    assert result.exit_code == 0
    assert result.stdout == answers(reference, "Hello!")[0] + "\n"
    assert re.fullmatch(
        r"8 tokens, \d+\.\d tok/s, first token after \d+\.\d\d s, 0 of \d+ prompt tokens cached\n", result.stderr
    )


def test_images(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_vision_checkpoint("llava", model)
    files = [tmp_path / f"{seed}.png" for seed in range(2)]
    for seed, file in enumerate(files):
        PIL.Image.fromarray(picture(40, 60, seed=seed)).save(file)
    flags = [flag for file in files for flag in ("--image", str(file))]
    result = run(model, "What is this?", "--max-tokens", "8", *flags, "--arch", "llava")
    messages = VisionMessages().add_image_message("user", "What is this?", files)
    asked = RequestBuilder.from_messages(messages).with_sampling(SamplingParams(temperature=0, max_len=8))
    builder = VisionModelBuilder(model).with_dtype("float32").with_num_threads(1)
    with BlockingModel(builder.build()) as api:
        assert result.stdout == f"{api.send_chat_request(asked).choices[0].message.content}\n"
    chat = run(model, "What is this?", "-i", "--max-tokens", "8", *flags, stdin="And now?\n")
    assert chat.exit_code == 0
    assert result.stdout in chat.stdout
    assert "--image" in run(model, "What is this?", *flags, "--raw").output
    refused = run(model, "What is this?", *flags, "--arch", "llama")  # its decoder's
    assert "of the family llava, not llama" in " ".join(refused.output.replace("│", " ").split())
    assert "has no GGUF file" in run(model, "What is this?", *flags, "--format", "gguf").output
    missing = run(model, "What is this?", "--image", str(tmp_path / "no.png")).output
    assert "does not exist" in " ".join(missing.replace("│", " ").split())  # the frame breaks lines anywhere


def test_a_pipe_that_does_not_take_every_character(endless: Path, reference: BlockingModel) -> None:
    encoding = "cp1252"  # what a pipe has on Windows
    (expected,) = answers(reference, "Hello!", max_len=60)
    assert not expected.isascii(), "this text has to have characters that the pipe does not take"
    run = subprocess.run(
        [*PROGRAM, "-m", str(endless), *FLAGS, "Hello!", "--max-tokens", "60"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert run.stdout == (expected + "\n").encode(encoding, errors="backslashreplace")
    assert b"Traceback" not in run.stderr


def test_bytes_that_are_no_text_are_no_prompt(endless: Path) -> None:
    for arguments in ([], ["-i"]):
        ended = subprocess.run(
            [*PROGRAM, "-m", str(endless), *FLAGS, *arguments],
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "200"},
            input=b"\xff\xfe\xfd\n",
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 2
        assert b"stdin is not valid text in utf-8" in ended.stderr


def test_what_is_quantized_again_is_said(tmp_path: Path) -> None:
    gguf = tiny.make_gguf(tmp_path, quantization="Q8_0")
    result = CliRunner().invoke(app, ["run", "-m", str(gguf), *FLAGS[2:], "Hello!", "--isq", "8", "--max-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert "are requantized to Q8_0." in result.stderr


def test_system_message_and_quiet(endless: Path, reference: BlockingModel) -> None:
    result = run(endless, "Hello!", "--max-tokens", "8", "--system", "Be brief.", "--quiet")
    assert result.stdout == answers(reference, "Hello!", system="Be brief.")[0] + "\n"
    assert result.stderr == ""


def test_thoughts_are_no_part_of_the_answer(endless: Path) -> None:
    thinking = ("--chat-template", "{{ messages[0].content }}<think>{# </think> #}", "--max-tokens", "8")
    result = run(endless, "Hello!", *thinking)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    thought, usage, _ = result.stderr.rpartition("8 tokens, ")
    assert thought.strip()
    assert usage
    assert run(endless, "Hello!", *thinking, "--quiet").output == ""


def test_a_prompt_from_stdin(endless: Path, reference: BlockingModel) -> None:
    assert run(endless, "--max-tokens", "8", stdin="Hello!\n").stdout == answers(reference, "Hello!")[0] + "\n"
    nothing = run(endless, stdin="\n")
    assert nothing.exit_code == 2
    assert "there is no prompt" in nothing.stderr


def test_raw_text(endless: Path, reference: BlockingModel) -> None:
    expected = reference.send_completion_request("Once upon", SamplingParams(temperature=0, max_len=8))
    assert run(endless, "Once upon", "--raw", "--max-tokens", "8").stdout == expected.choices[0].text + "\n"


def test_an_adapter(endless: Path, tmp_path: Path) -> None:
    """Texts, answers and chats go through it."""
    adapter = write_adapter(tmp_path / "own", tiny.build_model("llama"))

    def said(*arguments: str, stdin: str = "") -> str:
        found = run(endless, "--quiet", "--max-tokens", "8", *arguments, stdin=stdin)
        assert found.exit_code == 0, found.output
        return found.stdout

    for arguments, stdin in ((("Hello!",), ""), (("--raw", "Hello!"), ""), (("-i",), "Hello!\n")):
        plain = said(*arguments, stdin=stdin)
        assert said(*arguments, "--adapter", f"{adapter}", stdin=stdin) != plain
        assert said(*arguments, "--adapter", f"name={adapter}", stdin=stdin) != plain
    assert "is not allowed" in run(endless, "--adapter", "=x", "Hello!").output


def test_an_answer_of_a_json_schema(endless: Path, tmp_path: Path) -> None:
    ok = {"properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"], "additionalProperties": False}
    schema = {"type": "object", **ok}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    adapter = write_adapter(tmp_path / "own", tiny.build_model("llama"))
    for arguments, stdin in (
        (("Hello!", "--json-schema", json.dumps(schema)), ""),
        (("Hello!", "--json-schema", str(file)), ""),
        (("Hello!", "--json-schema", str(file), "--raw", "--speculate", "--adapter", str(adapter)), ""),
        (("-i", "--json-schema", str(file)), "Hello!\n"),
    ):
        found = run(endless, "--quiet", "--max-tokens", "400", *arguments, stdin=stdin)
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["ok"] in ("yes", "no")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("no/such.json", "No such file"),
        ("{", "property name"),
        ("[1]", "No such file"),
        ('{"type": "nothing"}', "nothing"),
    ],
)
def test_schemas_that_cannot_be_used(endless: Path, schema: str, said: str) -> None:
    found = run(endless, "Hello!", "--json-schema", schema)
    assert found.exit_code == 2, found.output
    shown = " ".join(found.stderr.replace("│", " ").split())
    assert "--json-schema" in shown
    assert said in shown


def test_a_seed_repeats_itself(endless: Path) -> None:
    first, again, other = (run(endless, "Hello!", "--max-tokens", "12", "--seed", seed).stdout for seed in "112")
    assert first == again != other


def test_a_chat_from_a_pipe_keeps_its_turns(endless: Path, reference: BlockingModel) -> None:
    lines = "Hello!\n\n/what\n/help\nAnd then?\n/reset\nHello!\n/system Be brief.\nHello!\n/exit\nnot read\n"
    result = run(endless, "-i", "--max-tokens", "8", stdin=lines)
    assert result.exit_code == 0
    first, second = answers(reference, "Hello!", "And then?")
    (brief,) = answers(reference, "Hello!", system="Be brief.")
    assert result.stdout == "\n".join([first, second, first, brief, ""])
    assert "Unknown command /what" in result.stderr
    assert "/reset        start over" in result.stderr
    cached = map(int, re.findall(r"(\d+) of \d+ prompt tokens cached", result.stderr))
    assert [tokens > 0 for tokens in cached] == [False, True, True, False]


def test_a_chat_may_begin_with_a_prompt(endless: Path, reference: BlockingModel) -> None:
    result = run(endless, "Hello!", "-i", "--max-tokens", "8", stdin="And then?\n")
    assert result.stdout == "\n".join([*answers(reference, "Hello!", "And then?"), ""])


def test_a_chat_survives_a_turn_that_is_too_long(endless: Path, reference: BlockingModel) -> None:
    result = run(endless, "-i", "--max-tokens", "8", stdin=f"Hello!\n{'word ' * 3000}\nAnd then?\n")
    assert result.exit_code == 0
    assert result.stdout == "\n".join([*answers(reference, "Hello!", "And then?"), ""])
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert re.fullmatch(r"error: the prompt has \d+ tokens, .*: shorten it, or start over with /reset", error)


def test_errors_are_one_line(tmp_path: Path, endless: Path) -> None:
    for result, named in (
        (run(tmp_path, "Hello!"), "is not a model"),
        (run(endless, "word " * 3000), r"tokens, .*\): shorten it$"),
    ):
        assert result.exit_code == 1
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert re.search(named, line)
    assert "Traceback" in run(tmp_path, "Hello!", "--verbose").stderr


def test_gguf_and_its_log(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path)
    arguments = ("Hello!", "--max-tokens", "4", "--verbose", *FLAGS)
    program = subprocess.run(
        [*PROGRAM, *arguments, "-m", str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "Prefix caching enabled (block-level, PagedAttention)." in program.stderr
    named = CliRunner().invoke(app, ["run", *arguments, "-m", str(tmp_path), "--format", "gguf", "-f", path.name])
    assert named.exit_code == 0, named.output
    assert named.stdout == program.stdout != ""


def test_a_reader_that_goes_is_no_error(endless: Path) -> None:
    program = subprocess.Popen(
        [*SLOW_PROGRAM, "-m", str(endless), *FLAGS, "Hello!"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stderr is not None
    with program:
        assert program.stdout.read(1)
        program.stdout.close()
        assert program.stderr.read() == b""
        program.wait(60)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_one_answer(sign: signal.Signals, code: int, endless: Path) -> None:
    program = subprocess.Popen(
        [*SLOW_PROGRAM, "-m", str(endless), *FLAGS, "Hello!"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stderr is not None
    with program:
        assert program.stdout.read(1)
        program.send_signal(sign)
        assert program.stderr.read() == b""
        assert program.wait(60) == code


LOADS_FOR_EVER = """
import signal, threading
from paged_sdk.cli import main
from paged_sdk.cli.terminal import Terminal

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which tests may run, has it ignored

def for_ever():
    with Terminal(quiet=True).loading("model"):
        threading.Thread(target=threading.Event().wait).start()  # which no exception would end
        signal.raise_signal(signal.{name})

import paged_sdk.cli.app
paged_sdk.cli.app.app = for_ever
main()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 143)])
def test_a_signal_ends_loading_at_once(name: str, code: int) -> None:
    command = [sys.executable, "-c", LOADS_FOR_EVER.format(name=name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (code, "")


class Screen:
    """Runs a program at a terminal of its own.

    :param before: a program of Python that is run first
    """

    def __init__(self, *arguments: str, before: str = "") -> None:
        self._terminal, theirs = pty.openpty()
        # Ctrl-C reaches whoever has the terminal as its controlling one.
        main = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from paged_sdk.cli import main\n"
        main += f"{before}\nmain()"
        self._program = subprocess.Popen(
            [sys.executable, "-c", main, "run", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._shown = ""

    def wait_for(self, text: str, *, seconds: float = 60.0) -> str:
        """Return what was shown before ``text``, since the last time."""
        deadline = time.monotonic() + seconds
        while text not in self._shown:
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} within {seconds} s in {self._shown!r}"
            self._shown += os.read(self._terminal, 4096).decode(errors="replace")
        before, _, self._shown = self._shown.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def interrupt_line(self, text: str) -> None:
        """Press Ctrl-C at the prompt until ``text`` is shown. Once may not suffice: CPython's readline looks for
        signals only when its ``select`` is interrupted, so one that comes just before waits for the next key.
        """
        for _ in range(59):
            self.type("\x03")
            with suppress(AssertionError):
                self.wait_for(text, seconds=1.0)
                return
        self.wait_for(text, seconds=1.0)

    def exit_code(self) -> int:
        """Wait for the program's end."""
        return self._program.wait(60)

    def close(self) -> None:
        self._program.kill()
        self._program.wait(60)
        os.close(self._terminal)


@pytest.fixture
def screen(endless: Path) -> Iterator[Screen]:
    """Open the chat at a terminal."""
    with closing(Screen("-m", str(endless), *FLAGS, before=SLOWLY)) as screen:
        yield screen


def test_a_chat_at_a_terminal(screen: Screen, reference: BlockingModel) -> None:
    screen.wait_for("/help lists the commands.")
    screen.wait_for("> ")
    screen.type("Hello!\r")
    screen.wait_for(answers(reference, "Hello!")[0].split()[0])
    screen.type("\x03")
    screen.wait_for("(canceled)")
    screen.wait_for("> ")
    # Its echo is waited for: Ctrl-C discards what was typed, and a readline that was just told of it waits for more.
    screen.type("half a line")
    screen.wait_for("half a line")
    screen.interrupt_line("Ctrl-D or /exit leaves.")
    screen.wait_for("> ")
    screen.type("/reset\r")
    screen.wait_for("> ")
    screen.type("Hello!\r")
    screen.wait_for(answers(reference, "Hello!")[0].split()[0])
    screen.type("\x03")
    screen.wait_for("(canceled)")
    screen.wait_for("> ")
    screen.type("\x04")
    assert screen.exit_code() == 0


LOADING_THAT_DOES_NOT_END = """
import threading
from paged_sdk.build import assembly
assembly.load_weights = lambda *_, **__: threading.Event().wait()
"""


def test_ctrl_c_while_loading(endless: Path) -> None:
    with closing(Screen("-m", str(endless), *FLAGS, before=LOADING_THAT_DOES_NOT_END)) as screen:
        screen.wait_for("Loading")
        screen.type("\x03")
        assert screen.exit_code() == 130
