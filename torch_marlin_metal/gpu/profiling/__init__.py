"""Explains a GPU and a plan: tile budgets, roofline, estimated times. Public as `torch_marlin_metal.profiling`."""
