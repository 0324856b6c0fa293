"""load_quantized loads a complete checkpoint into any model, or changes nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from tests.support.checkpoint_writers import LAYER, write_gptq
from tests.support.llama import FOLDERS, IDS, MODELS, write_gguf
from tests.support.models import same, tensors, tree
from torch_marlin_metal import MarlinEmbedding, MarlinLinear, PackedWeight, load_quantized
from torch_marlin_metal.convert import CheckpointError, UnsupportedFormat
from torch_marlin_metal.layers.fuse import FusedLinear
from torch_marlin_metal.models.linear_layers import ModelMismatchError

GPTQ = MODELS / "gptq-sym-g32-actorder"


def skeleton(folder: Path, device: str = "meta", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = AutoConfig.from_pretrained(folder)
    config.dtype = dtype
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def test_a_meta_skeleton_gets_packed_layers_and_the_checkpoints_other_tensors(folder_and_device, monkeypatch) -> None:
    folder, device = folder_and_device
    monkeypatch.setattr(PackedWeight, "dequantize", None)  # a decode of any weight would fail
    model = skeleton(folder)
    report = load_quantized(model, folder, device=device, progress=False)
    monkeypatch.undo()
    assert (len(report.converted), report.left) == (14, [])
    assert {tensor.device.type for held in (model.parameters(), model.buffers()) for tensor in held} == {device}
    stored, references = load_file(folder / "model.safetensors"), load_file(folder / "reference.safetensors")
    for name, reference in references.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, MarlinLinear)
        assert torch.equal(layer.dequantize().cpu().half(), reference)
        assert layer.weight.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), stored[name].float())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert bool(model(IDS.to(device)).logits.isfinite().all())


def test_a_real_skeleton_keeps_its_dtype_and_buffers() -> None:
    model = skeleton(GPTQ, "cpu", torch.bfloat16)
    frequencies = model.model.rotary_emb.inv_freq
    load_quantized(model, GPTQ, progress=False)
    assert model.model.rotary_emb.inv_freq is frequencies
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert same(tensors(model), tensors(load_on_meta(dtype=torch.bfloat16)))


def load_on_meta(**options) -> LlamaForCausalLM:
    model = skeleton(GPTQ)
    load_quantized(model, GPTQ, progress=False, **options)
    return model


def test_excluded_layers_are_decoded() -> None:
    model = skeleton(GPTQ)
    report = load_quantized(model, GPTQ, exclude=["*.o_proj", "*.layers.1.*"], progress=False)
    assert (len(report.converted), len(report.left)) == (6, 8)
    assert {entry.reason for entry in report.left} == {"excluded: decoded to floats"}
    references = load_file(GPTQ / "reference.safetensors")
    for entry in report.left:
        layer = model.get_submodule(entry.name)
        assert type(layer) is nn.Linear
        assert torch.equal(layer.weight.half(), references[f"{entry.name}.weight"])
    assert bool(model(IDS).logits.isfinite().all())


def test_fused_projections_compute_the_same(device) -> None:
    plain, fused = load_on_meta(device=device), load_on_meta(device=device, fuse=True)
    assert sum(isinstance(module, FusedLinear) for module in fused.modules()) == 10
    assert torch.equal(fused(IDS.to(device)).logits, plain(IDS.to(device)).logits)


def test_a_gguf_file_under_transformers_names(tmp_path) -> None:
    path, weights = write_gguf(tmp_path / "tiny.gguf", FOLDERS[0], "Q4_1")
    model = skeleton(FOLDERS[0])
    report = load_quantized(model, path, progress=False)
    assert {entry.weight_format for entry in report.converted} == {"uint4_bias"}
    embedding = torch.from_numpy(weights.pop("model.embed_tokens"))
    assert torch.equal(model.lm_head.weight, embedding)
    for name, weight in weights.items():
        assert torch.equal(model.get_submodule(name).dequantize(), torch.from_numpy(weight))


def test_an_embedding_in_blocks_stays_packed_and_so_does_its_head(tmp_path) -> None:
    path, weights = write_gguf(tmp_path / "tiny.gguf", FOLDERS[0], "Q4_0", embedding="Q4_0")
    model = skeleton(FOLDERS[0])
    report = load_quantized(model, path, progress=False)
    assert not report.left
    table = model.model.embed_tokens
    assert type(table) is MarlinEmbedding
    assert type(model.lm_head) is MarlinLinear
    assert model.lm_head.b_packed is table.b_packed
    exact = torch.from_numpy(weights["model.embed_tokens"])
    assert torch.equal(table(IDS), exact[IDS].to(table.dtype))
    dense = skeleton(FOLDERS[0])
    load_quantized(dense, path, exclude=["model.embed_tokens"], progress=False)
    assert torch.equal(dense.lm_head.weight, exact.to(dense.lm_head.weight.dtype))
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, rtol=1e-3, atol=1e-3)


def test_modules_that_share_a_weight_become_floats_together(tmp_path) -> None:
    path, weights = write_gguf(tmp_path / "tiny.gguf", FOLDERS[0], "Q4_0", embedding="Q4_0")
    model = skeleton(FOLDERS[0])
    report = load_quantized(model, path, exclude=["lm_head"], progress=False)
    assert [(entry.name, entry.reason) for entry in report.left] == [
        ("model.embed_tokens", "its weight is also that of lm_head: excluded: decoded to floats"),
        ("lm_head", "its weight is that of model.embed_tokens"),
    ]
    assert model.model.embed_tokens.weight is model.lm_head.weight
    assert torch.equal(model.lm_head.weight, torch.from_numpy(weights["model.embed_tokens"]).to(torch.float32))


class Scaled(nn.Embedding):
    """Like Gemma's embedding, multiplies the rows by a factor in its forward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 8


