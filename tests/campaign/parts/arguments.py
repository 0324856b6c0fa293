"""Passes random arguments to every operator. A call may return or raise, but must not end the process."""

import random
from pathlib import Path
from typing import Any

import torch

from torch_marlin_metal.interface import OPERATORS

OPS = torch.ops.torch_marlin_metal
NAMES = sorted(OPERATORS)
SIZES = (0, 1, 2, 3, 8, 16, 24, 64)
INTEGERS = (0, 1, -1, 2, 8, 16, 32, 64, 2**31 - 1, 2**31, -(2**31), 2**60, 2**62, 2**63 - 1, -(2**63))
TEXTS = (
    "",
    "uint4b8",
    "uint4",
    "nvfp4",
    "mxfp4",
    "lut4",
    "uint4_bias",
    "float4_e2m1",
    "auto",
    "word",
    "x" * 1000,
    "\0",
)
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip


def tensor(rng: random.Random) -> torch.Tensor:
    shape = [rng.choice(SIZES) for _ in range(rng.randrange(6))]
    dtype = rng.choice(DTYPES)
    made = (
        torch.zeros(shape, dtype=dtype) if rng.random() < 0.5 else torch.ones(shape).mul(rng.randrange(-9, 9)).to(dtype)
    )
    match rng.randrange(6):
        case 0 if made.dim() > 1:
            return made.transpose(0, 1)
        case 1:
            return made.expand(rng.choice((1, 3)), *made.shape)
        case 2:
            return made.to("meta")
    return made


def value(rng: random.Random, kind: str) -> Any:
    if "Tensor" in kind:
        return None if "?" in kind and rng.random() < 0.5 else tensor(rng)
    if "int" in kind or "SymInt" in kind:
        return rng.choice(INTEGERS)
    if "float" in kind:
        return rng.choice((0.0, 1e-6, -1.0, float("inf"), float("nan"), 1e308))
    if "bool" in kind:
        return rng.random() < 0.5
    return rng.choice(TEXTS)


def case(rng: random.Random, work: Path) -> str:
    del work
    outcome = "taken"
    op = getattr(OPS, rng.choice(NAMES)).default
    for _ in range(20):
        arguments = {}
        for argument in op._schema.arguments:
            if argument.name == "dtype":
                arguments[argument.name] = rng.choice(DTYPES)
            elif not argument.has_default_value() or rng.random() < 0.5:
                arguments[argument.name] = value(rng, str(argument.type))
        try:
            op(**arguments)
        except (ValueError, IndexError, TypeError, RuntimeError, NotImplementedError) as error:
            if not str(error) or "INTERNAL ASSERT" in str(error):
                raise AssertionError(f"{op}: the error tells a user nothing: {error!r}") from error
            outcome = "refused"
    return outcome
