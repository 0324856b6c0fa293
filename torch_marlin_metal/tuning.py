"""Selects kernels by measured times instead of the planner's model.

`tune` times the planner's candidates for the products of a model, and `save` stores the fastest. Later processes read
the stored choices at their first product on the GPU. They use the choices for the same GPU, torch version and package
version. The command `torch-marlin-metal tune` does both steps.

`set_commit_interval` sets how often the operators commit encoded work to the GPU.
"""

from torch_marlin_metal.gpu.commits import commit_interval, set_commit_interval
from torch_marlin_metal.gpu.tuning.products import Product, products_of
from torch_marlin_metal.gpu.tuning.table import TuningTable, load, save, table_path, use, use_saved
from torch_marlin_metal.gpu.tuning.tuner import tune

__all__ = [
    "Product",
    "TuningTable",
    "commit_interval",
    "load",
    "products_of",
    "save",
    "set_commit_interval",
    "table_path",
    "tune",
    "use",
    "use_saved",
]
