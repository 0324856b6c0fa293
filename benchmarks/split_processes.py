"""Times a split Llama: N processes of one thread each against one process of N threads.

    python benchmarks/split_processes.py [--processes 2] [--layers 16] [--rounds 7] [--dtype bfloat16]

The model has the shapes of Llama 3.2 1B, random weights in `uint4b8` with groups of 64, and a small vocabulary, because
the output layer is not split. All processes start before the first measurement. The single process and the group of N
processes take turns, so that a change of the machine's speed affects both alike. A turn is a prefill and a decode of 16
tokens. The report has medians and the memory that loading the weights takes. Each layer that is split by rows ends with
a sum over processes; the report also has the share of a process's time that these sums take.
"""

import argparse
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from peak_memory import reset_peak, resident
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from torch_marlin_metal import MarlinLinear, convert, load_quantized, quantize_weight
from torch_marlin_metal.parallel import MarlinColwiseParallel, MarlinRowwiseParallel, SplitPlan, styles

TOKENS = 16
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def save(folder: Path, layers: int) -> None:
    """Saves a model of random weights; all layers have the values of the first."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        num_hidden_layers=layers,
        vocab_size=4096,
        dtype="float32",
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    made, packed, others = {}, [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers." in name:
            kind = name.split(".", 3)[3]
            if kind not in made:
                made[kind] = quantize_weight(torch.randn(module.weight.shape) * 0.02, "uint4b8", 64)
            made[kind].name = name
            packed.append(type(made[kind])(**vars(made[kind])))
    for name, parameter in model.named_parameters():
        if "_proj" not in name:
            values = torch.ones if "norm" in name else torch.randn
            others.append((name, values(parameter.shape) * (1 if "norm" in name else 0.02)))
    convert.export_checkpoint(packed, folder, "gptq", other_tensors=others, config=config.to_dict())


def serve(rank: int, count: int, folder: Path, pipe: Connection, dtype: torch.dtype) -> None:
    """Loads the model, which `count` processes share, and runs it with each prompt length that the pipe sends."""
    torch.set_num_threads(1 if count > 1 else abs(count))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    split = None
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
        plan = {f"model.layers.*.{name}": MarlinColwiseParallel() for name in COLUMNS}
        plan |= {f"model.layers.*.{name}": MarlinRowwiseParallel() for name in ROWS}
        split = SplitPlan(init_device_mesh("cpu", (count,)), plan)
    reset_peak()
    before = resident("VmRSS")
    load_quantized(model.eval(), folder, split=split, progress=False)
    peak = resident("VmHWM") - before
    waited = count_waiting()
    packed = sum(b.nbytes for m in model.modules() if isinstance(m, MarlinLinear) for b in m.buffers())
    floats = sum(parameter.nbytes for parameter in model.parameters())
    pipe.send((packed, packed + floats, peak))
    while (length := pipe.recv()) is not None:
        ids = torch.arange(length)[None] % config.vocab_size
        with torch.inference_mode():
            waited[0], start = 0.0, time.perf_counter()
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
            prefill, first = time.perf_counter() - start, waited[0]
            waited[0], start = 0.0, time.perf_counter()
            for _ in range(TOKENS):
                model(ids[:, :1], past_key_values=cache, use_cache=True)
            decode = (time.perf_counter() - start) / TOKENS
        pipe.send((prefill, decode, first / prefill, waited[0] / TOKENS / decode))


def count_waiting() -> list[float]:
    """Returns a list with one number. From now on, every sum over processes adds the seconds that it took to it."""
    waited, original = [0.0], styles._sum

    def timed(*arguments: object) -> torch.Tensor:
        start = time.perf_counter()
        result = original(*arguments)
        waited[0] += time.perf_counter() - start
        return result

    styles._sum = timed
    return waited


def main() -> None:
    """Runs the comparison and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    count, dtype = options.processes, getattr(torch, options.dtype)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    context = processes.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save(folder, options.layers)
        pipes, started = [], []
        for rank, kind in [(0, -count), *((rank, count) for rank in range(count))]:
            own, other = context.Pipe()
            process = context.Process(target=serve, args=(rank, kind, folder, other, dtype), daemon=True)
            process.start()
            pipes.append(own)
            started.append(process)
        sizes = [pipe.recv() for pipe in pipes]
        results: list[list[tuple[float, ...]]] = [[], []]
        for _ in range(options.rounds + 1):  # the first round warms up
            for side, group in ((0, pipes[:1]), (1, pipes[1:])):
                for pipe in group:
                    pipe.send(options.prompt)
                times = [pipe.recv() for pipe in group]
                results[side].append(times[0])
        for pipe in pipes:
            pipe.send(None)
    one, many = ([statistics.median(values) for values in zip(*side[1:], strict=True)] for side in results)
    table = Table(title=f"Llama 1B, {options.layers} of 16 layers, {options.dtype}, medians of {options.rounds}")
    for heading in ("", f"1 process x {count} threads", f"{count} processes x 1 thread", "ratio", "in sums"):
        table.add_column(heading)
    for row, column in ((f"prefill of {options.prompt} tokens", 0), ("decode of a token", 1)):
        times = [f"{side[column] * 1e3:.1f} ms" for side in (one, many)]
        table.add_row(row, *times, f"{one[column] / many[column]:.2f}", f"{many[column + 2]:.0%}")
    rows = ("packed weights of a process", "all weights of a process", "peak of loading them")
    for row, values in zip(rows, zip(*sizes[:2], strict=True), strict=True):
        table.add_row(row, *(f"{value / 2**20:.0f} MiB" for value in values), "", "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
