"""Rewrites Metal Shading Language to clang's "C++ for OpenCL", which has Metal's address spaces under other names.

The text is only used to check types and address spaces. No code is generated from it. Each line keeps its number.
"""

from __future__ import annotations

from ..attributes import attribute_end, take_attributes
from ..tokens import Token, rewrite_literals, significant
from .structure import Structure
from .vectors import rewrite_vectors

# Metal's words and their form in the dialect. `constant` also becomes const, because it implies const in Metal but not
# in the dialect.
_WORDS = {
    "device": "__global",
    "threadgroup": "__local",
    "constant": "const __constant",
    "thread": "__private",
    "threadgroup_imageblock": "__local",
    "object_data": "__local",
    "ray_data": "__private",
    **dict.fromkeys(("kernel", "vertex", "fragment"), ""),
}
# Words and types of the dialect that are ordinary names in Metal.
_FOREIGN = {
    *("global", "local", "private", "generic", "pipe", "read_only", "write_only", "read_write"),
    *("event_t", "queue_t", "sampler_t", "clk_event_t", "reserve_id_t", "ndrange_t", "atomic_flag"),
}
_ACCESS = {"private"}  # words that are access specifiers, too
RENAMED = "sm_word_"


def to_opencl(tokens: list[Token]) -> str:
    """Returns the text in the dialect. Changes the tokens, which are preprocessed text, in place."""
    # Clang's -cl-single-precision-constant does not suffice: in a template, a literal next to a value of a dependent
    # type remains double (clang 19).
    rewrite_literals(tokens, half="h")
    code = significant(tokens)
    structure = Structure(code)
    rewrite_vectors(code, structure.in_function)
    _strip_attributes(code)
    for i, token in enumerate(code):
        if token.kind == "word":
            _word(code, i)
    return "".join(t.text for t in tokens)


def _strip_attributes(code: list[Token]) -> None:
    i = 0
    while i < len(code):
        end = attribute_end(code, i) if code[i].text == "[" else -1
        if end > i:
            take_attributes(code[i : end + 1])
            i = end
        i += 1


def _word(code: list[Token], i: int) -> None:
    token = code[i]
    if token.text == "coherent" and i + 3 < len(code) and code[i + 1].text == "(":
        for part in code[i : i + 4]:
            part.text = ""
    elif token.text in _WORDS:
        token.text = _WORDS[token.text]
    elif token.text in _FOREIGN:
        is_access = token.text in _ACCESS and (
            code[i + 1].text == ":" or (code[i + 1].kind == "word" and code[i - 1].text in (":", ","))
        )
        if not is_access:
            token.text = RENAMED + token.text
