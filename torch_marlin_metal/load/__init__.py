"""Loads a checkpoint into a model: plans from the headers, then places and fills the packed layers."""
