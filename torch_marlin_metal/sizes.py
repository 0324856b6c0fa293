"""Formats and parses sizes in bytes."""

import re

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def human_size(count: float) -> str:
    """Formats a number of bytes with three digits and a unit. 1 kB is 1000 bytes."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def parse_size(argument: str, text: str | int, *, binary: bool = False) -> int:
    """Converts a size such as "9 GB", "16GiB" or 9000000000 to bytes.

    Args:
        argument: the caller's argument for the error message.
        text: a number of bytes, or a number with a unit. Case and a space before the unit are ignored.
        binary: True if kB, MB, GB and TB are powers of 1024, as in Apple's memory sizes. False for powers of 1000.

    Raises:
        ValueError: the text is not a positive size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", text) if isinstance(text, str) else None
        units = {name.lower(): factor for name, factor in (DECIMAL | BINARY).items()}
        if binary:
            units |= dict(zip(("kb", "mb", "gb", "tb"), BINARY.values(), strict=True))
        if not found or found[2].lower() not in units:
            names = ", ".join((*DECIMAL, *BINARY))
            raise ValueError(f"{argument}: expected a number and one of {names}, such as '9 GB', got {text!r}")
        size = int(float(found[1]) * units[found[2].lower()])
    if size <= 0:
        raise ValueError(f"{argument}: expected more than 0 bytes, got {text!r}")
    return size
