"""Selects layers and tensors by name, for the arguments `include`, `exclude`, `ignore` and `keep`.

Such an argument is a pattern, a list of patterns or a function. A pattern is shell-style ("encoder.*.query", see
`fnmatch`). With the prefix "re:", it is a regular expression that must match the complete name. With "part:", it must
match one or more complete components of the name ("part:o_proj", "part:layers.0"). A function is called with the name
and, if the argument selects modules of a model, the module.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

PART = "part:"
Patterns = str | Sequence[str]
NameFilter = Patterns | Callable[[str], bool]
Filter = Patterns | Callable[[str, nn.Module], bool]


def selects(choice: Patterns | Callable[..., bool] | None, name: str, *module: nn.Module) -> bool:
    """Returns True if `choice` selects a name. None selects no name.

    Raises:
        ValueError: a regular expression is malformed.
    """
    if choice is None:
        return False
    if callable(choice):
        return bool(choice(name, *module))
    return any(_matches(pattern, name) for pattern in _patterns(choice))


def parts_of_names(names: Sequence[str]) -> list[str]:
    """Converts names in transformers' form to patterns. In this form, "o_proj" selects every layer with that name.

    Names with wildcards or a prefix do not change.
    """
    return [name if ":" in name or any(sign in name for sign in "*?[") else f"{PART}{name}" for name in names]


def check_patterns(op: str, names: Iterable[str], **choices: Any) -> None:
    """Raises an error if a pattern matches no name. Functions are not checked.

    Args:
        op: the caller's name for error messages.
        names: all names that can be selected.
        **choices: the caller's arguments by name.

    Raises:
        ValueError: a pattern matches nothing, or a regular expression is malformed.
    """
    known = list(names)
    for argument, choice in choices.items():
        for pattern in _patterns(choice):
            if any(_matches(pattern, name) for name in known):
                continue
            message = f"{op}: {argument}: {pattern.removeprefix(PART)!r} matches none of the {len(known)} layers"
            if wider := next((name for name in known if pattern in name), ""):
                message += f"; a pattern is for the whole name: '*{pattern}*' takes {wider}"
            raise ValueError(message)


def _patterns(choice: Any) -> list[str]:
    if choice is None or callable(choice):
        return []
    return [choice] if isinstance(choice, str) else list(choice)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(PART):
        return f".{pattern.removeprefix(PART)}." in f".{name}."
    if not pattern.startswith("re:"):
        return fnmatch.fnmatchcase(name, pattern)
    try:
        return re.fullmatch(pattern[3:], name) is not None
    except re.error as error:
        raise ValueError(f"pattern {pattern!r}: not a regular expression: {error}") from error
