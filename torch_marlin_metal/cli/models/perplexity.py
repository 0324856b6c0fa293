"""`torch-marlin-metal perplexity`: measures how well a model predicts a text, and compares two models' predictions."""

import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from torch_marlin_metal.cli.arguments import Device, device_of
from torch_marlin_metal.cli.models import opened
from torch_marlin_metal.cli.output import DONE, Json, progress_bar, show
from torch_marlin_metal.convert import CheckpointError
from torch_marlin_metal.printing import table


def perplexity(
    model: opened.Model,
    text: Annotated[Path, typer.Argument(help="A file of text.", show_default=False)],
    against: Annotated[Path | None, typer.Option(help="Another model: compare each token's probabilities.")] = None,
    context: Annotated[int, typer.Option(min=4, help="Tokens of a piece of the text; its second half counts.")] = 512,
    pieces: Annotated[int | None, typer.Option(min=1, help="Take only so many pieces.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pieces that are computed at once.")] = 2,
    device: Device = None,
    dtype: opened.ModelDtype = None,
    weight_format: opened.Quantize = None,
    fuse: opened.Fuse = True,
    tokenizer: opened.TokenizerPath = None,
    as_json: Json = False,
) -> int:
    """Measures how well a model predicts a text.

    The perplexity is that of llama-perplexity. --against adds the KL divergence from another model, which must have the
    same vocabulary. --weight-format quantizes only the first model. Both models are in memory at the same time.
    """
    place = device_of(device)
    if against is not None:
        opened.locate(against)
    parts = opened.read_pieces("perplexity", text, opened.open_tokenizer(model, tokenizer), context, pieces)
    models = [opened.Opened.of(model, place, dtype, weight_format, fuse)]
    if against is not None:
        models.append(opened.Opened.of(against, place, dtype, None, fuse))
        if models[0].vocabulary != models[1].vocabulary:
            sizes = f"{models[0].vocabulary} tokens as {model}, got {models[1].vocabulary}"
            raise CheckpointError(f"{against}: expected a vocabulary of {sizes}")
    models[0].check_tokens(parts)
    scores = _measure(models, parts, batch, as_json)
    value = models[0].described() | {"text": str(text), "pieces": len(parts), "context": context} | _summary(scores)
    value |= {"against": None if against is None else str(against)}
    show(value, _table(value), as_json)
    return DONE


def _measure(models: list[opened.Opened], parts: Tensor, batch: int, as_json: bool) -> dict[str, Tensor]:
    """Returns, by name of a measure, one value for each token of the second halves, fp64 on the CPU."""
    found: dict[str, list[Tensor]] = {}
    first = parts.shape[1] // 2
    with progress_bar(len(parts), "piece", as_json) as bar, torch.inference_mode(), opened.quiet():
        for ids in torch.split(parts.to(models[0].device), batch):
            with opened.memory_errors("perplexity", f"--batch {len(ids)} pieces of {parts.shape[1]} tokens"):
                logs = [_logs(one.model, ids, first) for one in models]
                targets = ids[:, first + 1 :, None]
                values = {"loss": -logs[0].gather(2, targets)}
                if len(logs) == 2:
                    values["other_loss"] = -logs[1].gather(2, targets)
                    values["divergence"] = (logs[1].exp() * (logs[1] - logs[0])).sum(2)
                    values["same_first"] = logs[0].argmax(2) == logs[1].argmax(2)
                for name, one in values.items():
                    found.setdefault(name, []).append(one.flatten().cpu().double())
            bar.update(len(ids))
    return {name: torch.cat(pieces) for name, pieces in found.items()}


def _logs(model: Any, ids: Tensor, first: int) -> Tensor:
    """Returns the log probabilities of the tokens after `first`, fp32 `[B, S - first - 1, vocabulary]`."""
    kept = ids.shape[1] - first
    logits: Tensor = model(input_ids=ids, use_cache=False, **opened.last_logits(model, kept)).logits
    return logits[:, -kept:-1].float().log_softmax(2)


def _summary(scores: dict[str, Tensor]) -> dict[str, Any]:
    """Returns the mean of each measure over all tokens, and its standard error."""
    value: dict[str, Any] = {"tokens": len(scores["loss"])}
    for other in ("", "other_") if "divergence" in scores else ("",):
        loss, error = _mean(scores[f"{other}loss"])
        value |= {f"{other}perplexity": math.exp(loss), f"{other}perplexity_error": error * math.exp(loss)}
    if "divergence" in scores:
        value["divergence"], value["divergence_error"] = _mean(scores["divergence"])
        value["divergence_99"] = float(scores["divergence"].quantile(0.99))
        value["same_first"], value["same_first_error"] = _mean(scores["same_first"])
    return value


def _mean(values: Tensor) -> tuple[float, float]:
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return values.mean().item(), error


def _table(value: dict[str, Any]) -> Any:
    rows = [("perplexity", f"{value['perplexity']:.4f}", f"{value['perplexity_error']:.4f}")]
    if value["against"] is not None:
        other, other_error = f"{value['other_perplexity']:.4f}", f"{value['other_perplexity_error']:.4f}"
        rows += [
            (f"perplexity of {value['against']}", other, other_error),
            ("KL divergence, mean", f"{value['divergence']:.6f}", f"{value['divergence_error']:.6f}"),
            ("KL divergence, 99 % of tokens are below", f"{value['divergence_99']:.6f}", ""),
            ("same likeliest token", f"{value['same_first']:.2%}", f"{value['same_first_error']:.2%}"),
        ]
    caption = f"{value['tokens']} tokens of {value['pieces']} pieces; +-: standard error\n{opened.in_words(value)}"
    title = f"{value['model']} on {value['text']}"
    return table(title, "measure", "value", "+-", rows=rows, right=("value", "+-"), caption=caption)
