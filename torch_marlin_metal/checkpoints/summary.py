"""The formats that are read and the variants that are refused, as a page of the documentation."""

from collections.abc import Sequence

from torch_marlin_metal.checkpoints.exporters import EXPORTERS
from torch_marlin_metal.checkpoints.known_formats import FORMATS


def formats_page() -> str:
    """Returns docs/checkpoints.md, made from the list of formats."""
    parts = [
        """# Which checkpoints can be read

`torch_marlin_metal.convert.formats_page()` makes this page from the list of formats (`known_formats.py`).
A test compares the two.

Every reader gives the codes, scales and zero points that the producer stored, so the weight is the producer's own.
A layer that cannot be represented so is refused. `read_layers(..., on_unsupported=...)` decides what happens then:
"error" raises an error that names the layer, "skip" leaves it out, and "dequantize" decodes it to floats if the
table says that it can.

There is one exception, of rounding. The global scale of compressed-tensors' NVFP4 divides, and its inverse is
rounded to fp32. A weight then differs from the exact quotient by at most 3 * 2^-24 of itself; the producer's own
fp32 arithmetic, by at most 2 * 2^-24.
"""
    ]
    for fmt in FORMATS:
        parts.append(f"## {fmt.title}\n\nRead from: {'; '.join(fmt.containers)}.\n")
        parts.append(_table(("read", "weight format"), fmt.variants))
        if fmt.refused:
            parts.append(_table(("refused", "because"), fmt.refused))
    targets = ", ".join(EXPORTERS)
    parts.append(
        "## Exports\n\n"
        f"`convert.export_checkpoint` writes {targets}. [Format on disk](on-disk-format.md) has its limits.\n"
    )
    return "\n".join(parts)


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| {} | {} |".format(*row) for row in (head, ("---", "---"), *rows)]) + "\n"
