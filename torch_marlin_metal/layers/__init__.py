"""Layers with packed weights: `MarlinLinear`, and projections that are fused into one layer."""
