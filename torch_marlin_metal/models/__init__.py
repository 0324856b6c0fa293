"""Functions for whole models: quantize their layers, replace those of other packages, or load a checkpoint."""
