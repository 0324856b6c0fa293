"""Helpers for the tiny Llama of tests/data/models: fp64 references, a GGUF file, and an error bound for its logits."""

import copy
import json
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from tests.support.reference import TINY, UNIT_ROUNDOFF, check_gemm
from torch_marlin_metal import MarlinLinear, PackedWeight

MODELS = Path(__file__).parents[1] / "data/models"
FOLDERS = sorted(path.parent for path in MODELS.glob("*/model.safetensors"))
IDS = torch.tensor([[5, 17, 99, 42, 7, 63, 110, 23, 8, 77, 31, 56]])


def dense_model(folder: Path, weights: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """Returns the model in fp64 from decoded weights (`[N, K]` by layer name) and the checkpoint's other tensors."""
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = LlamaForCausalLM(config).double().eval()
    state = dense | {f"{name}.weight": weight for name, weight in weights.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, _Norm(module))
    return model


def magnitude(weight: PackedWeight) -> torch.Tensor:
    """Returns the magnitude of each weight in the error bound, fp64 `[K, N]`.

    The rounding errors of kernels that sum raw codes grow with the codes and zero points, so these determine the
    magnitude.
    """
    if weight.zeros is not None or weight.weight_format == "uint4b8":
        return _code_magnitude(weight)
    return weight.dequantize().double().abs()


def layer_bound(weight: PackedWeight, a: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the error bound of one fp32 product, including the rounding of its fp64 input to fp32."""
    u, size = UNIT_ROUNDOFF[torch.float32], a.abs().double()
    rounded = u * (size @ weight.dequantize().double().abs())
    return u * y.abs().double() + TINY[torch.float32] + 16 * 2.0**-24 * (size @ magnitude(weight)) + rounded


def _code_magnitude(weight: PackedWeight) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    words = weight.b_packed.long() & 0xFFFFFFFF
    codes = ((words[:, None, :] >> shifts[None, :, None]) & 15).reshape(weight.K, weight.N).double()
    groups = torch.arange(weight.K) // weight.group_size
    zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
    scales = weight.scales.double().abs()[groups]
    if weight.weight_format == "uint4_bias":
        packed = codes * scales + zeros.double().abs()[groups]
    else:
        packed = (codes + zeros.double().abs()[groups]) * scales
    if weight.perm is None:
        return packed
    restored = torch.empty_like(packed)
    restored[weight.perm.long()] = packed
    return restored


class _Norm(nn.Module):
    """transformers' RMSNorm without the rounding to fp32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.weight * a * torch.rsqrt(a.square().mean(-1, keepdim=True) + self.eps)


class _InFp32(nn.Module):
    """Runs a packed layer in fp32 inside a model that computes everything else in fp64."""

    def __init__(self, layer: nn.Module, device: str) -> None:
        super().__init__()
        self.layer, self.device = layer, device

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.layer(a.float().to(self.device)).cpu().double()


class _Recorded(nn.Module):
    """A dense layer that stores its input and output, so that autograd can differentiate the logits by this output."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        self.a = a.detach()
        self.y = self.linear(a)
        return self.y


def check_logits(model: LlamaForCausalLM, reference: LlamaForCausalLM, device: str) -> float:
    """Compares the logits of a loaded model with the decoded fp64 reference. Returns the largest error / bound.

    Packed layers compute in fp32 on `device`. Everything else computes in fp64 on the CPU, so that only the operator
    causes errors. Each element of a layer's output has an error bound. To first order, the error of a logit is at most
    the sum over all layers and elements of |d logit / d element| times that bound. Autograd gives the derivatives
    exactly. The factor 1.001 covers the second order.
    """
    packed = {
        name: layer.to_packed().to("cpu") for name, layer in model.named_modules() if isinstance(layer, MarlinLinear)
    }
    assert len(packed) == 14
    mixed = copy.deepcopy(reference)
    recorded = {}
    for name in packed:
        mixed.set_submodule(name, _InFp32(model.get_submodule(name), device))
        recorded[name] = _Recorded(reference.get_submodule(name))
        reference.set_submodule(name, recorded[name])
    with torch.no_grad():
        got = mixed(IDS).logits[0, -1, ::8]
    exact = reference(IDS).logits[0, -1, ::8]
    bound = torch.zeros_like(exact)
    for index, logit in enumerate(exact):
        outputs = [layer.y for layer in recorded.values()]
        for (name, layer), gradient in zip(
            recorded.items(), torch.autograd.grad(logit, outputs, retain_graph=True), strict=True
        ):
            bound[index] += (gradient.abs() * layer_bound(packed[name], layer.a, layer.y.detach())).sum()
    exact = exact.detach()
    error = (got - exact).abs()
    assert bool((error <= 1.001 * bound).all()), (
        f"the logits' error is {float((error / bound).max()):.3g} times the bound"
    )
    share = float((error / bound.clamp(min=torch.finfo(bound.dtype).tiny)).max())
    assert float(bound.max()) < 1e-2 * float(exact.abs().max()), "a bound that large says nothing"
    return share


def write_gguf(path: Path, folder: Path, kind: str, embedding: str = "F16") -> tuple[Path, dict[str, np.ndarray]]:
    """Writes the tiny Llama of `folder` as GGUF with the gguf package. Returns the file and the decoded weights."""
    config = json.loads((folder / "config.json").read_text())
    references, stored = load_file(folder / "reference.safetensors"), load_file(folder / "model.safetensors")
    writer, decoded = GGUFWriter(path, "llama"), {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    embed = {name: tensor for name, tensor in stored.items() if "embed" in name or name.endswith("norm.weight")}
    for name, tensor in (references | embed).items():
        module = name.removesuffix(".weight")
        values = tensor.float().numpy()
        if module.endswith(("q_proj", "k_proj")):  # llama.cpp stores the two rows of a rotary pair next to each other
            heads = config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        target = f"{names.get_name(module)}.weight"
        if values.ndim == 1:
            writer.add_tensor(target, values)
            continue
        quantized = GGMLQuantizationType[embedding if "embed" in name else kind]
        writer.add_tensor(target, quantize(values, quantized), raw_dtype=quantized)
        decoded[module] = dequantize(quantize(tensor.float().numpy(), quantized), quantized).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, decoded


def check_layers(model: nn.Module, device: str, count: int = 14) -> None:
    """Checks that the error of every packed layer's output, in the model's dtype, is within the bound."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = [
        layer.register_forward_hook(lambda module, a, y, name=name: seen.update({name: (a[0].cpu(), y.cpu())}))
        for name, layer in model.named_modules()
        if isinstance(layer, MarlinLinear)
    ]
    with torch.no_grad():
        model(IDS.to(device))
    for handle in handles:
        handle.remove()
    assert len(seen) == len(handles) == count
    for name, (a, y) in seen.items():
        weight = model.get_submodule(name).to_packed().to("cpu")
        bias = torch.zeros(weight.N) if weight.bias is None else weight.bias.double()
        exact = a.double() @ weight.dequantize().double() + bias
        summed = a.abs().double() @ magnitude(weight) + bias.abs()
        bound = UNIT_ROUNDOFF[y.dtype] * exact.abs() + TINY[y.dtype] + 16 * 2.0**-24 * summed
        check_gemm(y, exact.numpy(), bound.numpy())
