"""Generates text with a 4-bit model whose layers are divided over several processes or machines.

    torchrun --nproc-per-node 2 examples/pipeline.py CHECKPOINT "The largest planet is" [--device mps]

Each process reads and stores only its own layers. It receives hidden states from the previous process and sends its
output to the next process. PyTorch's gloo does not support mps tensors, so hidden states pass through the CPU: `[1, H]`
for each new token. The processes work on a token one after the other. So a larger model fits, but it is not faster.

The model must have the modules of Llama, Mistral or Qwen: `model.embed_tokens`, `model.layers`, `model.norm` and
`lm_head`.
"""

import argparse
import re
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, PreTrainedModel

import torch_marlin_metal as tmm
from torch_marlin_metal.parallel import check_checkpoint, naming_failed_ranks

LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


class Receive(nn.Module):
    """Replaces the embedding: receives the hidden states `[B, S, H]` of the previous process."""

    def __init__(self, source: int, width: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.source, self.width, self.dtype, self.device = source, width, dtype, device

    def forward(self, ids: Tensor) -> Tensor:
        """Waits for the hidden states of the tokens `[B, S]`."""
        hidden = torch.empty(*ids.shape, self.width, dtype=self.dtype)
        with naming_failed_ranks("pipeline"):
            dist.recv(hidden, self.source)
        return hidden.to(self.device)


class Send(nn.Module):
    """Replaces the last norm: sends the hidden states to the next process."""

    def __init__(self, target: int) -> None:
        super().__init__()
        self.target = target

    def forward(self, hidden: Tensor) -> Tensor:
        """Sends and returns the hidden states. The return value is not used."""
        with naming_failed_ranks("pipeline"):
            dist.send(hidden.cpu().contiguous(), self.target)
        return hidden


class NoLogits(nn.Module):
    """Replaces the output layer in every process except the last. `TokenOfLast` replaces its logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns zeros with the shape of the logits. All are views of one element, so they use no memory."""
        return hidden.new_zeros(1).expand(*hidden.shape[:-1], self.vocabulary)


class TokenOfLast(LogitsProcessor):
    """Sends the last process's choice of the next token to all processes, so that all stop at the same token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores that permit only the token that is most probable in the last process."""
        token = scores.argmax(-1).cpu()
        with naming_failed_ranks("pipeline"):
            dist.broadcast(token, dist.get_world_size() - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, token.to(scores.device)[:, None], 0.0)


def own_name(name: str, own: range, first: bool, last: bool, tied: bool) -> str | None:
    """Returns the name of a checkpoint's tensor in this process's model, or None if the model does not need it."""
    if match := LAYER.fullmatch(name):
        return f"model.layers.{int(match[1]) - own.start}.{match[2]}" if int(match[1]) in own else None
    if name.startswith("model.embed_tokens"):
        return name if first else name.replace("model.embed_tokens", "lm_head") if last and tied else None
    return name if last else None


def load_stage(path: str, device: str) -> PreTrainedModel:
    """Loads this process's layers of a checkpoint into a model. All processes must call `generate` together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = AutoConfig.from_pretrained(path)
    count, tied = config.num_hidden_layers, config.tie_word_embeddings
    if count < world:
        raise ValueError(f"load_stage: path: expected a model of at least {world} layers, got {count}")
    check_checkpoint("load_stage", tmm.convert.open_reader(path), dist.group.WORLD)
    own = range(rank * count // world, (rank + 1) * count // world)
    config.num_hidden_layers = len(own)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[own.start : own.stop]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    first, last = rank == 0, rank == world - 1
    if not first:
        model.model.embed_tokens = Receive(rank - 1, config.hidden_size, model.dtype, device)
    if not last:
        model.model.norm, model.lm_head = Send(rank + 1), NoLogits(config.vocab_size)
    rename = partial(own_name, own=own, first=first, last=last, tied=tied)
    tmm.load_quantized(model, path, rename=rename, device=device, progress=False)
    return model.eval()


def generate(model: PreTrainedModel, ids: Tensor, tokens: int) -> Tensor:
    """Returns the ids `[B, S]` with up to `tokens` new ids, which are the same in every process."""
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, logits_processor=[TokenOfLast()])


def main() -> None:
    """Runs one process of `torchrun`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a directory with a 4-bit checkpoint")
    parser.add_argument("prompt")
    parser.add_argument("--device", default="cpu", choices=("cpu", "mps"))
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=120, help="seconds to wait for another process")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model = load_stage(options.checkpoint, options.device)
    ids = tokenizer(options.prompt, return_tensors="pt").input_ids.to(options.device)
    text = tokenizer.decode(generate(model, ids, options.tokens)[0])
    if dist.get_rank() == 0:
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
