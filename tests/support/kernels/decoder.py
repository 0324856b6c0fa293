"""Launches the kernels of kernels/decoder/ as csrc/decoder/ops_mps.mm does."""

import torch

from tests.support.kernels.launch import (
    ELEMENT_NAMES,
    Guarded,
    element_type,
    facts,
    launch,
    launch_elementwise,
    number,
    parameters,
    place,
    place_output,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_silu", "limited_silu")  # in the order of the enum


def run_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    gap: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the norm of `x [M, N]` and, with a residual, the sum.

    `gap` unused elements lie between two rows of `x`.
    """
    M, N = x.shape
    out, total = place_output((M, N), x.dtype), place_output((M, N), x.dtype)
    fields = {"x_stride": N + gap, "residual_stride": N if residual is not None else 0, "columns": N, "eps": eps}
    buffers = {
        "X": place(x, row_stride=N + gap),
        "NormWeight": place(weight),
        "Norm": out,
        "Params": parameters(
            "NormParams",
            **fields,
            weight_offset=offset,
            weight_type=element_type(weight.dtype),
            has_residual=int(residual is not None),
        ),
    }
    if residual is not None:
        buffers |= {"Residual": place(residual), "Sum": total}
    launch(
        "rms_norm",
        buffers,
        group=(facts()["norm_threads"][str(N)], 1, 1),
        groups=(M, 1, 1),
        element=ELEMENT_NAMES[x.dtype],
        threadgroup_bytes=number("kNormBytes"),
    )
    return out.read((M, N), x.dtype), None if residual is None else total.read((M, N), x.dtype)


def run_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *flags: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rotated q and k `[B, heads, S, D]`. In the inputs' memory, the heads of a token are adjacent."""
    (B, q_heads, S, D), k_heads, columns = q.shape, k.shape[1], cos.shape[2]
    rotary_size = 2 * columns if "PerPair" in flags else columns
    outs = [place_output(t.shape, q.dtype) for t in (q, k)]
    fields: dict[str, int] = {}
    for name, heads in (("q", q_heads), ("k", k_heads)):
        fields |= {f"{name}.batch": S * heads * D, f"{name}.head": D, f"{name}.token": heads * D}
    for name, table in (("cos", cos), ("sin", sin)):
        fields |= {f"{name}.batch": 0 if len(table) == 1 else S * columns, f"{name}.token": columns}
    params = parameters(
        "RotaryParams",
        **fields,
        q_heads=q_heads,
        k_heads=k_heads,
        tokens=S,
        head_size=D,
        rotary_size=rotary_size,
        table_type=element_type(cos.dtype),
        flags=sum(number(f"kRotary{flag}") for flag in flags),
    )
    width, height = number("kRotaryWidth"), number("kRotaryHeight")
    launch(
        "rotary",
        {
            "RotaryQ": place(q.transpose(1, 2)), "RotaryK": place(k.transpose(1, 2)), "Cos": place(cos),
            "Sin": place(sin), "RotatedQ": outs[0], "RotatedK": outs[1], "Params": params,
        },
        group=(width, height, 1),
        groups=(-(-(D - rotary_size // 2) // width), -(-(q_heads + k_heads) // height), B * S),
        element=ELEMENT_NAMES[q.dtype],
    )  # fmt: skip

    def result(out: Guarded, shape: torch.Size, flag: str) -> torch.Tensor:
        batches, heads, tokens, size = shape
        if flag in flags:
            return out.read((batches, tokens, heads, size), q.dtype).transpose(1, 2)
        return out.read(tuple(shape), q.dtype)

    return result(outs[0], q.shape, "TokenRowsQ"), result(outs[1], k.shape, "TokenRowsK")


def run_write_cache(k: torch.Tensor, v: torch.Tensor, length: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes k and v `[B, heads, S, size]` into a cache of `length` tokens filled with 7, and returns the cache.

    k is stored as `[B, S, heads, size]`, and v as `[B, heads, S, size]`.
    """
    (B, heads, S, k_size), v_size = k.shape, v.shape[3]
    caches = [torch.full((B, heads, length, size), 7.0, dtype=k.dtype) for size in (k_size, v_size)]
    placed = [place(cache) for cache in caches]
    params = parameters(
        "CacheParams",
        **{"k.batch": S * heads * k_size, "k.head": k_size, "k.token": heads * k_size},
        **{"v.batch": S * heads * v_size, "v.head": S * v_size, "v.token": v_size},
        heads=heads,
        tokens=S,
        length=length,
        k_size=k_size,
        v_size=v_size,
    )
    width, height = number("kCacheWidth"), number("kCacheHeight")
    launch(
        "write_cache",
        {
            "Keys": placed[0], "Values": placed[1], "NewKeys": place(k.transpose(1, 2)), "NewValues": place(v),
            "Start": place(torch.tensor([start])), "Params": params,
        },
        group=(width, height, 1),
        groups=(-(-max(k_size, v_size) // width), -(-2 * heads // height), B * S),
        element=ELEMENT_NAMES[k.dtype],
    )  # fmt: skip
    keys, values = (out.read(tuple(cache.shape), k.dtype) for out, cache in zip(placed, caches, strict=True))
    return keys, values


def run_activation(
    gate_up: torch.Tensor, activation: str, *, interleaved: bool, limit: float = 0.0, alpha: float = 0.0
) -> torch.Tensor:
    """Returns the gated activation of `gate_up [M, 2 N]`, in which gate and up are halves or alternate."""
    M, N = gate_up.shape[0], gate_up.shape[1] // 2
    out, step = place_output((M, N), gate_up.dtype), 2 if interleaved else 1
    # The host passes two addresses inside of one tensor. Here, the second is a copy.
    up = gate_up.flatten()[1 if interleaved else N :]
    params = parameters(
        "ActivationParams",
        **dict.fromkeys(("gate_row", "up_row"), 2 * N),
        **dict.fromkeys(("gate_column", "up_column"), step),
        rows=M,
        columns=N,
        activation=ACTIVATIONS.index(activation),
        limit=limit,
        alpha=alpha,
    )
    launch_elementwise(
        "gated_activation",
        N,
        M,
        {"Gate": place(gate_up.flatten()), "Up": place(up), "Activated": out, "Params": params},
        element=ELEMENT_NAMES[gate_up.dtype],
    )
    return out.read((M, N), gate_up.dtype)
