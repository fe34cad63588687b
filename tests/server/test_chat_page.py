"""The chat page is served, asks nothing of others, and what a model says cannot become markup. In a browser it is tried
by ``test_chat_page_in_a_browser.py``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from paged_sdk import ConfigError
from paged_sdk.server import ServerSettings, create_app
from paged_sdk.server.chat_page import FOLDER, PAGE_PATHS
from paged_sdk.testing import FakeRequest, fake_model
from serving import HI, Serving, serving

NODE: Final = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs node, to run the page's modules without a browser")
URLS: Final = re.compile(r"""\b(?:(?:src|href)=|(?:from|import) (?=["'])|url\()["']?([^"')]+)["')]""")


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(fake_model("Hello!"), key="k", api_keys=("k",)) as served:
        served.http.headers.pop("authorization")
        yield served


@pytest.mark.parametrize("path", PAGE_PATHS)
def test_files_come_without_a_key_and_may_ask_this_server_alone(served: Serving, path: str) -> None:
    response = served.http.get(path)
    assert response.status_code == 200
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert response.headers["x-content-type-options"] == "nosniff"
    again = served.http.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_everything_the_page_loads_is_there(served: Serving) -> None:
    for path in PAGE_PATHS:
        for url in URLS.findall(served.http.get(path).text):
            if url.startswith(("#", "http://www.w3.org/2000/svg")):
                continue
            assert not re.match(r"[a-z]+:|//", url), f"{path} asks {url}"
            found = url.removeprefix("./") if url.startswith("./") else url.removeprefix("page/")
            assert f"/page/{found}" in PAGE_PATHS, f"{path} asks for {url}"


def test_no_script_makes_markup_of_text() -> None:
    for path in FOLDER.glob("*.js"):
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
        assert not re.search(forbidden, path.read_text()), path.name


def test_the_rest_needs_the_key(served: Serving) -> None:
    assert served.http.get("/v1/models").status_code == 401
    assert served.http.get("/page/nothing.js").status_code == 401
    known = served.http.get("/page/nothing.js", headers={"Authorization": "Bearer k"})
    assert known.status_code == 404
    assert served.http.get("/page/..%2fapp.py", headers={"Authorization": "Bearer k"}).status_code == 404


def test_without_the_page_there_is_nothing() -> None:
    with serving(fake_model("Hello!"), page=False, key="k", api_keys=("k",)) as served:
        assert served.http.get("/").status_code == 404
        assert served.http.get("/", headers={"Authorization": ""}).status_code == 401
    with pytest.raises(ConfigError, match="page"):
        ServerSettings(page=1)  # type: ignore[arg-type]  # is refused


def test_what_requests_leave_open_comes_from_the_settings() -> None:
    model = fake_model("Hello!")
    with serving(model, sampling={"temperature": 0.25, "seed": 7, "stop": ["l"], "top_p": None}) as served:
        assert served.post().json()["choices"][0]["message"]["content"] == "He"
        assert served.post(stop=["o"], temperature=None, seed=8).json()["choices"][0]["message"]["content"] == "Hell"
        text = served.post("/v1/completions", prompt="a").json()["choices"][0]["text"]
        assert text == "He"
    seen = [request.sampling for request in model.requests if request.sampling is not None]
    assert [(each.temperature, each.seed) for each in seen] == [(0.25, 7), (0.25, 8), (0.25, 7)]


