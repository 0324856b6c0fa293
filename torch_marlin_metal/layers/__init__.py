"""Layers with packed weights: `MarlinLinear`, and projections fused into one layer."""

from torch_marlin_metal.layers.experts import ExpertWeights

__all__ = ["ExpertWeights"]
