"""Shows the tiles, choices, rooflines and traces of a GPU. Public as `torch_marlin_metal.profiling`."""
