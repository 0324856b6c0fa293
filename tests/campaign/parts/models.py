"""Loads tiny models of random families from random formats and files through random entry points."""

from tests.support.random_entry_points import case

__all__ = ["case"]
