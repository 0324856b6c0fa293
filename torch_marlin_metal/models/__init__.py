"""Whole models: layers are found, swapped for 4-bit ones, loaded and reported on."""
