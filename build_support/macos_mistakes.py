"""Makes deliberate mistakes in the Mac build. The build must report each one with the expected message.

    python -m build_support.macos_mistakes   # after `python -m build_support.macos`, whose objects it links

Each mistake is made in a copy of the sources and also in a copy of the stand-in headers. The two copies agree with each
other, so only Apple's metadata or PyTorch's real libraries can reveal the mistake.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from build_support import macos
from softmetal.apple import api_check


@dataclass(frozen=True)
class Mistake:
    """A deliberate mistake: a text to replace, the source to compile again, and a part of the expected report."""

    what: str
    before: str
    after: str
    source: str
    report: str


MISTAKES = (
    Mistake(
        "a wrong selector",
        "setThreadgroupMemoryLength:",
        "setThreadgroupMemorySize:",
        "encoder.mm",
        "setThreadgroupMemorySize:atIndex:]: Apple's MTLComputeCommandEncoder has no such method",
    ),
    Mistake(
        "a wrong encoding",
        "setBytes:(const void*)bytes length:(NSUInteger)length",
        "setBytes:(const void*)bytes length:(int)length",
        "encoder.mm",
        "-[MTLComputeCommandEncoder setBytes:length:atIndex:]: encoding",
    ),
    Mistake(
        "a wrong enum value",
        "MTLLanguageVersion3_1 = (3 << 16) + 1",
        "MTLLanguageVersion3_1 = (3 << 16) + 2",
        "library.mm",
        "enum MTLLanguageVersion3_1: 196610, Apple's is 196609",
    ),
    Mistake(
        "a method of macOS 15 without its guard",
        "respondsToSelector:@selector(setMathMode:)",
        "respondsToSelector:@selector(setFastMathEnabled:)",
        "library.mm",
        "sends setMathMode: of macOS 15.0 without asking respondsToSelector:",
    ),
    Mistake(
        "a symbol that PyTorch does not export",
        "id<MTLDevice> device() {",
        "}\nnamespace at::mps {\nvoid notExported();\n}\n"
        "namespace marlin::mps {\nid<MTLDevice> device() {\n  at::mps::notExported();",
        "pytorch_internals.mm",
        "undefined symbol: __ZN2at3mps11notExportedEv",
    ),
)


def spoil(folder: Path, mistake: Mistake) -> int:
    """Makes the mistake in every file below a folder. Returns the number of changed files."""
    changed = 0
    for path in filter(Path.is_file, folder.rglob("*")):
        text = path.read_text()
        if mistake.before in text:
            path.write_text(text.replace(mistake.before, mistake.after))
            changed += 1
    return changed


def report_of(mistake: Mistake, objects: list[Path]) -> str:
    """Builds with the mistake. Returns the error message, or an empty string if the build succeeds."""
    with tempfile.TemporaryDirectory(dir=macos.OUT) as name:
        root = Path(name)
        shutil.copytree(macos.ROOT / "csrc", root / "csrc")
        shutil.copytree(macos.ROOT / "kernels", root / "kernels")
        stand_ins = Path(shutil.copytree(api_check.INCLUDE, root / "include"))
        if not spoil(root, mistake):
            return f"{mistake.before!r} is nowhere: this mistake needs a new row"
        product = root / f"csrc_mps_{mistake.source}.o"
        command = [*macos.compiler(), *macos.compile_flags(macos.PINNED, root, stand_ins, root / "frameworks")]
        try:
            macos.compile_object(command, root / "csrc" / "mps" / mistake.source, product)
            others = [path for path in objects if path.name != product.name]
            macos.check_api([*others, product], macos.PINNED, root, stand_ins)
            macos.link([*others, product], root / macos.MODULE)
        except macos.MacBuildError as error:
            return str(error)
    return ""


def main() -> int:
    """Makes every mistake. Returns 1 if the build misses any of them."""
    objects = sorted(macos.objects_folder(macos.PINNED).glob("*.o"))
    missed = 0
    for mistake in MISTAKES:
        report = report_of(mistake, objects)
        found = next((line for line in report.splitlines() if mistake.report in line), None)
        missed += found is None
        print(f"{mistake.what}: {'reported: ' + found.strip() if found else 'NOT REPORTED: ' + report}", flush=True)
    print(f"== {len(MISTAKES) - missed} of {len(MISTAKES)} deliberate mistakes reported")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
