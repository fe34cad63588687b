"""Hooks of mkdocs: adds the pages that follow from other files, and leads links to them."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

from documentation.pages import generated_pages, with_links_of_the_site, without_contents

__all__ = ["on_config", "on_files", "on_page_markdown"]


def on_config(config: Any) -> Any:
    """Give headings the anchors that code hosts give them, so that one link is right at both places."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made."""
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead a page's links to where the site has what they name, and leave out what the site shows beside it."""
    return with_links_of_the_site(without_contents(markdown), page.file.src_uri)
