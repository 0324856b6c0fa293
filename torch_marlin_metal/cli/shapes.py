"""Arguments that name products, of the commands that plan and measure them."""

from typing import Annotated

import typer

Shapes = Annotated[list[str] | None, typer.Option("--shape", help="N,K of a weight; may be repeated.")]
Rows = Annotated[list[int] | None, typer.Option(help="M, rows of the activations; may be repeated.")]


def shape_of(text: str) -> tuple[int, int]:
    """Returns (N, K).

    Raises:
        ValueError: the text is not of the form N,K.
    """
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--shape: expected N,K, got {text!r}")
    return int(parts[0]), int(parts[1])
