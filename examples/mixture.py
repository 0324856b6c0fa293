"""Trains a small Mixtral on a text, packs its experts in 4 bit, and compares loss, bytes and generated text.

The text is Python's own reference (`pydoc_data.topics`), and each letter is a token. Start it with `make
demo-mixture`; `python examples/mixture.py --help` lists its options.
"""

import argparse
import copy
import math
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

# If other programs use the same cores, OpenMP threads that spin while they wait make everything ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, logging

import torch_marlin_metal as tmm
from torch_marlin_metal.models.report import Report, module_bytes
from torch_marlin_metal.sizes import human_size

FORMATS = (("uint4b8", 64), ("uint4b8", 32), ("uint4", 32), ("nf4", 64), ("mxfp4", 32), ("nvfp4", 16))
PROMPT = "The following "
WINDOW, BATCH = 128, 16
TEST_WINDOWS = 128
RATE = 3e-3


@dataclass
class Result:
    """One variant of the model.

    Attributes:
        label: the variant's name in the table.
        loss: the mean loss on the held-out text, in nats per letter.
        bytes: the bytes of all tensors.
        experts_bytes: the bytes of the experts.
        chosen: for each layer, the experts that the router chooses on the held-out text, `[tokens, top_k]`.
        error: the relative error of the experts' weights, averaged over the layers; 0 for fp32.
        text: the text that the variant generates after the prompt.
    """

    label: str
    loss: float
    bytes: int
    experts_bytes: int
    chosen: list[Tensor] = field(repr=False)
    error: float = 0.0
    text: str = ""


def read_text() -> tuple[list[str], Tensor, Tensor]:
    """Returns the alphabet, the text for training, and windows of the first twentieth, which is held out."""
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    index = {letter: at for at, letter in enumerate(alphabet)}
    text = torch.tensor([index[letter] for letter in corpus])
    held_out = len(text) // 20
    count = min(TEST_WINDOWS, held_out // (WINDOW + 1))
    return alphabet, text[held_out:], text[: count * (WINDOW + 1)].view(count, WINDOW + 1)


def make_model(letters: int, width: int = 128, layers: int = 3, experts: int = 8) -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=letters,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        router_aux_loss_coef=0.02,
        bos_token_id=None,
        eos_token_id=None,
    )
    return MixtralForCausalLM(config)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Returns the experts module of each layer, in fp32 or packed."""
    return [layer.mlp.experts for layer in model.model.layers]


def train(model: nn.Module, text: Tensor, seconds: float, console: Console) -> list[float]:
    """Trains for `seconds` and returns the loss of each step. A term of the loss balances the experts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    begin, shown, losses = time.perf_counter(), -math.inf, []
    model.train()
    while (elapsed := time.perf_counter() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (len(losses) + 1) / 20) * max(0.05, 1 - elapsed / seconds)
        starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=generator)
        batch = torch.stack([text[start : start + WINDOW + 1] for start in starts])
        output = model(batch, labels=batch, output_router_logits=True, use_cache=False)
        output.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((output.loss - model.config.router_aux_loss_coef * output.aux_loss).item())
        if elapsed - shown >= seconds / 6:
            console.print(f"{elapsed:5.0f} s  step {len(losses):4d}  loss {losses[-1]:.3f}")
            shown = elapsed
    model.eval()
    return losses


@torch.no_grad()
def evaluate(label: str, model: nn.Module, test: Tensor) -> Result:
    """Measures a variant on the held-out windows."""
    loss, chosen = 0.0, []
    for part in test.split(32):
        output = model(part, output_router_logits=True, use_cache=False)
        losses = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), part[:, 1:].flatten())
        loss += losses.item() * len(part) / len(test)
        chosen.append([logits.topk(model.config.num_experts_per_tok).indices.cpu() for logits in output.router_logits])
    layers = [torch.cat(parts) for parts in zip(*chosen, strict=True)]
    return Result(label, loss, module_bytes(model), sum(map(module_bytes, experts_of(model))), layers)


def same_choice(one: Result, other: Result) -> float:
    """Returns the fraction of expert choices that are the same in both models."""
    pairs = [(a[:, :, None] == b[:, None, :]).any(2) for a, b in zip(one.chosen, other.chosen, strict=True)]
    return torch.cat(pairs).float().mean().item()


