"""Measured choices in place of the planner's model: measure on this GPU, keep in a table, use.

`tune` times the planner's candidates for the products of a model, `save` keeps what won, and each later import of the
package uses it for the same GPU, torch and package version. `torch-marlin-metal tune` is all of that in one command.
"""

from torch_marlin_metal.tuning.chains import Chain, interleave
from torch_marlin_metal.tuning.products import Product, products_of
from torch_marlin_metal.tuning.table import (
    Machine,
    TunedRange,
    TuningTable,
    load,
    save,
    table_path,
    use,
    use_saved,
)
from torch_marlin_metal.tuning.tuner import ROWS, tune

__all__ = [
    "ROWS",
    "Chain",
    "Machine",
    "Product",
    "TunedRange",
    "TuningTable",
    "interleave",
    "load",
    "products_of",
    "save",
    "table_path",
    "tune",
    "use",
    "use_saved",
]
