"""quantize_model packs the experts of a float mixture; the results are those of the decoded weights."""

import copy
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.support.mixtures import decoded
from tests.support.models import IDS, fail_at, logits, same, tensors, tree
from torch_marlin_metal import MarlinExperts, MarlinLinear, quantize_model
from torch_marlin_metal.convert import replace_linear_layers
from torch_marlin_metal.layers.activation import find_known
from torch_marlin_metal.models.experts import ExpertLayers
from torch_marlin_metal.quantize import recipe

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 2, "tie_word_embeddings": False}
EXPERTS = "model.layers.0.mlp.experts"


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=4))
    elif name == "qwen3":
        config = Qwen3MoeConfig(**SIZES, intermediate_size=96, moe_intermediate_size=40, num_experts=5)
        model = Qwen3MoeForCausalLM(config)
    else:
        config = GptOssConfig(**SIZES, intermediate_size=96, num_local_experts=4, layer_types=["full_attention"])
        model = GptOssForCausalLM(config)
        for parameter in model.get_submodule(EXPERTS).parameters():
            nn.init.normal_(parameter, std=0.05)  # transformers initializes biases to zero
    return model.eval()


def decoded_model(floats: nn.Module, packed: nn.Module) -> nn.Module:
    """Returns a float copy of the model, with the weights that the packed model's words decode to."""
    model = copy.deepcopy(floats)
    with torch.no_grad():
        for name, module in packed.named_modules():
            if isinstance(module, MarlinLinear):
                model.get_submodule(name).weight.copy_(torch.from_numpy(decoded(module.to_packed())))
            elif isinstance(module, MarlinExperts):
                experts = model.get_submodule(name)
                for part, stack in (("gate_up_proj", module.gate_up), ("down_proj", module.down)):
                    for index in range(module.num_experts):
                        weight = torch.from_numpy(decoded(stack.to_packed(index)))
                        getattr(experts, part)[index].copy_(weight.T if experts.is_transposed else weight)
    return model


@pytest.mark.parametrize("weight_format", ["uint4", "mxfp4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt-oss"])
def test_experts_are_packed_and_saved(name, weight_format, tmp_path) -> None:
    model, floats = made(name), made(name)
    report = quantize_model(model, weight_format, 32, vocabulary_format=weight_format, progress=False)
    experts = model.get_submodule(EXPERTS)
    assert isinstance(experts, MarlinExperts)
    assert experts.top_k == 2
    assert (experts.gate_up.bias is not None) == (name == "gpt-oss")
    exact = decoded_model(floats, model)
    dense = logits(exact)
    exact.set_experts_implementation("eager")  # the grouped product does not support fp64
    wide = logits(exact.double())
    assert (logits(model) - wide).abs().max() <= 4 * (dense - wide).abs().max()

    (entry,) = [layer for layer in report.layers if layer.name == EXPERTS]
    old = floats.get_submodule(EXPERTS)
    pairs = [
        (getattr(exact.get_submodule(EXPERTS), part).detach(), getattr(old, part).detach())
        for part in ("gate_up_proj", "down_proj")
    ]
    error = sum((new - w).square().sum() for new, w in pairs) / sum(w.double().square().sum() for _, w in pairs)
    assert entry.error == pytest.approx(float(error**0.5), rel=1e-4)
    assert (entry.kind, entry.weight_format, entry.group_size) == (type(old).__name__, weight_format, 32)
    assert entry.bytes_before == sum(parameter.nbytes for parameter in old.parameters())
    assert entry.bytes_after == sum(t.nbytes for t in (*experts.buffers(), *experts.parameters()))
    assert not report.left

    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(again.state_dict(), model.state_dict())
    assert torch.equal(logits(again), logits(model))


def test_filters_choose_the_module_of_the_experts() -> None:
    model = made("mixtral")
    report = quantize_model(model, "uint4", 32, include="*.experts", progress=False)
    assert [layer.name for layer in report.layers] == [EXPERTS]
    model = made("mixtral")
    report = quantize_model(model, "uint4", 32, exclude=["*.experts"], progress=False)
    assert not [layer for layer in report.layers if "experts" in layer.name]
    assert not isinstance(model.get_submodule(EXPERTS), MarlinExperts)
    assert len(report.converted) == 6


