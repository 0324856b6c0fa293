"""Compares the results of transformers' experts modules with those of `MarlinExperts`."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.equivalence import agrees, in_mode, random_like
from torch_marlin_metal.layers.float_experts import WEIGHTS, apply_gate, is_experts, stores_transposed, takes_each_token

TOKENS, EXPERTS, TOP_K = 4, 3, 2
HIDDEN, INNER = 16, 24  # the model's own sizes would need gigabytes


class _EagerConfig:
    """A config that selects transformers' "eager" experts, the forward of the module's class."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def why_unknown(experts: nn.Module) -> str:
    """Returns the reason why `MarlinExperts` differs from float experts, or "" if the results agree.

    The test runs the forward of the module's class with small random weights, so it also works for experts on the meta
    device. `is_stack` must be true for the module, which is not changed.
    """
    name = type(experts).__name__
    counts = [len(experts._parameters[kind]) for kind in WEIGHTS]  # type: ignore[arg-type]
    if counts[0] != counts[1]:
        return f"{name} has {counts[0]} experts in gate_up_proj and {counts[1]} in down_proj"
    # MarlinExperts stores no tensors of an activation, so state_dict would lack them.
    if buffers := [name for name, _ in experts.named_buffers()]:
        return f"{name} has a buffer: {buffers[0]}"
    unlike = f"{name} computes something else than MarlinExperts"
    if not is_experts(experts):
        return unlike
    each = takes_each_token(experts)
    if each and len(experts._parameters) > len(WEIGHTS):
        return f"{name} has a bias, which it adds to tokens of other experts, too"
    with torch.no_grad(), torch.device("cpu"):  # the caller may have set another default device
        x = random_like(torch.empty(TOKENS, HIDDEN, device="cpu"))
        ids = torch.arange(TOKENS * TOP_K, device="cpu").view(TOKENS, TOP_K) % min(EXPERTS, counts[0])
        weights = random_like(torch.empty(TOKENS, TOP_K, device="cpu"), seed=1)
        if each:
            x = random_like(torch.empty(TOKENS * min(EXPERTS, counts[0]), HIDDEN, device="cpu"))
            ids, weights = torch.arange(len(x), device="cpu")[:, None] // TOKENS, torch.ones(len(x), 1, device="cpu")
        arguments = (x,) if each else (x, ids, weights)
        try:
            small = _with_small_weights(experts)
            with in_mode(small, training=False):
                expected, own = _compute(small, x, ids, weights), small.forward(*arguments)
            with in_mode(small, training=True):
                in_training = small.forward(*arguments)
        except Exception:  # the class needs other arguments or other sizes
            return unlike
    if not agrees(own, expected):
        return unlike
    return "" if agrees(in_training, expected) else f"{name} computes something else in training, such as dropout"


def _with_small_weights(experts: nn.Module) -> Any:
    """Returns a copy with a few small experts on the CPU. The copy shares the module's children."""
    small: Any = copy.copy(experts)
    transposed = stores_transposed(experts)
    shapes = [weight.mT.shape if transposed else weight.shape for weight in map(experts.get_parameter, WEIGHTS)]
    (count, columns, hidden), inner = shapes[0], shapes[1][2]
    # The forward of a class may read its sizes from attributes. Sizes that are equal must remain equal.
    narrow = HIDDEN * inner // hidden if hidden in (inner, columns) else INNER
    sizes = {hidden: HIDDEN, inner: narrow, columns: columns // inner * narrow}
    for key, value in vars(experts).items():
        if type(value) is int:
            setattr(small, key, sizes.get(value, value))
    if hasattr(experts, "config"):
        small.config = _EagerConfig(experts.config)
    small._parameters = {}
    for seed, kind in enumerate(WEIGHTS):
        _, N, K = shapes[seed]
        weight = (
            random_like(torch.empty(min(EXPERTS, count), sizes[N], sizes[K], device="cpu"), seed + 2) / sizes[K] ** 0.5
        )
        small._parameters[kind] = nn.Parameter(weight.mT.contiguous() if transposed else weight)
        if experts._parameters.get(f"{kind}_bias") is not None:
            bias = random_like(torch.empty(len(weight), sizes[N], device="cpu"), seed + 4)
            small._parameters[f"{kind}_bias"] = nn.Parameter(bias)
    small.is_transposed = transposed
    return small


def _compute(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Computes the result of `MarlinExperts` for `x [T, H]` with float weights."""

    def product(a: Tensor, kind: str) -> Tensor:
        weight, bias = experts._parameters[kind], experts._parameters.get(f"{kind}_bias")
        y = torch.einsum("tsk,tsnk->tsn", a, (weight.mT if experts.is_transposed else weight)[ids])
        return y if bias is None else y + bias[ids]

    inner = apply_gate(experts, product(x[:, None].expand(-1, ids.shape[1], -1), WEIGHTS[0]))
    result: Tensor = (product(inner, WEIGHTS[1]) * weights[..., None]).sum(1)
    return result
