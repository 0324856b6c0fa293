"""What quality a 4-bit output layer costs: held-out loss of a small language model that this script trains.

    python benchmarks/packed_head.py [--steps 1500] [--seeds 2]

The text is the source of Python's own modules, in tokens of a byte-pair vocabulary that is learnt from it. The model
is a Llama with an output layer of its own (not tied to the embedding), in fp32. The table shows how much the loss
rises, in nats a token, when the other layers, the output layer, or both are quantized.
"""

import argparse
import random
import sysconfig
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import torch_marlin_metal as tmm

VOCABULARY, WINDOW, BATCH = 4096, 128, 8
HEAD = "lm_head"


def tokens() -> tuple[Tensor, Tensor]:
    """Returns the tokens to train on, and those of a tenth of the modules, which are held out."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(modules)
    cut = len(modules) // 10
    texts = ["\n".join(path.read_text() for path in part) for part in (modules[cut:], modules[:cut])]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts[:1], VOCABULARY, show_progress=False)
    train, test = (torch.tensor(tokenizer.encode(text).ids) for text in texts)
    return train, test


def trained(train: Tensor, steps: int, seed: int) -> LlamaForCausalLM:
    """Returns a model that was trained with AdamW on random windows of the text."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in track(range(steps), f"training, seed {seed}"):
        starts = torch.randint(len(train) - WINDOW, (BATCH,))
        batch = torch.stack([train[start : start + WINDOW] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, test: Tensor) -> float:
    windows = test[: len(test) // WINDOW * WINDOW].view(-1, WINDOW)
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in windows.split(32)]
    return sum(losses) / len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    train, test = tokens()
    table = Table(title=f"{len(train)} tokens to train on, {len(test)} held out; {options.steps} steps")
    for column in ("seed", "format", "loss in floats", "layers", "output layer", "both"):
        table.add_column(column)
    for seed in range(options.seeds):
        model = trained(train, options.steps, seed)
        before = loss_of(model, test)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for weight_format, group_size in (("uint4b8", 128), ("uint4b8", 32), ("nf4", 64)):
            rises = []
            for include, exclude in ((["*"], [HEAD]), ([HEAD], []), (["*"], [])):
                fresh = LlamaForCausalLM(model.config).eval()
                fresh.load_state_dict(state)
                tmm.quantize_model(
                    fresh, weight_format, group_size=group_size, include=include, exclude=exclude, progress=False
                )
                rises.append(loss_of(fresh, test) - before)
            cells = (f"{rise:+.4f}" for rise in rises)
            table.add_row(str(seed), f"{weight_format}, groups of {group_size}", f"{before:.4f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
