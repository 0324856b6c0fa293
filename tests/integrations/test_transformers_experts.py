"""from_pretrained loads mixtures of experts, whose weights stay packed and stacked."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.support.llama import IDS
from tests.support.mixtures import SIZES, split_experts, stacked_experts
from tests.support.models import same
from torch_marlin_metal import MarlinExperts, MarlinLinear, PackedWeight, load_quantized
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.float_experts import ExpertFinder
from torch_marlin_metal.layers.mixed_experts import FloatExpertWeights
from torch_marlin_metal.load import loader
from torch_marlin_metal.load.placeholder import PendingLinear
from torch_marlin_metal.models.linear_layers import ModelMismatchError


@pytest.mark.parametrize("write", [split_experts, stacked_experts])
def test_experts_stay_packed_and_compute_the_same(write, tmp_path) -> None:
    expected = write(tmp_path / "source")
    path, nothing = tmp_path / "source", {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    model, told = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert told == {**nothing, "error_msgs": []}
    assert not [name for name, module in model.named_modules() if isinstance(module, MarlinLinear)]
    stacks = [module for module in model.modules() if isinstance(module, MarlinExperts)]
    assert [(stack.num_experts, stack.gate_up.sizes) for stack in stacks] == [
        (4, (96, 96) if write is split_experts else (192,))
    ] * 2
    assert not [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    with torch.no_grad():
        logits, dense = model(IDS).logits, expected(IDS).logits
        expected.set_experts_implementation("eager")  # the grouped product does not support fp64
        exact = expected.double()(IDS).logits
    rounding = (dense - exact).abs().max()  # the rounding error of the fp32 model with torch's own products
    assert rounding > 0
    assert (logits - exact).abs().max() <= 4 * rounding
    model.save_pretrained(tmp_path / "saved")
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert told == {**nothing, "error_msgs": []}
    assert same(again.state_dict(), model.state_dict())
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_loading_makes_no_module_for_each_expert_and_opens_a_file_once(tmp_path, monkeypatch) -> None:
    """A mixture may have 18,432 expert matrices. Each module would take a fifth of a millisecond."""
    split_experts(tmp_path / "source")
    model = MixtralForCausalLM(MixtralConfig(**SIZES))
    linear = sum(type(module) is torch.nn.Linear for module in model.model.modules())
    made, opened = [], []
    init, opens = PendingLinear.__init__, Path.open
    monkeypatch.setattr(PendingLinear, "__init__", lambda self, shape: made.append(shape) or init(self, shape))
    monkeypatch.setattr(Path, "open", lambda *args, **kw: opened.append(kw) or opens(*args, **kw))
    AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert len(made) <= linear
    assert len([options for options in opened if options.get("buffering") == 0]) < 20


@pytest.mark.parametrize("write", [split_experts, stacked_experts])
def test_a_model_with_experts_compiles_as_one_graph(write, tmp_path) -> None:
    write(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    experts = model.model.layers[0].mlp.experts
    a, ids, weights = torch.randn(5, 64), torch.tensor([[0, 1], [3, 2], [1, 4], [0, 3], [2, 1]]), torch.rand(5, 2)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for T in (5, 3):
            torch.testing.assert_close(compiled(a[:T], ids[:T], weights[:T]), experts(a[:T], ids[:T], weights[:T]))


def bytes_of_words(objects: list[Any]) -> int:
    """Returns the bytes of packed words among `objects` that are in no stack."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in objects
        if type(tensor) is torch.Tensor and tensor.dtype == torch.int32 and tensor.dim() == 2
    }
    return sum(found.values())


