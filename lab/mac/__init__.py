"""Measurements on a Mac that compare this package with other projects."""
