"""Reads packed layers of other packages from a model in memory."""
