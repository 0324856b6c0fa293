"""Prints the lines of the tracked text files by folder, and the change since the merge base with another branch.

    python3 scripts/lines_by_folder.py [BASE]

BASE is a branch or commit. The default is origin/main, or main if there is no origin/main. If HEAD is BASE itself, the
commit before HEAD is used. Only committed files count. The numbers are information, not a gate.
"""

import subprocess
import sys
from collections import Counter

PRODUCT = ("csrc", "kernels", "torch_marlin_metal")  # these are divided once more
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's name for a tree without files


def git(*arguments: str) -> str:
    """Returns the output of a git command, or "" if it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def folder_of(path: str) -> str:
    """Returns the folder to which a file is counted: two levels in the product's folders, otherwise one."""
    parts = path.split("/")
    depth = 2 if parts[0] in PRODUCT and len(parts) > 2 else 1
    return "/".join(parts[:depth]) if len(parts) > 1 else "."


def lines(commit: str) -> Counter[str]:
    """Returns the lines of each folder at a commit. Binary files have none."""
    found: Counter[str] = Counter()
    for row in git("diff", "--numstat", "--no-renames", EMPTY_TREE, commit).splitlines():
        added, _, path = row.split("\t")
        if added != "-":
            found[folder_of(path)] += int(added)
    return found


def merge_base(given: str) -> str:
    """Returns the commit with which HEAD is compared, or "" if there is none."""
    names = [given] if given else ["origin/main", "main"]
    known = next((name for name in names if git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")), "")
    if given and not known:
        sys.exit(f"lines_by_folder: BASE: expected a branch or commit, got {given!r}")
    base = git("merge-base", "HEAD", known) if known else ""
    return git("rev-parse", "--verify", "--quiet", "HEAD~1") if base == git("rev-parse", "HEAD") else base


def main() -> None:
    """Prints the table."""
    base = merge_base(sys.argv[1] if len(sys.argv) > 1 else "")
    now, before = lines("HEAD"), lines(base) if base else None
    print(f"lines by folder, and the change since {git('rev-parse', '--short', base) if base else 'no other commit'}")
    sums = [(f"{top} in all", (top,)) for top in PRODUCT] + [("the product", PRODUCT), ("all", ())]
    folders = sorted({*now, *(before or ())})
    table = [(folder, {folder}) for folder in folders]
    table += [
        (label, {folder for folder in folders if not tops or folder.split("/")[0] in tops}) for label, tops in sums
    ]
    for label, counted in table:
        total = sum(now[folder] for folder in counted)
        change = "" if before is None else f"{total - sum(before[folder] for folder in counted):+10,}"
        print(f"{label:36}{total:10,}{change}")


if __name__ == "__main__":
    main()
