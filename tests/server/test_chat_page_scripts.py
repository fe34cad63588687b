"""What the chat page's scripts make of texts, in node: what a model says cannot become markup, however it is cut."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import pytest

from paged_sdk.server.chat_page import FOLDER
from paged_sdk.testing import FakeRequest, fake_model
from serving import serving

NODE: Final = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, to run the page's scripts without a browser")
Node: TypeAlias = Callable[[str, object], Any]
MODULES: Final = ("markdown", "code", "chat", "problems", "sidebar", "settings")


RUNNER: Final = """
import { createInterface } from "node:readline";
const names = %s;
const modules = await Promise.all(%s.map((path) => import(path)));
const AsyncFunction = (async () => {}).constructor;
for await (const line of createInterface({input: process.stdin})) {
  const {script, given} = JSON.parse(line);
  try {
    const result = await new AsyncFunction(...names, "given", script)(...modules, given);
    console.log(JSON.stringify({result}));
  } catch (error) {
    console.log(JSON.stringify({error: error.stack}));
  }
}
"""
"""Starting node takes longer than most of what it is to do: one runs all scripts."""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Return what runs a script in node, with a value as ``given``, and returns what it returns."""
    assert NODE is not None
    paths = [(FOLDER / f"{name}.js").as_uri() for name in MODULES]
    command = [
        NODE,
        "--no-warnings",
        "--input-type=module",
        "--eval",
        RUNNER % (json.dumps(MODULES), json.dumps(paths)),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout

        def run(script: str, value: object) -> Any:
            asked.write(json.dumps({"script": script, "given": value}) + "\n")
            asked.flush()
            answer = json.loads(told.readline())
            assert "error" not in answer, answer["error"]
            return answer["result"]

        yield run
        asked.close()


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
    (
        "so:\n|a|b|\n|-:|:-:|\n|1|2|",
        [["p", {}, "so:"],
         ["table", {}, ["thead", {}, ["tr", {}, ["th", {"align": "end"}, "a"], ["th", {"align": "center"}, "b"]]],
          ["tbody", {}, ["tr", {}, ["td", {"align": "end"}, "1"], ["td", {"align": "center"}, "2"]]]]],
    ),
    ("- [x] a\n- [ ] b", [["ul", {}, ["li", {}, "☑ a"], ["li", {}, "☐ b"]]]),
    (r"so \(a_1 * b_1\) is", [["p", {}, "so ", ["code", {}, "a_1 * b_1"], " is"]]),
    ("```make\na:\n\tb\n```\n\t- c", [["code-block", {"language": "make"}, "a:\n\tb"], ["ul", {}, ["li", {}, "c"]]]),
    ("a  \nb\r\n\r\nc", [["p", {}, "a", ["br", {}], "b"], ["p", {}, "c"]]),
]  # fmt: skip


def test_markdown_is_read(node: Node) -> None:
    assert node("return given.map(markdown.parse)", [text for text, _ in READINGS]) == [tree for _, tree in READINGS]


