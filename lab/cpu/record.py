"""Writes results as lines of JSON."""

import json
from pathlib import Path
from typing import Any


class Record:
    """A file to which lines of JSON are appended, each as soon as it is known. Without a path, nothing is written."""

    def __init__(self, path: Path | None, **always: Any) -> None:
        self.path, self.always = path, always

    def add(self, **line: Any) -> None:
        """Writes one line, with what belongs in every line."""
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({**self.always, **line}) + "\n")
