"""The documentation's site shows every page: what can be said without building it, which `make docs` does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path
from typing import Any, Final, cast

import pytest
import yaml
from documentation.configuration import (
    builder_calls,
    command_options,
    configuration_page,
    environment_variables,
    fields_of,
)
from documentation.pages import api_names, generated_pages, with_links_of_the_site, without_contents

import paged_sdk
from paged_sdk.config import env
from paged_sdk.server import ServerSettings

ROOT: Final = Path(__file__).parents[1]
SETTINGS: Final = cast("dict[str, Any]", yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
WRITTEN: Final = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}


def named(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else named(value)


def test_every_page_has_its_place_and_every_place_a_page() -> None:
    places = list(named(SETTINGS["nav"]))
    assert len(places) == len(set(places))
    left_out = {line.lstrip("/") for line in SETTINGS["not_in_nav"].split()}
    assert set(places) | left_out == WRITTEN | set(generated_pages())


def test_every_public_name_has_its_documentation_on_one_page() -> None:
    names = [name for _, names in api_names().values() for name in names]
    assert len(names) == len(set(names))
    assert {f"paged_sdk.{name}" for name in paged_sdk.__all__} <= set(names)


def test_every_environment_variable_says_what_it_does() -> None:
    """What the page of settings says of a variable stands below its name in config/env.py."""
    known = {value for name, value in vars(env).items() if name.isupper() and isinstance(value, str)}
    variables = environment_variables()
    assert set(variables) == known
    assert all(variables.values())


@pytest.mark.parametrize(
    "builder",
    [
        paged_sdk.TextModelBuilder,
        paged_sdk.GgufModelBuilder,
        paged_sdk.VisionModelBuilder,
        paged_sdk.RequestBuilder,
    ],
)
def test_every_call_says_what_it_does_on_the_page_of_settings(builder: type) -> None:
    calls = builder_calls(builder)
    page = configuration_page()
    assert {call.partition("(")[0] for call in calls} == {name for name in dir(builder) if name.startswith("with")}
    assert all(calls.values())
    assert all(f"| `{call}` |" in page for call in calls)


def test_a_variable_of_several_commands_names_them_all() -> None:
    (row,) = (line for line in configuration_page().splitlines() if line.startswith("| `PAGED_SDK_API_KEY` |"))
    assert "paged-sdk serve" in row
    assert "paged-sdk top" in row


@pytest.mark.parametrize("value", [paged_sdk.SamplingParams, paged_sdk.PagedAttentionMeta, ServerSettings])
def test_every_field_says_what_it_means(value: type[Any]) -> None:
    fields = fields_of(value)
    assert all(meaning for _, meaning in fields.values())


def test_every_option_has_its_help() -> None:
    commands = command_options()
    assert {"paged-sdk run", "paged-sdk serve", "paged-sdk doctor"} <= set(commands)
    assert all(text for options in commands.values() for text in options.values())


def test_links_lead_to_what_the_site_has() -> None:
    """Files beside the documentation, such as tests, are on no page: a link to one ends the building of the site."""
    written = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in WRITTEN}
    pages = written | generated_pages()
    there = pages.keys() | {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*") if p.is_file()}
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", with_links_of_the_site(text, page)):
            if "://" not in target:
                assert normpath(Path(page).parent / target) in there, f"{page}: {target}"


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("index.md", "docs/server.md#errors", "server.md#errors"),
        ("quickstart.md", "../README.md#install", "index.md#install"),
        ("quickstart.md", "../examples/fastapi_service.py", "examples.md#fastapi_servicepy"),
        ("changelog.md", "docs/quantization.md", "quantization.md"),
        ("index.md", "examples", "examples.md"),
        ("quickstart.md", "#errors", "#errors"),
        ("quickstart.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_lead_to_where_the_site_has_what_they_name(page: str, link: str, there: str) -> None:
    assert with_links_of_the_site(f"[so]({link})", page) == f"[so]({there})"


def test_lists_of_contents_are_left_out_and_other_lists_are_not() -> None:
    quickstart = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    shown = without_contents(quickstart)
    assert "- [Streaming](#streaming)" in quickstart
    assert "](#streaming)\n" not in shown
    assert shown.startswith("# Quickstart\n\nThe code on this page")
    assert "\n\n## Install" in shown
    other = "- [Errors](server.md#errors)\n- A word\n- [One](#one)\n"
    assert without_contents(other) == other


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert SETTINGS["theme"]["font"] is False
    assert not [each for kind in ("extra_css", "extra_javascript") for each in SETTINGS.get(kind, []) if "://" in each]
