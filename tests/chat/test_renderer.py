"""The process that renders templates: what becomes of it, and of those who wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paged_sdk.chat.renderer import Interruption, Renderer, RenderError, _Process
from paged_sdk.chat.sandbox import RenderLimits, TemplateRefusalError
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.errors import CheckpointError, InvalidRequestError
from paged_sdk.types.messages import Message, TextMessageRole

HELLO = (Message(TextMessageRole.USER, "Hello!"),)
PLAIN = "{{ messages[0].content|title }}"
VARIABLES = {"messages": [{"role": "user", "content": "hello"}]}
ENDLESS = (
    "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x is odd }}"
)
"""The last products take minutes, and Python sees nothing else meanwhile."""


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(RenderLimits(max_seconds=60))
    yield renderer
    renderer.close()


def process_ids(of: int | None = None) -> set[int]:
    """Return the children of a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{of or os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread of another test has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def render(renderer: Renderer, source: str = PLAIN) -> str:
    return renderer.render(source, VARIABLES, Interruption())


def test_one_process_serves_one_after_the_other(renderer: Renderer) -> None:
    before = process_ids()
    assert [render(renderer) for _ in range(5)] == ["Hello"] * 5
    started = process_ids() - before
    assert len(started) == 1
    renderer.close()
    assert not started & process_ids()
    assert render(renderer) == "Hello"


def test_a_process_that_renders_when_the_others_are_ended_ends_with_its_rendering(renderer: Renderer) -> None:
    before = process_ids()
    slow = "{% for a in range(99) %}{% for b in range(50000) %}{% endfor %}{% endfor %}done"
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(render(renderer, slow)))
    thread.start()
    while not process_ids() - before:
        time.sleep(0.01)
    renderer.close()
    thread.join()
    assert texts == ["done"]
    assert not process_ids() - before


def test_a_process_that_was_told_to_end_is_lent_to_nobody() -> None:
    process = _Process(RenderLimits())
    process.kill()
    assert not process.is_alive
    process.end()


def test_what_the_template_says_comes_back(renderer: Renderer) -> None:
    with pytest.raises(TemplateRefusalError, match="no ü \ud800"):
        render(renderer, "{{ raise_exception('no ü \\ud800') }}")
    with pytest.raises(RenderError, match="ZeroDivisionError"):
        render(renderer, "{{ 1 / 0 }}")
    with pytest.raises(RenderError, match="TemplateSyntaxError"):
        renderer.check("{% if %}")
    assert renderer.render("{{ x }}", {"x": "\ud800 ü"}, Interruption()) == "\ud800 ü"


@pytest.mark.parametrize(
    ("source", "seconds", "message"),
    [
        (ENDLESS, 0.2, r"longer than 0\.2 seconds"),
        ("{{ 'x'.ljust(10**9) }}", 60, "more than 128 MiB"),
        ("{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}", 60, "beyond 65536 characters"),
    ],
)
def test_limits_are_named_and_the_next_rendering_works(source: str, seconds: float, message: str) -> None:
    renderer = Renderer(RenderLimits(max_chars=1 << 16, max_seconds=seconds, max_bytes=128 << 20))
    with pytest.raises(RenderError, match=message):
        render(renderer, source)
    texts: list[str] = []
    while not texts:  # a busy machine may take longer than the limit even for this
        with suppress(RenderError):
            texts.append(render(renderer))
    assert texts == ["Hello"]
    renderer.close()


def test_a_process_that_was_killed_is_replaced(renderer: Renderer) -> None:
    before = process_ids()
    render(renderer)
    (pid,) = process_ids() - before
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert render(renderer) == "Hello"


def test_an_interruption_ends_a_rendering_at_once() -> None:
    renderer = Renderer(RenderLimits(max_seconds=1000))  # far beyond the time that a test may take
    render(renderer)
    interruption = Interruption()
    threading.Timer(0.1, interruption.set).start()
    with pytest.raises(RenderError, match="the request has ended"):
        renderer.render(ENDLESS, VARIABLES, interruption)
    with pytest.raises(RenderError, match="the request has ended"):
        renderer.render(PLAIN, VARIABLES, interruption)
    renderer.close()
    assert render(renderer) == "Hello"


