"""Finds function constants without a value that a kernel needs. Metal makes no pipeline of such a kernel.

The search reads the LLVM text of clang's front end. No pass has removed code from that text, so it contains all
reachable functions, including branches that this specialization never executes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = r'@(?:[\w.$]+|"[^"]+")'
_FUNCTION = re.compile(rf"^define [^@\n]*({_NAME})\(.*?^\}}", re.MULTILINE | re.DOTALL)
_GLOBAL = re.compile(rf"^({_NAME}) = (.*)$", re.MULTILINE)
_TEXT = re.compile(r' c"([^"\\]*)\\00"')
# The targets of an initializer that runs at load time: a store, or the object of a constructor.
_TARGET = re.compile(rf"^  (?:store [^,\n]+, ptr|call void @\w+\(ptr [^@\n]*)\s*({_NAME})", re.MULTILINE)


def missing_values(llvm: str, unset: Iterable[str]) -> list[str]:
    """Returns the names of the constants in `unset` that the kernel's entry or its arguments use.

    Args:
        llvm: LLVM text of the translation's only entry, without any optimization.
        unset: the names of the function constants without a value.
    """
    uses: dict[str, set[str]] = {}
    texts: dict[str, str] = {}
    for match in _GLOBAL.finditer(llvm):
        uses[match[1]] = set(re.findall(_NAME, match[2]))
        if text := _TEXT.search(match[2]):
            texts[match[1]] = text[1]
    for match in _FUNCTION.finditer(llvm):
        uses[match[1]] = set(re.findall(_NAME, match[0])) - {match[1]}
        if "__cxx_global_var_init" in match[1]:
            for target in _TARGET.findall(match[0]):
                uses.setdefault(target, set()).add(match[1])
    reached: set[str] = set()
    entries = {match[1] for name in uses if (match := re.search(r"sm_entry_(\d+)", name))}
    roots = re.compile(rf"sm_(?:entry|arguments)_(?:{'|'.join(entries)})(?!\d)")
    waiting = [name for name in uses if roots.search(name)]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(uses.get(name, ()))
    found = {texts[name] for name in reached if name in texts}
    return [name for name in unset if name in found]