def test_an_embedding_with_a_forward_of_its_own_is_refused_or_decoded(tmp_path) -> None:
    path, weights = write_gguf(tmp_path / "tiny.gguf", FOLDERS[0], "Q4_0", embedding="Q4_0")
    model = skeleton(FOLDERS[0])
    model.model.embed_tokens.__class__ = Scaled
    with pytest.raises(ModelMismatchError, match=r"layer 'model.embed_tokens': .*Scaled has a forward of its own"):
        load_quantized(model, path, on_unsupported="error", progress=False)
    report = load_quantized(model, path, progress=False)  # the default for GGUF files
    assert [entry.reason for entry in report.left] == [
        "Scaled has a forward of its own",
        "its weight is that of model.embed_tokens",
    ]
    assert torch.equal(model.lm_head.weight, torch.from_numpy(weights["model.embed_tokens"]))


class Own(nn.Module):
    """A model in which one layer's name differs from the name in the checkpoint."""

    def __init__(self, K: int = 64, N: int = 32, bias: bool = False) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"down": nn.Linear(K, N, bias=bias)})
        self.norm = nn.LayerNorm(N)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net["down"](a))


NAMES = {"model.layers.3.mlp.down_proj": "net.down", "model.norm": "norm"}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    write_gptq(tmp_path, np.random.default_rng(0), 64, 32, 32)
    add(tmp_path, {"model.norm.weight": torch.rand(32), "model.norm.bias": torch.rand(32)})
    return tmp_path


def add(path: Path, new: dict[str, torch.Tensor], remove: tuple[str, ...] = ()) -> None:
    held = load_file(path / "model.safetensors") | new
    save_file({name: held[name] for name in held if name not in remove}, path / "model.safetensors")


def test_any_module_with_names_of_its_own(checkpoint) -> None:
    for rename in (NAMES, lambda name: NAMES[name] if name in NAMES else name.replace("model.norm", "norm")):
        model = Own()
        load_quantized(model, checkpoint, rename=rename, progress=False)
        assert isinstance(model.net["down"], MarlinLinear)
        assert torch.equal(model.norm.bias, load_file(checkpoint / "model.safetensors")["model.norm.bias"])


def test_hooks_and_mode_move_to_the_new_layer(checkpoint) -> None:
    model, seen = Own().eval(), []
    handle = model.net["down"].register_forward_hook(lambda module, a, y: seen.append(type(module)))
    load_quantized(model, checkpoint, rename=NAMES, progress=False)
    model(torch.ones(1, 64))
    assert (seen, model.net["down"].training) == ([MarlinLinear], False)
    handle.remove()
    model(torch.ones(1, 64))
    assert len(seen) == 1


