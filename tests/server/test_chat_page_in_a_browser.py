"""The chat page in Chromium: ``make test-browser``."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from paged_sdk import VisionModelBuilder
from paged_sdk.testing import FakeModel, FakeRequest, fake_model
from serving import Serving, idle, serving
from tiny_vision import make_vision_checkpoint

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api")

ANSWER: Final = "# Plan\n\nA **bold** word.\n\n```python\nprint('<b>hi</b>')\n```\n\n<img src=x onerror=alert(1)>"
LONG: Final = "and so on " * 400
THOUGHT: Final = "<think>What is the weather? A tool knows.</think>"
CALL: Final = '<tool_call>{"name": "get_weather", "arguments": {"city": "Berlin"}}</tool_call>'
PIXEL: Final = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def said(request: FakeRequest) -> str:
    last = request.messages[-1]
    if last.role.value == "tool":
        return f"It says **{last.content}**."
    if "weather" in last.content:
        return THOUGHT + CALL
    return LONG if "long" in last.content else ANSWER


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


@contextmanager
def opened(browser: Any, url: str, *, script: str = "", models: Any = None) -> Iterator[Any]:
    """Open the page, and see that nothing goes wrong in it.

    :param script: runs before the page's own
    :param models: what the server is made to say it has; None: what it says
    """
    context = browser.new_context(color_scheme="light", viewport={"width": 1100, "height": 760})
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security Policy" in line.text else None)
    if script:
        page.add_init_script(script)
    if models is not None:
        page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": models}))
    page.goto(url + "/")
    page.wait_for_selector("html[data-ready]")
    yield page
    context.close()
    assert not wrong


@pytest.fixture
def page(browser: Any, served: tuple[Serving, FakeModel]) -> Iterator[Any]:
    with opened(browser, served[0].url) as page:
        yield page


def expect(found: Any) -> Any:
    return playwright.expect(found)


def send(page: Any, text: str) -> None:
    count = page.locator(".figures").count()
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".figures")).to_have_count(count + 1, timeout=30_000)


def judge(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response["violations"]
    assert not [(each["id"], each["nodes"]) for each in found if each["impact"] in ("serious", "critical")]


def test_two_turns_by_keyboard_alone_of_which_the_second_begins_in_the_cache(page: Any) -> None:
    page.keyboard.type("Hello there, this is a first message of some length")
    page.keyboard.press("Enter")
    expect(page.locator(".figures")).to_have_count(1)
    assert page.locator(".body h1").inner_text() == "Plan"
    assert page.locator(".body pre").inner_text() == "print('<b>hi</b>')"
    assert page.locator(".assistant img").count() == 0
    send(page, "And then?")
    found = re.search(r"(\d+) of (\d+) prompt tokens cached", page.locator(".figures").last.inner_text())
    assert found
    assert 0 < int(found[1]) < int(found[2])
    assert re.search(r"[\d.]+ tokens/s", page.locator(".figures").last.inner_text())
    assert page.locator("#context-text").inner_text().endswith("/ 16,384 tokens")
    judge(page)


def test_stop_again_and_edit(page: Any, served: tuple[Serving, FakeModel]) -> None:
    page.keyboard.type("a long one")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .body")).to_contain_text("and so on and so on and so on")
    expect(page.locator(".live")).to_contain_text("tokens/s")
    page.keyboard.type("Too early")
    page.keyboard.press("Enter")
    expect(page.locator("#note")).to_have_text("The answer is still being written.")
    page.keyboard.press("Escape")
    expect(page.locator(".figures")).to_contain_text("stopped")
    kept = page.locator(".assistant .body").inner_text()
    assert kept.startswith("and so on and so on")
    served[0].wait(idle)
    send(page, "And?")
    assert page.locator(".assistant .body").first.inner_text() == kept
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit your message").fill("a short one")
    page.keyboard.press("Enter")
    expect(page.locator(".figures")).to_contain_text("prompt tokens")
    assert page.locator(".message.user .body").inner_text() == "a short one"
    with page.expect_request_finished(lambda request: request.url.endswith("/completions")) as again:
        page.get_by_role("button", name="Again").click()
    assert [each["content"] for each in again.value.post_data_json["messages"]] == ["a short one"]
    expect(page.locator(".message")).to_have_count(2)


def test_conversations_are_kept_renamed_exported_and_deleted(page: Any) -> None:
    send(page, "the first")
    page.keyboard.press("Alt+n")
    send(page, "the second")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#list .open").all_inner_texts() == ["the second", "the first"]
    page.get_by_role("button", name="the first", exact=True).click()
    assert page.locator(".message.user .body").inner_text() == "the first"
    page.get_by_role("button", name="More about the first").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    judge(page)
    page.keyboard.press("Enter")
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Renamed", exact=True)).to_be_focused()
    with page.expect_download() as download:
        page.get_by_role("button", name="More about Renamed").click()
        page.get_by_role("menuitem", name="Export as Markdown").click()
    assert download.value.suggested_filename == "Renamed.md"
    text = Path(download.value.path()).read_text()
    assert text.startswith("# Renamed\n\n**You**\n\nthe first\n\n**fake**\n\n# Plan")
    page.get_by_role("button", name="More about Renamed").click()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    judge(page)
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#list .open")).to_have_count(1)
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator("#list .open").all_inner_texts() == ["the second"]


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Any) -> None:
    send(page, "the first")
    page.keyboard.press("Alt+n")
    page.keyboard.type("a long one")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .body")).to_contain_text("and so on and so on")
    page.get_by_role("button", name="the first", exact=True).click()
    expect(page.locator(".body h1")).to_have_text("Plan")
    page.keyboard.type("And?")
    page.keyboard.press("Enter")
    expect(page.locator("#note")).to_have_text("An answer is being written in another conversation.")
    page.get_by_role("button", name="a long one", exact=True).click()
    shown = len(page.locator(".assistant .body").inner_text())
    expect(page.locator(".assistant .body")).to_have_text(re.compile(f"(?:and so on ){{{shown // 10 + 5}}}"))
    page.get_by_role("button", name="Stop the answer").click()
    expect(page.locator(".figures")).to_contain_text("stopped")
    assert page.locator("#prompt").input_value() == "And?"


def test_long_messages_are_folded(page: Any) -> None:
    send(page, "a line\n" * 60)
    folded = page.locator(".message.user .body").bounding_box()
    page.get_by_role("button", name="Show all").click()
    whole = page.locator(".message.user .body").bounding_box()
    assert folded["height"] < 300 < whole["height"]
    judge(page)


def test_another_tab_has_the_same_conversations(page: Any) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector("html[data-ready]")
    send(page, "Hi")
    other.get_by_role("button", name="Hi", exact=True).click()
    expect(other.locator(".figures")).to_contain_text("prompt tokens")
    send(other, "Ho")
    page.bring_to_front()
    expect(page.locator(".figures")).to_have_count(2)
    send(page, "Ha")
    expect(other.locator(".figures")).to_have_count(3)


def test_settings_are_in_the_request(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Texts that end").fill("###")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("A JSON list").fill("[{]")
    judge(page)
    page.get_by_role("button", name="Keep").click()
    expect(page.locator("#s-problem")).to_contain_text("The tools cannot be used")
    page.get_by_label("A JSON list").fill("")
    page.get_by_role("button", name="Keep").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "Hi")
    expect(page.get_by_role("button", name="some are set")).to_be_visible()
    body = asked.value.post_data_json
    assert (body["temperature"], body["stop"], body["enable_thinking"]) == (0.5, ["###"], False)
    assert [each["role"] for each in body["messages"]] == ["system", "user"]
    assert not {"top_p", "top_k", "seed", "tools"} & set(body)


def test_thoughts_are_folded_and_calls_wait_for_what_they_return(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Insert an example").click()
    page.get_by_role("button", name="Keep").click()
    send(page, "How is the weather?")
    expect(page.locator(".thought .text")).not_to_be_visible()
    page.locator(".thought summary").click()
    expect(page.locator(".thought .text")).to_have_text("What is the weather? A tool knows.")
    call = page.get_by_role("region", name="Call of get_weather")
    expect(call).to_contain_text('"city": "Berlin"')
    expect(call).to_contain_text("waits for its result")
    judge(page)
    page.get_by_label("What get_weather returns").fill("sunny")
    page.get_by_role("button", name="Give it to the model").click()
    expect(page.locator(".assistant .body strong")).to_have_text("sunny")
    expect(call).to_contain_text("answered")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.locator("#list .open").click()
    expect(call).to_contain_text("sunny")


def test_a_call_can_be_answered_when_the_conversation_has_gone_on(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Insert an example").click()
    page.get_by_role("button", name="Keep").click()
    send(page, "How is the weather?")
    send(page, "Hello!")
    expect(page.locator(".assistant .body strong")).to_have_text("bold")
    page.get_by_label("What get_weather returns").fill("sunny")
    page.get_by_role("button", name="Give it to the model").click()
    expect(page.get_by_role("region", name="Call of get_weather")).to_contain_text("answered")
    with page.expect_request("**/v1/chat/completions") as asked:
        send(page, "And now?")
    roles = [each["role"] for each in asked.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "tool", "user", "assistant", "user"]


def test_dark_and_small(page: Any) -> None:
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    send(page, "Hello in the dark")
    judge(page)
    page.set_viewport_size({"width": 390, "height": 800})
    judge(page)
    page.locator("#model option").evaluate("option => { option.textContent = 'a model with a name of some length'; }")
    for width in (320, 390):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        expect(page.get_by_role("button", name="Settings")).to_be_in_viewport(ratio=1)
    page.get_by_role("button", name="Show conversations").click()
    expect(page.locator("#list .open")).to_be_in_viewport()
    judge(page)
    page.keyboard.press("Escape")
    expect(page.locator("#list .open")).not_to_be_visible()
    expect(page.get_by_role("button", name="Show conversations")).to_be_focused()


def test_on_a_screen_to_touch_enter_makes_a_line(browser: Any, served: tuple[Serving, FakeModel]) -> None:
    context = browser.new_context(has_touch=True, is_mobile=True, viewport={"width": 390, "height": 800})
    page = context.new_page()
    page.goto(served[0].url + "/")
    page.wait_for_selector("html[data-ready]")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    page.get_by_role("button", name="Send").tap()
    expect(page.locator(".figures")).to_have_count(1)
    assert page.locator(".message.user .body").inner_text() == "one\ntwo"
    context.close()


def test_the_empty_page_has_ideas_and_nothing_to_object_to(page: Any) -> None:
    judge(page)
    page.get_by_role("button", name="Write code").click()
    expect(page.locator("#prompt")).to_be_focused()
    assert "Python" in page.locator("#prompt").input_value()


def test_a_screen_reader_hears_the_beginning_and_the_end_alone(page: Any) -> None:
    page.evaluate(
        """() => {
          window.heard = [];
          new MutationObserver(() => heard.push(said.textContent)).observe(said, {childList: true});
        }"""
    )
    send(page, "Hi")
    heard = page.evaluate("heard")
    assert heard[0] == "The model is answering."
    assert heard[-1].startswith("The answer: # Plan")
    assert len(heard) == 2
    assert page.locator("#log").get_attribute("aria-live") == "off"


DROP: Final = """([kind, base64]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], "a.png", {type: "image/png"}));
  const event = kind === "drop"
    ? new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})
    : new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true});
  document.getElementById("prompt").dispatchEvent(event);
}"""


def test_a_model_of_texts_says_why_it_takes_no_images(page: Any) -> None:
    expect(page.get_by_role("button", name="Add images")).to_have_attribute("aria-disabled", "true")
    for kind in ("paste", "drop"):
        page.locator("#note").evaluate("note => { note.textContent = ''; }")
        page.evaluate(DROP, [kind, base64.b64encode(PIXEL).decode()])
        expect(page.locator("#note")).to_have_text("fake takes no images.")
    assert page.locator(".thumb").count() == 0


def test_images_are_chosen_pasted_dropped_and_seen(browser: Any, tmp_path: Path) -> None:
    make_vision_checkpoint("qwen2_vl", tmp_path)
    builder = VisionModelBuilder(tmp_path).with_max_num_seqs(1)
    with serving({"tiny": builder.build}) as served, opened(browser, served.url) as page:
        page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": PIXEL})
        for kind in ("paste", "drop"):
            page.evaluate(DROP, [kind, base64.b64encode(PIXEL).decode()])
        expect(page.locator(".thumb")).to_have_count(3)
        judge(page)
        page.get_by_role("button", name="Remove image 2").click()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Most tokens").fill("4")
        page.get_by_role("button", name="Keep").click()
        with page.expect_request("**/v1/chat/completions") as asked:
            send(page, "What is it?")
        parts = asked.value.post_data_json["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
        expect(page.locator(".message.user img")).to_have_count(2)
        expect(page.locator(".figures")).to_contain_text("4 tokens")


def test_models_and_adapters_are_chosen_and_remembered(browser: Any) -> None:
    sources = {"one": fake_model("I am one."), "two": fake_model("I am two.")}
    card = {"object": "model", "input_modalities": ["text"], "output_modalities": ["text"], "max_model_len": 100}
    models = [
        {**card, "id": "one", "parent": None},
        {**card, "id": "two", "parent": "one"},
        {**card, "id": "vectors", "parent": None, "output_modalities": ["embedding"]},
    ]
    with serving(sources) as served, opened(browser, served.url, models=models) as page:
        assert page.locator("#model option").all_inner_texts() == ["one", "two (adapter of one)"]
        page.get_by_label("Model", exact=True).select_option("two")
        send(page, "Who?")
        assert page.locator(".assistant .body").inner_text() == "I am two."
        page.keyboard.press("Alt+n")
        page.get_by_label("Model", exact=True).select_option("one")
        send(page, "And who?")
        assert page.locator(".assistant .body").inner_text() == "I am one."
        page.get_by_role("button", name="Who?", exact=True).click()
        assert page.get_by_label("Model", exact=True).input_value() == "two"


def test_a_key_is_asked_for(browser: Any) -> None:
    with serving(fake_model(ANSWER), key="k", api_keys=("k",)) as served, opened(browser, served.url) as page:
        page.keyboard.press("Escape")
        page.locator("#prompt").fill("Hi")
        page.keyboard.press("Enter")
        expect(page.locator("#note")).to_have_text("There is no model to ask.")
        page.get_by_label("API key").fill("other")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#key-problem")).to_have_text("The server does not know this key.")
        judge(page)
        page.get_by_label("API key").fill("k")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#model")).to_have_value("fake")
        send(page, "Hi")
        assert page.locator(".body h1").inner_text() == "Plan"


def test_a_full_queue_is_asked_again(browser: Any) -> None:
    with (
        serving(fake_model(LONG[:600], delay=0.002, max_num_seqs=1, max_queue=1)) as served,
        opened(browser, served.url) as page,
    ):
        others = [threading.Thread(target=served.post) for _ in range(2)]
        others[0].start()
        served.wait(lambda model: model.stats().running == 1)
        others[1].start()
        served.wait(lambda model: model.stats().waiting == 1)
        page.locator("#prompt").fill("Hi")
        page.keyboard.press("Enter")
        expect(page.locator(".live")).to_contain_text("The server is busy. Next try in")
        expect(page.locator(".figures")).to_have_count(1, timeout=30_000)
        assert page.locator(".assistant .body").inner_text() == LONG[:600].strip()
        for other in others:
            other.join()


def test_a_lost_connection_is_said_and_found_again(page: Any) -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": "Half an ans"}}]})
    page.route(
        "**/completions", lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\n")
    )
    page.route("**/ready", lambda route: route.abort())
    send(page, "Hi")
    expect(page.locator("div.problem")).to_contain_text("The connection to the server was lost.")
    assert page.locator(".assistant .body").inner_text() == "Half an ans"
    expect(page.locator("#banner")).to_contain_text("No connection to the server.")
    judge(page)
    page.unroute_all()
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#banner")).not_to_be_visible()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".body h1")).to_have_text("Plan")
    assert page.locator("div.problem").count() == 0


def test_a_model_that_has_stopped_is_said(browser: Any) -> None:
    model = fake_model("Hello", error=RuntimeError("the device is gone"))
    with serving(model) as served, opened(browser, served.url) as page:
        page.keyboard.type("Hi")
        page.keyboard.press("Enter")
        expect(page.locator("div.problem")).to_contain_text("The model has stopped.")
        expect(page.locator("#banner")).to_contain_text("The server has to be started again.")
        assert page.locator(".assistant .body").inner_text() == "Hello"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); };",
            "The browser's storage is full",
        ),
        (
            """for (const name of ["indexedDB", "localStorage", "sessionStorage"]) {
              Object.defineProperty(window, name, {get() { throw new DOMException("no", "SecurityError"); }});
            }""",
            "This browser keeps nothing",
        ),
    ],
)
def test_where_nothing_is_kept_the_page_works_and_says_so(
    browser: Any, served: tuple[Serving, FakeModel], script: str, told: str
) -> None:
    with opened(browser, served[0].url, script=script) as page:
        send(page, "Hi")
        expect(page.locator("#kept")).to_contain_text(told)
        page.keyboard.press("Alt+n")
        send(page, "Ho")
        assert page.locator("#list .open").all_inner_texts() == ["Ho", "Hi"]
        judge(page)


def test_what_grows_is_drawn_as_if_it_were_there_at_once(page: Any) -> None:
    """However an answer comes, the elements are those of the whole text, and no others than there may be."""
    found = page.evaluate(
        """async () => {
          const {drawMarkdown} = await import("./page/draw.js");
          const pieces = ["*", "_", "`", "[", "](", ")", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>",
            "javascript:alert(1)", "https://x.y", "|", "-", "\\n", " ", ">", "1. ", "a", "```js\\n", "\\n```\\n",
            "|-|\\n", "|a|", "// c", "'t'", "if", "\\n\\n", "# ", "- ", "مر", "\\t", "f("];
          let seed = 5;
          const draw = (n) => (seed = (seed * 48271) % 2147483647) % n;
          const wrong = [];
          const tags = new Set();
          const links = new Set();
          for (let count = 0; count < 400; count += 1) {
            const text = Array.from({length: draw(50)}, () => pieces[draw(pieces.length)]).join("");
            const grown = document.createElement("div");
            for (let end = 0; end < text.length; end += 1 + draw(9)) drawMarkdown(grown, text.slice(0, end));
            drawMarkdown(grown, text);
            const whole = document.createElement("div");
            drawMarkdown(whole, text);
            for (const each of [grown, whole]) each.querySelectorAll(".lines").forEach((block) => block.normalize());
            if (grown.innerHTML !== whole.innerHTML) wrong.push([text, grown.innerHTML, whole.innerHTML]);
            for (const each of whole.querySelectorAll("*")) tags.add(each.localName);
            for (const each of whole.querySelectorAll("a")) links.add(each.protocol);
          }
          return {wrong: wrong.slice(0, 2), tags: [...tags], links: [...links]};
        }"""
    )
    assert found["wrong"] == []
    allowed = (
        "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p strong table tbody td th thead tr ul "
        "div span pre button svg use"
    )
    assert set(found["tags"]) <= set(allowed.split())
    assert "https:" in found["links"]
    assert "javascript:" not in found["links"]


def test_ten_thousand_tokens_are_drawn_once_each(page: Any) -> None:
    """What is there already is not made anew: the nodes that are ever added are about those that there are at last."""
    found = page.evaluate(
        """async () => {
          const {drawMarkdown} = await import("./page/draw.js");
          const part = "Some **bold** words.\\n\\n- one\\n- two\\n\\n```python\\n" +
            "value = f(17, 'text')  # note\\n".repeat(100) + "```\\n\\n";
          const whole = part.repeat(14);
          const body = document.createElement("div");
          document.getElementById("log").append(body);
          let added = 0;
          const seen = new MutationObserver((records) => {
            for (const record of records) added += record.addedNodes.length;
          });
          seen.observe(body, {childList: true, subtree: true});
          for (let end = 0; end < whole.length; end += 40) {
            drawMarkdown(body, whole.slice(0, end));
            if (end % 4000 === 0) await new Promise((resolve) => setTimeout(resolve));
          }
          drawMarkdown(body, whole);
          await new Promise((resolve) => setTimeout(resolve));
          return {length: whole.length, added, there: body.querySelectorAll("*").length};
        }"""
    )
    assert found["length"] > 40_000
    assert found["added"] < 3 * found["there"]


def test_lines_of_long_code_are_copied_as_they_are(page: Any) -> None:
    code = "\n".join(f"line {number}" if number % 7 else "" for number in range(1, 200))
    shown = page.evaluate(
        """async (code) => {
          const {drawMarkdown} = await import("./page/draw.js");
          const body = document.createElement("div");
          document.getElementById("log").append(body);
          drawMarkdown(body, "```\\n" + code + "\\n```");
          return [body.querySelectorAll(".lines").length, body.querySelector("pre").innerText];
        }""",
        code,
    )
    assert shown[0] > 3
    assert shown[1] == code
