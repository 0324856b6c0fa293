"""Writes synthetic checkpoints in the layouts of other programs, in plain NumPy, from the documented layouts.

This file does not use the package under test. Every writer fills a directory with one layer, `LAYER`, and returns the
weight in fp32 `[N, K]` that the producer's own arithmetic gives.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

LAYER = "model.layers.3.mlp.down_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

Tensors = dict[str, np.ndarray | torch.Tensor]


def save(path: Path, tensors: Tensors, config: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    held = {
        name: tensor.contiguous()
        if isinstance(tensor, torch.Tensor)
        else torch.from_numpy(np.ascontiguousarray(tensor))
        for name, tensor in tensors.items()
    }
    save_file(held, path / "model.safetensors", metadata)
    (path / "config.json").write_text(json.dumps(config))


def random_codes(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Returns random codes 0..15, each at least once."""
    codes = rng.integers(0, 16, (rows, columns))
    codes.reshape(-1)[: min(16, codes.size)] = np.arange(min(16, codes.size))
    return codes


def random_floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    values = rng.uniform(0.001, 0.02, shape) * rng.choice([1, 1, 1, -1], shape)
    return torch.from_numpy(values).to(FLOATS[dtype])


def words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Packs eight codes along `axis` into each int32 word. Nibble i holds code order[i]. Pads the axis with zeros."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint64)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 8)])
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), dtype=np.uint64)
    for nibble, position in enumerate(order):
        packed |= codes[..., position::8] << np.uint64(4 * nibble)
    return np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis)


