"""Measures a decoder with and without `fuse_layers` on the CPU, beside bf16 weights and Inductor.

    python benchmarks/fused_layers.py [--layers 16] [--rounds 15] [--compile] [--threads 16] [--seconds 180]

A random Llama of 1B parameters (the sizes of Llama 3.2 1B, with a vocabulary of 32000) computes three things: the next
token after 64 tokens, the same for a batch of four sequences, and a prompt of 64 tokens. In each round every model runs
once, in random order. The table has the median time of each model. It also has the median over the rounds of a ratio:
the model's time divided by the time of the packed model without fusing. A ratio below 1 means that the model is faster.

What is done is reported on stderr. `--seconds` limits the rounds: each of the three things gets a third of what is left
after the models are made, and at least one round.
"""

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# If other jobs share the cores, OpenMP threads that spin while they wait make everything ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from random_llama import random_llama, replace_linears
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, StaticCache

import torch_marlin_metal as tmm
from torch_marlin_metal.cli.bench import processor_name

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
PAST = 64
SHAPES = {"one token": (1, 1), "one token, batch 4": (4, 1), "64 tokens": (1, 64)}


def models(layers: int, is_compiled: bool) -> dict[str, Any]:
    """Returns the models to compare, by name."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, head_dim=64, vocab_size=32000, num_hidden_layers=layers)
    plain = random_llama(config, torch.bfloat16).eval()
    packed = copy.deepcopy(plain)
    replace_linears(packed, lambda linear: tmm.MarlinLinear.from_linear(linear, group_size=128))
    projections = copy.deepcopy(packed)
    tmm.fuse_projections(projections)
    fused, both = copy.deepcopy(packed), copy.deepcopy(projections)
    tmm.fuse_layers(fused)
    tmm.fuse_layers(both)
    found = {"4 bit": packed, "4 bit, fuse_layers": fused, "4 bit, fuse_projections": projections}
    found |= {"4 bit, both": both, "bf16": plain}
    if is_compiled:
        for name in ("bf16", "4 bit", "4 bit, fuse_layers"):
            found[f"{name}, Inductor"] = torch.compile(copy.deepcopy(found[name]), fullgraph=True)
    return found


def call_of(model: Any, name: str, batch: int, tokens: int) -> Callable[[], None]:
    """Returns a function that computes `tokens` tokens of each sequence once."""
    ids = torch.randint(5, 30000, (batch, PAST + tokens), generator=torch.Generator().manual_seed(1))
    if tokens > 1:
        return lambda: model(input_ids=ids[:, :tokens], use_cache=False, logits_to_keep=1)
    if name.endswith("Inductor"):
        # The cache has room for the tokens of all rounds, because a StaticCache never drops tokens.
        cache: Any = StaticCache(config=model.config, max_cache_len=2 * PAST)
        model._orig_mod(input_ids=ids[:, :PAST], past_key_values=cache)
        return lambda: model(input_ids=ids[:, PAST:], past_key_values=cache)
    past = DynamicCache(config=model.config)
    model(input_ids=ids[:, :PAST], past_key_values=past)

    def step() -> None:
        model(input_ids=ids[:, PAST:], past_key_values=past)
        past.crop(-tokens)

    return step


def report(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(calls: dict[str, Callable[[], None]], rounds: int, limit: float) -> dict[str, list[float]]:
    """Returns the seconds of each round, by name. No round but the first begins after `limit` seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        call()
        report(f"{name}: ready")
    deadline = time.perf_counter() + limit
    for turn in range(rounds):
        if turn and time.perf_counter() > deadline:
            report(f"--seconds: {turn} of {rounds} rounds")
            break
        for name in random.sample(list(calls), len(calls)):
            began = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also compile models with Inductor (minutes)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3600, help="limit of the whole measurement")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.rounds >= PAST:
        parser.error(f"--rounds: expected less than {PAST}, got {options.rounds}")
    if options.rounds < 1 or options.threads < 1:
        parser.error(f"--rounds, --threads: expected at least 1, got {options.rounds} and {options.threads}")
    torch.set_num_threads(options.threads)
    found = models(options.layers, options.compile)
    report(f"{len(found)} models made")
    table = Table("", *SHAPES)
    cells: dict[str, list[str]] = {name: [] for name in found}
    with torch.no_grad():
        for index, (shape, (batch, tokens)) in enumerate(SHAPES.items()):
            names = [name for name in found if tokens == 1 or not name.endswith("Inductor")]
            calls = {name: call_of(found[name], name, batch, tokens) for name in names}
            limit = (began + options.seconds - time.perf_counter()) / (len(SHAPES) - index)
            seconds = measure(calls, options.rounds, limit)
            for name in found:
                if name not in seconds:
                    cells[name].append("-")
                    continue
                ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["4 bit"], strict=True))
                cells[name].append(f"{1e3 * statistics.median(seconds[name]):.1f} ms, {ratio:.2f}")
                report(f"{shape}: {name}: {cells[name][-1]}")
    for name, row in cells.items():
        table.add_row(name, *row)
    Console(width=120).print(table)
    print(f"{processor_name()}, {options.threads} threads, {options.layers} layers, at most {options.rounds} rounds")


if __name__ == "__main__":
    main()
