"""load_quantized reads the packed experts of mixtures into stacks, or states the reason why not."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.mixtures import llama4, qwen_experts, rewritten, split_experts, stacked_experts
from tests.support.models import logits, same, tensors, tree
from torch_marlin_metal import MarlinExperts, MarlinLinear, convert, load_quantized, quantize_model, quantize_weight
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.models.linear_layers import ModelMismatchError
from torch_marlin_metal.parallel import MarlinExpertParallel

EXPERTS = "model.layers.0.mlp.experts"


def empty(model: nn.Module, device: str = "meta") -> nn.Module:
    with torch.device(device):
        return type(model)(model.config).eval()


def mlp(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")


def compressed(path: Path) -> nn.Module:
    return qwen_experts(path, "compressed-tensors")


@pytest.mark.parametrize("write", [split_experts, stacked_experts, qwen_experts, compressed])
def test_experts_are_stacked_and_compute_the_same(write, tmp_path) -> None:
    exact = write(tmp_path / "source")
    model = empty(exact)
    report = load_quantized(model, tmp_path / "source", rename=mlp, progress=False)
    assert [layer.name for layer in report.converted] == [f"model.layers.{index}.mlp.experts" for index in range(2)]
    assert len([module for module in model.modules() if isinstance(module, MarlinExperts)]) == 2
    dense = logits(exact)
    exact.set_experts_implementation("eager")  # the grouped product does not support fp64
    wide = logits(exact.double())
    assert (logits(model) - wide).abs().max() <= 4 * (dense - wide).abs().max()


def test_a_saved_model_loads_bit_for_bit(tmp_path) -> None:
    model = split_experts(tmp_path / "source")
    quantize_model(model, "uint4", 32, progress=False)
    model.save_pretrained(tmp_path / "saved")
    again = empty(model)
    load_quantized(again, tmp_path / "saved", progress=False)
    assert same(again.state_dict(), model.state_dict())
    assert torch.equal(logits(again), logits(model))
    assert not [module for module in again.modules() if isinstance(module, nn.Linear)]
    assert [module for module in again.modules() if isinstance(module, MarlinLinear)]


def without_one(state: dict) -> dict:
    return {name: tensor for name, tensor in state.items() if not name.startswith(f"{EXPERTS}.3.up_proj.")}


def one_more(state: dict) -> dict:
    parts = {name: tensor for name, tensor in state.items() if name.startswith(f"{EXPERTS}.3.up_proj.")}
    return state | {name.replace(".3.", ".4."): tensor.clone() for name, tensor in parts.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one, f"the experts of a mixture lack the layers {EXPERTS}.3.up_proj"),
        (one_more, f"layer '{EXPERTS}.4.up_proj': the model has no place for it beside other experts' layers"),
    ],
)
def test_experts_that_do_not_fit_are_named_and_change_nothing(change, message, tmp_path) -> None:
    model = empty(qwen_experts(tmp_path / "source"), "cpu")
    rewritten(tmp_path / "source", change)
    before, values = tree(model), tensors(model)
    with pytest.raises(ModelMismatchError, match=message):
        load_quantized(model, tmp_path / "source", progress=False)
    assert tree(model) == before
    assert same(tensors(model), values)


def test_experts_with_scales_of_different_dtypes_share_the_wider_one(tmp_path) -> None:
    model = empty(split_experts(tmp_path / "float"), "cpu")
    packed = copy.deepcopy(model)
    quantize_model(packed, "uint4", 32, progress=False)
    packed.save_pretrained(tmp_path / "saved")
    layer = f"{EXPERTS}.gate_up_proj.2"

    def change(state: dict) -> dict:
        return state | {f"{layer}.scales": state[f"{layer}.scales"].float()}

    rewritten(tmp_path / "saved", change)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    config["quantization_config"]["layers"][layer]["scale_dtype"] = "float32"
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    load_quantized(model, tmp_path / "saved", progress=False)
    assert model.get_submodule(EXPERTS).gate_up.scales.dtype == torch.float32
    torch.testing.assert_close(logits(model), logits(packed), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exclude", ["*.0.mlp.experts", "*.0.mlp.experts.2.up_proj"])
def test_experts_can_be_excluded_together_or_one_layer_of_them(exclude, tmp_path) -> None:
    exact = qwen_experts(tmp_path / "source")
    model = empty(exact)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_quantized(model, tmp_path / "source", exclude=exclude, progress=False)
    experts = model.get_submodule(EXPERTS)
    if exclude.endswith("experts"):
        assert torch.equal(experts.gate_up_proj, exact.get_submodule(EXPERTS).gate_up_proj)
    else:
        assert torch.equal(experts.gate_up.up.weight, exact.get_submodule(EXPERTS).gate_up_proj[:, 96:])
        assert isinstance(experts.gate_up.gate, ExpertWeights) and isinstance(experts.down, ExpertWeights)
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entry_point", ["quantize_model", "from_pretrained", "load_quantized"])
def test_experts_that_take_each_token_stay_packed(entry_point, tmp_path) -> None:
    floats = llama4()
    if entry_point == "from_pretrained":
        floats.save_pretrained(tmp_path / "floats")
        config = MarlinConfig("uint4b8", 32)
        model = Llama4ForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=config).eval()
    else:
        model = llama4()
        quantize_model(model, "uint4b8", 32, progress=False)
    model.save_pretrained(tmp_path / "packed")
    if entry_point == "load_quantized":
        with torch.device("meta"):
            model = Llama4ForCausalLM(floats.config).eval()
        load_quantized(model, tmp_path / "packed", progress=False)
    again = Llama4ForCausalLM.from_pretrained(tmp_path / "packed").eval()
    assert same(again.state_dict(), model.state_dict())
    exact = Llama4ForCausalLM.from_pretrained(tmp_path / "packed").eval().dequantize()
    experts, decoded = (one.model.layers[0].feed_forward.experts for one in (model, exact))
    assert isinstance(experts, MarlinExperts)
    assert decoded.gate_up_proj.shape == (4, 64, 128)
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(exact), logits(floats), rtol=0.5, atol=0.5)
    tokens = torch.randn(4 * 6, 64) * (torch.rand(4 * 6, 1) < 0.3)
    torch.testing.assert_close(experts(tokens), decoded(tokens), rtol=1e-4, atol=1e-5)
    assert not experts(torch.zeros(4, 64)).any()


def test_experts_that_take_each_token_are_refused_where_others_are_expected() -> None:
    model = llama4()
    quantize_model(model, "uint4b8", 32, progress=False)
    experts = model.model.layers[0].feed_forward.experts
    assert experts.top_k == 1
    with pytest.raises(ValueError, match=r"expected \[E \* T, H\] .* E = 4 experts, got \[13, 64\]"):
        experts(torch.ones(13, 64))
    with pytest.raises(TypeError, match="each token's experts and are not split, got ExpertsOfEachToken"):
        MarlinExpertParallel()._apply(experts, None)


class Twice(Llama4TextExperts):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


def test_experts_that_compute_something_else_are_named(tmp_path) -> None:
    model = llama4()
    model.model.layers[0].feed_forward.experts.__class__ = Twice
    layers = []
    for name, module in model.model.layers[0].named_modules():
        if type(module) is torch.nn.Linear:
            layers.append(quantize_weight(module.weight.detach(), "uint4b8", 32))
            layers[-1].name = f"model.layers.0.{name}"
    for index in range(4):
        for part in ("gate_proj", "up_proj", "down_proj"):
            layers.append(quantize_weight(torch.randn(64, 64), "uint4b8", 32))
            layers[-1].name = f"model.layers.0.feed_forward.experts.{index}.{part}"
    taken = {f"{layer.name}.weight" for layer in layers}
    others = [
        (name, tensor) for name, tensor in model.state_dict().items() if name not in taken and ".experts." not in name
    ]
    convert.export_checkpoint(layers, tmp_path / "packed", "gptq", other_tensors=others)
    with pytest.raises(ModelMismatchError, match="Twice computes something else than MarlinExperts"):
        load_quantized(model, tmp_path / "packed", on_unsupported="error", progress=False)
    with pytest.warns(UserWarning, match="feed_forward.experts is decoded to floats: Twice computes"):
        load_quantized(model, tmp_path / "packed", progress=False)
    experts = model.model.layers[0].feed_forward.experts
    gate, up, down = (layer.dequantize() for layer in layers[-3:])
    assert torch.equal(experts.gate_up_proj[3], torch.cat([gate, up], 1))
    assert torch.equal(experts.down_proj[3], down)


def test_experts_without_a_down_are_not_decoded_into_fewer(tmp_path) -> None:
    """LongCat has experts without weights, for which gate_up_proj has rows but down_proj has none."""
    model = qwen_experts(tmp_path / "source")
    experts = model.get_submodule(EXPERTS)
    experts.gate_up_proj = nn.Parameter(torch.cat([experts.gate_up_proj.detach(), torch.zeros(2, 192, 64)]))
    before = tensors(model)
    with pytest.raises(ModelMismatchError, match="Qwen3MoeExperts has 6 experts in gate_up_proj and 4 in down_proj"):
        load_quantized(model, tmp_path / "source", on_unsupported="error", progress=False)
    message = r"expected gate_up_proj of \[6, 192, 64\] as in the model, the checkpoint's is \[4, 192, 64\]"
    with pytest.warns(UserWarning, match="decoded to floats"), pytest.raises(ModelMismatchError, match=message):
        load_quantized(model, tmp_path / "source", progress=False)
    assert same(tensors(model), before)


class Doubled(Qwen3MoeExperts):
    def forward(self, *args):
        return 2 * super().forward(*args)


def test_experts_with_a_forward_of_their_own_are_refused(tmp_path) -> None:
    model = qwen_experts(tmp_path / "source")
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Doubled
    before = tensors(model)
    with pytest.raises(ModelMismatchError, match=f"experts '{EXPERTS}': Doubled computes something else"):
        load_quantized(model, tmp_path / "source", on_unsupported="error", progress=False)
    assert same(tensors(model), before)
