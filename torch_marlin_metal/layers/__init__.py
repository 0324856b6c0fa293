"""Layers with 4-bit weights: `MarlinLinear`, and projections that are fused into one layer."""
