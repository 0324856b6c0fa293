"""Arguments that describe products, for the commands that plan and measure them."""

from typing import Annotated

import typer

from torch_marlin_metal.formats import resolve_group_size
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.gpu.tuning.products import Product

Shapes = Annotated[list[str] | None, typer.Option("--shape", help="N,K of a weight; may be repeated.")]
Rows = Annotated[list[int] | None, typer.Option(min=1, help="M, rows of the activations; may be repeated.")]


def shape_of(text: str) -> tuple[int, int]:
    """Returns (N, K).

    Raises:
        ValueError: the text is not of the form N,K.
    """
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--shape: expected N,K, got {text!r}")
    return int(parts[0]), int(parts[1])


def product_of(command: str, shape: str, weight_format: str, group_size: int | None, dtype: str) -> Product:
    """Returns the product of a weight "N,K" with activations of a dtype.

    Raises:
        ValueError: the shape, the weight format or the group size is wrong.
    """
    N, K = shape_of(shape)
    fmt = find_format(weight_format)
    return Product(N, K, fmt.name, resolve_group_size(command, fmt, group_size, K), dtype)
