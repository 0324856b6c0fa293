"""Writes results as lines of JSON."""

import json
from pathlib import Path
from typing import Any


class Record:
    """Appends each result to a file as a line of JSON. Without a path, it writes nothing."""

    def __init__(self, path: Path | None, **always: Any) -> None:
        self.path, self.always = path, always

    def add(self, **line: Any) -> None:
        """Writes one line. The values of `always` are added to it."""
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({**self.always, **line}) + "\n")
