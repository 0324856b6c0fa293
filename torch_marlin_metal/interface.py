"""Lists the operators and functions of the compiled extension that the Python files use.

An extension built from older sources may lack operators or functions in these tables. A test compares the tables with
the extension, so every new operator, argument or function must be added here.
"""

from types import ModuleType

import torch

# Arguments of a packed weight that operators accept by name.
_NAMED = "weight_format group_size zeros super_scales super_zeros global_scale lut perm b_high"
#: Name of a public operator -> its arguments.
OPERATORS = {
    "add_rms_norm": "x residual weight eps weight_offset",
    "awq_repack": "qweight",
    "awq_unpack_zeros": "qzeros",
    "dequantize": f"b_packed scales {_NAMED} dtype",
    "embedding": f"ids b_packed scales {_NAMED} dtype",
    "gated_activation": "gate up activation limit alpha",
    "gemm": f"a b_packed scales {_NAMED} bias variant activations",
    "gemm_fp32": f"a b_packed scales {_NAMED} bias activations",
    "gemm_transposed": f"a b_packed scales {_NAMED}",
    "gptq_repack": "qweight perm code_bits",
    "gptq_unpack_zeros": "qzeros checkpoint_version rule",
    "mlstm": "q k v i f C0 n0 m0 chunk_size eps",
    "mlstm_output": "q k v i f C n m chunk_size eps",
    "mlstm_states": "k v i f C0 n0 m0 chunk_size save_states_every",
    "mlstm_step": "q k v i f C n m eps",
    "moe_gemm": f"a b_packed scales expert_ids {_NAMED} bias row_weights reduce variant",
    "moe_gemm_gated": f"a b_packed scales expert_ids {_NAMED} bias activation interleaved limit alpha",
    "moe_gemm_grad_a": f"grad b_packed scales expert_ids {_NAMED}",
    "rms_norm": "x weight eps weight_offset",
    "rotary": "q k cos sin interleaved per_pair transposed",
    "transpose_words": "words",
    "write_cache": "keys values k v start",
}
#: The functions in the extension's module.
FUNCTIONS = (
    "chips",
    "commit_seconds",
    "cpu_capability",
    "dispatch_seconds",
    "gemm_plans",
    "gemm_variants",
    "gpu_device",
    "gpu_families",
    "longest_plan_seconds",
    "moe_plan",
    "prefer_huge_pages",
    "set_commit_seconds",
    "set_longest_plan_seconds",
    "set_tuned",
    "set_tuned_loader",
    "torch_version",
)


def arguments(operator: str) -> str | None:
    """Returns the names of a registered operator's arguments, or None if the operator does not exist."""
    schemas = torch._C._jit_get_schemas_for_operator(f"torch_marlin_metal::{operator}")
    return " ".join(argument.name for argument in schemas[0].arguments) if schemas else None


def first_difference(compiled: ModuleType) -> str | None:
    """Returns a sentence about the first missing operator, argument or function of an extension, or None."""
    for name in FUNCTIONS:
        if not hasattr(compiled, name):
            return f"it has no function {name}"
    for name, expected in OPERATORS.items():
        found = arguments(name)
        if found is None:
            return f"it has no operator {name}"
        if found != expected:
            return f"its operator {name} takes ({found.replace(' ', ', ')}), not ({expected.replace(' ', ', ')})"
    return None
