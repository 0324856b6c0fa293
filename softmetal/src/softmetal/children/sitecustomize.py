"""Loads the software Metal device in the Python processes that a script under `python -m softmetal` starts.

Python imports a module of this name when it starts. `softmetal/__main__.py` adds this folder to the path of the
processes.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
import softmetal

softmetal.install()
