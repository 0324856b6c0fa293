"""Compares formats chosen under a memory limit with one format for all layers, at the same number of bytes.

Small Llamas are trained on text that every Python installation has, each for a fixed number of steps. Their predictions
on other text are compared with the predictions of the unquantized model. The demo's sentence encoder makes no
predictions, so its embeddings are compared. For the encoder, formats are not chosen by means of a text.

    python -m lab.whole_models.fit           # the tables, as Markdown; the training takes minutes
    python -m lab.whole_models.fit --write   # and write them into docs/use/models.md
"""

import argparse
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, logging

import torch_marlin_metal as tmm
from examples import writer
from scripts import page_section
from torch_marlin_metal.models.report import Report, module_bytes

PAGE = Path(__file__).parents[2] / "docs/use/models.md"
UNIFORM = ("uint4b8", "uint5b16", "uint6b32", "uint8b128")
GROUP = 128
CALIBRATION, HELD_OUT = 4096, 8192  # tokens
VOCABULARY = ("none", "uint8b128", "uint4b8")


@dataclass(frozen=True)
class Trained:
    """A model in floats, with text for calibration and text for measurement, int64 `[B, WINDOW]`."""

    name: str
    model: Any
    calibration: Tensor
    held_out: Tensor


@dataclass(frozen=True)
class Row:
    """The cost of one way to choose formats.

    Attributes:
        name: how the formats were chosen, for example "with a text".
        stated: the bytes that the report of `quantize_model` names, or 0 if it names none.
        held: the bytes of the model's tensors.
        mean: the mean KL divergence from the model in floats, in nats per token. For an encoder: the distance of
            embeddings.
        error: the standard error of the mean, or 0.
        largest: the largest divergence of one token, or 0.
    """

    name: str
    stated: int
    held: int
    mean: float
    error: float = 0.0
    largest: float = 0.0


