"""Draws docs/images/tree.svg: the folders of two revisions side by side, with their numbers of files and lines.

python scripts/draw_tree.py e8719fe HEAD
"""

import argparse
import subprocess
from collections import Counter
from html import escape
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"kernels": 2, "csrc": 3, "torch_marlin_metal": 3, "softmetal": 2, "tests": 3}  # folder: depth to show
HIDDEN = ("tests/data", "tests/models")  # models and checkpoints of other programs
TEXT = (".py", ".cpp", ".h", ".mm", ".metal", ".inc", ".md", ".sh")
ROW, WIDTH, TOP = 19, 470, 76


def git(*arguments: str) -> str:
    """Returns what a git command prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def rows(revision: str) -> list[tuple[str, int, int]]:
    """Returns folders with the number of files directly inside and the number of lines in all text files below."""
    files, lines = Counter[str](), Counter[str]()
    for path in map(PurePosixPath, git("ls-tree", "-r", "--name-only", revision).split("\n")):
        if path.parts and path.parts[0] in ROOMS and not str(path).startswith(HIDDEN):
            files[str(PurePosixPath(*path.parts[:-1]))] += 1
            if path.suffix in TEXT:
                length = git("show", f"{revision}:{path}").count("\n")
                for parent in list(path.parents)[:-1]:
                    lines[str(parent)] += length
    folders = [name for name in lines if len(PurePosixPath(name).parts) <= ROOMS[name.split("/")[0]]]
    order = {room: place for place, room in enumerate(ROOMS)}
    folders.sort(key=lambda name: (order[name.split("/")[0]], name))
    return [(name, files[name], lines[name]) for name in folders]


def column(title: str, found: list[tuple[str, int, int]], x: int, largest: int) -> list[str]:
    """Returns the SVG elements of one revision. The length of a bar is a folder's lines / `largest`."""
    out = [
        f'<text x="{x}" y="34" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<g font-size="11" fill="#57606a" text-anchor="end"><text x="{x + 262}" y="56">files</text>'
        f'<text x="{x + 322}" y="56">lines</text></g>',
    ]
    for place, (name, files, lines) in enumerate(found):
        y = TOP + place * ROW
        path = PurePosixPath(name)
        depth = len(path.parts) - 1
        weight = ' font-weight="bold"' if depth == 0 else ""
        crowded = ' fill="#a40e26" font-weight="bold"' if files > 20 else ""
        out.append(
            f'<text x="{x + 16 * depth}" y="{y}" font-family="monospace"{weight}>{escape(path.name)}/</text>'
            f'<text x="{x + 262}" y="{y}" text-anchor="end"{crowded}>{files or ""}</text>'
            f'<text x="{x + 322}" y="{y}" text-anchor="end">{lines:,}</text>'
            f'<rect x="{x + 332}" y="{y - 9}" width="{max(1, 110 * lines // largest)}" height="9" fill="#74c0fc"/>'
        )
    return out


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    arguments = parser.parse_args()
    before, after = rows(arguments.before), rows(arguments.after)
    largest = max(lines for _, _, lines in before + after)
    height = TOP + ROW * max(len(before), len(after)) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH + 20} {height}" '
        'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" font-size="13" fill="#1f2328">',
        "<title>The folders before and after: files right inside a folder, lines below it; red: more than 20 files"
        "</title>",
        f'<rect width="{2 * WIDTH + 20}" height="{height}" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
        *column("before", before, 24, largest),
        *column("after", after, WIDTH + 24, largest),
        "</svg>",
    ]
    (ROOT / "docs/images/tree.svg").write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