def test_what_an_api_does_not_take_is_left_out_there() -> None:
    model = fake_model("Hello!")
    with serving(model, sampling={"temperature": 1.5, "top_p": 0.5, "min_p": 0.1}) as served:
        assert served.post().status_code == 200
        answer = served.post("/v1/messages", messages=HI, max_tokens=4)
        assert answer.status_code == 200, answer.text
    seen = [request.sampling for request in model.requests if request.sampling is not None]
    assert [(each.temperature, each.top_p, each.min_p) for each in seen] == [(1.5, 0.5, 0.1), (1.5, 0.5, None)]


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"temperature": -1}, "sampling.temperature"),
        ({"warmth": 1}, "sampling.warmth"),
        ({"stop": [""]}, "stop"),
        ([], "sampling"),
    ],
)
def test_sampling_that_cannot_be_used_is_named(sampling: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_app(fake_model("Hello!"), ServerSettings(sampling=sampling))


def node(script: str, value: object) -> Any:
    """Run a script in node, with a value as ``given``, and return what it returns."""
    assert NODE is not None
    prelude = "".join(f"import * as {path.stem} from {json.dumps(path.as_uri())};\n" for path in (MARKDOWN, CHAT))
    whole = (
        f"{prelude}const given = {json.dumps(value)};\nconsole.log(JSON.stringify(await (async () => {{{script}}})()))"
    )
    command = [NODE, "--no-warnings", "--input-type=module", "-"]
    done = subprocess.run(command, input=whole, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MARKDOWN: Final = FOLDER / "markdown.js"
CHAT: Final = FOLDER / "chat.js"

READINGS: Final[list[tuple[str, Any]]] = [
    ("a *b* **c** `d`", [["p", {}, "a ", ["em", {}, "b"], " ", ["strong", {}, "c"], " ", ["code", {}, "d"]]]),
    ("# T\n\n---\n> q", [["h1", {}, "T"], ["hr", {}], ["blockquote", {}, ["p", {}, "q"]]]),
    ("```py\nx = '<b>'\n```\nz", [["code-block", {"language": "py"}, "x = '<b>'"], ["p", {}, "z"]]),
    ("```\nnot closed", [["code-block", {"language": ""}, "not closed"]]),
    (
        "- a\n- b\n  1. c\n  2. d",
        [["ul", {}, ["li", {}, "a"], ["li", {}, "b", ["ol", {}, ["li", {}, "c"], ["li", {}, "d"]]]]],
    ),
    ("3. x\n\n4. y", [["ol", {"start": 3}, ["li", {}, "x"], ["li", {}, "y"]]]),
    (
        "|a|b|\n|-|-|\n|1|x\\|y|",
        [["table", {}, ["thead", {}, ["tr", {}, ["th", {}, "a"], ["th", {}, "b"]]],
          ["tbody", {}, ["tr", {}, ["td", {}, "1"], ["td", {}, "x|y"]]]]],
    ),
    ("<img src=x onerror=alert(1)>", [["p", {}, "<img src=x onerror=alert(1)>"]]),
    ("[a](javascript:alert)", [["p", {}, "[a](javascript:alert)"]]),
    ("[a](https://b.example/c)", [["p", {}, ["a", {"href": "https://b.example/c"}, "a"]]]),
    ("![i](https://b.example/c.png)", [["p", {}, ["a", {"href": "https://b.example/c.png"}, "i"]]]),
    ("so http://b.de/a_b_c.", [["p", {}, "so ", ["a", {"href": "http://b.de/a_b_c"}, "http://b.de/a_b_c"], "."]]),
    ("snake_case_name and 2 * 3 * 4", [["p", {}, "snake_case_name and 2 * 3 * 4"]]),
    (r"\*a\*", [["p", {}, "*a*"]]),
]  # fmt: skip


@needs_node
def test_markdown_is_read() -> None:
    assert node("return given.map(markdown.parse)", [text for text, _ in READINGS]) == [tree for _, tree in READINGS]


@needs_node
def test_whatever_a_model_says_makes_known_elements_and_web_links_alone_and_soon() -> None:
    pieces = [
        "*",
        "_",
        "`",
        "[",
        "](",
        ")",
        "<script>",
        "javascript:",
        "https://x.y",
        "|",
        "-",
        "\n",
        " ",
        ">",
        "1. ",
        "a",
    ]
    script = """
        let seed = 1;
        const draw = (n) => (seed = (seed * 48271) % 2147483647) % n;
        const texts = given.hostile.concat(Array.from({length: 3000}, () =>
          Array.from({length: draw(40)}, () => given.pieces[draw(given.pieces.length)]).join("")));
        const tags = new Set();
        const links = new Set();
        const attributes = new Set();
        const walk = (value) => {
          if (typeof value === "string") return;
          const [tag, said, ...children] = value;
          tags.add(tag);
          Object.keys(said).forEach((name) => attributes.add(name));
          if (said.href !== undefined) links.add(said.href);
          children.forEach(walk);
        };
        const slow = [];
        for (const text of texts) {
          const start = performance.now();
          markdown.parse(text).forEach(walk);
          if (performance.now() - start > 5000) slow.push(text.slice(0, 20));
        }
        const unknown = [...tags].filter((tag) => !markdown.TAGS.has(tag));
        return {unknown, attributes: [...attributes], links: [...links], slow};
    """
    hostile = ["*" * 20000, "[" * 20000, "`" * 20000, "> " * 5000, "_a" * 10000, "**a" * 7000, "- " * 5000, "|" * 20000]
    found = node(script, {"pieces": pieces, "hostile": hostile})
    assert found["unknown"] == found["slow"] == []
    assert set(found["attributes"]) <= {"href", "language", "start"}
    assert found["links"]
    assert all(re.match("https?://|mailto:", link, re.IGNORECASE) for link in found["links"])


@needs_node
def test_events_are_read_however_they_are_cut(served: Serving) -> None:
    def think(request: FakeRequest) -> str:
        return "Grüße 🌍!"

    with serving(fake_model(think)) as other:
        raw = other.post(stream=True, stream_options={"include_usage": True}).content
    script = """
        const bytes = Uint8Array.from(given);
        const messages = [];
        for (const size of [1, 3, 7, 100000]) {
          const body = new ReadableStream({start(controller) {
            for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
            controller.close();
          }});
          const message = {role: "assistant", content: ""};
          let last = "";
          for await (const data of chat.events(body)) {
            last = data;
            if (data !== "[DONE]") chat.take(message, JSON.parse(data));
          }
          messages.push([last, message.content, message.finish, chat.figures(message.usage).replace(/[\\d.]+/g, "N")]);
        }
        return messages;
    """
    found = node(script, list(raw))
    assert {tuple(each[:3]) for each in found} == {("[DONE]", "Grüße 🌍!", "stop")}
    assert all(each[3].endswith("N of N prompt tokens cached") for each in found)


@needs_node
def test_a_conversation_becomes_a_request_that_the_server_takes() -> None:
    image = "data:image/png;base64,iVBORw0KGgo="
    calls = [{"id": "abcdefghi", "name": "add", "arguments": '{"a": 1}'}]
    conversation = {
        "settings": {"system": "Be brief.", "temperature": None, "max_tokens": 3, "tools": TOOLS},
        "messages": [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "calls": calls, "reasoning": "hm", "usage": {}},
            {"role": "tool", "id": "abcdefghi", "content": "2"},
        ],
    }
    seen = {**conversation, "messages": [{"role": "user", "content": "See", "images": [image]}]}
    body, with_image = node('return given.map((each) => chat.request(each, "fake"))', [conversation, seen])
    assert "temperature" not in body
    assert with_image["messages"][1]["content"][0] == {"type": "image_url", "image_url": {"url": image}}
    model = fake_model("Hello!")
    with serving(model) as served:
        answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 3, answer.text
    assert [message.role.value for message in model.requests[0].messages] == ["system", "user", "assistant", "tool"]


TOOLS: Final = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_a_page_of_another_site_is_not_let_in() -> None:
    with serving(fake_model("Hello!"), allowed_hosts=("127.0.0.1",)) as served:
        assert served.http.get("/", headers={"Host": "evil.example"}).status_code == 400
        assert served.http.get("/").headers["cross-origin-opener-policy"] == "same-origin"
        assert served.http.post("/v1/chat/completions", content=json.dumps({"messages": HI})).status_code == 415


def test_the_page_is_in_the_package() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"server/page/*"' in pyproject
