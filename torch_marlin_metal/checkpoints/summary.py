"""Generates the documentation page that lists the checkpoint formats: what is read and what is refused."""

from collections.abc import Sequence

from torch_marlin_metal.checkpoints.exporters import EXPORTERS
from torch_marlin_metal.checkpoints.known_formats import FORMATS


def formats_page() -> str:
    """Returns the text of docs/checkpoints.md, generated from the list of formats."""
    parts = [
        """# Which checkpoints can be read

`torch_marlin_metal.convert.formats_page()` generates this page from the list of formats
(`known_formats.py`), and a test compares the two.

Readers do not quantize again: they keep the codes, scales and zero points that the producer stored. A layer that no
weight format can represent exactly is refused. `read_layers(..., on_unsupported=...)` decides what happens then:
"error" raises an error that names the layer, "skip" leaves it out, and "dequantize" decodes it to floats if the
table says "dequantized on request".

One value is rounded. compressed-tensors divides NVFP4 weights by a global scale. This package multiplies by the
inverse, which it rounds to fp32. A weight then has a relative error of at most 3 * 2^-24; division in fp32, as the
producer does it, has at most 2 * 2^-24.
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
        f"`convert.export_checkpoint` writes {targets}. [Format on disk](on-disk-format.md) lists its limits.\n"
    )
    return "\n".join(parts)


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| {} | {} |".format(*row) for row in (head, ("---", "---"), *rows)]) + "\n"
