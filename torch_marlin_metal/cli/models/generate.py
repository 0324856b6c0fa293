"""`torch-marlin-metal generate`: a model answers a prompt as a stream, and its speed is reported."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from torch_marlin_metal.cli.arguments import Device, device_of
from torch_marlin_metal.cli.models import opened
from torch_marlin_metal.cli.output import DONE, Json, show, stream
from torch_marlin_metal.convert import CheckpointError
from torch_marlin_metal.fuse.caches import cache_name
from torch_marlin_metal.sizes import human_size


def generate(
    model: opened.Model,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue, or the first message of --chat.")] = None,
    chat: Annotated[bool, typer.Option(help="Answer by the chat template; read further messages from stdin.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the choice, with --temperature.")] = 0,
    device: Device = None,
    dtype: opened.ModelDtype = None,
    weight_format: opened.Quantize = None,
    fuse: opened.Fuse = True,
    tokenizer: opened.TokenizerPath = None,
    as_json: Json = False,
) -> int:
    """Continues a prompt, or chats.

    The text is printed while the model generates it. stdout has only the text; the last lines on stderr describe the
    loaded model and its speed. With --json, the text is printed at the end, in one object. With --chat, each line of
    stdin is a further message, until Ctrl-D.
    """
    if prompt is None and not chat:
        raise ValueError("generate: expected a prompt, or --chat")
    place = device_of(device)
    words = opened.open_tokenizer(model, tokenizer)
    if chat and not words.chat_template:
        raise CheckpointError(f"{model}: its tokenizer has no chat template; without --chat, a prompt is continued")
    loaded = opened.Opened.of(model, place, dtype, weight_format, fuse)
    torch.manual_seed(seed)
    sampling = {"do_sample": temperature > 0, "temperature": temperature or None}
    if not temperature:
        sampling |= {"top_p": None, "top_k": None}
    talk = _Talk(loaded, words, {"max_new_tokens": tokens, **sampling}, None if as_json else stream)
    answers = [talk.answer(message, chat) for message in _messages(prompt, chat)]
    value = {**loaded.described(), "answers": answers}
    if as_json:
        show(value, "", as_json)
    else:
        print("\n".join([*map(_numbers, answers), opened.in_words(value)]), file=sys.stderr)
    return DONE


def _messages(prompt: str | None, chat: bool) -> Iterator[str]:
    if prompt is not None:
        yield prompt
    while chat:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _numbers(answer: dict[str, Any]) -> str:
    decode = answer["decode_tokens_per_second"]
    return (
        f"prompt: {answer['prompt_tokens']} tokens, {opened.rate(answer['prompt_tokens_per_second'])}; first token "
        f"after {answer['first_token_seconds']:.3g} s; generated: {answer['new_tokens']} tokens"
        f"{'' if decode is None else f', {opened.rate(decode)}'}; peak memory "
        f"{human_size(answer['peak_memory_bytes'])}"
    )


@dataclass
class _Talk:
    """A model and the messages so far. `write`, if not None, receives the text while the model generates it.

    An answer reuses the cache of the previous one if its prompt starts with the same tokens.
    """

    loaded: opened.Opened
    words: Any
    settings: dict[str, Any]
    write: Callable[[str], None] | None
    said: list[dict[str, str]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    cache: Any = None

    def answer(self, message: str, chat: bool) -> dict[str, Any]:
        """Generates the answer to a message, or the continuation of a prompt, and returns it with its timing."""
        if chat:
            self.said.append({"role": "user", "content": message})
            ids = self.words.apply_chat_template(self.said, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = self.words(message)["input_ids"]
        if not ids:
            raise ValueError("generate: the prompt has no token")
        inputs = torch.tensor([ids], device=self.loaded.device)
        self.loaded.check_tokens(inputs)
        kept = len(self.seen) if ids[:-1][: len(self.seen)] == self.seen else 0
        if not kept:
            self.cache = None
        name = cache_name(self.loaded.model)
        timed = _Timed(self.words, self.write, self.loaded.device)
        begin = time.perf_counter()
        with opened.quiet(), opened.memory_errors("generate", f"the prompt has {len(ids)} tokens"):
            made = self.loaded.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                streamer=timed,
                return_dict_in_generate=True,
                pad_token_id=self.words.pad_token_id if self.words.eos_token_id is None else self.words.eos_token_id,
                **{name: self.cache},
                **self.settings,
            )
        all_ids = made.sequences[0].tolist()
        self.cache, self.seen = getattr(made, name), all_ids[:-1]  # the cache has no entry for the last token
        text = self.words.decode(all_ids[len(ids) :], skip_special_tokens=True)
        self.said.append({"role": "assistant", "content": text})
        first, new, last = timed.times[0] - begin, len(timed.times), timed.times[-1] - timed.times[0]
        return {
            "prompt": message,
            "text": text,
            "prompt_tokens": len(ids),
            "cached_tokens": kept,
            "new_tokens": new,
            "first_token_seconds": first,
            "prompt_tokens_per_second": (len(ids) - kept) / first,
            "decode_tokens_per_second": (new - 1) / last if new > 1 else None,
            "peak_memory_bytes": max(timed.memory, opened.peak_memory(self.loaded.device)),
        }


class _Timed:
    """A streamer for `generate` that records the time of each token. transformers' streamer writes the text."""

    def __init__(self, words: Any, write: Callable[[str], None] | None, device: str) -> None:
        from transformers import TextStreamer

        self.times: list[float] = []
        self.memory = 0
        self._device, self._is_prompt = device, True
        self._inner = None if write is None else TextStreamer(words, skip_prompt=True, skip_special_tokens=True)
        if self._inner is not None and write is not None:
            self._inner.on_finalized_text = lambda text, stream_end=False: write(text + "\n" * stream_end)

    def put(self, value: torch.Tensor) -> None:
        """Receives the prompt's tokens, and then each new token after the device has computed it."""
        if not self._is_prompt:
            self.times.append(time.perf_counter())
            if self._device == "mps":
                self.memory = max(self.memory, opened.peak_memory("mps"))
        self._is_prompt = False
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        if self._inner is not None:
            self._inner.end()
