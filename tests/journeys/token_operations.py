"""Counts the operations of one additional decoder layer in one decoded token, before and after `fuse_layers`.

    python -m tests.journeys.token_operations [FAMILY ...]

The models are tiny and random, have 4-bit layers, and run in eager mode on the CPU. On a Mac, every operation except a
view would be a dispatch. Without arguments, the command runs every family with a causal language model.

It prints a table in Markdown. A star marks a family that cannot be measured in this way: its numbers are the operations
of the whole model for seven tokens, without a cache. The difference is the largest change that fusing makes to the
results for random tokens, divided by the largest result.
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

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import StaticCache
from transformers.models.auto import modeling_auto as auto

import torch_marlin_metal as tmm
from lab.token.operations import Operations
from tests.journeys.architectures import SIZES, class_of, shrunken
from torch_marlin_metal.fuse.layers import FusedLayersReport


def fill(text: Any) -> None:
    """Sets sizes that a shrunken config leaves open, or whose shrunken values do not fit together."""
    for name in ("head_dim", "num_key_value_heads", "num_experts_per_tok"):
        if getattr(text, name, 0) is None:
            setattr(text, name, SIZES[name])
    if getattr(text, "rotary_dim", None) is not None:
        text.rotary_dim = min(text.rotary_dim, text.hidden_size // text.num_attention_heads)
    if getattr(text, "qk_rope_head_dim", None) is not None:
        text.head_dim = text.qk_rope_head_dim  # only these elements of a head are rotated


def model_of(family: str, layers: int | None = None) -> Any:
    """Returns a tiny random model in 4 bit.

    The model has `layers` layers of attention. With None, it has the family's default number.
    """
    config = shrunken(family)
    cls = class_of(family)
    if not isinstance(config, cls.config_class):  # the model is the text part of a composite model
        config = config.get_text_config()
    text = config.get_text_config()
    fill(text)
    if layers is not None:
        text.num_hidden_layers = layers
        if types := getattr(text, "layer_types", None):
            kind = next((kind for kind in types if "attention" in kind and "linear" not in kind), types[0])
            with contextlib.suppress(AttributeError):  # some configs compute this value and raise if it is set
                text.layer_types = [kind] * layers
    torch.manual_seed(0)
    model = cls._from_config(config).eval()
    with torch.no_grad():  # changes the weights of norms, so that none of them is 1
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantize_model warns of matrices that stay in floats
        tmm.quantize_model(model, group_size=32, progress=False)
    return model


def of_one_call(model: Any, batch: int = 1, tokens: int = 1, is_static: bool = False) -> Counter[str]:
    """Counts the operations of `tokens` tokens after six tokens in the cache."""
    ids = torch.arange(5, 11 + tokens).repeat(batch, 1)
    cache = StaticCache(config=model.config, max_cache_len=16) if is_static else None
    with torch.no_grad():
        past = model(input_ids=ids[:, :6], past_key_values=cache, use_cache=True).past_key_values
        with Operations() as seen:
            model(input_ids=ids[:, 6:], past_key_values=past, use_cache=True)
    return seen.counts


def pair_of(family: str, fuse: bool) -> tuple[list[Any], FusedLayersReport]:
    """Returns two models, with one layer and with two layers, and the report of fusing the second."""
    models, report = [model_of(family, layers) for layers in (1, 2)], FusedLayersReport()
    for model in models if fuse else ():
        tmm.fuse_projections(model)
        report = tmm.fuse_layers(model)
    return models, report


def of_one_layer(models: list[Any], **options: Any) -> Counter[str]:
    """Counts the operations that a second layer adds, in a pair of models. The options are those of `of_one_call`."""
    one, two = (of_one_call(model, **options) for model in models)
    two.subtract(one)
    return +two


def of_a_token(family: str, fuse: bool) -> tuple[Counter[str], FusedLayersReport]:
    """Counts the operations that a layer adds to one decoded token, and returns the report of fusing."""
    models, report = pair_of(family, fuse)
    return of_one_layer(models), report


def of_whole_model(family: str, fuse: bool) -> tuple[Counter[str], FusedLayersReport]:
    """Counts the operations of a model's first seven tokens, without a cache."""
    model, report = model_of(family), FusedLayersReport()
    if fuse:
        tmm.fuse_projections(model)
        report = tmm.fuse_layers(model)
    with torch.no_grad(), Operations() as seen:
        model(input_ids=torch.arange(5, 12)[None], use_cache=False)
    return seen.counts, report


@dataclass
class Row:
    family: str
    note: str = ""
    before: int = 0
    after: int = 0
    fused: dict[str, int] = field(default_factory=dict)
    difference: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        if self.failure:
            return f"| {self.family} | | | {self.failure} | |"
        fused = ", ".join(f"{count} {kind}" for kind, count in self.fused.items()) or "nothing"
        return f"| {self.family}{self.note} | {self.before} | {self.after} | {fused} | {self.difference:.1g} |"


def row_of(family: str) -> Row:
    """Measures the operations that a layer of a family adds, or of its complete model if that is not possible."""
    row = Row(family)
    for measure, note in ((of_a_token, ""), (of_whole_model, " *")):
        row.note = note
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            try:
                row.before = measure(family, fuse=False)[0].total()
                row.failure = ""
            except Exception as error:  # the row contains the error
                text = str(error).splitlines()[0][:80] if str(error) else ""
                row.failure = f"not run: {type(error).__name__}: {text}".replace("|", "/")
                continue
            try:
                counts, report = measure(family, fuse=True)
            except Exception as error:
                row.failure = f"BROKEN by fuse_layers: {type(error).__name__}: {error}"
                return row
        row.after, row.difference = counts.total(), report.difference
        for _, kind in report.fused:
            row.fused[kind] = row.fused.get(kind, 0) + 1
        return row
    return row


def main(families: list[str]) -> None:
    print("| family | before | after | fused | difference |\n|---|---|---|---|---|")
    for family in families or sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        print(row_of(family), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
