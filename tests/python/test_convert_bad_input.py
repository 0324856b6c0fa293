"""Every damaged or contradictory checkpoint gives one error that names the file and the tensor or key."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_writers as writers
import numpy as np
import pytest
import torch
from checkpoint_writers import LAYER
from safetensors.torch import load_file, save_file

from torch_marlin_metal import convert

K, N = 64, 16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}


@pytest.fixture
def gptq(tmp_path) -> Path:
    writers.write_gptq(tmp_path, np.random.default_rng(1), K, N, 32, version=2)
    return tmp_path


def fails(path: Path, match: str, kind: type = convert.CheckpointError, **options) -> None:
    with pytest.raises(kind, match=match) as caught:
        list(convert.read_layers(path, **options))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces or (None) removes tensors of the layer."""
    held = load_file(path / "model.safetensors")
    for role, tensor in tensors.items():
        held.pop(f"{LAYER}.{role}", None)
        if tensor is not None:
            held[f"{LAYER}.{role}"] = tensor
    save_file(held, path / "model.safetensors")


def configure(path: Path, settings: Any) -> None:
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str = "I32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS: dict[str, tuple[bytes | dict[str, Any], bytes, str]] = {
    "not JSON": (b"{", b"", "not valid JSON"),
    "not UTF-8": (b"\xff\xfe", b"", "not valid JSON"),
    "nested beyond the stack": (b"[" * 200_000, b"", "not valid JSON"),
    "an integer of too many digits": (b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    "a list": (b"[]", b"", "expected a JSON object as header"),
    "a tensor twice": (b'{"a": {}, "a": {}}', b"", "the key 'a' occurs twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, b"", "expected __metadata__ to map strings to strings"),
    "an entry that is a number": ({"a": 3}, b"", "tensor 'a': expected an object"),
    "an unknown dtype": ({"a": entry("I33")}, bytes(8), r"tensor 'a': expected dtype to be one of .*, got 'I33'"),
    "a negative size": ({"a": entry(shape=(-2,))}, bytes(8), "tensor 'a': expected shape"),
    "a fractional size": ({"a": entry(shape=(2.0,))}, bytes(8), "tensor 'a': expected shape"),
    "a size of true": ({"a": entry(shape=(True,), offsets=(0, 4))}, bytes(4), "tensor 'a': expected shape"),
    "shape beyond the data": ({"a": entry(shape=(3,))}, bytes(8), r"tensor 'a': shape \[3\] of I32 needs 96 bits"),
    "a huge shape": ({"a": entry(shape=(2**62, 2**62))}, bytes(8), "tensor 'a': shape"),
    "data beyond the file": ({"a": entry(shape=(4,), offsets=(0, 16))}, bytes(8), "tensor 'a': its data ends at byte"),
    "falling offsets": ({"a": entry(offsets=(8, 0))}, bytes(8), "tensor 'a': expected data_offsets"),
    "one offset": ({"a": entry(offsets=(8,))}, bytes(8), "tensor 'a': expected data_offsets"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), "tensor 'b': overlaps its neighbour"),
    "a hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), "tensor 'b': leaves a hole"),
    "bytes after the last tensor": ({"a": entry()}, bytes(9), "the tensors end at byte"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_safetensors_header(tmp_path, case) -> None:
    header, data, message = HEADERS[case]
    configure(tmp_path, GPTQ)
    write_raw(tmp_path, header, data)
    fails(tmp_path, rf"model\.safetensors: {message}")


def test_truncated_safetensors_at_every_length(gptq) -> None:
    whole = (gptq / "model.safetensors").read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        (gptq / "model.safetensors").write_bytes(whole[:length])
        fails(gptq, r"model\.safetensors: ")


def test_a_file_that_shrinks_after_its_header_was_read(gptq) -> None:
    reader = convert.open_reader(gptq)
    os.truncate(gptq / "model.safetensors", (gptq / "model.safetensors").stat().st_size - 1)
    with pytest.raises(convert.CheckpointError, match=r"the file ends after \d+ of its \d+ bytes"):
        list(reader)


SETTINGS: dict[str, tuple[Any, str, type]] = {
    "text": ("gptq", "config.json: quantization_config: expected an object", convert.CheckpointError),
    "unknown method": (
        {"quant_method": "aqlm"},
        "quant_method 'aqlm' is not read; known: .*gptq",
        convert.UnsupportedFormat,
    ),
    "no method": ({"beans": 4}, "name no quant_method; known: .*awq", convert.CheckpointError),
    "method of the wrong type": (
        {"quant_method": 4},
        "quant_method: expected a string, got 4",
        convert.CheckpointError,
    ),
    "group size of the wrong type": (
        GPTQ | {"group_size": "32"},
        "group_size: expected an integer, got '32'",
        convert.CheckpointError,
    ),
    "group size of true": (GPTQ | {"group_size": True}, "group_size: expected an integer", convert.CheckpointError),
    "another group size": (GPTQ | {"group_size": 16}, "scales.*expected 4 groups of 16", convert.CheckpointError),
    "a huge group size": (GPTQ | {"group_size": 10**40}, "scales.*expected 1 groups", convert.CheckpointError),
    "another width": (GPTQ | {"bits": 8}, "qweight.*4 bits by the shapes .* settings' 8", convert.CheckpointError),
    "gptq_p": (GPTQ | {"checkpoint_format": "gptq_p"}, "'gptq_p' is not read", convert.UnsupportedFormat),
    "marlin": (GPTQ | {"is_marlin_format": True}, "'marlin' is not read", convert.UnsupportedFormat),
    "pack_dtype": (GPTQ | {"pack_dtype": "int8"}, "pack_dtype 'int8' is not read", convert.UnsupportedFormat),
    "awq marlin": ({"quant_method": "awq", "version": "marlin"}, "AWQ version 'marlin'", convert.UnsupportedFormat),
    "awq 3 bit": ({"quant_method": "awq", "bits": 3}, "3-bit AWQ", convert.UnsupportedFormat),
    "compressed-tensors marlin-24": (
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
        "format 'marlin-24' is not read",
        convert.UnsupportedFormat,
    ),
    "compressed-tensors without groups": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "config_groups: expected at least one",
        convert.CheckpointError,
    ),
    "rotation": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"a": {"weights": {"num_bits": 4}}},
            "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
        },
        "transform_config: layers that rotate",
        convert.UnsupportedFormat,
    ),
    "modelopt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8' is not read", convert.UnsupportedFormat),
    "bitsandbytes 8 bit": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "load_in_8bit",
        convert.UnsupportedFormat,
    ),
    "auto-round fp8": (
        {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static"},
        "packing_format 'auto_round:fp8_static' is not read",
        convert.UnsupportedFormat,
    ),
    "another method's layers": ({"quant_method": "hqq"}, r"no tensor's name ends in \.W_q", convert.CheckpointError),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(gptq, case) -> None:
    settings, message, kind = SETTINGS[case]
    configure(gptq, settings)
    fails(gptq, message, kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"", "not valid JSON"), (b"[1]", "expected a JSON object"), (b'{"quantization_config": {', "not valid JSON")],
)
def test_config_file(gptq, text, message) -> None:
    (gptq / "config.json").write_bytes(text)
    fails(gptq, rf"config\.json: {message}")


