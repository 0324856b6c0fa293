"""Hooks for mkdocs that add pages from outside docs/ to the site, with README.md as the first page.

On GitHub, the links of a page are relative to the page's folder in the repository. In the site, all pages are below
docs/. These hooks rewrite the links between folders, so the same Markdown works in both places.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# The pages of the site that have another path in the repository.
MOVED = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages of mkdocs.yml that are outside docs/."""
    outside = re.findall(r"(?:lab|softmetal)/\S+\.md", Path(config.config_file_path).read_text())
    for name in (*MOVED, *outside):
        files.append(File.generated(config, name, content=(ROOT / MOVED.get(name, name)).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces links between the repository's folders by links between the site's pages."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri in ("index.md", "changelog.md"):
        return re.sub(r"\]\(docs/", "](", markdown)
    if page.file.src_uri.startswith(("lab/", "softmetal/")):
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    markdown = markdown.replace("](../../README.md", "](../index.md")
    return re.sub(r"\]\(\.\./\.\./((?:lab|softmetal)/[\w/-]+\.md)", r"](../\1", markdown)
