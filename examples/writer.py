"""Trains a small Llama on a text, packs it in 4 bit, and lets the command `generate` continue a sentence.

The text is Python's own reference (`pydoc_data.topics`). `make demo` runs it last.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

# If other programs use the same cores, OpenMP threads that spin while they wait make everything ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

import torch_marlin_metal as tmm

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "The following statement is"
WINDOW, BATCH, RATE = 128, 16, 3e-3


def make_tokenizer(corpus: list[str], words: int = 1024) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def make_model(words: int, width: int = 192, layers: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 6, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, **sizes, **heads))


def train(model: nn.Module, ids: Tensor, progress: Callable[[int], float]) -> list[float]:
    """Trains on random windows of the text until `progress(steps)` reaches 1, and returns the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    generator, losses = torch.Generator().manual_seed(0), []
    while (done := progress(len(losses))) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (len(losses) + 1) / 20) * max(0.05, 1 - done)
        starts = torch.randint(len(ids) - WINDOW, (BATCH,), generator=generator).tolist()
        batch = torch.stack([ids[start : start + WINDOW] for start in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def share_of(seconds: float, least_seconds: float, steps: int, least_steps: int) -> float:
    """Returns the completed fraction of the training, which ends after the least time and the least number of steps."""
    return min(seconds / least_seconds, steps / least_steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45, help="of training, at least")
    parser.add_argument("--steps", type=int, default=250, help="of training, at least; fewer do not give words")
    parser.add_argument("--tokens", type=int, default=100, help="to write")
    parser.add_argument("--folder", type=Path, default=ROOT / "demo-output/writer", help="where the model is saved")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    corpus = list(topics.values())
    tokenizer = make_tokenizer(corpus)
    model = make_model(len(tokenizer))
    ids, begin = torch.tensor(tokenizer("\n".join(corpus))["input_ids"]), time.perf_counter()
    print(f"training for {options.seconds:g} s, and for at least {options.steps} steps", flush=True)
    losses = train(
        model, ids, lambda steps: share_of(time.perf_counter() - begin, options.seconds, steps, options.steps)
    )
    spent = time.perf_counter() - begin
    print(
        f"a Llama of {model.num_parameters()} parameters, {len(losses)} steps in {spent:.0f} s: "
        f"loss {losses[0]:.2f}, {losses[-1]:.2f}"
    )
    print(tmm.quantize_model(model.eval(), "uint4", 64, "mse", progress=False).summary())
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    command = ["generate", str(options.folder), PROMPT, "--tokens", str(options.tokens), "--temperature", "0.6"]
    print(f"torch-marlin-metal {' '.join(command[:2])} '{PROMPT}' ...\n\n{PROMPT}", end="", flush=True)
    subprocess.run([sys.executable, "-m", "torch_marlin_metal", *command], check=True)


if __name__ == "__main__":
    main()
