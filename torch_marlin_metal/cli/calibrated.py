"""Runs a text through a model: in packages that quantize with it (GPTQModel, AutoRound), or to spend a memory limit."""

import importlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.convert import CheckpointError
from torch_marlin_metal.formats import DEFAULT_GROUP_SIZE, GROUP_SIZES
from torch_marlin_metal.formats import weight_format as find_format
from torch_marlin_metal.models.quantize import quantize_model
from torch_marlin_metal.models.report import Report

PACKAGES = {"gptq": "gptqmodel", "awq": "gptqmodel", "autoround": "auto_round"}
METHODS = tuple(PACKAGES)
INSTALL = {
    "gptqmodel": "pip install gptqmodel",
    "auto_round": 'pip install ".[quantize]" in a checkout of this package',
}
FORMATS = ("uint4b8", "uint4", "uint8b128", "uint8")  # those that the methods make; awq makes only uint4


@dataclass(frozen=True)
class Text:
    """A text file, cut into `samples` pieces of `length` tokens."""

    path: Path | None
    samples: int
    length: int

    def pieces(self, source: Path, method: str) -> list[Tensor]:
        """Returns the token ids of each text, int64 `[1, length]`.

        Raises:
            ValueError: there is no file, or its text is too short.
        """
        from transformers import AutoTokenizer

        if self.path is None:
            raise ValueError(f"--calibration: {method} needs a text file")
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
        ids = tokenizer(self.path.read_text(), add_special_tokens=False, return_tensors="pt", verbose=False)[
            "input_ids"
        ]
        whole = ids.shape[1] // self.length
        if not whole:
            raise ValueError(f"{self.path}: {ids.shape[1]} tokens are less than one piece of {self.length} (--length)")
        return list(ids[:, : whole * self.length].reshape(whole, 1, self.length)[: self.samples])


def fitted(
    source: Path,
    text: Text,
    device: str,
    weight_format: str,
    group_size: int | None,
    method: str,
    memory: str,
    **choice: Any,
) -> Report:
    """Chooses the formats of a checkpoint's layers by what a text shows of their errors.

    Raises:
        ValueError: the text is too short, or the smallest formats need more than `memory`.
        CheckpointError: transformers has no language model for the checkpoint.
    """
    from transformers import AutoModelForCausalLM

    ids = torch.cat(text.pieces(source, "--memory"))
    try:
        model = AutoModelForCausalLM.from_pretrained(source, local_files_only=True)
    except ValueError as error:
        raise CheckpointError(f"{source}: --calibration needs a language model of transformers: {error}") from error
    options = choice | {"memory": memory, "calibration": ids, "progress": False, "atomic": False}
    return quantize_model(model.to(device), weight_format, group_size, method, **options)


@dataclass(frozen=True)
class _Job:
    source: Path
    work: Path  # the package writes here
    method: str
    bits: int
    group_size: int
    symmetric: bool
    pieces: list[Tensor]
    device: str


@contextmanager
def quantized(
    source: Path,
    destination: Path,
    method: str,
    weight_format: str,
    group_size: int | None,
    text: Text,
    device: str,
) -> Iterator[Path]:
    """Quantizes into a temporary directory beside the destination and removes that directory at the end.

    Raises:
        ValueError: the package that implements the method is missing, or the method does not support the format or
            group size.
        CheckpointError: that package raised an error.
    """
    fmt = find_format(weight_format)
    wanted = ("uint4",) if method == "awq" else FORMATS
    if fmt.name not in wanted:
        raise ValueError(f"--weight-format: {method} makes {' or '.join(wanted)}, got {weight_format!r}")
    size = DEFAULT_GROUP_SIZE if group_size is None else group_size
    if size not in (-1, *GROUP_SIZES):
        raise ValueError(f"--group-size: expected -1 or one of {', '.join(map(str, GROUP_SIZES))}, got {size}")
    try:
        with redirect_stdout(sys.stderr):  # the packages print messages, but stdout may be one JSON object
            package = importlib.import_module(PACKAGES[method])
    except ImportError as error:
        raise ValueError(
            f"--method {method} needs the package {PACKAGES[method]}, which cannot be imported ({error}): "
            f"{INSTALL[PACKAGES[method]]}"
        ) from error
    pieces = text.pieces(source, method)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    run = _auto_round if method == "autoround" else _gptqmodel
    try:
        try:
            with redirect_stdout(sys.stderr):
                run(package, _Job(source, work, method, fmt.code_bits, size, fmt.is_symmetric, pieces, device))
        except Exception as error:  # the packages may raise any exception
            raise CheckpointError(f"{source}: {PACKAGES[method]} failed: {type(error).__name__}: {error}") from error
        made = [file.parent for file in work.rglob("config.json")]  # AutoRound may create a subdirectory
        if len(made) != 1:
            raise CheckpointError(f"{source}: {PACKAGES[method]} wrote {len(made)} checkpoints, expected one")
        yield made[0]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _gptqmodel(package: Any, job: _Job) -> None:
    kind: dict[str, Any] = (
        {"quant_method": "awq", "format": "gemm"} if job.method == "awq" else {"format": "gptq_v2", "desc_act": False}
    )
    if job.group_size == -1:
        kind["act_group_aware"] = False  # GPTQModel refuses this option with one group
    config = package.QuantizeConfig(bits=job.bits, group_size=job.group_size, sym=job.symmetric, **kind)
    model = package.GPTQModel.load(str(job.source), config, device=job.device)
    samples = [{"input_ids": ids[0].tolist(), "attention_mask": [1] * ids.shape[1]} for ids in job.pieces]
    model.quantize(samples, batch_size=1)
    model.save(str(job.work))


def _auto_round(package: Any, job: _Job) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(job.source, local_files_only=True, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job.source, local_files_only=True)
    options = {"dataset": job.pieces, "nsamples": len(job.pieces), "seqlen": job.pieces[0].shape[1]}
    options["device_map"] = job.device
    options["enable_torch_compile"] = job.device != "cpu"  # compiling for the CPU takes longer than it saves
    rounder = package.AutoRound(
        model, tokenizer, bits=job.bits, group_size=job.group_size, sym=job.symmetric, **options
    )
    rounder.quantize_and_save(str(job.work), format="auto_round")
