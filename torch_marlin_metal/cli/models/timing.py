"""`torch-marlin-metal bench MODEL`: tokens per second of a model, as llama-bench defines them (pp512, tg128)."""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.cli.models import opened
from torch_marlin_metal.cli.output import progress_bar
from torch_marlin_metal.gpu.planning import plan
from torch_marlin_metal.gpu.tuning.chains import synchronize
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.experts import MarlinExperts
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.printing import table
from torch_marlin_metal.sizes import human_size

PROMPT, NEW, BATCH, ROUNDS = 512, 128, 1, 5


def measure_model(
    loaded: opened.Opened, prompts: list[int], new: list[int], batches: list[int], rounds: int, as_json: bool
) -> list[dict[str, Any]]:
    """Times a model's prompts and single tokens, each from an empty cache, on random tokens without sampling.

    Each length in `prompts` is one call. Each number in `new` is a count of calls with one token, and the host waits
    for each call. After one untimed run, a test runs `rounds` times.
    """
    model = opened.cached(loaded.model)
    one_by_one = partial(_one_by_one, model)
    tests: list[tuple[str, int, int, Callable[[Tensor], None]]] = []
    for batch in batches:
        tests += [(f"pp{count}", count, batch, model) for count in prompts]
        tests += [(f"tg{count}", count, batch, one_by_one) for count in new]
    results = []
    with progress_bar(len(tests) * (rounds + 1), "run", as_json) as bar, torch.inference_mode(), opened.quiet():
        for name, count, batch, run in tests:
            generator = torch.Generator("cpu").manual_seed(0)
            ids = torch.randint(loaded.vocabulary, (batch, count), generator=generator, device="cpu").to(loaded.device)
            rates = []
            for _ in range(rounds + 1):
                synchronize(ids.device)
                begin = time.perf_counter()
                with opened.memory_errors("bench", f"{name} has {batch} x {count} tokens"):
                    run(ids)
                    synchronize(ids.device)
                rates.append(batch * count / (time.perf_counter() - begin))
                bar.update()
            del rates[0]
            steps, rows = (1, batch * count) if run is model else (count, batch)
            seconds = _predicted(loaded, rows, batch)
            results.append(
                {
                    "test": name,
                    "batch": batch,
                    "tokens_per_second": statistics.mean(rates),
                    "spread": statistics.stdev(rates),
                    "rounds": rates,
                    "predicted_tokens_per_second": batch * count / (steps * seconds) if seconds else None,
                    "peak_memory_bytes": opened.peak_memory(loaded.device),
                }
            )
    return results


def _one_by_one(model: Callable[..., Any], ids: Tensor) -> None:
    cache = None
    for column in torch.split(ids, 1, 1):
        cache = model(column, cache)
        synchronize(ids.device)


def _predicted(loaded: opened.Opened, rows: int, sequences: int) -> float | None:
    """Returns the planner's seconds for all packed products of `rows` rows, or None if a product has no prediction.

    The output layer computes only the last token of each sequence, if the model supports this.
    """
    modules = list(loaded.model.modules())
    if loaded.device != "mps" or any(isinstance(module, MarlinExperts) for module in modules):
        return None
    layers = [one for one in modules if isinstance(one, MarlinLinear) and not isinstance(one, MarlinEmbedding)]
    head = loaded.model.get_output_embeddings() if opened.last_logits(loaded.model) else None
    kinds = Counter(
        (
            *(sequences if one is head else rows, one.out_features, one.in_features),
            *(one.weight_format, one.group_size, one.dtype),
        )
        for one in layers
    )
    return sum(
        count * plan(M, N, K, weight_format=name, group_size=group_size, dtype=dtype).chosen.seconds
        for (M, N, K, name, group_size, dtype), count in kinds.items()
    )


def model_table(machine: str, described: dict[str, Any], results: list[dict[str, Any]]) -> Any:
    has_plans = any(row["predicted_tokens_per_second"] for row in results)
    keys = ("tokens_per_second", "spread", *(["predicted_tokens_per_second"] if has_plans else []))
    numbers = ("batch", "peak memory", "tokens/s", "+-", *(["predicted"] if has_plans else []))
    rows = [
        (row["test"], str(row["batch"]), human_size(row["peak_memory_bytes"]), *(f"{row[key]:.2f}" for key in keys))
        for row in results
    ]
    caption = opened.in_words(described) + "\npredicted: by the planner, for the packed products alone" * has_plans
    return table(f"{described['model']} on {machine}", "test", *numbers, rows=rows, right=numbers, caption=caption)
