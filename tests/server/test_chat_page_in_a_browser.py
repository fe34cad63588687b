"""The chat page in Chromium: ``make test-browser``."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any, Final

import pytest

from paged_sdk.testing import FakeModel, fake_model
from serving import Serving, idle, serving

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api")

ANSWER: Final = "# Plan\n\nA **bold** word.\n\n```python\nprint('<b>hi</b>')\n```\n\n<img src=x onerror=alert(1)>"
LONG: Final = "and so on " * 400
PIXEL: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def said(request: Any) -> str:
    last = request.messages[-1].content
    return LONG if "long" in last else ANSWER


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Serving, FakeModel]]:
    model = fake_model(said, delay=0.002)
    with serving(model) as served:
        yield served, model


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, served: tuple[Serving, FakeModel]) -> Iterator[Any]:
    context = browser.new_context(color_scheme="light", viewport={"width": 1100, "height": 760})
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    page.goto(served[0].url + "/")
    page.wait_for_selector("html[data-ready]")
    yield page
    context.close()
    assert not wrong


def send(page: Any, text: str) -> None:
    count = page.locator(".figures").count()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".figures")).to_have_count(count + 1, timeout=30_000)


def judge(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    assert not [(each["id"], each["nodes"]) for each in found if each["impact"] in ("serious", "critical")]


def test_two_turns_by_keyboard_alone_of_which_the_second_begins_in_the_cache(page: Any) -> None:
    send(page, "Hello there, this is a first message of some length")
    assert page.locator(".body h1").inner_text() == "Plan"
    assert page.locator(".body pre").inner_text() == "print('<b>hi</b>')"
    assert page.locator(".assistant img").count() == 0
    send(page, "And then?")
    found = re.search(r"(\d+) of (\d+) prompt tokens cached", page.locator(".figures").last.inner_text())
    assert found
    assert 0 < int(found[1]) < int(found[2])
    judge(page)


def test_stop_again_and_edit(page: Any, served: tuple[Serving, FakeModel]) -> None:
    page.keyboard.type("a long one")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".assistant .body")).to_contain_text("and so on and so on")
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".figures")).to_have_text("stopped")
    served[0].wait(idle)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("a short one")
    page.keyboard.press("Enter")
    playwright.expect(page.locator(".figures")).to_contain_text("tokens")
    assert page.locator(".message.user .body").inner_text() == "a short one"
    with page.expect_request_finished(lambda request: request.url.endswith("/completions")) as again:
        page.get_by_role("button", name="Again").click()
    assert [each["content"] for each in again.value.post_data_json["messages"]] == ["a short one"]
    playwright.expect(page.locator(".message")).to_have_count(2)


def test_conversations_are_still_there_after_a_reload(page: Any) -> None:
    send(page, "the first")
    page.keyboard.press("Alt+n")
    send(page, "the second")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#list .open").all_inner_texts() == ["the second", "the first"]
    page.get_by_role("button", name="the first", exact=True).click()
    assert page.locator(".message.user .body").inner_text() == "the first"


def test_settings_and_an_image_are_in_the_request(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    judge(page)
    page.get_by_role("button", name="Keep").click()
    page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": PIXEL})
    page.wait_for_selector(".thumb")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator("#prompt").fill("What is it?")
        page.keyboard.press("Enter")
    body = json.loads(asked.value.post_data)
    assert (body["temperature"], body["messages"][0]["content"]) == (0.5, "Be brief.")
    assert body["messages"][1]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_dark_and_small(page: Any) -> None:
    page.emulate_media(color_scheme="dark")
    playwright.expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    send(page, "Hello in the dark")
    judge(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Show conversations").click()
    playwright.expect(page.locator("#list .open")).to_be_in_viewport()
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#list .open")).not_to_be_visible()
    judge(page)
