"""Generates the documentation page that lists the checkpoint formats: what is read and what is refused."""

from collections.abc import Sequence

from torch_marlin_metal.checkpoints.exporters import EXPORTERS
from torch_marlin_metal.checkpoints.known_formats import FORMATS


def formats_page() -> str:
    """Returns the text of docs/formats/checkpoints.md, generated from the list of formats."""
    parts = [
        """# Which checkpoints can be read

`torch_marlin_metal.convert.formats_page()` generates this page from the list of formats
(`known_formats.py`), and a test compares the two.

A reader never quantizes again: it keeps the codes, scales and zero points that the producer stored. The tables below
list what each reader reads and what it refuses. A layer is also refused if no weight format can represent its weights
exactly.

The argument `on_unsupported` of `read_layers` and of `load_quantized` decides what happens to a refused layer:

- `"error"`, the default of `read_layers`, raises an error that names the layer.
- `"skip"` leaves the layer out.
- `"dequantize"`, the default of `load_quantized` and of transformers' `from_pretrained`, decodes the layer to floats.
  Not every layer can be decoded: the tables say "dequantized on request" for those that can. Any other refused layer
  raises the same error as with `"error"`.

Weights of 8 bits are multiplied with activations of 16 or 32 bits. Recipes that round the activations, too, such as
W8A8 and FP8, therefore become more accurate than their producers meant. One scale for a block of 128 x 128 weights is
repeated for each row of the block: 0.125 bits a weight if the scales are of 16 bits, 0.25 bits if they are fp32.
bitsandbytes multiplies an LLM.int8 code by the largest magnitude of its row, then by 1/127 in fp32. The scale here is
that magnitude divided by 127 in fp32, so the two differ by roundings of fp32: both are within 3 * 2^-24 of the exact
value.

compressed-tensors divides NVFP4 weights by a global scale. This package multiplies by the inverse of that scale and
rounds the inverse to fp32, which is one rounding more. So a weight has a relative error of at most 3 * 2^-24. With the
division in fp32, as compressed-tensors computes it, the error is at most 2 * 2^-24.
"""
    ]
    for fmt in FORMATS:
        parts.append(f"## {fmt.title}\n\nThe reader takes {' or '.join(fmt.containers)}.\n")
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