def test_no_settings_at_all(gptq) -> None:
    (gptq / "config.json").write_text("{}")
    fails(gptq, "no quantization settings: neither config.json")


def zeros_like(rows: int, columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=dtype)


def scale_of(value: float) -> torch.Tensor:
    scales = torch.ones(2, N, dtype=torch.float32)
    scales[1, 3] = value
    return scales


LAYERS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "scales missing": ({"scales": None}, f"layer '{LAYER}': expected a tensor scales"),
    "codes missing": ({"qweight": None}, "no tensor's name ends in"),
    "qzeros of other groups": ({"qzeros": zeros_like(3, 2)}, rf"tensor '{LAYER}\.qzeros': expected shape \[2, 2\]"),
    "qzeros of other columns": ({"qzeros": zeros_like(2, 3)}, "found 6 by the shapes|expected shape"),
    "qzeros of floats": ({"qzeros": zeros_like(2, 2, torch.float16)}, r"\.qzeros': expected dtype I32, got F16"),
    "scales of other columns": ({"scales": torch.ones(2, N + 8)}, rf"\.scales': expected shape \[any, {N}\]"),
    "scales of other groups": ({"scales": torch.ones(3, N)}, r"\.scales': expected 2 groups of 32 for K=64, got 3"),
    "scales of integers": ({"scales": zeros_like(2, N)}, r"\.scales': expected dtype F16 or BF16 or F32, got I32"),
    "scales of three dimensions": ({"scales": torch.ones(2, N, 1)}, r"\.scales': expected shape"),
    "scales empty": ({"scales": torch.ones(0, N)}, r"\.scales': expected shape \[any, 16\], got \[0, 16\]"),
    "NaN scale": ({"scales": scale_of(float("nan"))}, r"\.scales': scales: expected finite values"),
    "inf scale": ({"scales": scale_of(float("inf"))}, r"\.scales': scales: expected finite values"),
    "scale beyond 2^100": ({"scales": scale_of(2.0**101)}, r"\.scales': scales: expected .* at most 2\^100"),
    "codes of int64": ({"qweight": zeros_like(K // 8, N, torch.int64)}, r"\.qweight': expected dtype I32, got I64"),
    "codes of one dimension": ({"qweight": torch.zeros(8, dtype=torch.int32)}, r"\.qweight': expected shape"),
    "g_idx too large": ({"g_idx": torch.full((K,), 2, dtype=torch.int32)}, r"\.g_idx': expected groups in 0\.\.1"),
    "g_idx negative": (
        {"g_idx": torch.cat([torch.full((1,), -5), torch.zeros(K - 1)]).int()},
        r"\.g_idx': expected groups in 0\.\.1, got a range of -5",
    ),
    "g_idx uneven": (
        {"g_idx": torch.cat([torch.zeros(40), torch.ones(24)]).int()},
        r"\.g_idx': gptq_perm: g_idx: expected 32 rows in group 0 of 2, got 40",
    ),
    "g_idx of another length": ({"g_idx": torch.zeros(K - 1, dtype=torch.int32)}, r"\.g_idx': its 63 rows"),
    "g_idx of floats": ({"g_idx": torch.zeros(K)}, r"\.g_idx': expected dtype I32 or I64, got F32"),
    "bias of another length": ({"bias": torch.zeros(N + 1)}, r"\.bias': expected shape \[16\], got \[17\]"),
    "bias of integers": ({"bias": torch.zeros(N, dtype=torch.int32)}, r"\.bias': expected dtype"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layer(gptq, case) -> None:
    tensors, message = LAYERS[case]
    change(gptq, **tensors)
    fails(gptq, message)


def test_a_symmetric_file_with_the_other_versions_zero_points(tmp_path) -> None:
    for stated, stored in ((1, 2), (2, 1)):
        writers.write_gptq(tmp_path, np.random.default_rng(1), K, N, 32, version=stored, sym=True)
        configure(tmp_path, GPTQ | {"sym": True, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[stated]})
        fails(tmp_path, rf"\.qzeros': the settings say version {stated}.*those of version {stored}: wrongly labelled")


def test_zero_points_promised_and_absent(gptq) -> None:
    change(gptq, qzeros=None)
    fails(gptq, "the settings say sym=false, but there are no qzeros")


@pytest.mark.parametrize("code", [0, 15, 241, 255])
def test_e8m0_codes_out_of_range(tmp_path, code) -> None:
    writers.write_mxfp4(tmp_path, np.random.default_rng(1), K, N, container="compressed-tensors")
    scales = load_file(tmp_path / "model.safetensors")[f"{LAYER}.weight_scale"]
    scales[3, 1] = code
    change(tmp_path, weight_scale=scales)
    fails(tmp_path, rf"\.weight_scale': scales: expected E8M0 codes in 16\.\.240, got a range of .*\b{code}\b")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_e4m3_nan_codes(tmp_path, code) -> None:
    writers.write_nvfp4(tmp_path, np.random.default_rng(1), K, N, container="compressed-tensors")
    scales = load_file(tmp_path / "model.safetensors")[f"{LAYER}.weight_scale"]
    scales.view(torch.uint8)[3, 1] = code
    change(tmp_path, weight_scale=scales)
    fails(tmp_path, rf"\.weight_scale': scales: expected finite E4M3 codes, got a NaN \(0x{code:02X}\)")


@pytest.mark.parametrize("value", [0.0, float("nan"), 1e-38])
def test_global_scale_that_has_no_usable_inverse(tmp_path, value) -> None:
    writers.write_nvfp4(tmp_path, np.random.default_rng(1), K, N, container="compressed-tensors")
    change(tmp_path, weight_global_scale=torch.tensor([value]))
    fails(tmp_path, r"\.weight_global_scale': global_scale: expected finite values")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_hqq_settings_that_are_no_numbers(tmp_path, value) -> None:
    writers.write_hqq(tmp_path, np.random.default_rng(1), K, N, 32)
    change(tmp_path, nbits=torch.tensor(value))
    fails(tmp_path, r"\.nbits': expected a finite number")


def test_layers_that_do_more_than_multiply_are_refused(tmp_path) -> None:
    """A factor for the input, a rotation, or scales that are codes themselves: without them the result is wrong."""
    rng = np.random.default_rng(1)
    writers.write_nvfp4(tmp_path, rng, K, N, container="modelopt")
    change(tmp_path, pre_quant_scale=torch.ones(K))
    fails(tmp_path, f"layer '{LAYER}': it scales its input", convert.UnsupportedFormat)
    writers.write_nvfp4(tmp_path, rng, K, N, container="torchao")
    change(tmp_path, **{"weight.act_pre_scale": torch.ones(K)})
    fails(tmp_path, f"layer '{LAYER}': it scales its input", convert.UnsupportedFormat)
    writers.write_hqq(tmp_path, rng, K, N, 32)
    change(tmp_path, quant_zero=torch.tensor(1, dtype=torch.uint8))
    fails(tmp_path, f"layer '{LAYER}': its scales or zero points are themselves", convert.UnsupportedFormat)
    rotated = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "group_size": 32}
    writers.write_gptq(tmp_path, rng, K, N, 32, config=rotated | {"rotation_config": {"kind": "hadamard"}})
    fails(tmp_path, "rotation_config: layers that rotate", convert.UnsupportedFormat)


def test_parts_of_a_layer_without_its_codes(gptq) -> None:
    tensors = load_file(gptq / "model.safetensors")
    save_file(tensors | {"other.scales": torch.ones(2, 2)}, gptq / "model.safetensors")
    fails(gptq, r"tensor 'other\.scales': gptq: scales of a layer without other\.qweight")


def test_layers_quantized_in_another_way_are_named(tmp_path) -> None:
    writers.write_compressed_tensors(tmp_path, np.random.default_rng(1), K, N, 32)
    tensors = load_file(tmp_path / "model.safetensors")
    eight_bit = {"head.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn), "head.weight_scale": torch.ones(2, 2)}
    save_file(tensors | eight_bit, tmp_path / "model.safetensors")
    fails(tmp_path, "layer 'head': its weight is not packed", convert.UnsupportedFormat)
    reader = convert.open_reader(tmp_path, on_unsupported="skip")
    assert [weight.name for weight in reader] == [LAYER]
    assert list(reader.other_tensors()) == []
    fails(tmp_path, "only E4M3 weights with a scale", convert.UnsupportedFormat, on_unsupported="dequantize")


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.linspace(0.1, 1, 4)[:, None]])
def test_fp8_layers_beside_4_bit_ones_are_decoded_on_request(tmp_path, scale) -> None:
    writers.write_nvfp4(tmp_path, np.random.default_rng(1), K, N, container="modelopt")
    tensors = load_file(tmp_path / "model.safetensors")
    codes = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    eight_bit = {"head.weight": codes, "head.weight_scale": scale.to(torch.bfloat16), "head.bias": torch.ones(4)}
    save_file(tensors | eight_bit, tmp_path / "model.safetensors")
    weights = {weight.name: weight for weight in convert.read_layers(tmp_path, "dequantize")}
    assert torch.equal(weights["head"].weight, codes.float() * scale.to(torch.bfloat16).float())
    assert torch.equal(weights["head"].bias, torch.ones(4))
    assert isinstance(weights[LAYER], convert.PackedWeight)


def write_index(path: Path, weight_map: Any) -> None:
    os.rename(path / "model.safetensors", path / "a.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def all_in(path: Path, shard: str) -> dict[str, str]:
    return dict.fromkeys(load_file(path / "model.safetensors"), shard)


INDEXES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no map": (lambda path: None, "weight_map: expected an object"),
    "empty map": (lambda path: {}, "weight_map: expected an object"),
    "missing shard": (lambda path: all_in(path, "b.safetensors"), r"its shard b\.safetensors is missing"),
    "parent": (lambda path: all_in(path, "../a.safetensors"), r"expected the plain name .*, got '\.\./a\.safetensors'"),
    "absolute": (lambda path: all_in(path, "/etc/a.safetensors"), "expected the plain name"),
    "windows parent": (lambda path: all_in(path, "..\\a.safetensors"), "expected the plain name"),
    "no text": (lambda path: {"a": 3}, "tensor 'a': expected the plain name .*, got 3"),
    "NUL": (lambda path: all_in(path, "a\0.safetensors"), "expected the plain name"),
    "a pickle": (lambda path: all_in(path, "a.bin"), "expected the plain name of a .safetensors file"),
    "a tensor that is not there": (
        lambda path: all_in(path, "a.safetensors") | {"b.qweight": "a.safetensors"},
        r"a\.safetensors: tensor 'b\.qweight' is missing",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_index(gptq, case) -> None:
    make, message = INDEXES[case]
    write_index(gptq, make(gptq))
    fails(gptq, message)


def test_a_tensor_in_two_shards(gptq) -> None:
    tensors = load_file(gptq / "model.safetensors")
    write_index(gptq, dict.fromkeys(tensors, "a.safetensors") | {"x": "b.safetensors"})
    save_file({"x": torch.ones(1), f"{LAYER}.scales": torch.ones(1)}, gptq / "b.safetensors")
    fails(gptq, rf"b\.safetensors: tensor '{LAYER}\.scales' is also in .*a\.safetensors")


def test_a_link_that_leads_out(gptq, tmp_path_factory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret.safetensors"
    os.rename(gptq / "model.safetensors", outside)
    (gptq / "model.safetensors").symlink_to(outside)
    fails(gptq, r"model\.safetensors: a symbolic link that leads out of the checkpoint")


def test_a_loop_of_links_and_a_pipe(gptq) -> None:
    file = gptq / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    fails(gptq, r"model\.safetensors: expected a regular file")


def test_several_files_and_no_index(gptq) -> None:
    for name in "ab":
        (gptq / f"{name}.safetensors").write_bytes((gptq / "model.safetensors").read_bytes())
    (gptq / "model.safetensors").unlink()
    fails(gptq, r"an index file is needed to choose among a\.safetensors, b\.safetensors")


def test_paths_that_are_no_checkpoint(tmp_path) -> None:
    fails(tmp_path / "absent", "absent: does not exist")
    (tmp_path / "m.txt").write_text("")
    fails(tmp_path / "m.txt", r"m\.txt: expected a directory or a \.gguf file")
    configure(tmp_path, GPTQ)
    fails(tmp_path, "no safetensors file")
    (tmp_path / "m.gguf").write_bytes(b"")
    fails(tmp_path, r"for GGUF give the path of the \.gguf file itself")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_unsupported": "ignore"}, "on_unsupported: expected 'error', 'dequantize' or 'skip', got 'ignore'"),
        ({"gptq_zeros_rule": "x"}, "gptq_zeros_rule: expected"),
        ({"gptq_version": 3}, "gptq_version: expected None, 1 or 2, got 3"),
        ({"gguf_names": "x"}, "gguf_names: expected"),
    ],
)
def test_options(gptq, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        list(convert.read_layers(gptq, **options))


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def tensor_info(name: str = "w.weight", dims: tuple[int, ...] = (32, 2), kind: int = 2, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(infos: list[bytes], data: int = 64, metadata: bytes = b"", keys: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), keys) + metadata + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


GGUFS: dict[str, tuple[bytes, str, type]] = {
    "empty": (b"", "not a GGUF file", convert.CheckpointError),
    "magic": (b"GGML" + bytes(60), "not a GGUF file", convert.CheckpointError),
    "version": (gguf([tensor_info()], version=1), "GGUF version 1 is not read", convert.UnsupportedFormat),
    "big-endian": (gguf([], version=0x03000000), "GGUF version 50331648", convert.UnsupportedFormat),
    "no tensors": (gguf([]), "no tensor of a quantized type", convert.CheckpointError),
    "data beyond the file": (
        gguf([tensor_info()], data=35),
        "tensor 'w.weight': bytes .* beyond",
        convert.CheckpointError,
    ),
    "huge": (gguf([tensor_info(dims=(2**62, 2**62))]), "tensor 'w.weight': bytes", convert.CheckpointError),
    "partial block": (
        gguf([tensor_info(dims=(40, 2))]),
        "does not consist of Q4_0 blocks of 32",
        convert.CheckpointError,
    ),
    "no elements": (gguf([tensor_info(dims=(32, 0))]), "does not consist of Q4_0 blocks", convert.CheckpointError),
    "rank": (gguf([tensor_info(dims=(32,) * 5)]), "expected 1 to 4 dimensions, got 5", convert.CheckpointError),
    "type": (gguf([tensor_info(kind=77)]), "unknown type number 77", convert.UnsupportedFormat),
    "twice": (gguf([tensor_info(), tensor_info(offset=64)], 128), "'w.weight' occurs twice", convert.CheckpointError),
    "overlap": (
        gguf([tensor_info(), tensor_info("v", offset=32)], 128),
        "tensor 'v' overlaps 'w.weight'",
        convert.CheckpointError,
    ),
    "misaligned": (gguf([tensor_info(offset=8)], 128), "are not aligned", convert.CheckpointError),
    "key twice": (
        gguf([], metadata=2 * (string("a") + struct.pack("<IB", 0, 1)), keys=2),
        "metadata key 'a' occurs twice",
        convert.CheckpointError,
    ),
    "metadata type": (
        gguf([], metadata=string("a") + struct.pack("<I", 99), keys=1),
        "unknown metadata type 99",
        convert.CheckpointError,
    ),
    "alignment": (
        gguf([], metadata=string("general.alignment") + struct.pack("<II", 4, 24), keys=1),
        "general.alignment: expected a power of two, got 24",
        convert.CheckpointError,
    ),
    "more keys than bytes": (
        gguf([], keys=2**60),
        "truncated|unknown metadata type|occurs twice",
        convert.CheckpointError,
    ),
    "an array beyond the file": (
        gguf([], metadata=string("a") + struct.pack("<IIQ", 9, 8, 2**60), keys=1),
        "truncated",
        convert.CheckpointError,
    ),
    "arrays in arrays": (
        gguf([], metadata=string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, keys=1),
        "unknown metadata type 9",
        convert.CheckpointError,
    ),
    "a key beyond the file": (
        gguf([], metadata=struct.pack("<Q", 2**63), keys=1),
        "truncated",
        convert.CheckpointError,
    ),
}


@pytest.mark.parametrize("case", GGUFS)
def test_gguf(tmp_path, case) -> None:
    content, message, kind = GGUFS[case]
    (tmp_path / "m.gguf").write_bytes(content)
    fails(tmp_path / "m.gguf", rf"m\.gguf: .*({message})", kind)
