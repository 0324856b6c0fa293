"""The layer of xLSTM with the mLSTM operators.

The package is not named `mlstm`, because `torch_marlin_metal.mlstm` is the operator. Importing a submodule of this name
would replace the operator by the module.
"""
