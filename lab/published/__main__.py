"""Runs `published.py`."""

from lab.published.published import main

main()
