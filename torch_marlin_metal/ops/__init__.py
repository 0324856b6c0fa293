"""The operators as Python functions, a module for each family: `weights`, `gemm`, `experts`, `decoder` and `mlstm`.

A function on a packed weight takes a `PackedWeight`. `torch.ops.torch_marlin_metal.*` are the same operators with the
weight's tensors as single arguments. The C++ extension registers their schemas, checks, fake kernels, autograd and
autocast.
"""
