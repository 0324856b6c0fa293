"""Makes the helpers of tests/msl available to the tests of other packages' kernels."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "msl"))
