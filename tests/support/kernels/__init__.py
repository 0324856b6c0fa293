"""Runs one kernel of `kernels/` on the software Metal device and checks what the kernel wrote."""
