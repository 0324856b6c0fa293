"""Compares our compiler with Apple's, on kernels of public wheels.

A wheel contains each kernel as compiled by Apple's compiler. Our compiler compiles the source of the same kernel.
`python -m softmetal.proof` runs the two compiled forms on equal inputs and compares the output bits.
"""
