"""Loads a checkpoint into a model: makes a plan from the headers, then places and fills the packed layers."""
