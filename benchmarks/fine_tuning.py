"""Measures peak memory and time of a training step with LoRA adapters, for packed, bf16 and bitsandbytes weights.

The peak is the sum of four parts. The first is the base weights. The second is the adapters with their gradients and
optimizer states. The third is kept from the forward to the backward pass: the checkpoints, the logits and the loss. The
fourth is the rest: one layer's activations and their gradients, the gradient of the logits, and the decoded weight.

The model is a random Llama. Each kind runs in a process of its own, so that its peak memory is its own. The processes
take steps in turn, so that a disturbance of the machine affects all of them alike. bitsandbytes takes part if it is
installed.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

from peak_memory import reset_peak, resident

from torch_marlin_metal.cli.bench import processor_name

# If other jobs share the cores, OpenMP threads that spin while they wait make everything ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

PACKED = ("nf4", "uint4b8")  # formats of this package, in groups of 64
BASES = (*PACKED, "bf16", "bitsandbytes")
SIZES = {  # the sizes of Llama 3.2 1B
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024},
}


def quantize_layers(model: Any, base: str) -> None:
    """Quantizes every Linear but the head, one after the other."""
    import torch
    from torch import nn

    import torch_marlin_metal as tmm

    for name, linear in list(model.named_modules()):
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        if base in PACKED:
            layer: nn.Module = tmm.MarlinLinear.from_linear(linear, base, 64)
        else:
            import bitsandbytes as bnb

            layer = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            layer = layer.to("cpu")
        model.set_submodule(name, layer)


def make_model(base: str, size: str) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import torch_marlin_metal.integrations.peft  # noqa: F401  lets peft put adapters on packed layers

    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES[size],
        num_attention_heads=SIZES[size]["hidden_size"] // 64,
        num_key_value_heads=max(1, SIZES[size]["hidden_size"] // 256),
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if base != "bf16":
        quantize_layers(model, base)
    model.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(target_modules=targets, r=16), autocast_adapter_dtype=False).train()


def work(pipe: Connection, base: str, size: str, tokens: int, threads: int) -> None:
    """Trains one step for each message. Answers with the step's seconds and the growth of peak memory.

    The growth counts from before the model was made. CPU seconds depend less on other jobs than wall time.
    """
    import gc

    import torch

    torch.set_num_threads(threads)
    make_model(base, "tiny")  # imports what the measured model needs
    before = resident("VmRSS")
    model = make_model(base, size)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each base, after one that is not timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    bases = [b for b in options.bases if b != "bitsandbytes" or importlib.util.find_spec("bitsandbytes")]
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    results: dict[str, dict[str, Any]] = {}
    for base in bases:
        pipes[base], theirs = context.Pipe()
        arguments = (theirs, base, options.size, options.tokens, options.threads)
        context.Process(target=work, args=arguments, daemon=True).start()
        results[base] = {**pipes[base].recv(), "seconds": [], "cpu": []}
    for turn in range(options.rounds + 1):
        for base in bases:
            pipes[base].send(True)
            answer = pipes[base].recv()
            if turn:
                results[base].update(peak=answer["peak"], kept=answer["kept"])
                for key in ("seconds", "cpu"):
                    results[base][key].append(answer[key])
    parts = ("weights", "adapters and states", "kept for backward", "rest at the peak", "peak")
    print(f"| base | {' MB | '.join(parts)} MB | seconds, median of {options.rounds} | range | CPU seconds |")
    print("|---" * (len(parts) + 4) + "|")
    for base, result in results.items():
        held = (result["weights"], result["adapters"], result["kept"])
        memory = (*held, result["peak"] - sum(held), result["peak"])
        seconds = result["seconds"]
        print(
            f"| {base} | {' | '.join(f'{part / 1e6:.0f}' for part in memory)} | {statistics.median(seconds):.2f} | "
            f"{min(seconds):.2f} to {max(seconds):.2f} | {statistics.median(result['cpu']):.2f} |"
        )
    missing = set(options.bases) - set(bases)
    if missing:
        print(f"not installed: {', '.join(missing)}")
    print(f"{processor_name()}; {json.dumps(vars(options))}")
    for pipe in pipes.values():
        pipe.send(False)


if __name__ == "__main__":
    main()
