"""Runs a program on the software Metal device: `python -m softmetal program.py [arguments]`.

Python processes that the program starts also have the device. `python -m softmetal` alone builds the device.
"""

import os
import runpy
import sys
from pathlib import Path

import softmetal

if sys.argv[1:] and not Path(sys.argv[1]).exists():
    expected = "expected: python -m softmetal program.py [arguments]"
    print(f"softmetal: {sys.argv[1]} does not exist; {expected}", file=sys.stderr)
    sys.exit(2)  # as the interpreter does for a program that does not exist
softmetal.install()
if len(sys.argv) > 1:
    children = str(Path(__file__).resolve().with_name("children"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [children, os.environ.get("PYTHONPATH")]))
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
