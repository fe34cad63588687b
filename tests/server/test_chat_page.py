"""The chat page is served, and asks nothing of others. Its scripts are tried by ``test_chat_page_scripts.py``, and in a
browser by ``test_chat_page_in_a_browser.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from paged_sdk import ConfigError
from paged_sdk.server import ServerSettings, create_app
from paged_sdk.server.chat_page import FOLDER, PAGE_PATHS
from paged_sdk.testing import fake_model
from serving import HI, Serving, serving

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


def test_models_say_what_they_take(served: Serving) -> None:
    answer = served.http.get("/v1/models", headers={"Authorization": "Bearer k"}).json()
    assert [(each["input_modalities"], each["output_modalities"]) for each in answer["data"]] == [(["text"], ["text"])]


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


def test_a_page_of_another_site_is_not_let_in() -> None:
    with serving(fake_model("Hello!"), allowed_hosts=("127.0.0.1",)) as served:
        assert served.http.get("/", headers={"Host": "evil.example"}).status_code == 400
        assert served.http.get("/").headers["cross-origin-opener-policy"] == "same-origin"
        assert served.http.post("/v1/chat/completions", content=json.dumps({"messages": HI})).status_code == 415


def test_the_page_is_in_the_package() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"server/page/*"' in pyproject
