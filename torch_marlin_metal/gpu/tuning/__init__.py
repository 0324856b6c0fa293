"""Measures the planner's candidates on this machine and keeps the results. Public as `torch_marlin_metal.tuning`."""
