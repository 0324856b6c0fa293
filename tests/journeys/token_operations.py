"""Counts the operations of one more decoder layer in one decoded token, before and after `fuse_layers`.

    python -m tests.journeys.token_operations [FAMILY ...]

The models are tiny and random, with layers in 4 bit, in eager mode on the CPU. Every operation that is no view is a
dispatch on a Mac. Without families, it takes every family with a causal language model; a family whose model cannot be
built from a shrunken config, or cannot run on tokens alone, has the reason in its row.
"""

import contextlib
import io
import os
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers.models.auto import modeling_auto as auto

import torch_marlin_metal as tmm
from tests.journeys.architectures import class_of, shrunken
from torch_marlin_metal.fuse.layers import FusedLayersReport
from torch_marlin_metal.integrations.transformers.experts import make_room, stack

NO_DISPATCH = {"aten._unsafe_view.default"}  # the result has the storage of the argument, though no schema says so


class Operations(TorchDispatchMode):
    """Counts the operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "prim" and str(func) not in NO_DISPATCH:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def model_of(family: str, layers: int) -> Any:
    """Returns a tiny random model with layers in 4 bit."""
    config = shrunken(family)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[0]] * layers
    torch.manual_seed(0)
    model = class_of(family)._from_config(config).eval()
    with torch.no_grad():  # so that no weight of a norm is one
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    pack_experts(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about matrices that stay in floats
        tmm.quantize_model(model, group_size=32, progress=False)
    return model


def pack_experts(model: Any) -> None:
    """Replaces the stacked parameters of a mixture's experts by the packed layers that `from_pretrained` makes."""
    for name, module in list(model.named_modules()):
        held = dict(module._parameters)
        if not make_room(model, f"{name}.gate_up_proj.0"):
            continue
        for part in ("gate_up_proj", "down_proj"):
            stacked, bias = held[part], held.get(f"{part}_bias")
            for index, weight in enumerate(stacked.mT if module.is_transposed else stacked):
                packed = tmm.quantize_weight(weight, "uint4b8", 32)
                packed.bias = None if bias is None else bias[index].detach()
                model.set_submodule(f"{name}.{part}.{index}", tmm.MarlinLinear.from_packed(packed))
    stack(model)


def of_one_token(model: Any) -> Counter[str]:
    """Counts the operations of the seventh token, with a cache."""
    ids = torch.arange(5, 12)[None]
    with torch.no_grad():
        past = model(input_ids=ids[:, :6], use_cache=True).past_key_values
        with Operations() as seen:
            model(input_ids=ids[:, 6:], past_key_values=past, use_cache=True)
    return seen.counts


def of_one_layer(family: str, fuse: bool) -> tuple[Counter[str], FusedLayersReport]:
    """Counts the operations of one more layer, and returns what was fused in the larger model."""
    counts, report = [], FusedLayersReport()
    for layers in (1, 2):
        model = model_of(family, layers)
        if fuse:
            tmm.fuse_projections(model)
            report = tmm.fuse_layers(model)
        counts.append(of_one_token(model))
    counts[1].subtract(counts[0])
    return +counts[1], report


@dataclass
class Row:
    """A family's line of the table."""

    family: str
    before: int = 0
    after: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    difference: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        """Returns a row of Markdown."""
        if self.failure:
            return f"| {self.family} | | | {self.failure} | |"
        fused = ", ".join(f"{count} {kind}" for kind, count in self.fused.items()) or "nothing"
        return f"| {self.family} | {self.before} | {self.after} | {fused} | {self.difference:.1g} |"


def row_of(family: str) -> Row:
    """Measures a family; what is fused is that of a model of two layers."""
    row = Row(family)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            row.before = of_one_layer(family, fuse=False)[0].total()
            counts, report = of_one_layer(family, fuse=True)
    except Exception as error:  # the row says why
        row.failure = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
        return row
    row.after, row.difference = counts.total(), report.difference
    for _, kind in report.fused:
        row.fused[kind] = row.fused.get(kind, 0) + 1
    return row


def main(families: list[str]) -> None:
    print("| family | before | after | fused in two layers | largest difference |\n|---|---|---|---|---|")
    for family in families or sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        print(row_of(family), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
