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
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "lab/README.md": "lab/README.md",
    "lab/cpu/cpu_peers.md": "lab/cpu/cpu_peers.md",
    "lab/cpu/cpu_wide.md": "lab/cpu/cpu_wide.md",
    "lab/cpu/cpu_int8.md": "lab/cpu/cpu_int8.md",
    "lab/whole_models/whole_model.md": "lab/whole_models/whole_model.md",
    "lab/notes/predictions.md": "lab/notes/predictions.md",
    "lab/notes/kernel-costs.md": "lab/notes/kernel-costs.md",
    "lab/notes/few-rows.md": "lab/notes/few-rows.md",
    "lab/notes/tile-sizing.md": "lab/notes/tile-sizing.md",
    "lab/notes/tensor-units.md": "lab/notes/tensor-units.md",
    "lab/notes/host-audit.md": "lab/notes/host-audit.md",
    "softmetal/README.md": "softmetal/README.md",
    "softmetal/docs/device.md": "softmetal/docs/device.md",
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages from outside docs/."""
    for name, source in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
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
