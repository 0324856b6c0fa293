"""Counts memory traffic, barriers and matrix products of each variant with the software Metal device.

The operator runs the plan of each variant in the device's checked mode, which observes every load and store. "total"
counts every access, and "distinct" counts each accessed address once. Their ratio is the average number of accesses to
a byte. The program measures no times, and runs only on Linux. Sizes are small because checked mode is slow.

    python -m lab.software.traffic --rows 1 4 16 64 --columns 256 --k 512 --format uint4b8 --markdown
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import softmetal

softmetal.install()  # before anything asks torch about mps
import torch  # noqa: E402

import torch_marlin_metal as tmm  # noqa: E402
from tests.support import reference  # noqa: E402

OPS = torch.ops.torch_marlin_metal

VARIANTS = ("auto", "gemv", "double_buffered", "single_stage", "striped")
ROWS = (1, 4, 16, 64)
# Buffer slots of kernels/shared/slots.h. The slots of the packed weight, of the parameters, and of tensors that no
# product here has are left out.
SLOTS = {0: "activations", 2: "scales", 3: "zeros", 4: "global_scale", 5: "lut", 8: "out", 9: "partials"}
PARAMETERS = 10
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Traffic:
    """The counts of one product over all its dispatches.

    "total" counts every access, "distinct" each accessed byte once.
    """

    variant: str
    weight_format: str
    dtype: str
    M: int
    N: int
    K: int
    kernels: list[str]
    threadgroups: list[int]
    total: dict[str, int]
    distinct: dict[str, int]
    threadgroup_memory: int
    barriers: int  # per threadgroup of the product
    mma: int  # 8x8x8 matrix products


def measure(variant: str, weight_format: str, dtype: str, M: int, N: int, K: int, group_size: int) -> Traffic:
    group_size = tmm.WEIGHT_FORMATS[weight_format].fixed_group_size or group_size
    weight = reference.make_weight(weight_format, K, N, group_size).to("mps")
    a = torch.randn((M, K), generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype]).to("mps")
    with softmetal.checked():
        OPS.gemm(a[:1], weight.b_packed, weight.scales, **weight.arguments)  # the first product also runs the probe
        torch.mps.synchronize()
        softmetal.faults()
        OPS.gemm(a, weight.b_packed, weight.scales, variant=variant, **weight.arguments)
        records = softmetal.counters()
    given = {"activations", "scales", "out", *weight.arguments}
    if any(record.kernel.startswith("reduce") for record in records):
        given.add("partials")
    total, distinct = (dict.fromkeys((*SLOTS.values(), "weights"), 0) for _ in range(2))
    for record in records:
        assert record.buffers is not None, "checked mode counts bytes"
        for slot, counts in record.buffers.items():
            if slot == PARAMETERS:
                continue
            # SLOTS does not contain the packed weight, so any other slot is counted as "weights".
            name = SLOTS[slot] if SLOTS.get(slot) in given else "weights"
            total[name] += counts["bytes_read"] + counts["bytes_written"]
            distinct[name] += counts["distinct_read"] + counts["distinct_written"]
    return Traffic(
        variant, weight_format, dtype, M, N, K,
        kernels=[r.kernel for r in records],
        threadgroups=[r.threadgroups for r in records],
        total=total,
        distinct=distinct,
        threadgroup_memory=sum((r.threadgroup_bytes_read or 0) + (r.threadgroup_bytes_written or 0) for r in records),
        barriers=math.ceil(records[0].threadgroup_barriers / records[0].threadgroups),
        mma=sum(r.mmas for r in records),
    )  # fmt: skip


def table(rows: Iterable[Traffic], *, markdown: bool) -> str:
    operands = ("weights", "scales", "zeros", "activations", "partials")
    head = ["variant", "format", "M x N x K", "threadgroups", *(f"{o} total / distinct" for o in operands)]
    head += ["threadgroup memory", "barriers", "MMA"]
    cells = [head]
    for row in rows:
        traffic = [f"{row.total[o]} / {row.distinct[o]}" if row.total[o] else "-" for o in operands]
        shape = f"{row.M} x {row.N} x {row.K}"
        groups = " + ".join(map(str, row.threadgroups))
        cells.append(
            [f"{row.variant} ({row.kernels[0].split('_' + row.weight_format)[0]})", row.weight_format, shape, groups]
        )
        cells[-1] += [*traffic, str(row.threadgroup_memory), str(row.barriers), str(row.mma)]
    if markdown:
        lines = [f"| {' | '.join(line)} |" for line in cells]
        return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=VARIANTS, metavar="NAME")
    parser.add_argument("--format", nargs="+", default=["uint4b8"], choices=list(tmm.WEIGHT_FORMATS), dest="formats")
    parser.add_argument("--dtype", default="float16", choices=DTYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="M")
    parser.add_argument("--columns", type=int, default=256, metavar="N")
    parser.add_argument("--k", type=int, default=512, metavar="K")
    parser.add_argument("--group-size", type=int, default=64)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true")
    output.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    rows = [
        measure(variant, weight_format, options.dtype, M, options.columns, options.k, options.group_size)
        for weight_format in options.formats
        for M in options.rows
        for variant in options.variants
    ]
    print(
        json.dumps([asdict(row) for row in rows], indent=1) if options.json else table(rows, markdown=options.markdown)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