def byte_pairs(codes: np.ndarray) -> np.ndarray:
    """Packs codes `[N, K]` into bytes `[N, K/2]`. The low nibble holds the even k."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def groups_of(K: int, group_size: int) -> np.ndarray:
    return np.arange(K) // group_size


def affine(codes: np.ndarray, zeros: np.ndarray, scales: torch.Tensor, groups: np.ndarray) -> np.ndarray:
    """Returns (q - z) * s as fp32 `[N, K]` for codes `[K, N]`, zeros and scales `[G, N]`."""
    return ((codes - zeros[groups]).astype(np.float32) * scales.float().numpy()[groups]).T


def write_gptq(
    path: Path,
    rng: np.random.Generator,
    K: int,
    N: int,
    group_size: int,
    *,
    version: int = 1,
    sym: bool = False,
    act_order: bool = False,
    dtype: str = "fp16",
    with_g_idx: bool = True,
    config: dict[str, Any] | None = None,
) -> np.ndarray:
    size = K if group_size == -1 else group_size
    groups = groups_of(K, size)
    G = int(groups[-1]) + 1
    codes, scales = random_codes(rng, K, N), random_floats(rng, (G, N), dtype)
    zeros = np.full((G, N), 8) if sym else rng.integers(0, 16, (G, N))
    g_idx = rng.permutation(groups) if act_order else groups
    qzeros = words(zeros, 1).view(np.uint32)
    if version == 1:
        qzeros = (qzeros.astype(np.uint64) + 2**32 - 0x11111111).astype(np.uint32)
    tensors: Tensors = {
        f"{LAYER}.qweight": words(codes, 0),
        f"{LAYER}.qzeros": qzeros.view(np.int32),
        f"{LAYER}.scales": scales,
    }
    if with_g_idx:
        tensors[f"{LAYER}.g_idx"] = g_idx.astype(np.int32)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": act_order, "sym": sym}
    settings |= {"checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}
    save(path, tensors, {"quantization_config": settings if config is None else config})
    return affine(codes, zeros, scales, g_idx)


def write_awq(
    path: Path, rng: np.random.Generator, K: int, N: int, group_size: int, *, version: str = "gemm", dtype: str = "fp16"
) -> np.ndarray:
    size = K if group_size == -1 else group_size
    groups = groups_of(K, size)
    G = int(groups[-1]) + 1
    codes, scales = random_codes(rng, K, N), random_floats(rng, (G, N), dtype)
    zeros = rng.integers(0, 16, (G, N))
    tensors: Tensors = {}
    if version == "gemm":
        tensors = {"qweight": words(codes, 1, AWQ_COLUMN_OF_NIBBLE), "qzeros": words(zeros, 1, AWQ_COLUMN_OF_NIBBLE)}
        tensors["scales"] = scales
    else:
        zero_words = -(-max(K // size, 1) // 8)
        zero_words = -(-zero_words // {32: 4, 64: 2}.get(size, 1)) * {32: 4, 64: 2}.get(size, 1)
        padding = 8 * zero_words - G
        padded_scales = torch.nn.functional.pad(scales, (0, 0, 0, padding))
        if version == "gemv":
            padded_zeros = np.pad(zeros, ((0, padding), (0, 0)))
            tensors = {"qweight": words(codes, 0).T, "qzeros": words(padded_zeros, 0).T, "scales": padded_scales.T}
        else:
            products = -(scales.float() * torch.from_numpy(zeros)).to(FLOATS[dtype])
            padded_products = torch.nn.functional.pad(products, (0, 0, 0, padding))
            tensors = {"qweight": _gemv_fast(codes), "qzeros": padded_products, "scales": padded_scales}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": version}
    save(path, {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}, {"quantization_config": settings})
    return affine(codes, zeros, scales, groups)


def _gemv_fast(codes: np.ndarray) -> np.ndarray:
    K, N = codes.shape
    order = [8 * (i % 4) + i // 4 for i in range(32)]
    packed = np.zeros((N // 4, K), dtype=np.uint16)
    for tile_row in range(N // 4):
        for tile in range(K // 64):
            stream = [
                codes[64 * tile + 32 * run + k, 4 * tile_row + row]
                for row in range(4)
                for run in range(2)
                for k in order
            ]
            for word in range(64):
                value = sum(int(code) << (4 * i) for i, code in enumerate(stream[4 * word : 4 * word + 4]))
                packed[tile_row, 64 * tile + word] = value
    return packed.view(np.int16)


def write_compressed_tensors(
    path: Path,
    rng: np.random.Generator,
    K: int,
    N: int,
    group_size: int,
    *,
    sym: bool = True,
    act_order: bool = False,
    dtype: str = "bf16",
) -> np.ndarray:
    size = K if group_size == -1 else group_size
    groups = groups_of(K, size)
    G = int(groups[-1]) + 1
    codes, scales = random_codes(rng, K, N), random_floats(rng, (G, N), dtype)
    zeros = np.full((G, N), 8) if sym else rng.integers(0, 16, (G, N))
    g_idx = rng.permutation(groups) if act_order else groups
    tensors: Tensors = {
        "weight_packed": words(codes, 0).T,
        "weight_scale": scales.T,
        "weight_shape": np.array([N, K], dtype=np.int64),
    }
    if not sym:
        tensors["weight_zero_point"] = words(zeros.T, 0)
    if act_order:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    scheme = {"num_bits": 4, "type": "int", "symmetric": sym, "strategy": "channel" if group_size == -1 else "group"}
    scheme |= {"group_size": None if group_size == -1 else group_size, "actorder": "group" if act_order else None}
    save(path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, _ct_config("pack-quantized", scheme))
    return affine(codes, zeros, scales, g_idx)


def _ct_config(format_name: str, scheme: dict[str, Any]) -> dict[str, Any]:
    group = {"format": format_name, "targets": ["Linear"], "weights": scheme, "input_activations": None}
    settings = {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": group}}
    return {"quantization_config": settings | {"ignore": ["lm_head"], "sparsity_config": {}, "transform_config": {}}}


def e4m3_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns positive finite E4M3 codes, including subnormal ones."""
    return torch.from_numpy(rng.integers(0, 0x7F, shape).astype(np.uint8)).view(torch.float8_e4m3fn)


def e8m0_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(100, 140, shape).astype(np.uint8)


