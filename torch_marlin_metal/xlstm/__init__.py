"""The mLSTM of xLSTM: its operators and its layer.

The package is not named `mlstm` because `torch_marlin_metal.mlstm` is the operator: importing a submodule of that
name would put the module in its place.
"""
