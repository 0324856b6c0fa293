"""Functions for complete models: quantize their layers, replace layers of other packages, or load a checkpoint."""