def write(model: nn.Module, alphabet: list[str], count: int) -> str:
    """Returns the prompt and a random continuation by the model, with the same seed for every model."""
    torch.manual_seed(1)
    prompt = torch.tensor([[alphabet.index(letter) for letter in PROMPT]], device=model.device)
    mask = torch.ones_like(prompt)
    ids = model.generate(
        prompt, attention_mask=mask, max_new_tokens=count, do_sample=True, temperature=0.7, top_k=0, pad_token_id=0
    )
    return "".join(alphabet[letter] for letter in ids[0].tolist())


def pack(dense: nn.Module, weight_format: str, group_size: int) -> tuple[nn.Module, Report]:
    """Returns a packed copy of a model, and checks that its experts are in 4 bit and its routers unchanged."""
    model = copy.deepcopy(dense)
    report = tmm.quantize_model(model, weight_format, group_size, "mse", vocabulary_format="none", progress=False)
    for experts, layer, old in zip(experts_of(model), model.model.layers, dense.model.layers, strict=True):
        if not isinstance(experts, tmm.MarlinExperts):
            raise SystemExit(f"experts are not packed: {experts}")
        if not torch.equal(layer.mlp.gate.weight, old.mlp.gate.weight):
            raise SystemExit("a router has changed")
    return model, report


@torch.no_grad()
def check_reload(model: nn.Module, test: Tensor) -> int:
    """Saves and loads a model, checks that all bits are equal, and returns the bytes of the file."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        again = MixtralForCausalLM.from_pretrained(folder).to(model.device).eval()
    old, new = model.state_dict(), again.state_dict()
    if old.keys() != new.keys() or not all(torch.equal(old[name], new[name]) for name in old):
        raise SystemExit("the reloaded model has other tensors")
    if not torch.equal(model(test[:2]).logits, again(test[:2]).logits):
        raise SystemExit("the reloaded model computes other logits")
    return size


def compare(dense: nn.Module, test: Tensor, alphabet: list[str], letters: int) -> tuple[list[Result], list[int]]:
    """Returns the results of fp32 and of each format, and the bytes of each variant's file."""
    results, files = [evaluate("fp32", dense, test)], [check_reload(dense, test)]
    results[0].text = write(dense, alphabet, letters)
    for weight_format, group_size in FORMATS:
        model, report = pack(dense, weight_format, group_size)
        result = evaluate(f"{weight_format} g{group_size}", model, test)
        errors = [layer.error or 0.0 for layer in report.converted if layer.name.endswith(".experts")]
        result.error = sum(errors) / len(errors)
        result.text = write(model, alphabet, letters)
        results.append(result)
        files.append(check_reload(model, test))
    return results, files


def table_of(results: list[Result], files: list[int]) -> Table:
    table = Table(title="Mixtral in floats and in 4 bit; routers, embedding and output layer stay in fp32")
    for heading in ("weights", "held-out loss", "rise", "weight error", "same experts", "experts", "model", "file"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    dense = results[0]
    for result, size in zip(results, files, strict=True):
        packed = result is not dense
        table.add_row(
            result.label,
            f"{result.loss:.4f}",
            f"{result.loss - dense.loss:+.4f}" if packed else "",
            f"{result.error:.1%}" if packed else "",
            f"{same_choice(dense, result):.1%}" if packed else "",
            human_size(result.experts_bytes),
            human_size(result.bytes),
            human_size(size),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of training, which is always on the CPU")
    # Beyond the length of its training windows, the model writes nonsense.
    parser.add_argument("--letters", type=int, default=WINDOW - len(PROMPT), help="to write")
    parser.add_argument("--device", default="cpu", choices=("cpu", "mps"), help="for everything after the training")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 120)

    alphabet, text, test = read_text()
    model = make_model(len(alphabet))
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{len(text)} letters to train on, {test.numel()} held out, {parameters} parameters")
    train(model, text, options.seconds, console)
    dense = model.to(options.device)
    results, files = compare(dense, test.to(options.device), alphabet, options.letters)
    console.print(table_of(results, files))
    for result in results[:2]:
        console.print(f"\n{result.label} writes:\n{result.text}")


if __name__ == "__main__":
    main()
