"""Makes the pages of the site that do not stand under docs/, from the files they follow from."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from posixpath import normpath, relpath
from typing import Final

import paged_sdk
from documentation.configuration import configuration_page

__all__ = ["API", "api_names", "generated_pages", "source_of", "with_links_of_the_site", "without_contents"]

ROOT: Final = Path(__file__).parents[1]

API: Final = {
    "builders": "Builders",
    "model": "Models",
    "requests": "Requests",
    "responses": "Responses",
    "settings": "Settings",
    "errors": "Errors",
    "files": "Files, memory, machine",
}
"""The pages of the API reference."""

_PAGE_OF: Final = {
    "builders": "builders",
    "composed_builders": "builders",
    "errors": "errors",
    "config.sampling": "requests",
    "config": "settings",
    "types.messages": "requests",
    "types.request": "requests",
    "types.request_options": "requests",
    "types.constraint": "requests",
    "types.tool": "requests",
    "types.tool_call": "requests",
    "types.image": "requests",
    "types.logits_processor": "requests",
    "types.memory_plan": "files",
    "types": "responses",
    "build": "files",
    "weights": "files",
}
"""The page of the names of a module, or of a package where its module is not here; all others are on the models'."""

_FIRST: Final = (
    "Model",
    "Conversation",
    "TextModelBuilder",
    "GgufModelBuilder",
    "TextMessages",
    "RequestBuilder",
    "SamplingParams",
    "ChatCompletionResponse",
    "ChatCompletionChunkResponse",
    "PagedAttentionMeta",
    "MemoryGpuConfig",
    "PagedError",
)
"""What readers look for first stands first on its page; the rest is in the order of the alphabet."""

_BESIDE: Final = {"model": ("paged_sdk.streaming.ResponseStream", "paged_sdk.blocking.BlockingStream")}
"""Classes that a page needs, since public names stand for forms of them."""

PACKAGES: Final = {
    "server": ("paged_sdk.server", "The server as an application"),
    "testing": ("paged_sdk.testing", "Models for tests"),
    "kernels": ("paged_sdk.kernels", "Kernels"),
    "mistralrs": ("paged_sdk.mistralrs", "The drop-in for mistral.rs"),
}
"""The other packages with names for users."""

WHOLE_FILES: Final = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}


def generated_pages() -> dict[str, str]:
    """Return the pages that are not files under docs/: their text by their path in the site."""
    pages = {page: (ROOT / file).read_text(encoding="utf-8") for page, file in WHOLE_FILES.items()}
    pages["license.md"] = "# License\n\n```text\n" + (ROOT / "LICENSE").read_text(encoding="utf-8") + "```\n"
    return pages | {"examples.md": _examples(), "configuration.md": configuration_page()} | _api_pages()


def source_of(page: str) -> str:
    """Return the file of the repository whose text, and so whose links, a page has."""
    return WHOLE_FILES.get(page, f"docs/{page}")


def without_contents(text: str) -> str:
    """Return a page's text without its list of contents: the site shows one beside every page."""
    return re.sub(r"^(?:- \[[^\]]+\]\(#[^)]+\)\n){3,}\n?", "", text, flags=re.MULTILINE)


def with_links_of_the_site(text: str, page: str) -> str:
    """Return a page's text with links to files outside of docs/ leading to the pages that are made of them.

    :param page: the page's path in the site
    """
    folder = str(Path(source_of(page)).parent)

    def replaced(match: re.Match[str]) -> str:
        target, _, anchor = match[1].partition("#")
        file = normpath(f"{folder}/{target}")
        to = _page_of(file) if target and "://" not in target else None
        if to is None:
            return match[0]
        found = relpath(to.partition("#")[0], str(Path(page).parent))
        own_anchor = to.partition("#")[2] or anchor
        return f"]({found}#{own_anchor})" if own_anchor else f"]({found})"

    return re.sub(r"\]\(([^)\s]+)\)", replaced, text)


def _page_of(file: str) -> str | None:
    """Return the page, with its anchor, that a file of the repository is shown on; None: no page shows it."""
    for page, whole in WHOLE_FILES.items():
        if file == whole:
            return page
    if file == "LICENSE":
        return "license.md"
    if file == "examples":
        return "examples.md"
    if file.startswith("examples/"):
        return f"examples.md#{Path(file).name.replace('.', '')}"
    return file.removeprefix("docs/") if file.startswith("docs/") else None


def _examples() -> str:
    programs = sorted((ROOT / "examples").glob("*.py"))
    parts = ["# Examples\n\nShort programs, one per topic. The tests run every one of them.\n"]
    for program in programs:
        text = program.read_text(encoding="utf-8")
        parts.append(f"## {program.name}\n\n```python\n{text}```\n")
    return "\n".join(parts)


def _api_pages() -> dict[str, str]:
    pages: dict[str, str] = {}
    contents = ["# API reference\n", "The public names, from the code's docstrings.\n"]
    for page, (title, names) in api_names().items():
        pages[f"api/{page}.md"] = f"# {title}\n\n" + "\n".join(_directive(name) for name in names)
        shown = ", ".join(f"[`{name.rpartition('.')[2]}`][{name}]" for name in names)
        contents.append(f"- **[{title}]({page}.md)**: {shown}")
    return pages | {"api/index.md": "\n".join(contents) + "\n"}


def _directive(name: str) -> str:
    """Return what mkdocstrings replaces by a name's documentation."""
    # The other builders have the same calls, which would be there five times.
    with_base = "    options:\n      inherited_members: true\n" if name == "paged_sdk.TextModelBuilder" else ""
    return f"::: {name}\n{with_base}"


def _place(name: str) -> tuple[int, str]:
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)


def _page_of_name(name: str) -> str:
    """Return the page of a name that the package exports, by the module that its table of exports has it from."""
    (module,) = [module for module, names in paged_sdk._HOME.items() if name in names]
    return _PAGE_OF.get(module, _PAGE_OF.get(module.partition(".")[0], "model"))


def api_names() -> dict[str, tuple[str, list[str]]]:
    """Return each page's title and its names, in full."""
    found: dict[str, tuple[str, list[str]]] = {}
    for page, title in API.items():
        names = sorted((name for name in paged_sdk.__all__ if _page_of_name(name) == page), key=_place)
        found[page] = (title, [f"paged_sdk.{name}" for name in names] + list(_BESIDE.get(page, ())))
    for page, (module, title) in PACKAGES.items():
        found[page] = (title, [f"{module}.{name}" for name in import_module(module).__all__])
    return found
