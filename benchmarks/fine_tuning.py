"""Measures peak memory and time of a training step with LoRA adapters, for packed, bf16 and bitsandbytes weights.

    python benchmarks/fine_tuning.py [--threads 16] [--rounds 5] [--seconds 180] [--layers 4] [--bases nf4 uint4b8 bf16]

The model is a random Llama. Each kind runs in a process of its own, so that its peak memory is its own. The processes
take steps in turn, so that a disturbance of the machine affects all of them alike; a ratio of two kinds is the median
of the ratios of the rounds. bitsandbytes takes part if it is installed. Each step is reported on stderr when it ends.
After `--seconds`, no further round begins, and a round that is under way ends early: the tables then hold the rounds
that were complete.

The peak is the sum of four parts: the base weights; the adapters with their gradients and optimizer states; what is
kept from the forward to the backward pass (the checkpoints, the logits and the loss); and the rest at the peak, which
holds one layer's activations and their gradients, the gradient of the logits, and the decoded weight.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from peak_memory import reset_peak, resident

from torch_marlin_metal.cli.bench import processor_name

# If other jobs share the cores, OpenMP threads that spin while they wait make everything ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Formats of this package, in groups of 64. "nf4-rounded" trains with prepare_for_training(round_weights=True).
PACKED = {"nf4": "nf4", "nf4-rounded": "nf4", "uint4b8": "uint4b8"}
BASES = (*PACKED, "bf16", "bitsandbytes")
RIVALS = ("bf16", "bitsandbytes")
SIZES = {  # the sizes of Llama 3.2 1B
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024},
}
Results = dict[str, dict[str, Any]]


def quantized(linear: Any, base: str) -> Any:
    import torch

    import torch_marlin_metal as tmm

    if base in PACKED:
        return tmm.MarlinLinear.from_linear(linear, PACKED[base], 64)
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, False, compute_dtype=torch.bfloat16, quant_type="nf4"
    )
    layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


def make_model(base: str, size: str, layers: int | None) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from random_llama import random_llama, replace_linears
    from transformers import LlamaConfig

    from torch_marlin_metal.integrations.peft import prepare_for_training  # the import lets peft find packed layers

    torch.manual_seed(0)
    config = LlamaConfig(
        **(SIZES[size] | ({} if layers is None else {"num_hidden_layers": layers})),
        num_attention_heads=SIZES[size]["hidden_size"] // 64,
        num_key_value_heads=max(1, SIZES[size]["hidden_size"] // 256),
        tie_word_embeddings=True,
    )
    model = random_llama(config, torch.bfloat16)
    if base != "bf16":
        replace_linears(model, lambda linear: quantized(linear, base))
    if base == "nf4-rounded":
        prepare_for_training(model, round_weights=True)
    model.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(target_modules=targets, r=16), autocast_adapter_dtype=False).train()


def work(pipe: Connection, base: str, size: str, layers: int | None, tokens: int, threads: int) -> None:
    """Trains one step for each message. Answers with the step's seconds and the growth of peak memory.

    The growth counts from before the model was made. CPU seconds depend less on other jobs than wall time.
    """
    import gc
    import warnings

    import torch
    import transformers

    warnings.simplefilter("ignore", FutureWarning)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads)
    make_model(base, "tiny", None)  # imports what the measured model needs
    before = resident("VmRSS")
    model = make_model(base, size, layers)
    gc.collect()
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if not t.requires_grad)
    adapters = 4 * sum(p.nbytes for p in trained)  # values, gradients and the two states of AdamW
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(0, SIZES[size]["vocab_size"], (1, tokens))
    pipe.send({"weights": weights, "adapters": adapters})
    while pipe.recv():
        reset_peak()
        start, busy = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids).loss
        kept = resident("VmRSS") - before - weights - adapters  # right from the second step on, which has all states
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        taken = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - busy}
        pipe.send({**taken, "kept": kept, "peak": resident("VmHWM") - before})


def report(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def answer_of(pipe: Connection, base: str, deadline: float) -> dict[str, Any] | None:
    """Returns what the process of `base` sends, or None if it sends nothing before the deadline."""
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return None
    try:
        answer: dict[str, Any] = pipe.recv()
    except EOFError:
        raise SystemExit(f"the process of {base} ended; its error stands above") from None
    return answer


def measure(bases: list[str], options: argparse.Namespace) -> Results:
    """Returns the memory and the seconds of each complete round of each base."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for base in bases:
        pipes[base], theirs = context.Pipe()
        arguments = (theirs, base, options.size, options.layers, options.tokens, options.threads)
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()  # so that the end of the process is seen
    try:
        return take_steps(pipes, options, time.monotonic() + options.seconds)
    finally:
        for process in processes:
            process.kill()


