"""Compares our compiler with Apple's, on kernels of public wheels.

A wheel holds each kernel as Apple's compiler compiled it. Our compiler compiles the source of that kernel.
`python -m softmetal.proof` runs the two compiled forms on equal inputs and compares the output bits.
"""
