"""Compares our compiler with Apple's: kernels from public wheels as Apple compiled them, and our compile of their source.

`python -m softmetal.witness` (`make witness`) runs both forms of each kernel on the same inputs and compares the bits.
"""