def test_beside_the_stacks_only_one_expert_exists(tmp_path, monkeypatch, new_objects) -> None:
    split_experts(tmp_path / "source")
    gc.collect()
    before, reading, filling = bytes_of_words(new_objects()), [], []
    read, fill = CheckpointReader.read, ExpertWeights._fill

    def counted_read(self: CheckpointReader, index: int):
        reading.append(bytes_of_words(new_objects()) - before)
        return read(self, index)

    def counted_fill(self: ExpertWeights, index: int, parts: list[PackedWeight]) -> None:
        filling.append(bytes_of_words(new_objects()) - before)
        fill(self, index, parts)

    monkeypatch.setattr(CheckpointReader, "read", counted_read)
    monkeypatch.setattr(ExpertWeights, "_fill", counted_fill)
    monkeypatch.setattr(loader, "MOST_AHEAD", 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    part = 64 * 96 // 2  # bytes of one matrix; `//` below ignores four bytes of overhead
    # In each of two layers, the loader fills gate and up of the four experts, two matrices at a time, and then down, one
    # at a time. The plan has read one matrix of each kind, so in the first layer, gate and up also count its down.
    assert [size // part for size in filling] == 4 * [3] + 4 * [1] + 4 * [2] + 4 * [1]
    assert len(reading) == 24 and max(reading) // part == 2
    assert sum(own.b_packed.nbytes for own in model.modules() if isinstance(own, ExpertWeights)) == 24 * part


def test_a_stack_with_an_excluded_layer_becomes_floats_alone_and_computes_the_same(tmp_path) -> None:
    expected = split_experts(tmp_path / "source")
    config = MarlinConfig(modules_to_not_convert="*.experts.2.w2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32, quantization_config=config)
    stacks = [(type(own.gate_up), type(own.down)) for own in model.modules() if isinstance(own, MarlinExperts)]
    assert stacks == [(ExpertWeights, FloatExpertWeights)] * 2
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["absent", "in floats"])
def test_a_layer_that_is_absent_is_named_and_one_of_floats_is_read(kind, tmp_path) -> None:
    path = tmp_path / "source"
    split_experts(path)
    state = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    lost = "model.layers.1.block_sparse_moe.experts.3.w1"
    state = {name: tensor for name, tensor in state.items() if not name.startswith(lost)}
    if kind == "in floats":
        state[f"{lost}.weight"] = torch.randn(96, 64)
    for file in (*path.glob("*.safetensors"), *path.glob("*.index.json")):
        file.unlink()
    save_file(state, path / "model.safetensors", {"format": "pt"})
    if kind == "in floats":
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not any(info.values())
        gate_up = model.model.layers[1].mlp.experts.gate_up
        assert torch.equal(gate_up.gate.weight[3], state[f"{lost}.weight"]) and isinstance(gate_up.up, ExpertWeights)
        return
    with pytest.raises(
        ModelMismatchError, match=r"the experts of a mixture lack the layers model\.layers\.1\..*\.3\.w1$"
    ):
        AutoModelForCausalLM.from_pretrained(path)


def test_experts_whose_forward_was_changed_are_refused(tmp_path, monkeypatch) -> None:
    split_experts(tmp_path / "source")
    own = MixtralExperts.forward
    monkeypatch.setattr(MixtralExperts, "forward", lambda self, *args: 2 * own(self, *args))
    message = r"experts 'model\.layers\.0\.mlp\.experts': MixtralExperts computes something else than MarlinExperts"
    config = MarlinConfig(on_unsupported="error")
    with pytest.raises(ModelMismatchError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config)


def test_experts_that_compute_something_else_are_left_alone() -> None:
    name = "model.layers.0.mlp.experts.0.w1"
    model = MixtralForCausalLM(MixtralConfig(**SIZES))
    experts = model.model.layers[0].mlp.experts
    experts.post_expert_norm = torch.nn.RMSNorm(64)  # as in MuseSpark's experts, after down
    assert ExpertFinder(dict(model.named_modules())).find(name) is None
    del experts.post_expert_norm
    found = ExpertFinder(dict(model.named_modules())).find(name)
    assert found == ("model.layers.0.mlp.experts", ("w1", "w3", "w2"))


def test_ids_of_no_expert_add_nothing_where_a_stack_is_in_floats(tmp_path) -> None:
    stacked_experts(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    config = MarlinConfig(modules_to_not_convert="model.layers.0.*.down_proj.2")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32, quantization_config=config)
    stack, separate = (one.model.layers[0].mlp.experts for one in (model, other))
    assert isinstance(stack, MarlinExperts)
    assert isinstance(separate.down, FloatExpertWeights)
    ids, weights = torch.tensor([[1, -1], [4, 0], [-3, 9]]), torch.rand(3, 2)
    a = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(separate(a, ids, weights), stack(a, ids, weights))


@pytest.mark.parametrize("write", [split_experts, stacked_experts])
def test_dequantize_gives_a_model_of_floats_that_computes_the_same(write, tmp_path) -> None:
    write(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    with torch.no_grad():
        before = model(IDS).logits
        model.dequantize()
        assert not [module for module in model.modules() if isinstance(module, MarlinExperts | MarlinLinear)]
        torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("load", ["from_pretrained", "load_quantized"])
def test_loading_makes_no_layer_for_an_expert(load, tmp_path, monkeypatch) -> None:
    """A mixture may have 18,432 expert matrices. Each layer would take about half a millisecond."""
    source = split_experts(tmp_path / "source")
    made: list[MarlinLinear] = []
    create = MarlinLinear.__init__

    def counted(self: MarlinLinear, *args, **kwargs) -> None:
        made.append(self)
        create(self, *args, **kwargs)

    monkeypatch.setattr(MarlinLinear, "__init__", counted)
    if load == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
        assert made == []
        described = model.config.quantization_config.layers
        model.save_pretrained(tmp_path / "saved")  # under the names of the file, from copies of the tensors
        stored = model.config.quantization_config.layers
        assert len(described) == 24 and len(made) == 24
        assert sorted(map(str, described.values())) == sorted(map(str, stored.values()))
        made.clear()
    else:
        model = source
        rename = {f"model.layers.{index}.block_sparse_moe": f"model.layers.{index}.mlp" for index in range(2)}
        load_quantized(model, tmp_path / "source", rename=rename, progress=False)
    assert sum(isinstance(module, MarlinExperts) for module in model.modules()) == 2
    assert made == []
