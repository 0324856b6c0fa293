"""Layers that hold a 4-bit weight: one layer, and several fused into one."""
