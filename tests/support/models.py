"""A small model, a small config for transformers, and functions that record what a conversion must preserve."""

import torch
from torch import nn

from torch_marlin_metal import MarlinLinear
from torch_marlin_metal.models import quantize as model_module

IDS = torch.tensor([[3, 9, 27, 41, 5]])
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}


class Block(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(64, 96, device=device)
        self.down = nn.Linear(96, 64, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def make_model(device: str, blocks: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(device) for _ in range(blocks))).eval()


def tree(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def packed_layers(model: nn.Module) -> dict[str, MarlinLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MarlinLinear)}


def fail_at(monkeypatch, name: str, call: int, module=model_module) -> None:
    """Makes a function of a module raise an error at its call number `call`, counted from 0."""
    original, count = getattr(module, name), iter(range(1000))

    def wrapper(*args, **kw):
        if next(count) == call:
            raise RuntimeError("injected")
        return original(*args, **kw)

    monkeypatch.setattr(module, name, wrapper)
