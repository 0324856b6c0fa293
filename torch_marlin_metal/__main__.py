"""Makes `python -m torch_marlin_metal` run the command line `torch-marlin-metal`."""

from torch_marlin_metal.cli.main import main

main()
