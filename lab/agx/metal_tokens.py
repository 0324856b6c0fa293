"""Reads Metal source: pastes local includes into one text, and splits the text into tokens."""

import os
import re
from pathlib import Path


class Err(Exception):
    """The rewriter cannot read the kernel."""


INC = re.compile(r'^[ \t]*#[ \t]*(include|import)[ \t]*([<"])([^>"]+)[>"].*$')


def flatten(path, folders, _including=()):
    """Returns a file's text with its local includes pasted in. Includes of Apple's headers <metal_...> are dropped.

    A header is pasted at each of its includes, because the preprocessor may drop the branch with the first include. A
    guard macro replaces #pragma once, so the preprocessor keeps the first copy that it reaches.
    """
    real = os.path.realpath(path)
    try:
        lines = Path(real).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise Err(f"cannot read {path}: {error.strerror}") from error
    shown = os.path.basename(path)
    out = [f'# 1 "{shown}"']
    is_once = False
    for number, line in enumerate(lines, 1):
        if re.match(r"^[ \t]*#[ \t]*pragma[ \t]+once", line):
            is_once = True
            out.append("")
            continue
        found = INC.match(line)
        if not found:
            out.append(line)
            continue
        name, is_system = found.group(3), found.group(2) == "<"
        places = [*([] if is_system else [os.path.dirname(real)]), *folders]
        hit = next((os.path.join(d, name) for d in places if os.path.isfile(os.path.join(d, name))), None)
        if hit is None:
            is_apples = is_system or name.startswith(("metal_", "simd/"))
            out.append("" if is_apples else f'#error "include file not found: {name}"')
        elif os.path.realpath(hit) in (*_including, real):
            out.append("")
        else:
            out += [flatten(hit, folders, (*_including, real)), f'# {number + 1} "{shown}"']
    if is_once:
        guard = "MSL_ONCE_" + re.sub(r"\W", "_", real)
        out = [f"#ifndef {guard}", f"#define {guard}", *out, "#endif"]
    return "\n".join(out)


TOK = re.compile(
    r"""
   (?P<pp>(?:(?<=\n)|\A)[ \t]*\#[^\n]*)
 | (?P<ws>\s+)
 | (?P<com>//[^\n]*|/\*.*?\*/)
 | (?P<str>"(?:\\.|[^"\\])*")
 | (?P<chr>'(?:\\.|[^'\\])*')
 | (?P<id>[A-Za-z_]\w*)
 | (?P<num>\.?\d(?:[eEpP][+-]|[\w.'])*)
 | (?P<op>->\*|->|::|\.\.\.|<<=|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|.)
""",
    re.X | re.S,
)


class T:
    """A token: its kind and its text."""

    __slots__ = ("k", "s")

    def __init__(self, k, s):
        self.k, self.s = k, s

    def __repr__(self):
        return self.s


def lex(text):
    return [T(m.lastgroup, m.group()) for m in TOK.finditer(text) if m.lastgroup != "com"]


def sig(toks):
    return [t for t in toks if t.k not in ("ws", "pp")]


def txt(toks):
    return "".join(t.s for t in toks)


def where(toks, i):
    """Returns 'file:line: ' of a token, from the preprocessor's line markers, or '' if there are no markers."""
    n = 0
    for t in reversed(toks[:i]):
        m = re.match(r'[ \t]*#\s*(\d+)\s+"([^"]*)"', t.s) if t.k == "pp" else None
        if m:
            return f"{m.group(2)}:{int(m.group(1)) + n - 1}: "
        n += t.s.count("\n")
    return ""


OPEN = {"(": ")", "[": "]", "{": "}"}


def match(toks, i, hi=None):
    """Returns the index of the bracket that closes toks[i]."""
    hi = len(toks) if hi is None else hi
    stack = []
    for j in range(i, hi):
        if toks[j].k != "op":
            continue
        s = toks[j].s
        if s in OPEN:
            stack.append(OPEN[s])
        elif stack and s == stack[-1]:
            stack.pop()
            if not stack:
                return j
    raise Err(f"{where(toks, i)}this {toks[i].s} is never closed")


def match_angle(toks, i, hi=None, header=False):
    """Returns the index of the > that closes the < at toks[i], or None if toks[i] does not open a template list.

    With header=True, the < follows the word `template`, so it always opens a template list.
    """
    hi = len(toks) if hi is None else hi
    d, j = 0, i
    while j < hi:
        t = toks[j]
        if t.k == "op":
            if t.s == "<":
                d += 1
            elif t.s == ">":
                d -= 1
                if d == 0:
                    return j
            elif t.s in OPEN:
                if t.s == "{":
                    return None
                j = match(toks, j, hi)
            elif t.s == ";" or (t.s in ("&&", "||") and not header):
                return None
        j += 1
    return None


def split_commas(toks):
    parts, cur, i = [], [], 0
    while i < len(toks):
        t = toks[i]
        j = None
        if t.k == "op" and t.s in OPEN:
            j = match(toks, i)
        elif t.k == "op" and t.s == "<":
            j = match_angle(toks, i)
        if j is not None:
            cur += toks[i : j + 1]
            i = j + 1
            continue
        if t.k == "op" and t.s == ",":
            parts.append(cur)
            cur = []
        else:
            cur.append(t)
        i += 1
    if sig(cur) or parts:
        parts.append(cur)
    return parts


def attrs(toks):
    """Removes attributes `[[...]]`. Returns the other tokens and the attributes' texts."""
    rest, got, i = [], [], 0
    while i < len(toks):
        if toks[i].s == "[" and i + 1 < len(toks) and toks[i + 1].s == "[" and toks[i].k == "op":
            j = match(toks, i)
            for p in split_commas(sig(toks[i + 2 : j - 1])):
                got.append("".join(t.s if t.k != "str" else '"' + t.s[1:-1] + '"' for t in p))
            i = j + 1
        else:
            rest.append(toks[i])
            i += 1
    return rest, got


CLASSY = {"struct", "class", "union", "enum"}
