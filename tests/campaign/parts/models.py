"""Loads tiny models of random families from random formats through random doors; see `tests/support/random_models.py`."""

from tests.support.random_models import case

__all__ = ["case"]
