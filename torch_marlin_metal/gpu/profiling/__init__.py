"""Shows a GPU's tiles, choices, rooflines and traces. Public as `torch_marlin_metal.profiling`."""
