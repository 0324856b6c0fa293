"""Prints the planner's plans of 10,000 products, one per line, to compare two states of the planner.

    .venv/bin/python scripts/dump_plans.py > before.txt     # then change the planner, build, and
    .venv/bin/python scripts/dump_plans.py | diff before.txt -

A line contains the product, the chosen tiling, its estimated seconds, its launches with all sizes and constants, and a
hash of all other candidates. The products are random but the same in every run. Each format has its own random numbers,
so a new format does not change the products of other formats.
"""

import hashlib
import random

from torch_marlin_metal import WEIGHT_FORMATS
from torch_marlin_metal.extension import native

PRODUCTS, EXPERT_PRODUCTS = 11_000, 3_000  # the planner refuses a tenth, because not all GPUs have tensor units
K_SIZES = (8, 16, 40, 64, 200, 256, 1024, 1504, 2048, 2880, 4096, 5120, 8192, 11008, 14336, 16384)
N_SIZES = (1, 3, 4, 32, 63, 100, 128, 1000, 1024, 2880, 4096, 5760, 11008, 14336, 32000, 151936)
M_SIZES = (*range(1, 10), 12, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 128, 255, 256, 512, 1000, 2048, 4096)
FLOATS = ("float16", "bfloat16", "float32")


def described(dispatches: list[dict[str, object]]) -> str:
    """Returns the launches as text. A launch of PyTorch's own kernel appears only by name."""
    return " then ".join(str(dispatch["text"]) for dispatch in dispatches)


def weight_of(rng: random.Random, name: str) -> dict[str, object]:
    """Returns the arguments that describe a weight of a format."""
    fmt = WEIGHT_FORMATS[name]
    K = rng.choice(K_SIZES)
    group_size = fmt.fixed_group_size or rng.choice((16, 32, 64, 128, 256, K))
    return {"K": K, "N": rng.choice(N_SIZES), "weight_format": name, "group_size": group_size}


def gemm_line(rng: random.Random, name: str, chip: str, cores: int) -> str:
    fmt = WEIGHT_FORMATS[name]
    scales = rng.choice(FLOATS) if fmt.scale_coding == "floating" else "uint8"
    zeros = rng.choice(FLOATS if fmt.zeros_role == "bias" else (*FLOATS, "uint8"))
    problem: dict[str, object] = {
        "chip": chip,
        "cores": cores,
        "half_subnormals": rng.random() < 0.8,
        "M": rng.choice(M_SIZES),
        **weight_of(rng, name),
        "activations": rng.choice(FLOATS),
        "scales": scales,
        "zeros": zeros,
        "has_perm": rng.random() < 0.2,
        "has_global_scale": fmt.has_global_scale and rng.random() < 0.5,
        "has_bias": rng.random() < 0.3,
        "variant": rng.choice(("auto", "auto", "auto", *native.gemm_variants())),
    }
    try:
        rows, chosen, _ = native.gemm_plans(**problem, tuned=False, own_system=False)
    except (ValueError, RuntimeError) as error:
        return f"gemm {problem} -> {type(error).__name__}: {error}"
    tiling, _, _, seconds, dispatches = rows[chosen]
    candidates = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    return f"gemm {problem} -> {tiling} {seconds!r} of {len(rows)} ({candidates}): {described(dispatches)}"


def experts_line(rng: random.Random, name: str, chip: str, cores: int) -> str:
    experts = rng.choice((1, 4, 8, 32, 128))
    problem: dict[str, object] = {
        "chip": chip,
        "cores": cores,
        "tokens": rng.choice(M_SIZES),
        "top_k": rng.choice([k for k in (1, 2, 4, 8) if k <= experts]),
        "experts": experts,
        **weight_of(rng, name),
        "activations": rng.choice(FLOATS),
        "rows_by_slot": rng.random() < 0.3,
        "reduce": rng.random() < 0.4,
        "variant": rng.choice(("auto", "auto", "auto", "gemv", "fused", "tensor")),
    }
    try:
        tiling, dispatches, gated = native.moe_plan(**problem)
    except (ValueError, RuntimeError) as error:
        return f"moe_gemm {problem} -> {type(error).__name__}: {error}"
    return f"moe_gemm {problem} -> {tiling} gated={gated}: {described(dispatches)}, {dispatches!r}"


def main() -> None:
    """Prints the lines."""
    chips = [(name, cores) for name, _, most, fewest, _ in native.chips() for cores in sorted({most, fewest})]
    for name in WEIGHT_FORMATS:
        for line, count in ((gemm_line, PRODUCTS), (experts_line, EXPERT_PRODUCTS)):
            rng = random.Random(f"{name} {line.__name__}")
            for i in range(-(-count // len(WEIGHT_FORMATS))):
                print(line(rng, name, *chips[i % len(chips)]))


if __name__ == "__main__":
    main()
