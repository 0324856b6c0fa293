"""Loads a checkpoint into a model: makes a plan from the headers, sets placeholders, and replaces them by layers."""
