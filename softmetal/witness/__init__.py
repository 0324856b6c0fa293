"""Apple's own compiler as a witness: kernels that it compiled, from public wheels, beside our compile of their source.

`python -m softmetal.witness` (`make witness`) runs both forms of each kernel on the same inputs and compares bits.
"""