def poisoned(experts: nn.Module) -> None:
    experts.down_proj.data[2, 3, 4] = torch.nan


def shared(experts: nn.Module) -> None:
    experts.other = nn.Module()
    experts.other.register_parameter("gate_up_proj", experts.gate_up_proj)


def narrow(experts: nn.Module) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj[..., :90].detach().clone())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (poisoned, "down_proj is not finite"),
        (shared, rf"its weight is also that of {EXPERTS}.other \(Module\), which stays"),
        (narrow, "K = 90 of down_proj is not a positive multiple of 8"),
        (lambda experts: setattr(experts, "forward", experts.forward), "its forward was replaced on the instance"),
        (lambda experts: experts.double(), "gate_up_proj is torch.float64; expected float16, bfloat16 or float32"),
        (lambda experts: experts.to("meta"), "gate_up_proj is on the meta device"),
    ],
)
@pytest.mark.filterwarnings("ignore:quantize_model. only")
def test_experts_that_stay_are_listed_with_the_reason(change, reason) -> None:
    model = made("mixtral")
    change(model.get_submodule(EXPERTS))
    report = quantize_model(model, "uint4", 32, progress=False)
    (entry,) = [layer for layer in report.left if layer.name == EXPERTS]
    assert re.fullmatch(reason, entry.reason)


class Doubled(MixtralExperts):
    def forward(self, *args):
        return 2 * super().forward(*args)


class Normalized(MixtralExperts):
    def forward(self, hidden, ids, weights):
        experts = [
            super(Normalized, self).forward(hidden, ids[:, i : i + 1], weights[:, i : i + 1] * 0 + 1) for i in (0, 1)
        ]
        return sum(functional.layer_norm(y, y.shape[-1:]) * weights[:, i, None] for i, y in enumerate(experts))


class WithDropout(GptOssExperts):
    def _apply_gate(self, both):
        return functional.dropout(super()._apply_gate(both), 0.5, self.training)


class WithBuffer(MixtralExperts):
    def __init__(self, config):
        super().__init__(config)
        self.act_fn = nn.SiLU()
        self.act_fn.register_buffer("factor", torch.ones(1))


class OwnGate(GptOssExperts):
    def _apply_gate(self, both):
        gate, up = both.split(self.intermediate_size, -1)
        return gate.relu() * up


def replaced(experts_class: type[nn.Module]) -> nn.Module:
    """Returns a model with another class of experts, which has the same parameters."""
    model = made("gpt-oss" if issubclass(experts_class, GptOssExperts) else "mixtral")
    experts = experts_class(model.config)
    experts.load_state_dict(model.get_submodule(EXPERTS).state_dict(), strict=False)
    model.set_submodule(EXPERTS, experts.eval())
    return model


REFUSED = {
    Doubled: "Doubled computes something else than MarlinExperts",
    Normalized: "Normalized computes something else than MarlinExperts",
    WithDropout: "WithDropout computes something else in training, such as dropout",
    WithBuffer: "WithBuffer has a buffer: act_fn.factor",
}


@pytest.mark.parametrize("experts_class", REFUSED)
@pytest.mark.filterwarnings("ignore:quantize_model. only")
def test_experts_of_another_class_stay_if_they_compute_something_else(experts_class) -> None:
    model, before = replaced(experts_class), replaced(experts_class)
    report = quantize_model(model, "uint4", 32, progress=False)
    assert [layer.reason for layer in report.left if layer.name == EXPERTS] == [REFUSED[experts_class]]
    own, old = model.get_submodule(EXPERTS), before.get_submodule(EXPERTS)
    assert type(own) is experts_class
    assert not own.training
    assert vars(own).keys() == vars(old).keys()
    sizes = [{key: value for key, value in vars(one).items() if isinstance(value, int)} for one in (own, old)]
    assert sizes[0] == sizes[1]


