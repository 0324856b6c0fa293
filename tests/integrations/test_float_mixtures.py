"""The experts of float checkpoints are packed by from_pretrained with a MarlinConfig, and by the command quantize."""

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.support.mixtures import FAMILIES, family, rewritten
from tests.support.models import IDS, logits, same
from torch_marlin_metal import MarlinExperts, convert, load_quantized, quantize_model
from torch_marlin_metal.checkpoints import checkpoint
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.integrations.transformers.float_experts import FloatExperts

DENSE = ["lm_head", "model.embed_tokens", *(f"model.layers.0.self_attn.{part}_proj" for part in "koqv")]
EXPERTS = "model.layers.0.mlp.experts"


def load(path, weight_format: str = "uint4b8", group_size: int = 32, **options) -> nn.Module:
    config = MarlinConfig(weight_format, group_size, **options)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    assert same(model.state_dict(), expected.state_dict())
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize(
    ("name", "how"),
    # gate and up share nvfp4's global scale
    [*((name, ("uint4b8", 32)) for name in FAMILIES), *((name, ("nvfp4", 16)) for name in ("mixtral", "gpt-oss"))],
)
def test_every_way_to_quantize_a_mixture_gives_the_same_bits(name, how, tmp_path) -> None:
    model = family(name)
    model.save_pretrained(tmp_path / "floats")
    # transformers computes buffers such as rotary frequencies during a load
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=torch.float32)
    quantize_model(expected, *how, progress=False)
    loaded = load(tmp_path / "floats", *how)
    assert [module for module in loaded.modules() if isinstance(module, MarlinExperts)]
    assert_equal(loaded, expected)
    loaded.save_pretrained(tmp_path / "saved")
    convert.write_checkpoint(convert.FloatReader(tmp_path / "floats", *how), tmp_path / "written")
    for path in (tmp_path / "saved", tmp_path / "written"):
        assert_equal(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), expected)
        other = type(model)(model.config).eval()
        load_quantized(other, path, progress=False)
        assert_equal(other, expected)


def pytest_generate_tests(metafunc) -> None:
    """Compiles two families, or all with --everything, because each takes seconds."""
    if "family_to_compile" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--everything")
        metafunc.parametrize("family_to_compile", FAMILIES if everything else ["mixtral", "gpt-oss"])


def test_generate_compiles_with_a_static_cache(family_to_compile) -> None:
    torch._dynamo.reset()
    counters["stats"].clear()
    model = family(family_to_compile)
    quantize_model(model, "uint4b8", 16, progress=False)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    how = CompileConfig(fullgraph=True, backend="eager", mode=None)
    how._compile_all_devices = True  # by default, generate compiles only on CUDA
    got = model.generate(IDS, **options, cache_implementation="static", compile_config=how)
    assert got.tolist() == expected.tolist()
    assert counters["stats"]["unique_graphs"] == 1


