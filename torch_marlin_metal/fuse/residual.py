"""Finds decoder layers in which a norm's operator can also add the residual.

While the model runs, this module records the order in which a layer calls its norms and blocks, and their arguments. If
the order is one of `ORDERS`, the layer's forward is replaced by a function that calls the same children in the same
order with the same arguments. The replacement is used only if its results equal the layer's.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from torch_marlin_metal.fuse.norms import Norm
from torch_marlin_metal.layers.equivalence import agrees, agrees_in_training, is_supported, random_like
from torch_marlin_metal.ops.decoder import add_rms_norm

# The orders in which a layer may call its norms (N) and blocks (B). In the second order, a norm follows each block.
ORDERS = ("NBNB", "NBNNBN")
Forward = Callable[..., Any]


@dataclass
class Recorded:
    """The arguments, child calls and result of a layer during one run of the model.

    Attributes:
        args: positional arguments of the layer.
        kwargs: keyword arguments of the layer.
        calls: the children that the layer called, in order, each with its arguments.
        output: the layer's result.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    output: Any = None


def record(layers: dict[str, nn.Module], run: Callable[[], Any]) -> dict[str, Recorded]:
    """Runs the model and returns a record for each layer that was called."""
    found: dict[str, Recorded] = {}
    handles = []

    def before(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[name] = Recorded(args, dict(kwargs))

    def called(name: str, child: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in found and found[name].output is None:
            found[name].calls.append((child, args, dict(kwargs)))

    def after(name: str, _: nn.Module, __: tuple[Any, ...], ___: dict[str, Any], output: Any) -> None:
        found[name].output = output

    for name, layer in layers.items():
        handles.append(layer.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        handles.append(layer.register_forward_hook(partial(after, name), with_kwargs=True))
        for child, module in layer.named_children():
            if not isinstance(module, nn.Dropout):
                handles.append(module.register_forward_pre_hook(partial(called, name, child), with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def fused_layer(
    layer: nn.Module, seen: Recorded, norms: dict[nn.Module, Norm], original: Forward
) -> tuple[Forward | None, str]:
    """Returns a fused forward whose results equal the layer's on random input, or None and the reason."""
    children = dict(layer.named_children())
    if any(isinstance(child, nn.Dropout) and child.p > 0 for child in children.values()):
        return None, "it has dropout between its blocks"
    order = "".join("N" if children[name] in norms else "B" for name, _, _ in seen.calls)
    if order not in ORDERS:
        return None, f"its norms (N) and blocks (B) run in the order {order}"
    parameters = inspect.signature(layer.forward).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not named or not isinstance(seen.output, Tensor):
        return None, "its result is not one tensor"
    defaults = {p.name: p.default for p in named[1:] if p.default is not p.empty}
    given = defaults | dict(zip([p.name for p in named], seen.args, strict=False)) | seen.kwargs
    hidden = given.get(named[0].name)
    if not isinstance(hidden, Tensor) or not is_supported(hidden) or hidden.is_meta:
        return None, "its first argument is not a tensor of float16, bfloat16 or float32"
    blocks = [call for call in seen.calls if children[call[0]] not in norms]
    (attention, attention_args, attention_kwargs), (mlp, mlp_args, mlp_kwargs) = blocks
    by_name = named[0].name if named[0].name in attention_kwargs else None
    passed = [name for name in attention_kwargs if name != by_name]
    if len(attention_args) + (by_name is not None) != 1 or len(mlp_args) != 1 or mlp_kwargs:
        return None, "its blocks have arguments of their own"
    if any(name not in given or given[name] is not attention_kwargs[name] for name in passed):
        return None, "its attention has arguments of its own"
    known = {p.name for p in named}
    own = [name for name in passed if name in known]
    names = [name for name, _, _ in seen.calls if children[name] in norms]
    around = order == "NBNNBN"
    add = names[2] if around else names[1]
    norm = norms[children[add]]
    positions = [p.name for p in named[1:]]
    first = named[0].name

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modules: Any = self._modules
        if args:
            x, rest = args[0], dict(zip(positions, args[1:], strict=False)) | kwargs
        else:
            rest = dict(kwargs)
            x = rest.pop(first)
        weight = modules[add].weight
        if not is_supported(x) or x.dtype != weight.dtype:
            return original(self, *args, **kwargs)
        options = {name: rest.get(name, defaults.get(name)) for name in own}
        if takes_more:
            options |= {name: value for name, value in rest.items() if name not in known}
        normed = modules[names[0]](x)
        if by_name is None:
            out = _first(modules[attention](normed, **options))
        else:
            out = _first(modules[attention](**{by_name: normed}, **options))
        if around:
            out = modules[names[1]](out)
        if out.dtype == x.dtype:
            normed, total = add_rms_norm(out, x, weight, eps=norm.eps, weight_offset=norm.offset)
        else:  # under autocast, the blocks compute in another dtype than that of the sums
            total = x + out
            normed = modules[add](total)
        out = _first(modules[mlp](normed))
        if around:
            out = modules[names[3]](out)
        return total + out

    x = random_like(hidden, seed=3)
    arguments = seen.kwargs if seen.args else {**seen.kwargs, first: x}
    positional = (x, *seen.args[1:]) if seen.args else ()
    ours, theirs = (partial(f, *positional, **arguments) for f in (partial(forward, layer), layer.forward))
    try:
        expected, got = theirs(), ours()
        is_same_in_training = agrees_in_training(layer, ours, theirs)
    except Exception as error:  # repeating the call of a layer with state can raise any error
        return None, f"the comparison failed: {type(error).__name__}: {error}"
    if not agrees(got, expected):
        return None, "its sums differ from those of the usual decoder layers"
    if not is_same_in_training:
        return None, "its results differ in training mode"
    return forward, ""
