"""Counts the matrices of a checkpoint that become floats, because no weight format holds them."""

from torch_marlin_metal.checkpoints.options import typed
from torch_marlin_metal.checkpoints.reader import CheckpointReader

MB = 1e6
SMALL = 0.01  # share of the bytes that needs no warning: routers of mixtures, which mlx-lm stores in 8 bit


class FloatShare:
    """The layers of a checkpoint that were decoded to floats, by their kind."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._stored: dict[str, int] = {}
        self._held = 0

    def add(self, index: int, kind: str, held: int) -> None:
        """Notes a layer.

        Args:
            index: the layer's index in the reader.
            kind: see `DenseWeight.kind`.
            held: the bytes of its floats.
        """
        self._stored[kind] = self._stored.get(kind, 0) + self._reader.stored_bytes(index)
        self._held += held

    def sentence(self) -> str:
        """Returns a sentence about layers that became floats, with their size; or "" if their share is small."""
        stored, total = self._sizes()
        if stored < SMALL * total:
            return ""
        return (
            f"{self._reader.path}: {stored / total:.0%} of the bytes of its matrices have no weight format and "
            f"became floats: {self._kinds(total)}. They take {self._held / MB:.3g} MB instead of {stored / MB:.3g} MB; "
            f"{typed('on_unsupported', 'error')} refuses them"
        )

    def refusal(self) -> str:
        """Returns a sentence about layers that are refused."""
        stored, total = self._sizes()
        return f"{stored / total:.0%} of the bytes of its matrices ({stored / MB:.3g} MB): {self._kinds(total)}"

    def _sizes(self) -> tuple[int, int]:
        """Returns the bytes in the file of these layers and of all."""
        reader = self._reader
        return sum(self._stored.values()), max(1, sum(map(reader.stored_bytes, range(len(reader)))))

    def _kinds(self, total: int) -> str:
        return ", ".join(f"{kind} ({size / total:.0%})" for kind, size in sorted(self._stored.items()))