PIECES: Final = (
    *"*_`[|->#\\~ \n\n",
    "](",
    ")",
    "<script>",
    "javascript:alert(1)",
    "data:text/html,x",
    "https://x.y",
    "1. ",
    "- ",
    "```",
    "\r\n",
    "|-|",
    "| a ",
    "\t",
    "  ",
    "größe",
    "🌍",
    "مر",
    "&lt;",
    "\\(",
)
HOSTILE: Final = tuple(
    piece * (12_000 // len(piece))
    for piece in (
        "*",
        "[",
        "`",
        "> ",
        "_a",
        "**a",
        "- ",
        "|",
        "\\(",
        "  ",
        "<",
        "h",
        "![",
        "~~",
        "1. ",
        '"""',
        "/*",
        "\t",
    )
)
FUZZ: Final = """
    let seed = given.seed;
    const draw = (n) => (seed = (seed * 48271) % 2147483647) % n;
    const made = () => Array.from({length: draw(40)}, () => given.pieces[draw(given.pieces.length)]).join("");
"""


def test_whatever_a_model_says_makes_known_elements_and_web_links_alone_and_soon(node: Node) -> None:
    script = """
        const texts = given.hostile.concat(Array.from({length: 3000}, made));
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
    found = node(FUZZ + script, {"pieces": PIECES, "hostile": HOSTILE, "seed": 1})
    assert found["unknown"] == found["slow"] == []
    assert set(found["attributes"]) <= {"href", "language", "start", "align"}
    assert found["links"]
    assert all(re.match("https?://|mailto:", link, re.IGNORECASE) for link in found["links"])


def test_a_text_that_grows_is_read_as_if_it_were_there_at_once(node: Node) -> None:
    script = """
        const wrong = [];
        let settled = 0;
        for (let count = 0; count < 400; count += 1) {
          const text = made();
          const reader = new markdown.Reader();
          let before = [];
          for (let end = 0; end <= text.length; end += 1 + draw(6)) {
            const part = text.slice(0, end);
            const {blocks, same} = reader.read(part);
            settled = Math.max(settled, same);
            const isRight = JSON.stringify(blocks) === JSON.stringify(markdown.parse(part));
            const isSame = JSON.stringify(blocks.slice(0, same)) === JSON.stringify(before.slice(0, same));
            if (!isRight || !isSame) wrong.push([part, isRight, isSame]);
            before = blocks;
          }
        }
        return {wrong: wrong.slice(0, 3), settled};
    """
    found = node(FUZZ + script, {"pieces": PIECES, "seed": 2})
    assert found["wrong"] == []
    assert found["settled"] > 1


def test_code_is_colored_and_stays_what_it_was(node: Node) -> None:
    script = """
        const classes = new Set();
        const wrong = [];
        for (let count = 0; count < 1500; count += 1) {
          const text = given.hostile[count] ?? made();
          const parts = code.parts(text, given.languages[draw(given.languages.length)]);
          if (parts.map(([, part]) => part).join("") !== text) wrong.push(text.slice(0, 50));
          for (const [name] of parts) classes.add(name);
        }
        const shown = code.parts("x = f('a')  # b", "python");
        return {wrong, classes: [...classes].sort(), shown, plain: code.parts("if", "")};
    """
    languages = ["", "python", "js", "rust", "sql", "html", "nonsense", "text", "bash"]
    pieces = [*PIECES, '"', "'", "/*", "*/", "//", "# ", "--", '"""', "if", "None", "f(", "12.5", "<!--"]
    found = node(FUZZ + script, {"pieces": pieces, "hostile": HOSTILE, "seed": 3, "languages": languages})
    assert found["wrong"] == []
    assert found["classes"] == ["", "c-call", "c-comment", "c-number", "c-text", "c-word"]
    assert [each for each in found["shown"] if each[0]] == [["c-call", "f"], ["c-text", "'a'"], ["c-comment", "# b"]]
    assert found["plain"] == [["", "if"]]


def test_events_are_read_however_they_are_cut(node: Node) -> None:
    def think(request: FakeRequest) -> str:
        return "Grüße 🌍!"

    with serving(fake_model(think), is_judged=False) as other:
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
          const cost = chat.figures(message.usage).map(([text]) => text).join(" · ");
          messages.push([last, message.content, message.finish, cost.replace(/[\\d.]+/g, "N")]);
        }
        return messages;
    """
    found = node(script, list(raw))
    assert {tuple(each[:3]) for each in found} == {("[DONE]", "Grüße 🌍!", "stop")}
    assert all(each[3].endswith("N of N prompt tokens cached") for each in found)


def test_a_conversation_becomes_a_request_that_the_server_takes(node: Node) -> None:
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
    with serving(model, is_judged=False) as served:
        answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 3, answer.text
    assert [message.role.value for message in model.requests[0].messages] == ["system", "user", "assistant", "tool"]


TOOLS: Final = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def test_what_never_came_is_not_sent_again(node: Node) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "problem": {"title": "t"}},
        {"role": "user", "content": "", "images": ["data:image/png;base64,AA=="]},
        {"role": "assistant", "content": "b", "calls": [{"id": "1", "name": "add", "arguments": "{"}]},
    ]
    assert node("return chat.wire(given)", messages) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]},
        {"role": "assistant", "content": "b"},
    ]


def test_figures_say_what_was_cached_and_guessed(node: Node) -> None:
    usage = {
        "prompt_tokens": 40,
        "completion_tokens": 12,
        "avg_compl_tok_per_sec": 31.25,
        "time_to_first_token_sec": 0.5,
        "prompt_tokens_details": {"cached_tokens": 32},
        "completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2},
    }
    assert node("return chat.figures(given).map(([text]) => text)", usage) == [
        "12 tokens",
        "31.3 tokens/s",
        "first after 0.50 s",
        "32 of 40 prompt tokens cached",
        "6 of 8 drafts right",
    ]


def test_problems_are_said_in_words(node: Node) -> None:
    model = fake_model("Hello!", max_model_len=64)
    with serving(model, is_judged=False) as served:
        refused = served.post(messages=[{"role": "user", "content": "a" * 100}]).json()["error"]
        unknown = served.post(warmth=1).json()["error"]
    given = [
        [400, refused, None],
        [400, unknown, None],
        [401, {"message": "a key is needed"}, None],
        [404, {"message": "there is no model"}, None],
        [429, {"message": "full", "code": "rate_limit_exceeded"}, 3],
        [503, {"message": "the server is ending", "code": "unavailable"}, None],
        [0, {"message": "the engine stopped", "code": "unavailable"}, None],
        [0, {"message": "it took longer", "code": "timeout"}, None],
        [500, {"message": "its log says why"}, None],
    ]
    script = """
        const said = given.map((each) => problems.problem(new chat.Refused(...each)));
        said.push(problems.problem(new TypeError("Failed to fetch")));
        const waits = [0, 1, 3, 9].map((attempt) => problems.patience({retryAfter: 3}, attempt));
        return {said, waits};
    """
    found = node(script, given)
    titles = [each["title"] for each in found["said"]]
    assert titles == [
        "The conversation is longer than the model can read.",
        "The server refuses this message.",
        "The server needs a key.",
        "This model is not there any more.",
        "The server is busy.",
        "The server is shutting down.",
        "The model has stopped.",
        "The answer took longer than the server allows.",
        "The server failed.",
        "The connection to the server was lost.",
    ]
    assert "warmth" in found["said"][1]["text"]
    assert [each["next"] for each in found["said"]] == [
        None, None, "key", "models", "wait", "watch", "watch", None, None, "watch",
    ]  # fmt: skip
    assert found["waits"] == [3, 3, 8, 30]


def test_conversations_are_exported_as_people_and_programs_read_them(node: Node) -> None:
    conversation = {
        "title": "Sums",
        "settings": {"system": "Be brief.", "temperature": 0.5, "tools": TOOLS},
        "messages": [
            {"role": "user", "content": "Add."},
            {
                "role": "assistant",
                "content": "",
                "model": "m",
                "calls": [{"id": "1", "name": "add", "arguments": "{}"}],
            },
            {"role": "tool", "id": "1", "content": "2"},
            {"role": "assistant", "content": "*Two*.", "model": "m"},
        ],
    }
    text, data = node("return [sidebar.asMarkdown(given), sidebar.asJson(given)]", conversation)
    assert re.findall(r"^(?:#|>|\*\*).*", text, re.MULTILINE) == [
        "# Sums", "> Be brief.", "**You**", "**m**", "**Result of a tool**", "**m**",
    ]  # fmt: skip
    written = json.loads(data)
    assert (written["title"], written["tools"], written["sampling"]) == ("Sums", TOOLS, {"temperature": 0.5})
    with serving(fake_model("Hello!"), is_judged=False) as served:
        assert served.post(messages=written["messages"]).status_code == 200


def test_tools_that_are_none_are_refused(node: Node) -> None:
    script = """
        return given.map((text) => {
          try { return settings.readTools(text).length; } catch (error) { return error.message; }
        });
    """
    found = node(script, ["", json.dumps(TOOLS), "{}", "[1]", "[{]"])
    assert found[:3] == [0, 1, "they have to be a JSON list"]
    assert found[3].startswith("each has to be")
    assert isinstance(found[4], str)
