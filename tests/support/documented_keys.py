"""The keys of the JSON objects that docs/use/command-line.md promises."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/use/command-line.md"


def documented(command: str) -> set[str]:
    """Returns the keys that a command's section lists after "With `--json`", including those that it refers to."""
    text = _about_json(command)
    return set(re.findall(r"`([a-z_0-9]+)`", text)) | (_of_a_model() if "describe the model" in text else set())


def keys_of(value: Any) -> set[str]:
    """Returns the keys of an object and of all nested objects, except names of formats."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(keys_of(one) for name, one in value.items() if name != "packed"))


def _about_json(command: str) -> str:
    section = PAGE.read_text(encoding="utf-8").split(f"\n### {command}", 1)[1].split("\n### ", 1)[0]
    return re.split("\n#+ ", section.split("With `--json`", 1)[1])[0]


def _of_a_model() -> set[str]:
    rows = re.findall(r"^\| (`.+?) \|", _about_json("generate"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"answers"}
