"""Counts registers, instructions and waits in the listing of a kernel that Mesa's offline compiler prints."""

import collections
import re
import struct
from pathlib import Path

from chain import Fail


def shaderdb(log):
    """Parses Mesa's statistics of the main program, which Mesa prints before those of other programs."""
    m = re.search(
        r"(\d+) inst, (\d+) alu, (\d+) fscib, (\d+) ic, (\d+) bytes, (\d+) regs, (\d+) uniforms, "
        r"(\d+) scratch, (\d+) threads, (\d+) loops, (\d+):(\d+) spills:fills",
        log,
    )
    if not m:
        raise Fail("asahi_clc", "no statistics line in its output:\n" + log.strip())
    k = ["inst", "alu", "fscib", "ic", "bytes", "regs", "uniforms", "scratch", "threads", "loops", "spills", "fills"]
    return dict(zip(k, map(int, m.groups()), strict=True))


def blob(path):
    """Returns the header fields and the code of the first kernel binary in the C file that asahi_clc wrote."""
    t = Path(path).read_text()
    for m in re.finditer(r"static const uint32_t (\w+)\[(\d+)\] = \{(.*?)\};", t, re.S):
        w = [int(x, 16) for x in re.findall(r"0x[0-9a-f]+", m.group(3))]
        b = struct.pack(f"<{len(w)}I", *w)
        _, main, msize, bsize = struct.unpack_from("<4I", b, 0)
        if not (0 < msize <= bsize <= len(b)):
            continue
        for hs in range(32, 64, 4):
            if hs + bsize <= len(b) < hs + bsize + 4:
                break
        else:
            continue
        # After the first four words, the layout is: rodata as {u32, u16, u16}; then u16 fields: registers of the
        # program, registers of the preamble, push count, the three sizes of the threadgroup, threadgroup memory,
        # imageblock.
        _, _, _, wx, wy, wz, local, _ = struct.unpack_from("<8H", b, 24)
        return {
            "binary": b[hs : hs + bsize],
            "main": main,
            "msize": msize,
            "local": local,
            "wg": (wx, wy, wz),
        }
    raise Fail("asahi_clc", "no kernel binary in the compiler output")


Ins = collections.namedtuple("Ins", "off size op bytes target text")


#              I8 I16 I32 F16 U8N S8N U16N S16N RGB10A2 - SRGBA8 - RG11B10F RGB9E5
FORMAT_BYTES = (1, 2, 4, 2, 1, 1, 2, 2, 4, 0, 1, 0, 4, 4)


def listing(log, which):
    """Returns the instructions of the first main program or preamble, from the listing of the patched agx_pack.c."""
    m = re.search(r"(?m)^agxlist\t" + which + r"\n(.*?)^agxlist\tend$", log, re.S)
    out = []
    for line in m.group(1).split("\n")[:-1] if m else ():
        off, size, op, fmt, comps, target, text = line.split("\t", 6)
        text, target = text.strip(), int(target)
        if target >= 0:
            text = re.sub(r"#[0-9a-f]{5,}", f"-> {target:#x}", text)
        text = re.sub(r", #[0-9a-f]{9,}", "", text)  # a pointer of the compiler
        fmt = int(fmt)
        out.append(Ins(int(off), int(size), op, int(comps) * FORMAT_BYTES[fmt] if fmt >= 0 else 0, target, text))
    return out


def checked(ins, db, b):
    """Returns the instructions. Raises Fail if they contradict the statistics, or the size or jumps of the binary."""
    if len(ins) != db["inst"]:
        raise Fail("listing", f"{len(ins)} instructions listed, {db['inst']} in the statistics")
    size = sum(i.size for i in ins)
    if not ins or ins[-1].off + ins[-1].size - ins[0].off != size or size + 16 != b["msize"] or ins[0].off != b["main"]:
        raise Fail("listing", f"{size} bytes listed, {b['msize']} - 16 in the binary")
    for i in ins:
        if i.op.startswith("jmp") and i.off + struct.unpack_from("<i", b["binary"], i.off + 2)[0] != i.target:
            raise Fail("listing", f"jump at {i.off:#x} does not go to {i.target:#x} in the binary")
    return ins


