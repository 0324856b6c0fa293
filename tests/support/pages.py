"""Reads the code blocks of the pages, and writes the model that the README's example loads."""

import re
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
README_MODEL = "Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def readme_program(folder: Path) -> str:
    """Returns the README's snippets as one program, which loads a model from `folder`.

    The model is a GPTQ model of the test data, with a tokenizer of single bytes.
    """
    shutil.copytree(ROOT / "tests/data/models/gptq-sym-g32-actorder", folder)
    words = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token=chr(0)))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return "\n".join(blocks(ROOT / "README.md", "python")).replace(README_MODEL, str(folder))
