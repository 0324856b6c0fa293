"""What is read and what is refused, as a page of the documentation."""

from collections.abc import Sequence

from torch_marlin_metal.convert.catalogue import FORMATS
from torch_marlin_metal.convert.export import EXPORTERS


def formats_page() -> str:
    """Returns docs/checkpoints.md, made from the registry."""
    parts = [
        """# Which checkpoints work

Made from the registry of readers by `torch_marlin_metal.convert.formats_page()`; a test compares it.

Every reader gives the codes, scales and zero points that the producer stored, so the weight is the producer's own. What
cannot be represented so is refused by name: `read_layers(..., on_unsupported=...)` raises ("error"), leaves it out
("skip"), or decodes it to floats where the table says so ("dequantize").

One exception, of rounding: the global scale of compressed-tensors' NVFP4 divides, and its inverse is rounded to fp32. A
weight is then within 3 * 2^-24 of itself of the exact quotient; the producer's own fp32 arithmetic is within 2 * 2^-24.
"""
    ]
    for fmt in FORMATS:
        parts.append(f"## {fmt.title}\n\nComes as: {'; '.join(fmt.containers)}.\n")
        parts.append(_table(("read", "weight format"), fmt.variants))
        if fmt.refused:
            parts.append(_table(("refused", "because"), fmt.refused))
    parts.append(f"## Exports\n\n`convert.export_checkpoint` writes {', '.join(EXPORTERS)}; see [format](format.md).\n")
    return "\n".join(parts)


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| {} | {} |".format(*row) for row in (head, ("---", "---"), *rows)]) + "\n"
