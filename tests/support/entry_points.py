"""One small network, loaded by each entry point: transformers, load_quantized, diffusers, sentence-transformers,
command.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.configuration_utils import ConfigMixin, register_to_config
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules.module import Module
from torch import nn
from transformers import MixtralConfig, initialization
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from typer.testing import CliRunner

import torch_marlin_metal.integrations.diffusers
import torch_marlin_metal.integrations.sentence_transformers  # noqa: F401
from tests.support.mixtures import decoded
from torch_marlin_metal import PackedWeight, load_quantized, quantize_weight
from torch_marlin_metal.checkpoints.formats.native import NativeExporter
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.integrations.transformers import MarlinConfig

IDS = torch.tensor([[3, 9, 27, 5]])
SCALE = 3.0
PACKED = ("table", "block.up", "block.down", "head")
SIZES = {"table": (32, 64), "block.up": (128, 64), "block.down": (64, 128), "head": (32, 64)}
EXPERTS = 2
SIZES |= {
    f"experts.{i}.{part}": (64, 32) if part == "w2" else (32, 64) for i in range(EXPERTS) for part in ("w1", "w2", "w3")
}


def build(self: nn.Module) -> None:
    self.table, self.norm, self.head = nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 32, bias=False)
    self.block = nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64, bias=False)})
    self.experts = MixtralExperts(MixtralConfig(hidden_size=64, intermediate_size=32, num_local_experts=EXPERTS))
    self.register_buffer("scale", torch.tensor(SCALE), persistent=False)


def compute(self: Any, ids: torch.Tensor) -> torch.Tensor:
    x = self.table(ids)
    x = x + self.block["down"](torch.relu(self.block["up"](x)))
    every = torch.arange(EXPERTS, device=ids.device).expand(ids.numel(), -1)
    x = x + self.experts(x.flatten(0, 1), every, torch.ones_like(every, dtype=x.dtype)).view(x.shape)
    return self.head(self.norm(x)) * self.scale


class NetConfig(transformers.PretrainedConfig):
    model_type = "small_net"


class SmallNet(transformers.PreTrainedModel):
    config_class = NetConfig
    _tp_plan = {"block.up": "colwise", "block.down": "rowwise"}  # noqa: RUF012
    _tied_weights_keys = {"head.weight": "table.weight"}  # noqa: RUF012  transformers reads it as a dictionary

    def __init__(self, config: NetConfig) -> None:
        super().__init__(config)
        build(self)
        self.post_init()

    forward = compute

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SmallNet):
            initialization.constant_(module.scale, SCALE)


class DiffusersNet(diffusers.ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        build(self)

    forward = compute


class SentenceNet(Module):
    def __init__(self) -> None:
        super().__init__()
        build(self)

    forward = compute

    def save(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError


@dataclass
class Saved:
    """The settings and layers of a checkpoint in this package's format, before it is written."""

    tied: bool = True
    weights: dict[str, PackedWeight] = field(default_factory=dict)
    floats: dict[str, torch.Tensor] = field(default_factory=dict)
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def pack(self, name: str, N: int = 64, K: int = 64) -> None:
        weight = quantize_weight(torch.randn(N, K), "uint4b8", 32, scale_dtype=torch.float32)
        weight.name = name
        self.weights[name], self.exact[name] = weight, torch.from_numpy(decoded(weight))

    def drop(self, name: str) -> None:
        del self.weights[name]

    def renamed(self, change: Callable[[str], str]) -> None:
        self.weights = {change(name): weight for name, weight in self.weights.items()}
        self.floats = {change(name): tensor for name, tensor in self.floats.items()}

    def logits(self) -> torch.Tensor:
        """Returns the network's result in fp64, computed from the decoded weights."""
        x = self.exact["table"][IDS]
        up = torch.relu(x @ self.exact["block.up"].T + self.exact["block.up.bias"])
        x = x0 = x + up @ self.exact["block.down"].T
        for w1, w3, w2 in ([self.exact[f"experts.{i}.{part}"] for part in ("w1", "w3", "w2")] for i in range(EXPERTS)):
            x = x + (nn.functional.silu(x0 @ w1.T) * (x0 @ w3.T)) @ w2.T
        x = nn.functional.layer_norm(x, (64,), self.exact["norm.weight"], self.exact["norm.bias"])
        return x @ self.exact["table" if self.tied else "head"].T * SCALE

    def write(self, path: Path) -> Path:
        exporter, state = NativeExporter(), {name: tensor.clone() for name, tensor in self.floats.items()}
        for name, weight in self.weights.items():
            state |= {f"{name}.{key}": tensor for key, tensor in exporter.own_tensors(weight, name).items()}
        path.mkdir()
        config = {"model_type": "small_net", "_class_name": "DiffusersNet", "architectures": ["SmallNet"]}
        config |= {"tie_word_embeddings": self.tied, "quantization_config": self.settings or exporter.settings()}
        (path / "config.json").write_text(json.dumps(config))
        for file in ("model", "diffusion_pytorch_model"):
            (path / file).mkdir()
            (path / file / "config.json").write_text(json.dumps(config))
            save_file(state, path / file / f"{file}.safetensors", {"format": "pt"})
        return path


