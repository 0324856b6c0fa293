"""Measurements on a Mac, beside the model and other projects."""
