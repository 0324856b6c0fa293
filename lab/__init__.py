"""The laboratory: predicts and compares times of kernels on Apple GPUs. It is not part of the package."""
