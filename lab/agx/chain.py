"""Compiles one Metal kernel for the M1's GPU in four stages: rewriter, clang, SPIR-V, Mesa's offline compiler."""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from metal_to_opencl import function_constants, rewrite
from metal_tokens import Err, flatten

HERE = os.path.dirname(os.path.realpath(__file__))
# The folder that setup.sh makes by default.
DEFAULT_DIR = os.path.join(os.path.dirname(os.path.dirname(HERE)), "build", "agx")


class Fail(Exception):
    """A stage of the compilation failed. The error has the stage and the message of its program."""

    def __init__(self, stage, msg):
        Exception.__init__(self, msg)
        self.stage = stage


class Chain:
    """Runs the compilers that setup.sh installed, in a working folder for one kernel."""

    def __init__(self, root, keep, verbose):
        self.root = os.path.realpath(root)
        self.keep, self.verbose = keep, verbose
        self.sources = {}  # (file name, line) -> text, for messages
        for f in ("/usr/local/bin/asahi_clc", "/usr/bin/clang-19", "/usr/bin/opt-19", "/usr/bin/llvm-spirv-19"):
            if not os.path.lexists(self.root + f):
                raise Fail("set-up", f"{root}{f} is not here: run sh lab/agx/setup.sh {root} first")
        self.work = tempfile.mkdtemp(prefix="agxstat-", dir=self.root + "/tmp")
        os.chmod(self.work, 0o755)
        self.inner = "/tmp/" + os.path.basename(self.work)
        self.pre = ["chroot", self.root]
        if os.geteuid() != 0:
            self.pre = ["unshare", "--map-root-user", "chroot", self.root]

    def path(self, n):
        return os.path.join(self.work, n)

    def run(self, stage, cmd, env=None):
        """Runs a program in the working folder and returns what it printed."""
        e = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LC_ALL": "C"}
        e.update(env or {})
        if self.verbose:
            print("+", " ".join(cmd), file=sys.stderr)
        full = [*self.pre, "sh", "-c", 'cd "$0" && exec "$@"', self.inner, *cmd]
        try:
            r = subprocess.run(
                full, env=e, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
        except OSError as x:
            raise Fail(stage, str(x)) from x
        if r.returncode != 0:
            how = f"exit status {r.returncode}" if r.returncode > 0 else f"signal {-r.returncode}"
            out = re.sub(r"(?m)^SPIR-V WARNING:\n(?:    .*\n?)*", "", r.stdout)
            lines = out.strip().split("\n")
            if not self.verbose:
                lines = self.readable(lines)
                # Mesa then prints the whole program with its errors. Only the lines with errors are useful.
                if any(x.startswith("NIR validation failed") for x in lines):
                    lines = [
                        x
                        for i, x in enumerate(lines)
                        if x.startswith(("NIR validation", "error:"))
                        or (i + 1 < len(lines) and lines[i + 1].startswith("error:"))
                    ]
            if len(lines) > 40 and not self.verbose:
                lines = [*lines[:30], f"... ({len(lines) - 35} lines left out; all with -v)", *lines[-5:]]
            raise Fail(stage, f"{cmd[0]}: {how}\n" + "\n".join(lines))
        return r.stdout

    def remember(self, flat):
        """Stores each line of the Metal source under the file name and line number that messages will have."""
        name, no = "?", 1
        for line in flat.split("\n"):
            m = re.match(r'# (\d+) "([^"]*)"$', line)
            if m:
                no, name = int(m.group(1)), m.group(2)
                continue
            self.sources.setdefault((name, no), line)
            no += 1

    def readable(self, lines):
        """Returns clang's first 5 errors, with lines of the Metal source in place of the rewritten lines."""
        out, errors, skip = [], 0, False
        for line in lines:
            m = re.match(r"(?:\./)?([^:\s]+):(\d+):(\d+): (fatal error|error|note|warning): (.*)", line)
            if not m:
                if line.startswith(("In file included from", "clang")) or re.match(r"\d+ (errors?|warnings?)\b", line):
                    continue
                if not skip:
                    out.append(line)
                continue
            name, no, kind, msg = os.path.basename(m.group(1)), int(m.group(2)), m.group(4), m.group(5)
            if kind.endswith("error"):
                errors += 1
            # Drops notes that do not lead back to the kernel.
            keep = kind.endswith("error") or (
                kind == "note" and re.search(r"requested here|expanded from|in instantiation|declared here", msg)
            )
            skip = True
            if errors > 5 or not keep or (kind == "note" and name == "msl_shim.h"):
                continue
            msg = re.sub(r"(\w+) __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"\1\2", msg)
            out.append(f"{name}:{no}: {kind}: {msg}")
            if (name, no) in self.sources:
                out.append(f"{no:6} | {self.sources[name, no].rstrip()}")
        if errors > 5:
            out.append(f"... and {errors - 5} more errors (all of them, as clang gave them, with -v)")
        return out or lines

    def close(self):
        """Copies the files to the folder of --keep, if it is set, and removes the working folder."""
        if self.keep:
            dst = self.keep
            os.makedirs(dst, exist_ok=True)
            for f in glob.glob(self.work + "/*"):
                shutil.copy(f, dst)
        shutil.rmtree(self.work, ignore_errors=True)


CLANG = [
    "clang-19",
    "-x",
    "cl",
    "-cl-std=clc++1.0",
    "-target",
    "spir64-unknown-unknown",
    "-Xclang",
    "-finclude-default-header",
    "-Xclang",
    "-cl-ext=+all,-cl_intel_subgroups",
    "-D__opencl_c_subgroups=1",
    "-Dcl_khr_subgroup_shuffle=1",
    "-Dcl_khr_subgroup_shuffle_relative=1",
    "-ffp-contract=fast",
    "-cl-single-precision-constant",
    "-Wno-everything",
    "-ferror-limit=12",
    "-fno-discard-value-names",
    "-emit-llvm",
    "-S",
    "-I.",
]


# --O1 inlines, moves scalars out of memory, unrolls the loops with an unroll pragma, and cleans up. Unlike -O2, it
# neither hoists nor merges code, and unrolls no other loop.
O1 = (
    "cgscc(inline),function(sroa,early-cse,simplifycfg,instcombine<no-verify-fixpoint>,loop-simplify,loop(loop-rotate),"
    "instcombine<no-verify-fixpoint>,loop(indvars,loop-unroll-full),sroa,early-cse,instcombine<no-verify-fixpoint>,"
    "simplifycfg,adce)"
)


def rewritten(ch, a, notes):
    """Rewrites the kernel that the options name. Returns the kernel's host name and the text for clang."""
    try:
        text = flatten(a.kernel, [*a.inc, os.path.dirname(os.path.abspath(a.kernel))])
        fcn = function_constants(text)
        fc, defs = {}, []
        for d in a.define:
            n, _, v = d.partition("=")
            if n in fcn:
                fc[n] = v or "1"
            else:
                defs.append("-D" + d)
        Path(ch.path("in.metal")).write_text(text)
        ch.remember(text)
        ch.run(
            "preprocessor",
            [
                "clang-19",
                "-E",
                "-x",
                "c++",
                "-std=c++17",
                "-undef",
                "-nostdinc",
                "-Wno-everything",
                "-D__METAL__=1",
                "-D__METAL_VERSION__=310",
                "-D__METAL_MACOS__=1",
                "-D__HAVE_BFLOAT__=1",
                *defs,
                "in.metal",
                "-o",
                "pp.i",
            ],
        )
        out, host = rewrite(Path(ch.path("pp.i")).read_text(), a.entry, a.threads, a.tg, fc, notes)
    except Err as e:
        raise Fail("rewriter", str(e)) from e
    return host, out


def compile_kernel(ch, a, text):
    """Compiles the text that rewritten() returned. Returns what Mesa printed."""
    Path(ch.path("k.clcpp")).write_text(text)
    shutil.copy(os.path.join(HERE, "msl_shim.h"), ch.path("msl_shim.h"))
    opt = ["-O0", "-Xclang", "-disable-O0-optnone"]
    try:
        ch.run("clang", CLANG + opt + ["-DMSL_VEC_DIRECT", "k.clcpp", "-o", "k.ll"])
    except Fail:
        ch.run("clang", CLANG + opt + ["k.clcpp", "-o", "k.ll"])
    code = Path(ch.path("k.ll"))
    # With this line, the SPIR-V translator would leave the sub-group queries as calls.
    code.write_text(re.sub(r"(?m)^!opencl\.cxx\.version.*\n", "", code.read_text()))
    if a.opt == 1:
        # clang -O0 marks plain functions noinline.
        code.write_text(re.sub(r"(?m)^(attributes #\d+ = \{.*?) noinline\b", r"\1", code.read_text()))
        ch.run(
            "opt",
            [
                "opt-19",
                "-S",
                "-passes=" + O1,
                "-inline-threshold=100000",
                "-unroll-threshold=100",
                "k.ll",
                "-o",
                "k1.ll",
            ],
        )
        # Loop hints on rotated loops become merge instructions that Mesa's SPIR-V reader rejects.
        code.write_text(re.sub(r", !llvm\.loop !\d+", "", Path(ch.path("k1.ll")).read_text()))
    ch.run("llvm-as", ["llvm-as-19", "k.ll", "-o", "k.bc"])
    ch.run(
        "llvm-spirv",
        ["llvm-spirv-19", "--spirv-max-version=1.4", "--spirv-ext=-all,+SPV_KHR_float_controls", "k.bc", "-o", "k.spv"],
    )
    listing = {"AGX_LISTING": "1", "AGX_MESA_DEBUG": "shaderdb,internal"}
    return ch.run("asahi_clc", ["asahi_clc", "k.spv", "k.h", "k.c"], listing)
