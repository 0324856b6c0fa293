"""Makes random Llamas with the sizes of Llama 3.2 1B in seconds, for benchmarks: times do not depend on the weights."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights


def random_llama(config: LlamaConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """Returns a model whose matrices hold random numbers that repeat, because it takes long to draw a billion."""
    torch.set_default_dtype(dtype)
    with no_init_weights():
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.tie_weights()
    block = 0.02 * torch.randn(2**20 + 7)
    for matrix in model.parameters():
        if matrix.dim() == 2:
            for part in matrix.data.view(-1).split(len(block)):
                part.copy_(block[: len(part)])
    return model


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replaces every Linear but the head. Layers of one shape get copies of one new layer, which saves time."""
    made: dict[tuple[int, int], nn.Module] = {}
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            shape = linear.in_features, linear.out_features
            if shape not in made:
                made[shape] = make(linear)
            model.set_submodule(name, copy.deepcopy(made[shape]))
