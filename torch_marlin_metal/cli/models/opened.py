"""Loads a language model and its tokenizer for the commands, and describes them."""

import contextlib
import inspect
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from torch_marlin_metal.cli.arguments import floating
from torch_marlin_metal.convert import CheckpointError, NotQuantized, open_reader
from torch_marlin_metal.fuse.caches import cache_name
from torch_marlin_metal.layers.packed_layer import PackedLayer
from torch_marlin_metal.models.report import module_bytes
from torch_marlin_metal.sizes import human_size

Model = Annotated[Path, typer.Argument(help="A directory of transformers, or a .gguf file.", show_default=False)]
ModelDtype = Annotated[str | None, typer.Option("--dtype", help="Dtype of the floats. Default: the model's own.")]
Quantize = Annotated[
    str | None, typer.Option("--weight-format", help="Quantize a model of floats to this format while it loads.")
]
Fuse = Annotated[bool, typer.Option(help="Join projections and the operations between products, where it is exact.")]
TokenizerPath = Annotated[Path | None, typer.Option("--tokenizer", help="A directory that has MODEL's tokenizer.")]


@dataclass(frozen=True)
class Opened:
    """A transformers model that is loaded on its device, and the seconds that loading took."""

    path: Path
    model: Any
    device: str
    seconds: float

    @classmethod
    def of(cls, path: Path, device: str, dtype: str | None, weight_format: str | None, fuse: bool) -> "Opened":
        """Loads a model with transformers and this package's integration, quantized to `weight_format` if given."""
        place, file = locate(path)
        file["dtype"] = "auto" if dtype is None else floating(dtype)
        if weight_format is not None:
            with contextlib.suppress(NotQuantized):
                packed = open_reader(path, gguf_names="hf", on_unsupported="dequantize").format.name
                raise ValueError(f"--weight-format: expected a model of floats, got {path}, which is packed ({packed})")
        size, memory = sum(part.stat().st_size for part in weight_files(path)), physical_memory()
        if weight_format is None and size > memory:
            raise MemoryError(
                f"{path}: its weights have {human_size(size)}, this machine has {human_size(memory)} of memory; "
                "`torch-marlin-metal fit` lists smaller formats"
            )
        from transformers import AutoModelForCausalLM

        from torch_marlin_metal.integrations.transformers import MarlinConfig, take_over

        begin = time.perf_counter()
        options: dict[str, Any] = {"fuse": "layers" if fuse else False, "prepare": device == "mps"}
        if weight_format is not None:
            file["quantization_config"] = MarlinConfig(weight_format, **options)
        take_over(**options)
        try:
            with quiet(), memory_errors(str(path), f"the weights have {human_size(size)}"):
                model = AutoModelForCausalLM.from_pretrained(place, local_files_only=True, device_map=device, **file)
        finally:
            take_over()
        return cls(path, model.eval(), device, time.perf_counter() - begin)

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def check_tokens(self, ids: Tensor) -> None:
        """Raises a CheckpointError for token ids outside the model's vocabulary, for example another model's."""
        if (largest := int(ids.max())) >= self.vocabulary:
            raise CheckpointError(
                f"{self.path}: expected tokens below its vocabulary of {self.vocabulary}, the tokenizer gives "
                f"{largest}: --tokenizer names another one"
            )

    def described(self) -> dict[str, Any]:
        """Describes the loaded model in JSON types."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, PackedLayer)]
        return {
            "model": str(self.path),
            "device": self.device,
            "packed": dict(Counter(f"{layer.weight_format} g{layer.group_size}" for layer in layers)),
            "packed_bytes": module_bytes(nn.ModuleList(layers)),
            "model_bytes": module_bytes(self.model),
            "load_seconds": self.seconds,
        }


def in_words(found: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} layers of {kind}" for kind, count in found["packed"].items()) or "no packed layer"
    sizes = f"{human_size(found['packed_bytes'])} of the model's {human_size(found['model_bytes'])}"
    return f"{kinds}: {sizes}; loaded in {found['load_seconds']:.3g} s on {found['device']}"


def rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second >= 100 else f"{tokens_per_second:.3g} tokens/s"


def locate(path: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the arguments for transformers' `from_pretrained`: a directory, and the name of a .gguf file in it."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: does not exist; a model of the Hub must be downloaded first: hf download NAME --local-dir FOLDER"
        )
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, {"gguf_file": path.name}
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: expected a directory with a config.json of transformers, or a .gguf file")
    return path, {}


def weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(path.glob("model*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block, transformers logs only errors, and shows progress bars only on a terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def open_tokenizer(model: Path, given: Path | None) -> Any:
    """Loads the tokenizer from the directory `given`, or else the model's own."""
    place, file = locate(model) if given is None else (given, {})
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(place, local_files_only=True, **file)
    except ImportError:
        raise
    except Exception as error:  # tokenizer classes raise many kinds of errors
        reason = str(error).partition("\n")[0] or type(error).__name__
        why = "" if reason.rstrip().endswith(":") else f" ({reason})"  # the message was the heading of a list
        raise CheckpointError(
            f"{given or model}: its tokenizer cannot be loaded{why}: --tokenizer names a directory that has one"
        ) from error


def read_pieces(argument: str, file: Path, words: Any, length: int, most: int | None) -> Tensor:
    """Splits a text file into pieces of tokens, at most `most`: int64 `[pieces, length]` on the CPU.

    Each piece starts with the tokens that the tokenizer puts before a text. A shorter last piece is omitted.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument}: {file}: expected a text in UTF-8, got {error}") from error
    with quiet():
        ids = words(text)["input_ids"]
    if len(ids) < length:
        raise ValueError(f"{argument}: {file}: expected at least {length} tokens, got {len(ids)}")
    pieces = torch.tensor(ids[: len(ids) // length * length], device="cpu").view(-1, length)[:most]
    if ids[0] == words.bos_token_id:
        pieces[:, 0] = ids[0]
    return pieces


def cached(model: Any) -> Callable[..., Any]:
    """Returns a function that runs the model on tokens after those in a cache, and returns the new cache."""
    name, options = cache_name(model), last_logits(model)

    def run(ids: Tensor, cache: Any = None) -> Any:
        return getattr(model(input_ids=ids, use_cache=True, **{name: cache}, **options), name)

    return run


def last_logits(model: Any, count: int = 1) -> dict[str, int]:
    """Returns the argument that limits the logits to the last `count` tokens, or {} if the model lacks it."""
    return {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def peak_memory(device: str) -> int:
    """Returns the bytes that the GPU driver has allocated. On the CPU, returns the peak memory of this process."""
    if device == "mps":
        return torch.mps.driver_allocated_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def memory_errors(op: str, size: str) -> Iterator[None]:
    """Converts torch's errors about memory to a MemoryError that names the size of the problem."""
    try:
        yield
    except RuntimeError as error:
        if not any(part in str(error) for part in ("out of memory", "can't allocate memory", "not enough memory")):
            raise
        text = f"{op}: there is not enough memory: {size}; `torch-marlin-metal fit` says what fits"
        raise MemoryError(text) from error
