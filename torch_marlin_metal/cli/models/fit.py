"""`torch-marlin-metal fit`: computes the memory of a model in each weight format, without loading the model."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_marlin_metal.cli.arguments import floating
from torch_marlin_metal.cli.models import opened
from torch_marlin_metal.cli.output import ANSWER_IS_NO, DONE, Json, show
from torch_marlin_metal.convert import CheckpointError, CheckpointReader, NotQuantized, open_reader
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.loader import Loader
from torch_marlin_metal.load.names import namer
from torch_marlin_metal.models.linear_layers import shared_weights
from torch_marlin_metal.models.report import module_bytes
from torch_marlin_metal.printing import table
from torch_marlin_metal.sizes import human_size, parse_size

LARGE_MAC = 36 * 2**30  # bytes; macOS lends the GPU 2/3 of a Mac's memory up to this size, and 3/4 above it
PROMPT = 512
# Temporary bytes that an operator allocates besides its result. The meta device does not show them.
INSIDE: dict[Any, Callable[[Tensor], int]] = {
    # two masks: which scores are -inf, and which rows are all -inf
    torch.ops.aten._safe_softmax.default: lambda made: made.numel() + made.numel() // made.shape[-1] + made.itemsize,
    torch.ops.torch_marlin_metal.moe_gemm_gated.default: lambda made: 2 * made.nbytes,  # gate and up
}


def fit(
    model: opened.Model,
    memory: Annotated[str | None, typer.Option(help="A Mac's memory: 16GB (of 2^30). Default: this one's.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache of keys and values.")] = 8192,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that are computed at once.")] = PROMPT,
    dtype: opened.ModelDtype = None,
    as_json: Json = False,
) -> int:
    """Reports if a model fits into a Mac.

    The table has a row for each weight format, or one row if the model is packed. The bytes are those of the weights
    after loading. The exit code is 1 if nothing fits.
    """
    limit = gpu_memory(memory)
    place, file = opened.locate(model)
    rows: list[dict[str, Any]] = []
    with opened.quiet():
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(place, local_files_only=True, **file)
        empty = partial(empty_model, config, floating(dtype) if dtype else config.dtype or torch.float32)
        try:
            reader = open_reader(model, gguf_names="hf", on_unsupported="dequantize")
        except NotQuantized:
            made = {name: empty(name) for name in ("floats", *WEIGHT_FORMATS)}
        else:
            made = {"as packed": _loaded(empty("floats"), reader)}
        cache, activations = measured(str(model), list(made.values())[-1], context, min(prompt_tokens, context))
        for name, one in made.items():
            weights = module_bytes(one)
            total = weights + cache + activations
            rows.append({"format": name, "weight_bytes": weights, "total_bytes": total, "fits": total <= limit})
    value = {"model": str(model), "context": context, "prompt_tokens": min(prompt_tokens, context)}
    value |= {"cache_bytes": cache, "activation_bytes": activations, "gpu_bytes": limit, "formats": rows}
    show(value, _table(value), as_json)
    return DONE if any(row["fits"] for row in rows) else ANSWER_IS_NO


def gpu_memory(memory: str | None) -> int:
    """Returns the bytes that macOS lets the GPU of a Mac use.

    Args:
        memory: the Mac's memory, for example "16GB". None means this machine: on a Mac, the GPU reports the limit.
            Other machines use the smallest shares that docs/use/command-line.md lists.
    """
    if memory is None and torch.backends.mps.is_available():
        return torch.mps.recommended_max_memory()
    size = opened.physical_memory() if memory is None else parse_size("--memory", memory, binary=True)
    return int(size * 2 / 3 if size <= LARGE_MAC else size * 3 / 4)


def _loaded(model: Any, reader: CheckpointReader) -> Any:
    """Fills a model on the meta device as the loader would. Reads one layer of each size and kind."""
    read, seen = reader.read, dict[Hashable, Any]()

    def without_values(index: int) -> Any:
        kind = sizes[index], reader.kind(index)
        if kind not in seen:
            seen[kind] = read(index)
            for name, tensor in vars(seen[kind]).items():
                if isinstance(tensor, Tensor) and name != "bias":  # the loader reads biases, to find zeros
                    setattr(seen[kind], name, tensor.to("meta"))
        values = {name: one for name, one in vars(seen[kind]).items() if isinstance(one, Tensor) and one.is_meta}
        own: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in values.items()}
        return replace(seen[kind], name=reader.layer_names[index], **own)

    reader.read = without_values  # type: ignore[method-assign]
    options: dict[str, Any] = {
        "ties": shared_weights(model),
        "device_of": lambda name: torch.device("meta"),
        "progress": False,
    }
    loader = Loader(model, reader, Caller(op="fit", find=namer(model, None), **options), lambda message: None)
    shapes = {place.index: place.spot.shape for place in loader.plan.places}
    for experts in loader.plan.experts.values():
        shapes |= {index: experts.shapes[inner] for inner, index in experts.indexes.items()}
    sizes = {index: shape and (shape.N, shape.K) for index, shape in shapes.items()}  # some headers lack the sizes
    loader.place()
    loader.fill()
    return model


def empty_model(config: Any, dtype: torch.dtype, weight_format: str) -> Any:
    """Makes a transformers model on the meta device, quantized like `from_pretrained`, or unquantized for "floats"."""
    from transformers import AutoModelForCausalLM

    from torch_marlin_metal.integrations.transformers import MarlinConfig, MarlinQuantizer

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if weight_format != "floats":
        MarlinQuantizer(MarlinConfig(weight_format), pre_quantized=False).quantize_empty(model)
    return model


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living tensors that operators create while this mode is active: `now` and the peak `most`."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._storages: set[int] = set()
        for tensor in held:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in known:
                self._add(one)
        if func in INSIDE:
            self.most = max(self.most, self.now + INSIDE[func](result))
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size


def measured(path: str, model: Any, context: int, prompt: int) -> tuple[int, int]:
    """Returns the bytes of a cache of `context` tokens, and of the activations of the last `prompt` tokens.

    The model runs on the meta device. Attention stores all scores of these tokens, as PyTorch's does on a Mac's GPU.
    """
    tokens = torch.zeros(1, context, dtype=torch.long, device="meta")
    run = opened.cached(model)
    try:
        with torch.no_grad():  # in inference mode, the dispatch mode does not see the parts of composite operators
            cache = run(tokens[:, prompt:]) if context > prompt else None
            live = Live(_tensors(cache))
            with live:
                cache = run(tokens[:, :prompt], cache)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: {type(model).__name__} does not run without values: {reason}") from error
    held = sum(tensor.untyped_storage().nbytes() for tensor in _tensors(cache))
    return held, max(0, live.most - held)


def _tensors(cache: Any) -> list[Tensor]:
    held = [] if cache is None else [list(vars(layer).values()) for layer in cache.layers]
    return [tensor for tensor in tree_leaves(held) if isinstance(tensor, Tensor)]


def _table(value: dict[str, Any]) -> Any:
    numbers = ("weights", "cache", "prompt", "in all")
    rows = []
    for row in value["formats"]:
        sizes = (row["weight_bytes"], value["cache_bytes"], value["activation_bytes"], row["total_bytes"])
        rows.append((row["format"], *map(human_size, sizes), "yes" if row["fits"] else "no"))
    title = f"{value['model']} on a GPU with {human_size(value['gpu_bytes'])}"
    tokens = f"cache: of {value['context']} tokens; prompt: activations of {value['prompt_tokens']} tokens at once"
    caption = f"{tokens}; 1 GB has 10^9 bytes"
    return table(title, "format", *numbers, "fits", rows=rows, right=numbers, caption=caption)
