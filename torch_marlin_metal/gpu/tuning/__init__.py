"""Measures the planner's candidates on this machine and stores the results. Public as `torch_marlin_metal.tuning`."""
