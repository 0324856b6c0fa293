"""Reads Metal's `[[...]]` attributes, and the parameters of kernels."""

from __future__ import annotations

from dataclasses import dataclass

from .tokens import SourceError, Token, join, match_closing, split_commas

# Attributes that give a kernel parameter a value without a buffer. sm::Builtin (msl/thunk.h) reads the value.
BUILTINS = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_quadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
    "thread_execution_width",
    "threads_per_simdgroup",
    "grid_origin",
    "grid_size",
}
_PLAIN_CPP = {"maybe_unused", "nodiscard", "fallthrough", "likely", "unlikely", "noreturn", "deprecated"}


@dataclass(slots=True)
class Attribute:
    """One attribute. For example, `buffer(0)` has the name "buffer" and the argument "0"."""

    name: str
    argument: str
    line: int


def attribute_end(tokens: list[Token], start: int) -> int:
    """Returns the index of the last `]` of the attribute list that begins at `start`, or -1 if no list begins there."""
    if start + 2 >= len(tokens) or tokens[start].text != "[" or tokens[start + 1].text != "[":
        return -1
    if tokens[start + 2].kind != "word" or (start and tokens[start - 1].text == "operator"):
        return -1
    inner = match_closing(tokens, start + 1)
    return inner + 1 if inner + 1 < len(tokens) and tokens[inner + 1].text == "]" else -1


def take_attributes(tokens: list[Token]) -> list[Attribute]:
    """Reads all attribute lists among `tokens`, and removes the lists that C++ does not accept."""
    found = []
    i = 0
    while i < len(tokens):
        end = attribute_end(tokens, i) if tokens[i].text == "[" else -1
        if end < 0:
            i += 1
            continue
        keep = False
        for part in split_commas(tokens[i + 2 : end - 1]):
            name = part[0].text
            if name in _PLAIN_CPP or (len(part) > 1 and part[1].text == "::"):
                keep = True
                continue
            argument = ""
            if len(part) > 1 and part[1].text == "(":
                argument = join(part[2 : match_closing(part, 1)])
            found.append(Attribute(name, argument, part[0].line))
        if not keep:
            for token in tokens[i : end + 1]:
                token.text = ""
        i = end + 1
    return found


@dataclass(slots=True)
class Parameter:
    """A kernel parameter, and where its value comes from."""

    name: str
    source: str  # "buffer", "threadgroup" or one of BUILTINS
    index: str  # C++ constant expression, empty for BUILTINS
    is_constant: bool
    gate: str  # name of the function constant that decides whether the parameter exists, or ""


def placed_indices(parameters: list[Parameter], source: str) -> list[str]:
    """Returns the indices that Metal source gives to buffers or to threadgroup memory.

    `source` is "buffer" or "threadgroup".
    """
    return [p.index for p in parameters if p.source == source and p.index and not p.index.startswith("sm::")]


def read_parameters(tokens: list[Token]) -> list[Parameter]:
    """Reads a kernel's parameters from the tokens between its brackets, and removes their attributes.

    Raises:
        SourceError: a parameter has neither an attribute nor an address space, or this device does not support the
            attribute.
    """
    parameters = []
    unplaced: list[Parameter] = []
    for part in split_commas(tokens):
        spaces = {t.text for t in part if t.text in ("device", "constant", "threadgroup")}
        attributes = take_attributes(part)
        words = [t for t in part if t.text]
        if [t.text for t in words] in ([], ["void"]):
            continue
        while words[-1].text == "]":  # array declarator
            opening = max(i for i, t in enumerate(words) if t.text == "[")
            words = words[:opening]
        name = words[-1].text
        parameter = Parameter(name, "", "", "constant" in spaces, "")
        for a in attributes:
            if a.name in ("buffer", "threadgroup"):
                if not a.argument:
                    raise SourceError(a.line, f"'{a.name}' attribute of '{name}' needs an index")
                parameter.source, parameter.index = a.name, a.argument
            elif a.name == "function_constant":
                parameter.gate = a.argument
            elif a.name in BUILTINS:
                parameter.source = a.name
            elif a.name == "stage_in":
                raise SourceError(a.line, f"parameter '{name}': [[stage_in]] is not supported by the software device")
            elif a.name in ("texture", "sampler"):
                raise SourceError(a.line, f"parameter '{name}': the software device has no textures and no samplers")
            else:
                raise SourceError(a.line, f"parameter '{name}': attribute '{a.name}' is not one of a compute kernel")
        if not parameter.source:
            if not spaces:
                raise SourceError(words[-1].line, f"kernel parameter '{name}' has neither attribute nor address space")
            parameter.source = "threadgroup" if "threadgroup" in spaces else "buffer"
            unplaced.append(parameter)
        parameters.append(parameter)
    for number, parameter in enumerate(unplaced):
        before = sum(p.source == parameter.source for p in unplaced[:number])
        parameter.index = f"sm::free_index<{', '.join([str(before), *placed_indices(parameters, parameter.source)])}>()"
    return parameters
