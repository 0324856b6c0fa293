"""Trains a small xLSTM language model on a text, then generates text in fp32 and in 4 bit.

    python examples/xlstm.py [--seconds 60] [--device cpu]

The text is Python's own reference (`pydoc_data.topics`), and each letter is a token. Training and the prompt are
computed in chunks, and generation in single steps. The program first checks that both give the same logits.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import torch_marlin_metal as tmm

PROMPT = "The following "
WINDOW, BATCH = 128, 16


class Block(nn.Module):
    """An mLSTM and a gated feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_mlstm, self.norm_ffn = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlstm = tmm.xlstm.MLSTMLayer(width, heads)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, state: tmm.xlstm.MLSTMState | None) -> tuple[Tensor, tmm.xlstm.MLSTMState]:
        """Runs the block over tokens `[B, S, width]`."""
        y, state = self.mlstm(self.norm_mlstm(x), state)
        x = x + y
        y = self.norm_ffn(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), state


class LanguageModel(nn.Module):
    """A language model whose tokens are letters. Returns the logits of the next letter."""

    def __init__(self, letters: int, width: int = 128, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(
        self, letters: Tensor, states: list[tmm.xlstm.MLSTMState] | None = None
    ) -> tuple[Tensor, list[tmm.xlstm.MLSTMState]]:
        """Runs the model over letters `[B, S]`. `states` are the states after the previous letters."""
        x, after = self.embedding(letters), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state)
            after.append(state)
        return self.head(self.norm(x)), after


def windows(text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=generator)
    return torch.stack([text[start : start + WINDOW + 1] for start in starts])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits, _ = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(model: nn.Module, text: Tensor, seconds: float, device: str, console: Console) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    begin, step, shown = time.perf_counter(), 0, -math.inf
    while (elapsed := time.perf_counter() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20) * max(0.05, 1 - elapsed / seconds)
        loss = loss_of(model, windows(text, generator).to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if elapsed - shown >= seconds / 6:
            console.print(f"{elapsed:5.0f} s  step {step:4d}  loss {loss.item():.3f}")
            shown = elapsed
    console.print(f"{elapsed:5.0f} s  step {step:4d}  loss {loss.item():.3f}")


@torch.no_grad()
def check_steps(model: nn.Module, letters: Tensor) -> float:
    """Returns the largest difference between logits from chunks and single steps, relative to the largest logit."""
    by_chunks, _ = model(letters)
    states, by_steps = None, []
    for t in range(letters.shape[1]):
        logits, states = model(letters[:, t : t + 1], states)
        by_steps.append(logits)
    difference = (torch.cat(by_steps, 1) - by_chunks).abs().max() / by_chunks.abs().max()
    return difference.item()


@torch.no_grad()
def write(model: nn.Module, alphabet: list[str], prompt: str, count: int, device: str) -> str:
    generator = torch.Generator().manual_seed(1)
    logits, states = model(torch.tensor([[alphabet.index(letter) for letter in prompt]], device=device))
    text = prompt
    for _ in range(count):
        probabilities = torch.softmax(logits[0, -1].float().cpu() / 0.7, -1)
        letter = torch.multinomial(probabilities, 1, generator=generator)
        text += alphabet[letter]
        logits, states = model(letter[None].to(device), states)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--letters", type=int, default=400, help="to write")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    console, device = Console(width=110, highlight=False, markup=False), arguments.device

    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    index = {letter: at for at, letter in enumerate(alphabet)}
    text = torch.tensor([index[letter] for letter in corpus])
    held_out = text[: len(text) // 20]
    test = torch.stack([held_out[at : at + WINDOW + 1] for at in range(0, 16 * WINDOW, WINDOW)]).to(device)
    torch.manual_seed(0)
    model = LanguageModel(len(alphabet)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{len(corpus)} letters of {len(alphabet)} kinds, {parameters} parameters, {device}")

    train(model, text[len(held_out) :], arguments.seconds, device, console)
    model.eval()
    for name in ("fp32", "4 bit"):
        if name == "4 bit":
            tmm.quantize_model(model, "uint4b8", group_size=64, exclude=["*gate_preact", "head"], progress=False)
            if not any(isinstance(module, tmm.MarlinLinear) for module in model.modules()):
                raise SystemExit("no layer was quantized")
        with torch.no_grad():
            loss = loss_of(model, test).item()
        difference = check_steps(model, test[:2, :69])
        console.print(f"\n{name}: loss on held-out text {loss:.3f}; steps differ from chunks by {difference:.1e}")
        if not difference < 1e-3:
            raise SystemExit("chunks and steps disagree")
        console.print(write(model, alphabet, PROMPT, arguments.letters, device))


if __name__ == "__main__":
    main()
