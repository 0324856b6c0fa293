"""Makes `device="mps"` ready. On Linux it is the software Metal device."""

import importlib.util
import sys

import torch


def load_mps() -> str:
    """Loads the device. Returns why there is none, or an empty string."""
    if sys.platform == "darwin":
        return "" if torch.backends.mps.is_available() else "this Mac has no MPS device"
    found = importlib.util.find_spec("softmetal")
    if found is None or found.origin is None:  # Python takes the folder softmetal/ for a package without files
        return "softmetal is not installed: run `make build`, or `pip install --editable softmetal`"
    import softmetal

    try:
        softmetal.install()
    except softmetal.Unavailable as error:
        return str(error)
    return ""
