"""`trace_token`: the operations of one decoded token before and after fusing, and its predicted time on each chip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from lab.token.cost import TokenCost, Work, cost_of
from lab.token.operations import KINDS, OUTSIDE, Operations, Part
from lab.token.sample import VOCABULARY, Sample, config_of, sample_of
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.fuse.layers import fuse_layers
from torch_marlin_metal.gpu.device import AppleSiliconGPU, as_gpu
from torch_marlin_metal.layers.fuse import fuse_projections
from torch_marlin_metal.printing import RichText

PROMPT = 6  # tokens that the sample runs before the traced token


@dataclass(frozen=True)
class TokenOperations:
    """The operations of one decoded token, without views. On mps, each is a dispatch.

    Attributes:
        kinds: the number of operations of each kind in the full model.
        layer: the number of operations of one decoder layer. If layers differ, this is a layer of the most frequent
            kind.
        work: the work of a GPU for the token.
        costs: the predicted time on each GPU.
    """

    kinds: dict[str, int]
    layer: int
    work: Work
    costs: tuple[TokenCost, ...]

    @property
    def total(self) -> int:
        return self.work.operations


@dataclass(frozen=True)
class TokenTrace(RichText):
    """The result of `trace_token`.

    Attributes:
        model_type: the model's family, as named in its config.
        layers: decoder layers of the model.
        sampled: decoder layers that were run; each other layer has the kind of one of them.
        context: tokens before the traced one.
        before: the operations with 4-bit layers and nothing fused.
        after: the operations after `fuse_projections` and `fuse_layers`.
        fused: messages about what `fuse_layers` replaced in the sampled layers, and what it did not replace.
    """

    model_type: str
    layers: int
    sampled: int
    context: int
    before: TokenOperations
    after: TokenOperations
    fused: str

    def __rich__(self) -> Group:
        title = f"{self.model_type}: operations of one decoded token, {self.layers} layers"
        counts = Table(title=title, title_justify="left", caption_justify="left")
        times = Table(title=f"Milliseconds by the model, {self.context} tokens before", title_justify="left")
        for table, headings in ((counts, ("kind", "before", "after")), (times, ("chip", *_TIMES))):
            for heading in headings:
                table.add_column(heading, justify="left" if heading in ("kind", "chip") else "right")
        for kind in KINDS:
            counts.add_row(kind, str(self.before.kinds[kind]), str(self.after.kinds[kind]))
        counts.add_row("all", str(self.before.total), str(self.after.total))
        counts.add_row("in one layer", str(self.before.layer), str(self.after.layer))
        counts.caption = (
            f"{self.sampled} of {self.layers} layers were run, with random weights; the others are like one of them"
        )
        for one, two in zip(self.before.costs, self.after.costs, strict=True):
            parts = (two.weights, two.attention, one.dispatches, two.dispatches, one.seconds, two.seconds)
            row = (*(f"{1e3 * part:.2f}" for part in parts), f"{one.seconds / two.seconds:.2f}")
            times.add_row(one.gpu, *row)
        return Group(counts, times)


_TIMES = ("weights", "attention", "dispatches before", "after", "token before", "token after", "before / after")


def trace_token(
    source: Any,
    *,
    gpus: Sequence[AppleSiliconGPU | str] | None = None,
    weight_format: str = "uint4b8",
    group_size: int | None = None,
    dtype: torch.dtype = torch.float16,
    context: int = 1024,
    dispatch_seconds: float | None = None,
) -> TokenTrace:
    """Counts the operations of one decoded token before and after fusing, and predicts the token's time on each chip.

    Reads no weights. The function makes the model's first layers, until it has a layer of each kind, with the config's
    sizes and random 4-bit weights. It runs them on the CPU and multiplies the counts of each layer by the number of
    layers of its kind. The cache grows by `torch.cat`, as in an eager `generate`; the batch size is 1.

    Args:
        source: a model's directory, its config.json, or a config of transformers, of a causal language model.
        gpus: the GPUs, or their names; None means all chips of the package's table.
        weight_format: weight format of the Linear layers and experts.
        group_size: as in `quantize_weight`.
        dtype: dtype of the activations: float16, bfloat16 or float32.
        context: tokens before the traced token. Attention reads their keys and values.
        dispatch_seconds: time of one dispatch; None means the time that the model assumes.

    Raises:
        ValueError: an argument is out of range or unknown, or transformers is not installed.
        FileNotFoundError: there is no such file.
        CheckpointError: transformers cannot build the model, or the model does not run on tokens alone.
        RuntimeError: fusing changed the results.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"trace_token: dtype: expected float16, bfloat16 or float32, got {dtype}")
    if context < 0:
        raise ValueError(f"trace_token: context: expected 0 or more, got {context}")
    if dispatch_seconds is not None and not 0 <= dispatch_seconds < 1:
        raise ValueError(f"trace_token: dispatch_seconds: expected 0 to 1, got {dispatch_seconds}")
    found = [as_gpu("trace_token", gpu) for gpu in (AppleSiliconGPU.names() if gpus is None else gpus)]
    sample = sample_of(config_of(source), weight_format=weight_format, group_size=group_size, dtype=dtype)
    sides, report = [], ""
    for fuse in (False, True):
        if fuse:
            fuse_projections(sample.model)
            report = str(fuse_layers(sample.model))
        parts = _parts_of_a_token(sample)
        work = _whole(sample, parts, context)
        kinds = Counter[str]()
        for index in (OUTSIDE, *sample.kinds):
            kinds.update(parts[index].kinds)
        usual = parts[Counter(sample.kinds).most_common(1)[0][0]].counts.total()
        costs = tuple(cost_of(work, gpu, dtype, dispatch_seconds) for gpu in found)
        sides.append(TokenOperations({kind: kinds[kind] for kind in KINDS}, usual, work, costs))
    return TokenTrace(
        model_type=str(sample.config.model_type),
        layers=len(sample.kinds),
        sampled=len(sample.layers),
        context=context,
        before=sides[0],
        after=sides[1],
        fused=report,
    )


def _parts_of_a_token(sample: Sample) -> dict[int, Part]:
    ids = torch.arange(1, PROMPT + 2, device="cpu")[None]
    with torch.no_grad():
        try:
            past = sample.model(input_ids=ids[:, :PROMPT], use_cache=True).past_key_values
            with Operations(sample.model, sample.layers, PROMPT + 1) as seen:
                sample.model(input_ids=ids[:, PROMPT:], past_key_values=past, use_cache=True)
        except Exception as error:  # the model's own code can raise any exception
            raise CheckpointError(f"trace_token: the model does not run on tokens alone: {error}") from error
    return seen.parts


def _whole(sample: Sample, parts: dict[int, Part], context: int) -> Work:
    """Returns the work of all layers of the model, computed from the parts of the sample."""
    operations, cache_bytes = parts[OUTSIDE].counts.total(), 0.0
    products: Counter[Any] = Counter()
    for product, count in parts[OUTSIDE].products.items():
        whole = replace(product, N=int(sample.config.vocab_size)) if product.N == VOCABULARY else product
        products[whole] += count
    for index in sample.kinds:
        part, window = parts[index], sample.windows[index]
        operations += part.counts.total()
        products.update(part.products)
        cache_bytes += part.cache_bytes * (context if window is None else min(window, context))
    return Work(operations, dict(products), cache_bytes)
