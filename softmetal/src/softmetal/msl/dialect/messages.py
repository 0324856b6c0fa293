"""Translates clang's messages about the dialect into messages about Metal source."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from .rewrite import RENAMED

_ERROR = re.compile(r"^(?P<place>.*?:\d+):\d+: (?:fatal )?error: (?P<text>.*)$")
_WARNING = re.compile(r"^.*?:\d+:\d+: warning: ")
_NOTE = re.compile(r"^(?P<place>.*?:\d+):\d+: note: (?P<text>.*)$")
_LIBRARY = str(Path(__file__).resolve().parent / "include")

# Errors of the dialect in code that Metal accepts: (pattern of the error, pattern that a note of the error must match).
_OF_THE_DIALECT = (
    # Metal can copy a struct out of `constant`. In C++ for OpenCL, the copy constructor takes an object in the generic
    # space, which does not include `constant`.
    (r"no matching constructor|no viable conversion|no viable overloaded '='", r"__constant .*implicit|implicit copy"),
    # In Metal, a temporary is in `thread` memory. In C++ for OpenCL it is in no address space, so member functions of
    # `thread` objects do not accept it.
    (r"", r"'this' object is in default address space, but method expects .* '__private'"),
    # Template arguments are checked again when the source is compiled to code. The dialect does not deduce an argument
    # if its type is const in one place and not in another.
    (r"", r"deduced conflicting types for parameter '\w+' \('const (\w+)' vs\. '\1'\)"),
    # Template arguments are checked again when the source is compiled to code. In C++ for OpenCL, clang refuses
    # functions whose parameters depend on a template parameter (MLX's fft.h).
    (r"^no matching function", r"candidate template ignored: invalid explicitly-specified argument"),
    # Constant expressions are evaluated again when the source is compiled to code, with the right layout of types.
    (r"^static assertion failed", ""),
    (r"not an? (integral )?constant expression", r"undefined function|non-constexpr|non-literal"),
    # The dialect cannot copy a struct out of `constant` in a constant expression.
    (r"constexpr variable '[^']*' must be initialized by a constant expression", ""),
    # In a conditional expression, Metal copies two structs in different address spaces, as if both were values.
    (
        r"^(?:incompatible operand types \('|conditional expression is ambiguous; ')(?:const |volatile |__\w+ )*"
        r"(?P<struct>[^'*&]+)'(?: \(aka '[^']*'\))? and '(?:const |volatile |__\w+ )*(?P=struct)'",
        "",
    ),
    # In Metal, a list in braces can be the argument for a vector parameter. In C++ for OpenCL it cannot.
    (r"^no matching", r"cannot convert initializer list argument to '[^'*&]*\b(?:vec<|[a-z]+[234]\b)"),
    (r"scalar operand type has greater rank than the type of the vector element", ""),
    (r"excess elements in scalar initializer", ""),  # T(x, y) where T is a vector
    (r"too few elements in vector initialization", ""),
    (r" from vector .* to vector .* of different size", ""),
    (r"cast from .*'half'.* to .*(bf16|bfloat)|cast from .*(bf16|bfloat).* to .*'half'", ""),
    (r"cannot bind to a temporary object because of address space mismatch", ""),
    (r"invalid vector element type 'bool'|'bool[234]'|'bool' \(vector", ""),
    # Metal can index a matrix that is the value of an expression and not a variable.
    (r"use of overloaded operator '\[\]' is ambiguous \(with operand types '(metal::)?matrix<", ""),
    # Metal can add a pointer and an object that converts to an integer. The later compile to code checks all sums of
    # pointers except sums of two pointers.
    (
        r"^invalid operands to binary expression \('[^']*\*[^']*'(?: \(aka '[^']*'\))? and '[^'*]*'(?: \(aka '[^'*]*'\))?\)",
        "",
    ),
    # In C++14, clang accepts most C++17 constructs with a warning. It refuses deduced class arguments and auto
    # parameters, so messages about these two are kept.
    (r"^(?!class template argument|non-type template).* incompatible with C\+\+ standards before C\+\+17", ""),
)
_SPACES = (
    (r"const __constant\b|__constant\b", "constant"),
    (r"__global\b", "device"),
    (r"__local\b", "threadgroup"),
    (r"__private\b", "thread"),
    (r"__generic ", ""),
    (r"(\w+) __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"\1\2"),
    (r"metal::sm_make<([^<>]*(?:<[^<>]*>)?)>", r"\1"),
    (RENAMED, ""),
    (r"\*thread'", "*'"),
    (r"'thread ([^'*&]*)'", r"'\1'"),
    (r"no matching function for call to 'of'", "no constructor of the vector takes these arguments"),
    (
        r"program scope variable must reside in constant address space",
        "a variable outside of functions must be constant",
    ),
)
_SPACE_ADVICE = "; a pointer or reference keeps its address space: declare one function or template for each space"
_ADVICE = (
    (r"call to '.*' is ambiguous", "; Metal has one overload for each type: cast the arguments to one type"),
    (r"call to deleted function", "; Metal has it for numbers of at most 32 bits: cast the argument"),
    (r"(undeclared identifier|unknown type name|no template named).*(memory_order|atomic_|bfloat|thread_scope)",
     "; the language version may be too old for it"),
)  # fmt: skip


# C++ for OpenCL has no vectors of bool. One such vector causes further errors, which do not concern the source.
_NO_BOOL_VECTOR = "invalid vector element type 'bool'"
_FOLLOWS = r"subscripted value is not an array|substitution failure"


@dataclass(slots=True)
class Messages:
    """Clang's messages.

    `errors` holds the errors that Metal's compiler also reports. `all` counts every error of clang.
    """

    errors: list[str] = field(default_factory=list)
    all: int = 0


@dataclass(slots=True)
class _Group:
    place: str
    text: str
    notes: list[str] = field(default_factory=list)
    is_ours: bool = False  # the error is reported in our declarations, in a template instance that the source needs


def _groups(output: str) -> list[_Group]:
    groups: list[_Group] = []
    is_error = False
    for line in output.splitlines():
        if found := _ERROR.match(line):
            groups.append(_Group(found["place"], found["text"]))
            is_error = True
        elif _WARNING.match(line):
            is_error = False
        elif is_error and (note := _NOTE.match(line)):
            groups[-1].notes.append(note["text"])
            if groups[-1].place.startswith(_LIBRARY) and "requested here" in note["text"]:
                groups[-1].place = note["place"]
                groups[-1].is_ours = True
    return groups


def read_messages(output: str) -> Messages:
    """Filters clang's messages, and replaces the dialect's names of types and address spaces with Metal's names."""
    result = Messages()
    groups = _groups(output)
    lacks_bool = any(_NO_BOOL_VECTOR in group.text for group in groups)
    for group in groups:
        result.all += 1
        follows = lacks_bool and re.search(_FOLLOWS, "\n".join([group.text, *group.notes]))
        if follows or _is_of_the_dialect(group):
            continue
        message = f"{group.place}: error: {_in_metal(group)}"
        if message not in result.errors:
            result.errors.append(message)
    return result


def _is_of_the_dialect(group: _Group) -> bool:
    if group.is_ours and group.text.startswith("static assertion failed"):
        return False
    notes = "\n".join(group.notes)
    return any(re.search(error, group.text) and re.search(note, notes) for error, note in _OF_THE_DIALECT)


def _in_metal(group: _Group) -> str:
    text = re.sub(r" \[-Werror,.*\]$", "", group.text)
    reasons = [n for n in group.notes if re.search(r"not viable|cannot|ignored", n)]
    if reasons and "no matching" in text:
        text += f" ({reasons[0]})"
    for pattern, name in _SPACES:
        text = re.sub(pattern, name, text)
    for error, advice in _ADVICE:
        if re.search(error, text):
            return text + advice
    if len(set(re.findall(r"\b(device|threadgroup|thread|constant)\b", text))) > 1:
        return text + _SPACE_ADVICE
    return text
