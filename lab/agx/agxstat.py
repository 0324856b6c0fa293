"""Compiles one Metal kernel for the M1's GPU with Mesa's offline compiler, and prints what it counts as JSON."""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

from chain import DEFAULT_DIR, Chain, Fail, compile_kernel, rewritten
from counts import blob, checked, listing, report, shaderdb
from metal_to_opencl import parse_threads
from metal_tokens import Err


def stored(chain: Chain, text: str, opt: int) -> Path:
    """Returns the path of cached counts. Its hash covers the text, the compilers and the code of this folder."""
    parts = [re.sub(r'(?m)^# \d+ "[^"]*"$', "", text), str(opt)]
    parts += [path.read_text() for path in sorted(Path(__file__).parent.glob("*.[hp]*"))]
    compiler = os.stat(chain.root + "/usr/local/bin/asahi_clc")
    parts += [str(compiler.st_size), str(compiler.st_mtime_ns)]
    folder = Path(chain.root, "counted")
    folder.mkdir(exist_ok=True)
    return folder / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", help="Metal source file")
    parser.add_argument("--dir", default=os.environ.get("AGX_DIR", DEFAULT_DIR), help="what setup.sh made")
    parser.add_argument("--entry", help="host name of the kernel, or name<arguments> of a kernel template")
    parser.add_argument("--threads", default="128", type=parse_threads, help="threads of a threadgroup: N or XxYxZ")
    parser.add_argument("--tg", action="append", default=[], metavar="I=BYTES", help="size of [[threadgroup(I)]]")
    parser.add_argument(
        "-D", action="append", default=[], dest="define", metavar="NAME=VALUE", help="macro, or function constant"
    )
    parser.add_argument("-I", action="append", default=[], dest="inc", metavar="DIR")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--O0", dest="opt", action="store_const", const=0, help="Mesa optimises alone (default)")
    level.add_argument("--O1", dest="opt", action="store_const", const=1, help="LLVM unrolls and cleans up before")
    parser.set_defaults(opt=0)
    parser.add_argument("--asm", action="store_true", help="also print the instructions, on the standard error stream")
    parser.add_argument("--keep", metavar="DIR", help="copy the intermediate files there")
    parser.add_argument("-v", action="store_true", dest="verbose")
    options = parser.parse_args()
    notes: list[str] = []
    chain = None
    try:
        try:
            options.tg = {int(index): int(size) for index, size in (text.split("=") for text in options.tg)}
        except ValueError:
            raise Fail("arguments", "--tg wants INDEX=BYTES") from None
        chain = Chain(options.dir, options.keep, options.verbose)
        name, text = rewritten(chain, options, notes)
        cache = stored(chain, text, options.opt)
        if cache.exists() and not (options.asm or options.keep):
            print(cache.read_text())
            return 0
        log = compile_kernel(chain, options, text)
        statistics = shaderdb(log)
        binary = blob(chain.path("k.c"))
        instructions = checked(listing(log, "main"), statistics, binary)
        found = report(statistics, binary, instructions, listing(log, "preamble"))
        found |= {"entry": name, "source": os.path.basename(options.kernel), "opt": options.opt, "notes": notes}
        if options.asm:
            print(*(f"{i.off:6x}: {i.text}" for i in instructions), sep="\n", file=sys.stderr)
        print(json.dumps(found))
        whole = cache.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(found))
        whole.replace(cache)
        return 0
    except Err as error:
        print(f"agxstat: rewriter failed:\n{error}", file=sys.stderr)
    except Fail as error:
        print(f"agxstat: {error.stage} failed:\n{error}", file=sys.stderr)
    finally:
        if chain:
            chain.close()
    return 1


if __name__ == "__main__":
    sys.exit(main())