def saved(tied: bool) -> Saved:
    torch.manual_seed(0)
    made = Saved(tied)
    for name, (N, K) in SIZES.items():
        if name != "head" or not tied:
            made.pack(name, N, K)
    bias = torch.randn(SIZES["block.up"][0])
    made.weights["block.up"].bias = bias
    made.floats = {"norm.weight": torch.rand(64), "norm.bias": torch.randn(64)}
    made.exact |= {name: value.double() for name, value in made.floats.items()} | {"block.up.bias": bias.double()}
    return made


def from_pretrained(path: Path, **options: Any) -> nn.Module:
    hosts = library_options(options)
    return SmallNet.from_pretrained(path / "model", quantization_config=config_of(options), **hosts)


def library_options(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the options of the library, such as "dtype", from `options` and returns them."""
    names = ("dtype", "device_map", "distributed_config")
    taken = {name: options.pop(name) for name in names if name in options}
    return taken | ({"device_map": {"": options.pop("device")}} if "device" in options else {})


def config_of(options: dict[str, Any]) -> MarlinConfig:
    return MarlinConfig(**{{"exclude": "modules_to_not_convert"}.get(name, name): v for name, v in options.items()})


def load_quantized_cpu(path: Path, **options: Any) -> nn.Module:
    return into(SmallNet(net_config(path)).float(), path, options)


def load_quantized_meta(path: Path, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = SmallNet(net_config(path)).float()
    return into(model, path, options)


def in_shards(path: Path, last: Callable[[Path, dict[str, str]], None]) -> None:
    """Makes the file of each library the first of two shards. `last` gets the path of the second shard, which it may
    write, and the index, which it may change.
    """
    for name in ("model", "diffusion_pytorch_model"):
        file = path / name / f"{name}.safetensors"
        first = file.rename(path / name / f"{name}-00001-of-00002.safetensors")
        table = dict.fromkeys(load_file(first), first.name)
        last(first.with_name(first.name.replace("00001", "00002", 1)), table)
        file.with_suffix(".safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def into(model: nn.Module, path: Path, options: dict[str, Any]) -> nn.Module:
    load_quantized(model, path / "model", progress=False, **options)
    return model


def net_config(path: Path) -> NetConfig:
    return NetConfig(tie_word_embeddings=json.loads((path / "config.json").read_text())["tie_word_embeddings"])


def by_diffusers(path: Path, **options: Any) -> nn.Module:
    given = library_options(options)
    given = {{"dtype": "torch_dtype"}.get(name, name): value for name, value in given.items()}
    given |= {"quantization_config": config_of(options)} if options else {}
    return DiffusersNet.from_pretrained(path / "diffusion_pytorch_model", **given)


def by_sentence_transformers(path: Path) -> nn.Module:
    return SentenceNet.load_torch_weights(str(path / "model"), model=SentenceNet())


def command(path: Path, **options: Any) -> nn.Module:
    """Runs `inspect --model`, which only plans. Returns the model of load_quantized, which follows the same plan."""
    given = [
        word for name, value in options.items() for one in _list(value) for word in (f"--{name.replace('_', '-')}", one)
    ]
    with known_to_transformers():
        done = CliRunner().invoke(app, ["inspect", str(path / "model"), "--model", str(path / "model"), *given])
    if done.exit_code:
        raise ValueError(done.output.replace("\n", " "))
    return load_quantized_meta(path, **options)


def _list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


@contextlib.contextmanager
def known_to_transformers() -> Iterator[None]:
    transformers.AutoConfig.register("small_net", NetConfig, exist_ok=True)
    library = sys.modules["transformers"]
    library.SmallNet = SmallNet
    try:
        yield
    finally:
        del library.SmallNet


ENTRY_POINTS: dict[str, Callable[..., nn.Module]] = {
    "from_pretrained": from_pretrained,
    "load_quantized": load_quantized_cpu,
    "load_quantized, meta": load_quantized_meta,
    "diffusers": by_diffusers,
    "sentence-transformers": by_sentence_transformers,
    "inspect --model": command,
}
UNTIED = ("diffusers", "sentence-transformers")  # these libraries tie no weights


def quietly(function: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()