CASES = {
    "another K": (lambda: Own(K=128), {}, r"layer 'net.down': expected a weight of \[32, 128\].* is \[32, 64\]"),
    "a bias": (lambda: Own(bias=True), {}, "layer 'net.down': the model's layer has a bias, the checkpoint's has none"),
    "another norm": (lambda: norm_of(16), {}, r"tensor 'norm.bias': expected shape \[16\].*got \[32\]"),
    "another kind": (lambda: with_layer(nn.LayerNorm(4)), {}, "layer 'net.down': expected nn.Linear .*got LayerNorm"),
    "no such layer": (
        Own,
        {"rename": {"model.norm": "norm"}},
        r"Own has no place for model.layers.3.mlp.down_proj \(packed layer\); its own Linear layers are for example "
        r"net.down; ignore=.model.layers.3.mlp.down_proj. leaves",
    ),
    "more tensors": (
        lambda: norm_of(None),
        {},
        r"Own has no place for model.norm.bias, model.norm.weight; .*; ignore=.norm.bias.",
    ),
    "fewer tensors": (
        lambda: more(Own()),
        {},
        r"the checkpoint lacks extra.bias, extra.weight; keep=.extra.weight. keeps the model.s values$",
    ),
    "integers": (lambda: integers(Own()), {}, r"tensor 'norm.weight': expected torch.int32 as in the model, got F32"),
}


def norm_of(size: int | None) -> Own:
    model = Own()
    model.norm = nn.Identity() if size is None else nn.LayerNorm(size)
    return model


def with_layer(layer: nn.Module) -> Own:
    model = Own()
    model.net["down"] = layer
    return model


def more(model: Own) -> Own:
    model.extra = nn.Linear(2, 2)
    return model


def integers(model: Own) -> Own:
    model.norm.weight = nn.Parameter(torch.zeros(32, dtype=torch.int32), requires_grad=False)
    return model


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_named_and_the_model_stays(checkpoint, case) -> None:
    make, options, message = CASES[case]
    model = make()
    before, values = tree(model), tensors(model)
    with pytest.raises(ModelMismatchError, match=message):
        load_quantized(model, checkpoint, progress=False, **{"rename": NAMES, **options})
    assert (tree(model), same(tensors(model), values)) == (before, True)


def test_ignored_and_kept_tensors(checkpoint) -> None:
    model = more(norm_of(None))
    kept = model.extra.weight
    load_quantized(model, checkpoint, rename=NAMES, ignore=["norm.*"], keep=["extra.*"], progress=False)
    assert isinstance(model.net["down"], MarlinLinear)
    assert model.extra.weight is kept


def test_a_bias_of_zeros_is_dropped_and_another_refused(checkpoint) -> None:
    add(checkpoint, {f"{LAYER}.bias": torch.zeros(32)})
    model = Own()
    load_quantized(model, checkpoint, rename=NAMES, progress=False)
    assert model.net["down"].bias is None
    add(checkpoint, {f"{LAYER}.bias": torch.ones(32)})
    with pytest.raises(ModelMismatchError, match="the checkpoint's layer has a bias, the model's has none"):
        load_quantized(Own(), checkpoint, rename=NAMES, progress=False)


def test_damage_in_the_last_layer_leaves_the_model(tmp_path) -> None:
    for file in GPTQ.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = "model.layers.1.self_attn.v_proj.scales"
    add(tmp_path, {name: torch.full((2, 64), float("nan"), dtype=torch.float16)})
    model = skeleton(GPTQ, "cpu")
    before, values = tree(model), tensors(model)
    with pytest.raises(CheckpointError, match=r"v_proj.scales': scales: expected finite values"):
        load_quantized(model, tmp_path, progress=False)
    assert (tree(model), same(tensors(model), values)) == (before, True)


def test_a_failed_fusion_leaves_the_model(monkeypatch) -> None:
    model = skeleton(GPTQ, "cpu")
    before, values = tree(model), tensors(model)
    monkeypatch.setattr("torch_marlin_metal.layers.fuse._fuse", lambda layers: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_quantized(model, GPTQ, fuse=True, progress=False)
    assert (tree(model), same(tensors(model), values)) == (before, True)


def test_a_format_that_is_listed_as_refused_is_refused_by_name(checkpoint) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "marlin"
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFormat, match="marlin"):
        load_quantized(Own(), checkpoint, rename=NAMES, progress=False)


def test_buffers_that_no_checkpoint_holds(checkpoint) -> None:
    with torch.device("meta"):
        model = Own()
        model.register_buffer("table", torch.ones(3), persistent=False)
    with pytest.raises(
        ModelMismatchError,
        match=r"Own: the tensors table are in no checkpoint, and the model.s class does not compute them",
    ):
        load_quantized(model, checkpoint, rename=NAMES, progress=False)
    assert model.table.is_meta
