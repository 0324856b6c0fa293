"""Loads the software Metal device in the Python processes that a script under `python -m softmetal` starts.

Python imports a module of this name at its start. `softmetal/__main__.py` puts this folder on the processes' path.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
import softmetal

softmetal.install()
