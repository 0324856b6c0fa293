"""`python -m lab.token MODEL`: the operations of a decoded token before and after fusing, and its predicted time."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from lab.token.token import trace_token
from torch_marlin_metal.cli.arguments import Cores, Dtype, Format, Gpu, GroupSize, floating, gpu_of
from torch_marlin_metal.cli.output import DONE, reported, show

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def trace(
    model: Annotated[Path, typer.Argument(help="A model's directory, or its config.json.", show_default=False)],
    gpu: Gpu = None,
    cores: Cores = None,
    weight_format: Format = "uint4b8",
    group_size: GroupSize = None,
    dtype: Dtype = "float16",
    context: Annotated[int, typer.Option(min=0, help="Tokens before the traced one.")] = 1024,
    dispatch_us: Annotated[
        float | None, typer.Option(help="Microseconds of one dispatch; without it, the model.")
    ] = None,
) -> int:
    """Counts the operations of a decoded token before and after fusing, and predicts its time on each chip.

    Reads only the model's config. A few layers with random 4-bit weights are made from it and run on the CPU.
    """
    found = trace_token(
        model,
        gpus=None if gpu is None and cores is None else [gpu_of("lab.token", gpu, cores)],
        weight_format=weight_format,
        group_size=group_size,
        dtype=floating(dtype),
        context=context,
        dispatch_seconds=None if dispatch_us is None else dispatch_us / 1e6,
    )
    show({}, Group(found.__rich__(), found.fused), as_json=False)
    return DONE


app.command()(reported(trace))

if __name__ == "__main__":
    app()
