"""`torch-marlin-metal plan`: shows how a GPU would compute a product, with the reason."""

from typing import Annotated, Any

import typer

from torch_marlin_metal.cli.arguments import Cores, Dtype, Format, Gpu, GroupSize, floating, gpu_of
from torch_marlin_metal.cli.output import DONE, Json, show
from torch_marlin_metal.gpu.planning import PlanCandidate
from torch_marlin_metal.gpu.planning import plan as make_plan


def plan(
    rows: Annotated[int, typer.Argument(metavar="M", help="Rows of the activations.", show_default=False)],
    columns: Annotated[int, typer.Argument(metavar="N", help="Columns of the weight.", show_default=False)],
    depth: Annotated[int, typer.Argument(metavar="K", help="Rows of the weight.", show_default=False)],
    gpu: Gpu = None,
    cores: Cores = None,
    weight_format: Format = "uint4b8",
    group_size: GroupSize = None,
    dtype: Dtype = "float16",
    variant: Annotated[str, typer.Option(help="auto, rounded, or the only variant to consider.")] = "auto",
    as_json: Json = False,
) -> int:
    """Shows how a GPU would compute a product.

    The product is [M, K] x [K, N]. The table shows the planner's choice, its reason and the alternatives.
    """
    found = make_plan(
        rows,
        columns,
        depth,
        # None means this machine's GPU with its tuned choices.
        gpu=None if gpu is None and cores is None else gpu_of("plan", gpu, cores),
        weight_format=weight_format,
        group_size=group_size,
        dtype=floating(dtype),
        variant=variant,
    )
    value = {"gpu": found.gpu.name, "cores": found.gpu.cores, "reason": found.reason, "chosen": _in_json(found.chosen)}
    show({**value, "candidates": [_in_json(candidate) for candidate in found.candidates]}, found, as_json)
    return DONE


def _in_json(candidate: PlanCandidate) -> dict[str, Any]:
    return {
        "variant": candidate.variant,
        "tile": list(candidate.tile),
        "estimated_seconds": candidate.seconds,
        "dispatches": [dispatch.text for dispatch in candidate.dispatches],
    }
