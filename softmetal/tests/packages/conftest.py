"""Lets the tests of other packages' kernels use the helpers of the tests of the language."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "msl"))