def e8m0_values(codes: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def write_nvfp4(path: Path, rng: np.random.Generator, K: int, N: int, *, container: str) -> np.ndarray:
    """Writes NVFP4 as "compressed-tensors", "modelopt", "torchao", "torchao-swizzled" or "mlx" stores it."""
    codes, scales = random_codes(rng, N, K), e4m3_codes(rng, (N, -(-K // 16)))
    divisor = np.float32(2.0 ** rng.integers(5, 9))  # the inverse of a power of two is exact
    factor = np.float32(1) if container == "mlx" else np.float32(1) / divisor
    if container == "compressed-tensors":
        tensors: Tensors = {"weight_packed": byte_pairs(codes), "weight_scale": scales}
        tensors["weight_global_scale"] = np.array([divisor])
        scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        config = _ct_config("nvfp4-pack-quantized", scheme)
    elif container == "modelopt":
        tensors = {"weight": byte_pairs(codes), "weight_scale": scales, "weight_scale_2": np.array(factor)}
        tensors["input_scale"] = np.array(1, dtype=np.float32)
        config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    elif container == "mlx":
        tensors = {"weight": words(codes, 1).view(np.uint32), "scales": scales.view(torch.uint8)}
        config = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    else:
        stored = swizzled(scales.view(torch.uint8).numpy()) if container == "torchao-swizzled" else scales
        tensors = {
            "weight.qdata": byte_pairs(codes),
            "weight.scale": stored,
            "weight.per_tensor_scale": np.array(factor),
        }
        config = _torchao_config({"class": "NVFP4Tensor", "block_size": "16"})
    save(path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, config)
    return E2M1[codes] * (scales.float().numpy() * factor)[:, groups_of(K, 16)]


def swizzled(scales: np.ndarray) -> np.ndarray:
    """Returns block scales `[rows, columns]` in cuBLAS's layout.

    A tile has 128 rows and 4 columns, and is stored as 32 lines of 16. Row 32 * a + b of the tile fills places 4 * a to
    4 * a + 3 of line b.
    """
    rows, columns = scales.shape
    tile_rows, tile_columns = -(-rows // 128), -(-columns // 4)
    flat = np.zeros((tile_rows, tile_columns, 32, 16), dtype=np.uint8)
    row, column = np.indices(scales.shape)
    flat[row // 128, column // 4, row % 32, row % 128 // 32 * 4 + column % 4] = scales
    return flat.reshape(tile_rows * 32, tile_columns * 16)


def _torchao_config(attributes: dict[str, str]) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "torchao"}, "tensor_attributes": attributes}


def write_mxfp4(path: Path, rng: np.random.Generator, K: int, N: int, *, container: str) -> np.ndarray:
    """Writes MXFP4 as "compressed-tensors", "torchao", "torchao-swizzled" or "mlx" stores it."""
    codes, scales = random_codes(rng, N, K), e8m0_codes(rng, (N, -(-K // 32)))
    if container == "compressed-tensors":
        tensors: Tensors = {"weight_packed": byte_pairs(codes), "weight_scale": scales}
        config = _ct_config("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32})
    elif container == "mlx":
        tensors = {"weight": words(codes, 1).view(np.uint32), "scales": scales}
        config = {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    else:
        stored = swizzled(scales) if container == "torchao-swizzled" else scales
        tensors = {"weight.qdata": byte_pairs(codes), "weight.scale": stored}
        config = _torchao_config({"class": "MXTensor", "elem_dtype": "torch.float4_e2m1fn_x2", "block_size": "32"})
    save(path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, config)
    return E2M1[codes] * e8m0_values(scales)[:, groups_of(K, 32)]


def write_gpt_oss(path: Path, rng: np.random.Generator, K: int, N: int, experts: int) -> list[np.ndarray]:
    codes = [random_codes(rng, N, K) for _ in range(experts)]
    scales = e8m0_codes(rng, (experts, N, K // 32))
    tensors: Tensors = {
        f"{LAYER}_blocks": np.stack([byte_pairs(c) for c in codes]).reshape(experts, N, K // 32, 16),
        f"{LAYER}_scales": scales,
        f"{LAYER}_bias": torch.arange(experts * N).reshape(experts, N).to(torch.bfloat16),
    }
    save(path, tensors, {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}})
    return [E2M1[c] * e8m0_values(s)[:, groups_of(K, 32)] for c, s in zip(codes, scales, strict=True)]


def write_bitsandbytes(
    path: Path,
    rng: np.random.Generator,
    K: int,
    N: int,
    blocksize: int,
    *,
    kind: str = "nf4",
    double_quant: bool = False,
) -> np.ndarray:
    codes = random_codes(rng, N, K)
    table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
    blocks = -(-N * K // blocksize)
    packed = ((codes.reshape(-1)[0::2] << 4) | codes.reshape(-1)[1::2]).astype(np.uint8)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": blocksize, "dtype": "float16", "shape": [N, K]}
    tensors: Tensors = {"": packed[:, None], ".quant_map": table}
    if double_quant:
        offset = float(np.float32(rng.uniform(0, 0.1)))
        inner = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        inner_codes, inner_scales = rng.integers(0, 256, blocks), rng.uniform(0.01, 0.02, -(-blocks // 256))
        inner_scales = inner_scales.astype(np.float32)
        absmax = inner[inner_codes] * np.repeat(inner_scales, 256)[:blocks] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {".absmax": inner_codes.astype(np.uint8), ".nested_absmax": inner_scales, ".nested_quant_map": inner}
    else:
        absmax = rng.uniform(0.01, 0.1, blocks).astype(np.float32)
        tensors[".absmax"] = absmax
    tensors[f".quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), dtype=np.uint8).copy()
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}}
    save(path, {f"{LAYER}.weight{n}": t for n, t in tensors.items()}, config)
    return (table[codes.reshape(-1)] * np.repeat(absmax, blocksize)[: N * K]).reshape(N, K)


def write_hqq(
    path: Path, rng: np.random.Generator, K: int, N: int, group_size: int, *, axis: int = 1, dtype: str = "fp16"
) -> np.ndarray:
    """Writes HQQ's layout.

    The groups are rows (axis 1) or columns (axis 0) of a matrix; a byte holds codes of two rows.
    """
    count = N * K // group_size
    codes = random_codes(rng, N, K)
    matrix = codes.reshape(count, group_size) if axis == 1 else codes.reshape(group_size, count)
    half = matrix.shape[0] // 2
    scales, zeros = random_floats(rng, (count,), dtype), torch.from_numpy(rng.uniform(0, 15, count)).to(FLOATS[dtype])
    column = (count, 1) if axis == 1 else (1, count)
    tensors: Tensors = {
        "W_q": ((matrix[:half] << 4) | matrix[half:]).astype(np.uint8),
        "scale": scales.reshape(column),
        "zero": zeros.reshape(column),
        "shape": np.array([N, K]),
        "nbits": np.array(4, dtype=np.int32),
        "axis": np.array(axis, dtype=np.int32),
        "group_size": np.array(group_size, dtype=np.int32),
        "packing": np.frombuffer(b"4bit_u8", dtype=np.uint8).copy(),
        "quant_scale": np.array(0, dtype=np.uint8),
        "quant_zero": np.array(0, dtype=np.uint8),
    }
    weights = {"nbits": 4, "group_size": group_size, "axis": axis}
    config = {"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": weights}}}
    save(path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, config)
    zeros, scales = zeros.float().numpy().reshape(column), scales.float().numpy().reshape(column)
    return ((matrix.astype(np.float32) - zeros) * scales).reshape(N, K)


def write_mlx_affine(
    path: Path, rng: np.random.Generator, K: int, N: int, group_size: int, *, dtype: str = "bf16", experts: int = 0
) -> list[np.ndarray]:
    stack = max(experts, 1)
    codes = [random_codes(rng, N, K) for _ in range(stack)]
    scales = random_floats(rng, (stack, N, K // group_size), dtype)
    biases = random_floats(rng, (stack, N, K // group_size), dtype) * 8
    packed = np.stack([words(c, 1) for c in codes]).view(np.uint32)
    tensors: Tensors = {"weight": packed, "scales": scales, "biases": biases}
    if not experts:
        tensors = {name: tensor[0] for name, tensor in tensors.items()}
    settings = {"group_size": group_size, "bits": 4, "mode": "affine"}
    save(path, {f"{LAYER}.{n}": t for n, t in tensors.items()}, {"quantization": settings}, {"format": "mlx"})
    groups = groups_of(K, group_size)
    return [
        c.astype(np.float32) * s.float().numpy()[:, groups] + b.float().numpy()[:, groups]
        for c, s, b in zip(codes, scales, biases, strict=True)
    ]


def write_intx(
    path: Path, rng: np.random.Generator, K: int, N: int, group_size: int, *, sym: bool, own_names: bool = False
) -> np.ndarray:
    """Writes torchao's IntxUnpackedToInt8Tensor.

    With `own_names`, tensors have the names of torchao's safetensors support.
    """
    groups = groups_of(K, group_size)
    G = int(groups[-1]) + 1
    codes, scales = random_codes(rng, K, N) - 8, random_floats(rng, (G, N), "fp32")
    zeros = np.zeros((G, N), dtype=np.int64) if sym else rng.integers(-8, 8, (G, N))
    parts: Tensors = {"qdata": codes.T.astype(np.int8), "scale": scales.T, "zero_point": zeros.T.astype(np.int8)}
    attributes = {"target_dtype": "torch.int4", "block_size": f"(1, {group_size})", "dtype": "torch.float32"}
    config = {"quantization_config": {"quant_method": "torchao"}}
    metadata = {}
    if own_names:
        tensors = {f"{LAYER}._weight_{name}": tensor for name, tensor in parts.items()}
        data = {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}, "block_size": [1, group_size]}
        entry = {"_type": "IntxUnpackedToInt8Tensor", "_data": data, "_tensor_data_names": list(parts)}
        metadata = {f"{LAYER}.weight": json.dumps(entry), "tensor_names": json.dumps([f"{LAYER}.weight"])}
    else:
        tensors = {f"{LAYER}.weight.{name}": tensor for name, tensor in parts.items()}
        config |= {"tensor_attributes": {"class": "IntxUnpackedToInt8Tensor", **attributes}}
    save(path, tensors, config, metadata)
    return affine(codes, zeros, scales, groups)