def test_experts_with_a_gate_of_their_own_are_packed() -> None:
    model, floats = replaced(OwnGate), replaced(OwnGate)
    quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    assert isinstance(model.get_submodule(EXPERTS), MarlinExperts)
    exact = decoded_model(floats, model)
    torch.testing.assert_close(logits(model), logits(exact), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", [0, 2, 4, 9])
def test_an_error_leaves_the_model_unchanged(call, monkeypatch) -> None:
    """The model has 14 weights: the embedding, four of attention, eight of experts, and the output layer."""
    model = made("mixtral")
    before, values = tree(model), tensors(model)
    fail_at(monkeypatch, "quantize_weight", call, recipe)
    with pytest.raises(RuntimeError, match="injected"):
        quantize_model(model, "uint4", 32, progress=False)
    assert tree(model) == before
    assert same(tensors(model), values)


def test_a_weight_that_does_not_fit_is_named() -> None:
    model = made("mixtral")
    model.get_submodule(EXPERTS).down_proj.data[1] = 1e30
    with pytest.raises(ValueError, match=rf"quantize_model: layer {EXPERTS}.down_proj.1: .*scale_dtype"):
        quantize_model(model, "uint4", 32, progress=False)


def test_without_atomic_the_old_experts_are_freed() -> None:
    model = made("gpt-oss")
    old = [weakref.ref(parameter) for parameter in model.get_submodule(EXPERTS).parameters()]
    quantize_model(model, "uint4", 32, atomic=False, progress=False)
    assert [reference() for reference in old] == [None] * 4


@pytest.mark.filterwarnings("error:quantize_model")
def test_a_warning_that_is_an_error_leaves_the_model_unchanged() -> None:
    model = made("mixtral")
    poisoned(model.get_submodule(EXPERTS))
    before, values = tree(model), tensors(model)
    with pytest.raises(UserWarning, match=f"only .* stay in floats: {EXPERTS} "):
        quantize_model(model, "uint4", 32, progress=False)
    assert tree(model) == before
    for name, value in tensors(model).items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=0, equal_nan=True)


def test_a_model_that_was_quantized_in_inference_mode_passes_gradients_on() -> None:
    model, other = made("mixtral"), made("mixtral")
    with torch.inference_mode():
        quantize_model(model, "uint4", 32, progress=False)
    quantize_model(other, "uint4", 32, progress=False)
    gradients = []
    for one in (model, other):
        a = one.get_input_embeddings()(IDS).detach().requires_grad_()
        one(inputs_embeds=a).logits.square().sum().backward()
        gradients.append(a.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_replace_linear_layers_says_that_experts_stay_in_floats() -> None:
    report = replace_linear_layers(made("mixtral"), progress=False)
    assert [(layer.name, layer.reason) for layer in report.left] == [
        (EXPERTS, "its experts are in floats; quantize_model packs them")
    ]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_replace_linear_layers_lists_the_experts_of_other_packages(is_loaded) -> None:
    model = made("gpt-oss")
    experts = Mxfp4GptOssExperts(model.config)
    if is_loaded:  # transformers has then replaced the parameters by tensors of another library
        for name in ("gate_up_proj", "down_proj"):
            delattr(experts, name)
            setattr(experts, name, object())
    model.set_submodule(EXPERTS, experts)
    report = replace_linear_layers(model, progress=False)
    ((name, kind, reason),) = [(layer.name, layer.kind, layer.reason) for layer in report.left]
    assert (name, kind) == (EXPERTS, "Mxfp4GptOssExperts")
    assert "load the checkpoint with load_quantized" in reason


@pytest.mark.parametrize(
    ("experts_class", "config_class"),
    [
        (DeepseekV4Experts, DeepseekV4Config),
        (Glm5NextTextExperts, Glm5NextTextConfig),
        (HYV4Experts, HYV4Config),
        (GptOssExperts, GptOssConfig),
    ],
)
def test_families_with_a_limit_have_a_known_activation(experts_class, config_class) -> None:
    config = config_class(hidden_size=64)
    config.swiglu_limit = 5.0
    with torch.device("meta"):  # at the sizes of the real models
        layers = ExpertLayers.of(experts_class(config))
    assert not layers.why_unknown
    known = find_known(layers.gate, layers.shapes[0].N)
    assert known is not None
    assert known.activation == ("clamped_silu" if experts_class is GptOssExperts else "limited_silu")
    assert known.limit == 5.0
