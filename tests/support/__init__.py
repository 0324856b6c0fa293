"""What tests share: references in fp64, small models and layers, writers of checkpoints, launches of single kernels."""