def trained(name: str, texts: list[str], words: int, steps: int, **sizes: Any) -> Trained:
    """Trains a Llama on the first part of the texts, and holds out the rest."""
    tokenizer = writer.make_tokenizer(texts, words)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config)
    ids = torch.tensor(tokenizer("\n".join(texts))["input_ids"])
    kept = (CALIBRATION + HELD_OUT) // writer.WINDOW * writer.WINDOW
    if len(ids) < 2 * kept:
        raise SystemExit(f"{name}: {len(ids)} tokens are too few")
    with tqdm(total=steps, desc="training") as bar:

        def progress(done: int) -> float:
            bar.update(done - bar.n)
            return done / steps

        loss = writer.train(model, ids[:-kept], progress)[-1]
    print(f"{name}: {model.num_parameters()} parameters, {len(ids) - kept} tokens, {steps} steps, loss {loss:.2f}")
    windows = ids[-kept:].reshape(-1, writer.WINDOW)
    return Trained(name, model.eval(), windows[: CALIBRATION // writer.WINDOW], windows[CALIBRATION // writer.WINDOW :])


def models(steps: int) -> Iterator[Trained]:
    from lab.whole_models.sentences import sentences

    yield trained(
        "3 layers, H = 192, separate vocabulary of 1024, Python's reference", list(topics.values()), 1024, steps,
        hidden_size=192, intermediate_size=384, num_hidden_layers=3, num_attention_heads=6,
    )  # fmt: skip
    yield trained(
        "4 layers, H = 256, tied vocabulary of 2048, docstrings", sentences(4000, calibrate=True), 2048, steps,
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip


@torch.no_grad()
def predictions(model: Any, ids: Tensor) -> Tensor:
    """Returns the logarithms of the probabilities of next tokens, `[tokens, V]`."""
    parts = [model(input_ids=one, use_cache=False).logits.log_softmax(-1).flatten(0, 1) for one in ids.split(8)]
    return torch.cat(parts)


def divergence(exact: Tensor, other: Tensor) -> tuple[float, float, float]:
    """Returns mean, standard error and maximum of the KL divergence over the tokens."""
    each = torch.cat([(p.double().exp() * (p.double() - q.double())).sum(-1) for p, q in zip(
        exact.split(1024), other.split(1024), strict=True)])  # fmt: skip
    return float(each.mean()), float(each.std() / len(each) ** 0.5), float(each.max())


def quantized(model: Any, *args: Any, **options: Any) -> tuple[Any, Report]:
    """Returns a quantized copy of a model, and the report."""
    copied = copy.deepcopy(model)
    return copied, tmm.quantize_model(copied, *args, progress=False, **options)


def compare(one: Trained, uniform: str, group_size: int = GROUP) -> list[Row]:
    """Compares ways to choose formats. Each way may use as many bytes as the format `uniform` for all layers.

    The embedding and the output layer have at least 8 bits.
    """
    exact = predictions(one.model, one.held_out)
    plain, _ = quantized(one.model, uniform, group_size)
    limit = module_bytes(plain)
    rows = [Row(f"`{uniform}`", 0, limit, *divergence(exact, predictions(plain, one.held_out)))]
    for name, text in (("by the errors of weights", None), ("with a text", one.calibration)):
        made, report = quantized(one.model, uniform, group_size, memory=limit, calibration=text)
        stated = report.fit.total_bytes
        rows.append(Row(name, stated, module_bytes(made), *divergence(exact, predictions(made, one.held_out))))
    return rows


def compare_encoder() -> list[list[Row]]:
    """Compares choices for the demo's model, by 1 minus the mean cosine of sentence embeddings."""
    from lab.whole_models.sentences import batches, demo_encoder, embed, sentences

    model, tokenizer = demo_encoder()
    held = batches(tokenizer, sentences(256, calibrate=False))
    exact, tables = embed(model, held), []
    for uniform in UNIFORM:
        plain, _ = quantized(model, uniform, GROUP)
        made, report = quantized(model, uniform, GROUP, memory=module_bytes(plain))
        tables.append([
            Row(name, stated, module_bytes(each), float(1 - (exact * embed(each, held)).sum(1).mean()))
            for name, stated, each in ((f"`{uniform}`", 0, plain),
                                       ("by the errors of weights", report.fit.total_bytes, made))
        ])  # fmt: skip
    return tables


def vocabulary(one: Trained) -> list[str]:
    """Returns a table of the divergence for different formats of the embedding and of the output layer."""
    exact = predictions(one.model, one.held_out)
    lines = [
        "| other layers | floats, mean | 8 bits, mean | 4 bits, mean | floats, largest | 8 bits, largest "
        "| 4 bits, largest |",
        "|---|---|---|---|---|---|---|",
    ]
    words = [
        name for name, module in one.model.named_modules() if isinstance(module, nn.Embedding) or name == "lm_head"
    ]
    for size in (0, 128, 64, 32):
        found = []
        for chosen in VOCABULARY:
            if size == 0 and chosen == "none":
                found.append((0.0, 0.0, 0.0))
                continue
            include = words if size == 0 else None
            made, _ = quantized(one.model, "uint4b8", size or GROUP, vocabulary_format=chosen, include=include)
            found.append(divergence(exact, predictions(made, one.held_out)))
        label = f"`uint4b8`, groups of {size}" if size else "floats"
        numbers = [*(f"{mean:.4f}" for mean, _, _ in found), *(f"{most:.2f}" for _, _, most in found)]
        lines.append(f"| {label} | {' | '.join(numbers)} |")
    return lines


def of_llama(tables: list[list[Row]]) -> list[str]:
    lines = [
        "| bytes of | `memory` | MB | stated / measured | mean | of one format | standard error | largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for plain, *others in tables:
        lines.append(
            f"| {plain.name} | - | {plain.held / 1e6:.3f} | | {plain.mean:.3g} | | {plain.error:.1g} "
            f"| {plain.largest:.2g} |"
        )
        for row in others:
            lines.append(
                f"| {plain.name} | {row.name} | {row.held / 1e6:.3f} | {row.stated / row.held:.4f} | {row.mean:.3g} "
                f"| {row.mean / plain.mean:.0%} | {row.error:.1g} | {row.largest:.2g} |"
            )
    return lines


def of_encoder(tables: list[list[Row]]) -> list[str]:
    lines = [
        "| bytes of | MB | stated / measured | one format | `memory` | of one format |",
        "|---|---|---|---|---|---|",
    ]
    for plain, row in tables:
        lines.append(
            f"| {plain.name} | {row.held / 1e6:.3f} | {row.stated / row.held:.4f} | {plain.mean:.6f} | {row.mean:.6f} "
            f"| {row.mean / plain.mean:.0%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the tables of {PAGE.name}")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    lines: list[str] = []
    words: list[str] = []
    for number, one in enumerate(models(options.steps)):
        if number == 0:
            words = vocabulary(one)
        lines += [f"**{one.name}.** KL divergence:", "", *of_llama([compare(one, each) for each in UNIFORM]), ""]
    lines += ["**all-MiniLM-L6-v2.** 1 - mean cosine:", "", *of_encoder(compare_encoder())]
    for name, made in (("lab.whole_models.fit, vocabulary", words), ("lab.whole_models.fit", lines)):
        print("\n".join(["", *made]))
        if options.write:
            page_section.section(PAGE, name, "\n".join(made))


if __name__ == "__main__":
    main()
