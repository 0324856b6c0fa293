"""Loads the software Metal device and runs a script: `python -m softmetal script.py [arguments]`.

Python processes that the script starts load the device, too.
"""

import os
import runpy
import sys
from pathlib import Path

if len(sys.argv) < 2:
    sys.exit("usage: python -m softmetal script.py [arguments]")
children = str(Path(__file__).resolve().with_name("children"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [children, os.environ.get("PYTHONPATH")]))
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
runpy.run_path(sys.argv[0], run_name="__main__")
