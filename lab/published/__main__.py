"""Runs `published.py`."""

import sys

from lab.published.published import main

sys.exit(main())
