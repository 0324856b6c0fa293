"""A tiny Llama that divides by 1, 2, 3 and 4 processes, and the plan that splits it."""

import torch
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models import SIZES
from torch_marlin_metal.checkpoints import checkpoint
from torch_marlin_metal.parallel import MarlinColwiseParallel, MarlinRowwiseParallel


def divisible_llama(layers: int = 2, *, bias: bool = False) -> LlamaForCausalLM:
    """Returns a tiny Llama in floats whose heads and groups of 32 can be divided over 1, 2, 3 and 4 processes.

    With `bias`, its projections have biases that are large enough to change the tokens.
    """
    torch.manual_seed(0)
    sizes = SIZES | {
        "hidden_size": 384,
        "num_attention_heads": 12,
        "intermediate_size": 768,
        "num_hidden_layers": layers,
    }
    config = LlamaConfig(**sizes, num_key_value_heads=12, initializer_range=0.1, attention_bias=bias, mlp_bias=bias)
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            parameter.data.normal_()
    return model


def llama_plan() -> dict[str, ParallelStyle]:
    """Returns the styles of a Llama's layers, the same as in transformers' own plan."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, ParallelStyle] = {f"model.layers.*.{name}": MarlinColwiseParallel() for name in columns}
    return plan | {f"model.layers.*.{name}": MarlinRowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}


def count_bytes_read() -> dict[str, int]:
    """Returns a table that from now on counts the bytes that this process reads, by tensor name."""
    read: dict[str, int] = {}
    read_tensor = checkpoint.read_tensor

    def counted(info, index=None, part=None):
        tensor = read_tensor(info, index, part)
        read[info.name] = read.get(info.name, 0) + tensor.nbytes
        return tensor

    checkpoint.read_tensor = counted
    return read
