"""The headers of Metal 4's tensors, in Metal Shading Language, for the kernels that include them."""

from pathlib import Path

# A kernel finds the headers in this folder as its own includes. They are not part of the prelude of every kernel.
INCLUDE = Path(__file__).resolve().parent / "include"