def floats_of(objects: list[Any]) -> int:
    """Returns the bytes of float matrices and stacks among `objects`."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in objects
        if type(tensor) is torch.Tensor and not tensor.is_meta and tensor.dtype == torch.float32 and tensor.dim() > 1
    }
    return sum(found.values())


def test_beside_the_stacks_only_one_expert_is_in_floats(tmp_path, monkeypatch, new_objects) -> None:
    family("qwen3").save_pretrained(tmp_path)

    def floats_alive() -> int:
        gc.collect()
        return floats_of(new_objects())

    seen, pack = [], FloatExperts.__init__

    def counted(self: FloatExperts, op, model, names, quantize) -> None:
        def quantize_and_count(name: str, weight: torch.Tensor):
            seen.append((name, floats_alive() - before))
            return quantize(name, weight)

        pack(self, op, model, names, quantize_and_count)

    before = floats_alive()
    monkeypatch.setattr(FloatExperts, "__init__", counted)
    load(tmp_path)
    assert [name for name, _ in seen] == [
        f"{EXPERTS}.{kind}.{index}" for kind in ("down_proj", "gate_up_proj") for index in range(5)
    ]
    down, gate_up = 64 * 40 * 4, 64 * 80 * 4
    for name, size in seen:
        assert size >= (own := down if "down" in name else gate_up)
        assert size < 2 * own + 64 * 64 * 4, name  # more than one part: gate and up before they are joined


@pytest.mark.filterwarnings("ignore:.*only .* of the matrix weights were quantized")
def test_experts_can_stay_in_floats(tmp_path) -> None:
    family("mixtral").save_pretrained(tmp_path)
    model = load(tmp_path, modules_to_not_convert="*.experts")
    assert not [module for module in model.modules() if isinstance(module, MarlinExperts)]
    names = convert.FloatReader(tmp_path, "uint4b8", 32, exclude="*.experts").layer_names
    assert sorted(names) == DENSE


def without(*parts: str):
    return lambda state: {name: tensor for name, tensor in state.items() if not any(part in name for part in parts)}


def with_value(part: str, change):
    return lambda state: {name: change(tensor.clone()) if part in name else tensor for name, tensor in state.items()}


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[7] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen3",
            without(".down_proj"),
            f"experts '{EXPERTS}': expected gate_up_proj and down_proj .* lacks down_proj",
        ),
        (
            "qwen3",
            without(".3.up_proj"),
            f"{EXPERTS}.gate_up_proj: expected all parts of each expert, got 5 of .* 4 of ",
        ),
        ("qwen3", without(".3.down_proj"), rf"{EXPERTS}.down_proj: expected 5 experts of \[64, 40\] .* got 4 experts"),
        (
            "qwen3",
            with_value(".2.down_proj", lambda tensor: tensor[:48].clone()),
            rf"{EXPERTS}.down_proj: expected 5 experts of \[64, 40\] .* got at least 3 experts, the last of \[48, 40\]",
        ),
        ("qwen3", with_value(".4.down_proj", poisoned), f"layer '{EXPERTS}.down_proj.4': .*finite"),
        ("gpt-oss", with_value("experts.down_proj", poisoned), f"layer '{EXPERTS}.down_proj.0': .*finite"),
        (
            "gpt-oss",
            with_value("experts.gate_up_proj", lambda tensor: tensor[:3].clone() if tensor.dim() == 3 else tensor),
            rf"{EXPERTS}.gate_up_proj: expected 4 experts of \[64, 192\] .* got 3 experts",
        ),
    ],
)
def test_experts_that_cannot_be_packed_are_named(name, change, message, tmp_path) -> None:
    family(name).save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "filters", [{"exclude": "*.experts.3.*"}, {"include": ["*.experts", "*_proj"], "exclude": "*.1.w2"}]
)
def test_a_part_of_the_experts_is_refused(filters, tmp_path) -> None:
    family("mixtral").save_pretrained(tmp_path)
    message = "expected all layers of the experts 'model.layers.0.block_sparse_moe.experts' or none"
    with pytest.raises(ValueError, match=f"include, exclude: {message}, they leave (9|11) of 12"):
        convert.FloatReader(tmp_path, "uint4b8", 32, **filters)


def test_the_command_leaves_experts_that_are_not_complete(tmp_path) -> None:
    family("qwen3").save_pretrained(tmp_path)
    rewritten(tmp_path, without(".3.up_proj"))
    reader = convert.FloatReader(tmp_path, "uint4b8", 32)
    assert sorted(reader.layer_names) == DENSE
    assert len([name for name in reader.left if name.startswith(f"{EXPERTS}.")]) == 14


@pytest.mark.filterwarnings("ignore:.*only .* of the matrix weights were quantized")
def test_experts_whose_forward_was_changed_stay_in_floats(tmp_path, monkeypatch) -> None:
    family("mixtral").save_pretrained(tmp_path)
    own = MixtralExperts.forward
    monkeypatch.setattr(MixtralExperts, "forward", lambda self, *args: 2 * own(self, *args))
    names = convert.FloatReader(tmp_path, "uint4b8", 32).layer_names
    assert sorted(names) == DENSE
    assert not [module for module in load(tmp_path).modules() if isinstance(module, MarlinExperts)]


def test_gate_and_up_are_read_once_each(tmp_path, monkeypatch) -> None:
    """With nvfp4, gate and up share a global scale, so each needs the other's values. The order of requests is free."""
    family("mixtral").save_pretrained(tmp_path)
    read: Counter[str] = Counter()
    original = checkpoint.read_tensor
    monkeypatch.setattr(
        checkpoint, "read_tensor", lambda info, *part: (read.update([info.name]), original(info, *part))[1]
    )
    reader = convert.FloatReader(tmp_path, "nvfp4", 16)
    expected = list(reader)
    assert set(read.values()) == {1}
    assert {f"{name}.weight" for name in reader.layer_names} == set(read)
    read.clear()
    # In this order, each gate is requested long before its up, but only one matrix may be kept in memory.
    gates_first = sorted(range(len(reader)), key=lambda index: reader.layer_names[index].rpartition(".")[2])
    for index in gates_first:
        assert same(reader.read(index).tensors(), expected[index].tensors())
        assert sum(tensor.nbytes for tensor in reader._kept.values()) <= 64 * 96 * 4
    assert max(read.values()) == 2
    assert {name for name, count in read.items() if count == 2} <= {name for name in read if ".w3." in name}
