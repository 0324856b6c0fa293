"""The headers of Metal 4's tensors, in Metal Shading Language, for the kernels that include them."""

from pathlib import Path

# Kernels find the headers in this folder as if they were their own includes. The headers are not part of the prelude.
INCLUDE = Path(__file__).resolve().parent / "include"
