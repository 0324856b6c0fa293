"""Generates the `air.*` functions of Metal's bitcode: C++ that calls functions.h, and LLVM text that calls the C++.

A name ends in the operand types, for example `air.simd_sum.f32`, `air.convert.f.f32.s.i32`, `air.max.u.v2i32`. Only the
name says whether integers are signed. An unknown function is an error, and the message contains the function's name.

The LLVM text passes values to the C++ by address, because the C ABI passes short vectors in other registers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


class UnknownFunction(ValueError):
    """A module calls an `air.*` function that this device does not support."""


@dataclass(frozen=True)
class Type:
    """An operand type in a name, for example "f32" or "u.v2i16"."""

    element: str  # as in functions.h: "f32", "bf16", "s32", "u1"
    length: int  # 0: a scalar

    @property
    def cpp(self) -> str:
        """The type's name in functions.h. A vector of booleans has bytes as elements."""
        element = "u8" if self.length and self.element == "u1" else self.element
        return f"vector<{element}, {self.length}>" if self.length else element


@dataclass(frozen=True)
class Declaration:
    """A declaration in the module: the name without `air.`, and the result and parameters as LLVM types."""

    name: str
    result: str
    parameters: tuple[str, ...]

    @property
    def symbol(self) -> str:
        """The C name of the function."""
        return "sm_air_" + self.name.replace(".", "_")


_TYPE = re.compile(r"(?:v(\d+))?(bf|f|i)(\d+)")

# The C++ of each function. "@" stands for the operands, and R for the result's type. T0, T1, ... are the types in the
# name.
_MODAL = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "atan2", "cos", "cosh", "cospi", "exp", "exp2", "exp10"),
    *("log", "log2", "log10", "sin", "sinh", "sinpi", "sqrt", "rsqrt", "tan", "tanh", "tanpi", "pow", "powr", "divide"),
)
_PLAIN = (
    *("abs", "clamp", "min", "max", "fabs", "fmin", "fmax", "floor", "ceil", "rint", "round", "trunc", "fract", "fmod"),
    *("fma", "dot", "copysign", "nextafter", "ldexp", "any", "all", "simd_all", "simd_any"),
    *(f"{g}_{x}" for g in ("simd", "quad") for x in ("sum", "product", "min", "max", "and", "or", "xor")),
    *(f"simd_prefix_{i}clusive_{x}" for i in ("in", "ex") for x in ("sum", "product")),
    *(f"{g}_shuffle{x}" for g in ("simd", "quad") for x in ("", "_up", "_down", "_xor", "_rotate_up", "_rotate_down")),
    *("simd_broadcast", "simd_broadcast_first", "quad_broadcast"),
    *("simd_shuffle_and_fill_up", "simd_shuffle_and_fill_down"),
)
_VALUES = {
    "convert": "air::convert<R>(@)",
    "get_simdgroup_size": "32",
    "get_thread_index_in_simdgroup": "static_cast<R>(air::lane())",
    "tensor_cooperative_tensor_data_size": "air::tensor_bytes(@)",
    "tensor_cooperative_tensor_get_element_pointer": "air::tensor_element(@)",
    # Always true, because Metal's code passes the result to llvm.assume, and assuming false is undefined behavior.
    "is_uniform": "true",
    "normalize_function_constant_predicate": "a0 != 0",
    "simdgroup_matrix_8x8_init_filled": "R(a0)",
    "simdgroup_matrix_8x8_init_diag": "air::matrix_diagonal(a0)",
    "simdgroup_matrix_8x8_load": "air::matrix_load<E0>(@)",
    "simdgroup_matrix_8x8_multiply_accumulate": "air::matrix_product<E0>(@)",
    **{name: f"air::{name}(@)" for name in _PLAIN},
    **{name: f"metal::{name}(@)" for name in _MODAL},
    **{f"fast_{name}": f"metal::fast::{name}(@)" for name in _MODAL},
    "sincos": "metal::sincos(a0, *static_cast<R*>(a1))",
    "fast_sincos": "metal::fast::sincos(a0, *static_cast<R*>(a1))",
    "atomic.load": "air::atomic_load<T0>(a0)",
    "atomic.xchg": "air::atomic_exchange<T0>(a0, a1)",
    "atomic.cmpxchg.weak": "air::atomic_compare_exchange<T0>(a0, a1, a2)",
}
_EFFECTS = {
    "wg.barrier": "sm_threadgroup_barrier(a0)",
    "simdgroup.barrier": "sm_simdgroup_barrier(a0)",
    "atomic.fence": "__atomic_thread_fence(__ATOMIC_SEQ_CST)",
    "simdgroup_matrix_8x8_store": "air::matrix_store(@)",
    "tensor_cooperative_tensor_init": "(void)0",
    "tensor_run_cooperative": "air::tensor_product<T0, T1, T2>(a0, a1, a2, a3)",
    "atomic.store": "air::atomic_store<T0>(a0, a1)",
}
_UPDATES = {"add": "plus", "sub": "minus", "min": "least", "max": "most"}
_UPDATES |= {name: f"bit_{name}" for name in ("and", "or", "xor")}
for _name, _operation in _UPDATES.items():
    _VALUES[f"atomic.{_name}"] = _EFFECTS[f"atomic.{_name}"] = f"air::atomic_update<T0>(a0, a1, air::{_operation}())"