def take_steps(pipes: dict[str, Connection], options: argparse.Namespace, deadline: float) -> Results:
    results: Results = {}
    bases = list(pipes)
    for base in bases:
        answer = answer_of(pipes[base], base, deadline)
        if answer is None:
            raise SystemExit(f"--seconds: {base} was not ready after {options.seconds} s")
        results[base] = {**answer, "seconds": [], "cpu": []}
        report(f"{base}: ready")
    for turn in range(options.rounds + 1):
        answers: Results = {}
        for base in bases:
            pipes[base].send(True)
            answer = answer_of(pipes[base], base, deadline)
            if answer is None:
                report(f"{base}: not ended after {options.seconds} s in all")
                return results
            answers[base] = answer
            name = f"round {turn} of {options.rounds}" if turn else "first step, not counted"
            report(f"{base}: {name}: {answer['seconds']:.2f} s, CPU {answer['cpu']:.2f} s")
        if turn:
            for base, answer in answers.items():
                results[base].update(peak=answer["peak"], kept=answer["kept"])
                for key in ("seconds", "cpu"):
                    results[base][key].append(answer[key])
            report(f"rounds that are complete: {turn}\n{time_table(results)}")
    return results


def ratio(results: Results, rival: str, base: str, key: str) -> str:
    """Returns the median over the rounds of the rival's time divided by the base's; above 1, the base is faster."""
    if rival not in results or rival == base:
        return ""
    quotients = [a / b for a, b in zip(results[rival][key], results[base][key], strict=True)]
    return f"{statistics.median(quotients):.2f}"


def time_table(results: Results) -> str:
    headings = [f"{rival} / base, {unit}" for rival in RIVALS for unit in ("seconds", "CPU")]
    lines = [f"| base | seconds, median | range | CPU seconds | {' | '.join(headings)} |", "|---" * 8 + "|"]
    for base, result in results.items():
        seconds = result["seconds"]
        cells = [ratio(results, rival, base, key) for rival in RIVALS for key in ("seconds", "cpu")]
        lines.append(
            f"| {base} | {statistics.median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f} | "
            f"{statistics.median(result['cpu']):.2f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def memory_table(results: Results) -> str:
    parts = ("weights", "adapters and states", "kept for backward", "rest at the peak", "peak")
    lines = [f"| base | {' MB | '.join(parts)} MB |", "|---" * (len(parts) + 1) + "|"]
    for base, result in results.items():
        held = (result["weights"], result["adapters"], result["kept"])
        memory = (*held, result["peak"] - sum(held), result["peak"])
        lines.append(f"| {base} | {' | '.join(f'{part / 1e6:.0f}' for part in memory)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--layers", type=int, help="decoder layers, if fewer than the size has")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each base, after one that is not timed")
    parser.add_argument("--seconds", type=float, default=3600, help="limit of the whole measurement")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    options = parser.parse_args()
    for name in ("layers", "tokens", "rounds", "seconds", "threads"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name}: expected more than 0, got {value}")
    bases = [b for b in options.bases if b != "bitsandbytes" or importlib.util.find_spec("bitsandbytes")]
    results = measure(bases, options)
    rounds = min(len(result["seconds"]) for result in results.values())
    if not rounds:
        raise SystemExit(f"--seconds: no round was complete after {options.seconds} s; try --layers 1 or fewer bases")
    print(f"{memory_table(results)}\n\n{time_table(results)}")
    missing = set(options.bases) - set(bases)
    if missing:
        print(f"not installed: {', '.join(missing)}")
    print(f"{processor_name()}; complete rounds: {rounds}; {json.dumps(vars(options))}")


if __name__ == "__main__":
    main()