# Clocks of a slow integer or complex instruction for one simdgroup (metal-benchmarks). A separate unit executes it, so
# the scheduler can issue other instructions meanwhile.
COMPLEX_CLOCKS = dict.fromkeys(
    [
        "convert",
        "imad",
        "bfi",
        "bfeil",
        "extr",
        "asr",
        "floor",
        "ceil",
        "trunc",
        "roundeven",
        "exp2",
        "log2",
        "bitrev",
        "popcount",
        "ffs",
        "intl",
    ],
    4,
) | {"rcp": 6, "rsqrt": 8, "srsqrt": 8, "sin_pt_1": 7, "sin_pt_2": 7}
MATRIX, SHUFFLE, REDUCE, JUMP = 17, 2, 15, 2
JUMPS = ("while_", "jmp_", "if_", "else_", "pop_exec", "push_exec")
MEMORY = {
    "device_load": "device_load_bytes",
    "device_store": "device_store_bytes",
    "local_load": "threadgroup_load_bytes",
    "local_store": "threadgroup_store_bytes",
}
FIGURES = [
    "issue",
    "ic_cycles",
    "matrix_cycles",
    "simd_cycles",
    "est_cycles",
    "device_load_bytes",
    "device_store_bytes",
    "threadgroup_load_bytes",
    "threadgroup_store_bytes",
    "waits",
    "barriers",
    "converts",
    "shuffles",
    "matrix_ops",
    "stack_ops",
]


def cost(instructions):
    """Adds up the costs of instructions. Each instruction of the listing counts once, and a wait costs nothing."""
    total = dict.fromkeys(FIGURES, 0)
    for instruction in instructions:
        base = instruction.op.split(".")[0]
        if base == "wait":
            total["waits"] += 1
            continue
        if base == "simd_matrix_fmadd":
            total["matrix_ops"] += 1
            total["matrix_cycles"] += MATRIX
        elif "shuffle" in base or base.startswith("quad_") or "ballot" in base:
            total["shuffles"] += "shuffle" in base
            total["simd_cycles"] += SHUFFLE
        elif base.startswith("simd_"):
            total["simd_cycles"] += REDUCE
        elif base.startswith(JUMPS):
            total["issue"] += JUMP
        else:
            total["issue"] += 1
            total["ic_cycles"] += COMPLEX_CLOCKS.get(base, 0)
        total["converts"] += base == "convert"
        total["barriers"] += "barrier" in base and not base.startswith("get_sr")
        total["stack_ops"] += base.startswith("stack_")
        if base in MEMORY:
            total[MEMORY[base]] += instruction.bytes
    total["est_cycles"] = max(total["issue"] + total["simd_cycles"] + total["matrix_cycles"], total["ic_cycles"])
    return total


def loops_of(instructions):
    """Returns (first, last, is innermost, depth) of each loop. A loop ends at a jump back to its first instruction."""
    at = {instruction.off: index for index, instruction in enumerate(instructions)}
    spans = {}
    for index, instruction in enumerate(instructions):
        first = at.get(instruction.target) if instruction.op.startswith("jmp") else None
        if first is not None and first <= index:
            spans[first] = max(spans.get(first, 0), index)
    loops = sorted(spans.items())

    def inside(a, b):
        return a != b and a[0] >= b[0] and a[1] <= b[1]

    return [(*loop, not any(inside(o, loop) for o in loops), sum(inside(loop, o) for o in loops)) for loop in loops]


def report(statistics, binary, instructions, preamble):
    result = {
        "half_registers": statistics["regs"],
        "largest_threadgroup": statistics["threads"],
        "threadgroup_bytes": binary["local"],
        "threads_per_threadgroup": list(binary["wg"]),
        "spills": statistics["spills"],
        "fills": statistics["fills"],
        "scratch_bytes": statistics["scratch"],
        "uniforms": statistics["uniforms"],
        "instructions": len(instructions),
        "preamble_instructions": len(preamble),
        "code_bytes": binary["msize"],
        "total": cost(instructions),
        "histogram": dict(collections.Counter(i.op for i in instructions).most_common()),
        "loops": [],
        "hot_loop": None,
    }
    for first, last, is_innermost, depth in loops_of(instructions):
        part = instructions[first : last + 1]
        result["loops"].append(
            {
                "start": part[0].off,
                "end": part[-1].off,
                "innermost": is_innermost,
                "depth": depth,
                "instructions": len(part),
                "code_bytes": part[-1].off + part[-1].size - part[0].off,
                **cost(part),
                "histogram": dict(collections.Counter(i.op for i in part).most_common()),
            }
        )
    innermost = [index for index, loop in enumerate(result["loops"]) if loop["innermost"]]
    if innermost:
        result["hot_loop"] = max(innermost, key=lambda index: result["loops"][index]["est_cycles"])
    return result
