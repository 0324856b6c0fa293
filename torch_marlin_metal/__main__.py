"""`python -m torch_marlin_metal` is `torch-marlin-metal`."""

from torch_marlin_metal.cli import main

main()
