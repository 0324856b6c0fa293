"""The subcommands of `torch-marlin-metal`. Each returns an exit code. docs/use/command-line.md explains them."""

from collections.abc import Callable

import typer

from torch_marlin_metal.cli.bench import bench
from torch_marlin_metal.cli.convert import convert
from torch_marlin_metal.cli.doctor import doctor
from torch_marlin_metal.cli.inspect import inspect
from torch_marlin_metal.cli.models.fit import fit
from torch_marlin_metal.cli.models.generate import generate
from torch_marlin_metal.cli.models.perplexity import perplexity
from torch_marlin_metal.cli.output import Commands, reported
from torch_marlin_metal.cli.plan import plan
from torch_marlin_metal.cli.profile import profile
from torch_marlin_metal.cli.quantize import quantize
from torch_marlin_metal.cli.tune import tune
from torch_marlin_metal.cli.verify import verify
from torch_marlin_metal.version import __version__

COMMANDS: tuple[Callable[..., int], ...] = (
    *(inspect, convert, verify, quantize, generate, perplexity, fit, plan, profile, tune, bench, doctor),
)

app = typer.Typer(
    cls=Commands,
    help="Runs, times, converts, compares and quantizes models, and explains plans.",
    epilog="Example: torch-marlin-metal fit MODEL --memory 16GB. Explained in docs/use/command-line.md.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command()(reported(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Runs, times, converts, compares and quantizes models."""
