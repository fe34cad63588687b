"""Templates that would take hours or gigabytes: none does, in this process or in the one that renders."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator

import pytest
from template_bombs import BOMBS

from paged_sdk.chat.allowlist import MAX_SOURCE_CHARS
from paged_sdk.chat.metered import MeteredTemplate
from paged_sdk.chat.renderer import Interruption, Renderer, RenderError
from paged_sdk.chat.sandbox import RenderLimits, TemplateEnvironment
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.errors import CheckpointError, InvalidRequestError
from paged_sdk.types.messages import Message, TextMessageRole

MESSAGES = (
    Message(TextMessageRole.USER, "Hello <world>"),
    Message(TextMessageRole.ASSISTANT, "x" * 1000),
    Message(TextMessageRole.USER, "y"),
)
VARIABLES = {"messages": [{"role": message.role.value, "content": message.content} for message in MESSAGES]}
SMALL = RenderLimits(max_chars=1 << 17, max_seconds=0.02)
TIGHT = RenderLimits(max_chars=1 << 20, max_seconds=0.05, max_bytes=128 << 20)
PARSED = [name for name in BOMBS if len(BOMBS[name]) <= MAX_SOURCE_CHARS]
SAMPLE = random.Random(0).sample(PARSED, 15)


def test_there_are_enough() -> None:
    assert len(BOMBS) >= 150
    assert len(set(BOMBS.values())) == len(BOMBS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (place % 3 > 0)) for place, name in enumerate(PARSED)]
)
def test_in_this_process_a_bomb_does_nothing(name: str) -> None:
    source = BOMBS[name]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.thread_time()
    try:
        text = MeteredTemplate(TemplateEnvironment(SMALL).parse(source), SMALL).render(VARIABLES)
    except Exception:  # not cheap, mostly; or what is wrong with it before that
        text = ""
    assert len(text) < SMALL.max_chars
    assert time.thread_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(TIGHT)
    yield renderer
    renderer.close()


@pytest.mark.parametrize("name", SAMPLE)
def test_in_the_rendering_process_a_bomb_ends(renderer: Renderer, name: str) -> None:
    start = time.monotonic()
    try:
        renderer.render(BOMBS[name], VARIABLES, Interruption())
    except RenderError as error:
        assert len(str(error)) < 300
    assert time.monotonic() - start < 10


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends(name: str) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    try:
        template = ChatTemplate(BOMBS[name], {})
        try:
            template.render(MESSAGES)
        finally:
            template.close()
    except (CheckpointError, InvalidRequestError) as error:
        assert len(str(error)) < 300
    assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 512 << 10
    # A child that is forked begins with what this process has.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(512 << 10, own + (16 << 10))
