"""A small random Llama with a tokenizer of words: "w7" is token 7, and any other word is token 0."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 96
CHAT = "{% for one in messages %}{{ one.content }}{% if one.role == 'user' %} . {% else %} {% endif %}{% endfor %}"


def save_small_llama(folder: Path, tokenizer: bool = True, template: bool = True, seed: int = 0, **config) -> Path:
    """Saves the model with its tokenizer, whose chat template ends a user's message with the unknown word."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = LlamaConfig(
        **{"vocab_size": WORDS, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, **sizes, **config}
    )
    with torch.no_grad():
        model = LlamaForCausalLM(settings)
        for parameter in model.parameters():  # larger than the class makes them, so that the next token is clear
            parameter.mul_(4 if parameter.dim() > 1 else 1)
        model.save_pretrained(folder)
    if tokenizer:
        inner = Tokenizer(models.WordLevel({f"w{i}" if i else "?": i for i in range(WORDS)}, unk_token="?"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words = PreTrainedTokenizerFast(tokenizer_object=inner)
        words.chat_template = CHAT if template else None
        words.save_pretrained(folder)
    return folder