def parse_name(name: str) -> tuple[str, list[Type]]:
    """Splits a name such as "convert.f.f32.s.i32" into function and operand types, without the types of pointers."""
    base: list[str] = []
    types: list[Type] = []
    sign = "u"
    for part in name.split("."):
        if match := _TYPE.fullmatch(part):
            kind = sign if match[2] == "i" else match[2]
            types.append(Type(kind + match[3], int(match[1] or 0)))
        elif part in ("s", "u", "f"):
            sign = part
        elif not re.fullmatch(r"p\d\w+|global|local", part):
            base.append(part)
    return ".".join(base), types


def _split(llvm: str) -> tuple[str, int]:
    """Returns the element type and the length of an LLVM type. The length of a scalar is 0."""
    match = re.fullmatch(r"<(\d+) x (\w+)>", llvm)
    return (match[2], int(match[1])) if match else (llvm, 0)


def _cpp(llvm: str, types: Sequence[Type]) -> str:
    """Returns the C++ type of a value. An integer is signed if `types` has a signed integer of the same width."""
    element, length = _split(llvm)
    if element == "ptr":
        return "void*"
    known = {"half": "f16", "bfloat": "bf16", "float": "f32"}
    if element not in known:
        bits = element.removeprefix("i")
        signed = any(t.element == f"s{bits}" for t in types)
        return Type(f"{'s' if signed else 'u'}{bits}", length).cpp
    return Type(known[element], length).cpp


def _memory(llvm: str) -> str:
    """Returns the type of a value in memory, where each boolean is a byte."""
    element, length = _split(llvm)
    if element != "i1":
        return llvm
    return f"<{length} x i8>" if length else "i8"


def cpp_function(declaration: Declaration) -> str:
    """Returns the C++ of a function, under the name that `llvm_wrapper` calls.

    Raises:
        UnknownFunction: the device does not support this function.
    """
    base, types = parse_name(declaration.name)
    has_result = declaration.result != "void"
    text = (_VALUES if has_result else _EFFECTS).get(base)
    if text is None:
        raise UnknownFunction(f"air.{declaration.name} is not known to the software device")
    # The name of a conversion has the result's type first and the operand's type second. This order distinguishes the
    # types, because they may have the same width.
    own = [[types[0]], [types[1]]] if base == "convert" else [types, types]
    parameters, lines = [], []
    if has_result:
        result = _cpp(declaration.result, own[0])
        parameters.append(f"{result}* r")
        lines.append(f"typedef {result} R;")
    lines += [f"typedef {t.cpp} T{i};" for i, t in enumerate(types)]
    lines += [f"typedef {t.element} E{i};" for i, t in enumerate(types)]
    for i, llvm in enumerate(declaration.parameters):
        cpp = _cpp(llvm, own[1])
        parameters.append(f"{cpp} const* p{i}")
        lines.append(f"{cpp} a{i} = *p{i};")
    operands = ", ".join(f"a{i}" for i in range(len(declaration.parameters)))
    value = text.replace("@", operands)
    lines.append(f"*r = {value};" if has_result else f"{value};")
    return f'extern "C" SM_CONVERGENT void {declaration.symbol}({", ".join(parameters)}) {{ {" ".join(lines)} }}'


def cpp_builtin(name: str) -> str:
    """Returns the C++ that stores the three numbers of a position."""
    return f'extern "C" void sm_builtin_{name}(uint32_t* place) {{ air::builtin<sm::{name}>(place); }}'


def llvm_wrapper(declaration: Declaration, attributes: str) -> str:
    """Returns the definition of `@air.<name>` in LLVM's text form.

    The function stores the operands in memory, calls the C++ function and loads the result.
    """
    names = [f"%a{i}" for i in range(len(declaration.parameters))]
    signature = ", ".join(f"{t} {n}" for t, n in zip(declaration.parameters, names, strict=True))
    lines = [f"define internal {declaration.result} @air.{declaration.name}({signature}) {attributes} {{"]
    operands = []
    if declaration.result != "void":
        lines.append(f"  %r = alloca {_memory(declaration.result)}, align 16")
        operands.append("ptr %r")
    for name, llvm in zip(names, declaration.parameters, strict=True):
        memory, value = _memory(llvm), name
        lines.append(f"  {name}.p = alloca {memory}, align 16")
        if memory != llvm:
            value = f"{name}.w"
            lines.append(f"  {value} = zext {llvm} {name} to {memory}")
        lines.append(f"  store {memory} {value}, ptr {name}.p, align 16")
        operands.append(f"ptr {name}.p")
    lines.append(f"  call void @{declaration.symbol}({', '.join(operands)})")
    if declaration.result == "void":
        lines.append("  ret void")
    else:
        memory, value = _memory(declaration.result), "%v"
        lines.append(f"  %v = load {memory}, ptr %r, align 16")
        if memory != declaration.result:
            value = "%n"
            lines.append(f"  %n = trunc {memory} %v to {declaration.result}")
        lines.append(f"  ret {declaration.result} {value}")
    lines.append("}")
    lines.append(f"declare void @{declaration.symbol}({', '.join(['ptr'] * len(operands))})")
    return "\n".join(lines)