def test_a_bomb_holds_up_nobody_else(renderer: Renderer) -> None:
    interruptions = [Interruption(), Interruption()]
    threads = [threading.Thread(target=lambda i=i: swallow(renderer, i)) for i in interruptions]
    threads[0].start()
    wait_until_lent(renderer, 1)
    assert render(renderer) == "Hello"  # beside the bomb
    threads[1].start()
    wait_until_lent(renderer, 2)
    waiting = Interruption()
    threading.Timer(0.1, waiting.set).start()
    with pytest.raises(RenderError, match="the request has ended"):  # in the queue behind two of them
        renderer.render(PLAIN, VARIABLES, waiting)
    interruptions[0].set()
    assert render(renderer) == "Hello"
    interruptions[1].set()
    for thread in threads:
        thread.join()


def wait_until_lent(renderer: Renderer, number: int) -> None:
    """Wait until so many renderings have a process."""
    while renderer._pool._num_lent < number:
        time.sleep(0.001)


def swallow(renderer: Renderer, interruption: Interruption) -> None:
    with pytest.raises(RenderError):
        renderer.render(ENDLESS, VARIABLES, interruption)


def test_the_process_knows_nothing_of_the_application(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    before = process_ids()
    render(renderer)
    (pid,) = process_ids() - before
    assert b"abc" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


PROGRAM = """
import os, sys, threading, time
from paged_sdk.chat.renderer import Interruption, Renderer, RenderError
from paged_sdk.chat.sandbox import RenderLimits

renderer = Renderer(RenderLimits(max_seconds=1))
variables = {"messages": [{"role": "user", "content": "hello"}]}
renderer.render(sys.argv[2], variables, Interruption())

def endless():
    try:
        renderer.render(sys.argv[1], variables, Interruption())
    except RenderError:
        pass
"""
ENDS = {
    "at its end": "",
    "while a daemon thread renders": "threading.Thread(target=endless, daemon=True).start(); time.sleep(0.2)",
    "at once": "os._exit(0)",
    "at once while it renders": "threading.Thread(target=endless, daemon=True).start(); time.sleep(0.2); os._exit(0)",
    "after a fork": """
child = os.fork()
if not child:
    assert renderer.render(sys.argv[2], variables, Interruption()) == "Hello"
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert renderer.render(sys.argv[2], variables, Interruption()) == "Hello"
""",
    "with a fork that lives on": """
if not os.fork():
    os.closerange(0, 3)
    time.sleep(5)
os._exit(0)
""",
}


LONG_ENDS = ("at its end", "at once", "with a fork that lives on")


@pytest.mark.parametrize(
    "end", [pytest.param(ENDS[end], id=end, marks=[pytest.mark.long] * (end in LONG_ENDS)) for end in ENDS]
)
def test_the_process_ends_with_the_program(end: str) -> None:
    run_program(end)


@pytest.mark.timing
@pytest.mark.parametrize("end", ENDS)
def test_no_rendering_holds_up_the_end_of_the_program(end: str) -> None:
    start = time.monotonic()
    run_program(ENDS[end])
    assert time.monotonic() - start < 9


def run_program(end: str) -> None:
    """Run a program, and wait until its renderers have ended, which pytest's timeout bounds."""
    names = running_renderers()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + end, ENDLESS, PLAIN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    while running_renderers() - names:
        time.sleep(0.05)


def running_renderers() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"render_process" in path.read_bytes():
                found.add(path.parent.name)
        except OSError:
            continue
    return found


def test_without_an_interpreter_there_is_none_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(CheckpointError, match="no Python interpreter"):
        ChatTemplate(PLAIN, {})
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(HELLO) == "Hello!"


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(PLAIN, {})
    template.close()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(InvalidRequestError, match="cannot be started"):
        template.render(HELLO)
