"""Runs what twelve first-time users try to do, and prints what happens.

    python -m tests.journeys.table [NUMBER ...]

The command prints a line for each user. A function returns what happened, or raises AssertionError if this must not
happen. If a function needs a library that is not installed, the line says that it was not tried.
"""

import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import nn

import torch_marlin_metal as tmm
from tests.journeys.architectures import FIRST, result_of
from tests.support.programs import run_python
from torch_marlin_metal.checkpoints.formats.native import ADVICE
from torch_marlin_metal.integrations.transformers import MarlinConfig

ROOT = Path(__file__).parents[2]
IDS = torch.arange(8)[None]
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    llama = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)).eval()
    if family == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**llama, num_local_experts=4)).eval()
    if family == "falcon":
        return transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES)).eval()
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config).eval()


def packed(model: nn.Module) -> int:
    return sum(isinstance(module, tmm.MarlinLinear) for module in model.modules())


def bits(model: nn.Module, other: nn.Module) -> bool:
    one, two = model.state_dict(), other.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def install_lines(folder: Path) -> str:
    """1: all pip commands in the docs install from a checkout; none takes the package from an index."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for page in pages for line in re.findall(r"pip install .*", page.read_text())]
    named = [line for line in lines if re.search(r"""install ["']?torch[_-]marlin[_-]metal(?![\w*-])""", line)]
    assert lines
    assert not named, named
    return f"{len(lines)} pip lines in the docs; none takes torch_marlin_metal from an index"


def source_distribution(folder: Path) -> str:
    """2: the sdist contains what a build needs."""
    environment = {**os.environ, "WITHOUT_EXTENSION": "1"}
    made = run_python("setup.py", "-q", "sdist", "-d", folder, cwd=ROOT, env=environment)
    assert made.returncode == 0, made.stderr
    names = subprocess.run(["tar", "tzf", *folder.glob("*.tar.gz")], check=True, capture_output=True, text=True).stdout
    counts = {kind: len(re.findall(rf"\.{kind}$", names, re.MULTILINE)) for kind in ("h", "metal", "mm", "cpp")}
    assert all(counts.values()) and "build_support/" in names
    return f"sdist with build_support and {', '.join(f'{count} .{kind}' for kind, count in counts.items())}"


def other_torch(folder: Path) -> str:
    """3: an extension that was built for another torch is refused with an error of one sentence."""
    path = next((ROOT / "torch_marlin_metal").glob("_C*.so"))
    code = (
        "import torch, sys\ntorch.__version__ = type(torch.__version__)('2.99.0')\n"
        "import torch_marlin_metal as t\nt.cpu_capability()"
    )
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 1, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    needs = next(need for need in importlib.metadata.requires("torch_marlin_metal") or [] if need.startswith("torch"))
    assert "2.99.0" in last, last
    return f"{path.name} with torch 2.99.0: {last[:200]}; metadata: {needs}"


def quantized_in_memory(folder: Path) -> str:
    """4: save_pretrained and from_pretrained keep the bits of a quantized model, in every library that is installed."""
    model = tiny("llama")
    tmm.quantize_model(model, "uint4", 32, progress=False)
    model.save_pretrained(folder / "llama")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    assert bits(again, model) and torch.equal(again(IDS).logits, model(IDS).logits)
    told = ["transformers: the same bits and logits"]
    torch.save(model.state_dict(), folder / "state.pt")
    try:
        tiny("llama").load_state_dict(torch.load(folder / "state.pt"), strict=False)
        raise AssertionError("a float model loaded a 4-bit state_dict, so its weights stay random")
    except RuntimeError:
        told.append("torch.save into a float model: refused")
    if importlib.util.find_spec("diffusers"):
        import diffusers

        kwargs: Any = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
        sizes = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8), "in_channels": 16}
        flux = diffusers.FluxTransformer2DModel(patch_size=1, **sizes, **kwargs)
        tmm.quantize_model(flux, "uint4", 32, progress=False)
        flux.save_pretrained(folder / "flux")
        assert bits(diffusers.FluxTransformer2DModel.from_pretrained(folder / "flux"), flux)
        told.append("diffusers: the same bits")
    else:
        told.append("diffusers: not installed, not tried")
    return "; ".join(told)


def from_somebody(folder: Path) -> str:
    """5: a saved directory that is opened without our import gives an error that says what to install and import."""
    model = tiny("llama")
    tmm.quantize_model(model, "uint4", 32, progress=False)
    model.save_pretrained(folder / "llama")
    code = f"from transformers import AutoModelForCausalLM as A\nA.from_pretrained({str(folder / 'llama')!r})"
    done = run_python("-c", code)
    assert done.returncode == 1 and ADVICE in done.stderr
    assert "import torch_marlin_metal" in (folder / "llama/README.md").read_text()
    return f"error: {done.stderr.strip().splitlines()[-1][:200]}; the directory's README.md says it, too"


def experts(folder: Path) -> str:
    """6: a mixture of experts in floats is quantized, or a warning names the matrices that stay."""
    model = tiny("mixtral")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = tmm.quantize_model(model, "uint4", 32, progress=False)
    if report.quantized_share >= 0.5:
        return f"{report.quantized_share:.0%} of the matrices' bytes in 4 bit"
    assert any("experts" in str(warning.message) for warning in said)
    return f"{report.quantized_share:.0%} in 4 bit, and a warning that names the experts"


def adapters(folder: Path) -> str:
    """7: LoRA adapters train on a quantized model."""
    if not importlib.util.find_spec("peft"):
        return "peft is not installed: not tried"
    import peft

    import torch_marlin_metal.integrations.peft  # noqa: F401

    model = tiny("llama")
    tmm.quantize_model(model, "uint4", 32, progress=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4))
    adapted(IDS, labels=IDS).loss.backward()
    gradients = [name for name, value in adapted.named_parameters() if value.grad is not None]
    assert any("lora_B" in name for name in gradients)
    return f"adapter attached; {len(gradients)} parameters with gradients"


def families(folder: Path) -> str:
    """8: families whose code for initializing weights needs more than a plain Linear load in 4 bit."""
    results = {family: result_of(family)[0] for family in FIRST}
    assert set(results.values()) == {"right"}, results
    return f"{len(results)} of {len(results)} right: {', '.join(results)}"


def head(folder: Path) -> str:
    """9: the output layer is in 8 bits, and in the format that the user asks for."""
    tiny("llama").save_pretrained(folder / "floats")
    formats = []
    for name in ("none", None, "uint4"):
        config = MarlinConfig("uint4", 32, vocabulary_format=name)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "floats", quantization_config=config)
        formats.append(getattr(model.lm_head, "weight_format", ""))
    assert formats == ["", "uint8b128", "uint4"]
    return "in 8 bits by default; vocabulary_format names another format, or none; models.md says so"


def without_python(folder: Path) -> str:
    """10: a C++ program can use the operators without Python."""
    library = next((ROOT / "torch_marlin_metal/cpp/lib").glob("libtorch_marlin_metal.*"), None)
    assert library is not None, "the build has not made the C++ library"
    symbols = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True)
    assert "c10" in symbols.stdout and not re.findall(r" U _?Py\w+", symbols.stdout)
    return f"{library.name} uses no symbol of Python; CMake finds it (docs/use/operators.md)"


def other_layers(folder: Path) -> str:
    """11: GPT-2's Conv1D and Falcon's Linear are quantized. A model without any layer to quantize is an error."""
    told = []
    for family in ("gpt2", "falcon"):
        tiny(family).save_pretrained(folder / family)
        config = MarlinConfig("uint4", 32)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / family, quantization_config=config)
        model.save_pretrained(folder / f"{family}4")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{family}4")
        assert packed(model) == 10 and bits(again, model)
        told.append(f"{family}: 10 layers, reloaded with the same bits")
    nothing = MarlinConfig("uint4", 32, modules_to_not_convert=["*"])
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder / "gpt2", quantization_config=nothing)
        raise AssertionError("no error although nothing was quantized")
    except ValueError as error:
        told.append(str(error)[:60])
    return "; ".join(told)


def backward(folder: Path) -> str:
    """12: a layer's gradient is that of a dense layer with the same weight; the times of both are printed."""
    packed_layer = tmm.MarlinLinear.from_linear(nn.Linear(1024, 2816, bias=False).bfloat16())
    dense = nn.Linear(1024, 2816, bias=False)
    dense.weight.data = packed_layer.dequantize(torch.bfloat16)
    a, upstream = torch.randn(1024, 1024).bfloat16().requires_grad_(), torch.randn(1024, 2816).bfloat16()
    times, gradients = [], []
    for layer in (packed_layer, dense):
        best = float("inf")
        for _ in range(4):
            start = time.process_time()
            (gradient,) = torch.autograd.grad(layer(a), a, upstream)
            best = min(best, time.process_time() - start)
        times.append(best)
        gradients.append(gradient.float())
    largest = gradients[1].abs().max()
    assert largest > 0 and (gradients[0] - gradients[1]).abs().max() < 0.02 * largest
    ratio = times[0] / times[1]
    return f"bf16, M = 1024: {times[0] * 1e3:.0f} ms of CPU against {times[1] * 1e3:.0f} dense ({ratio:.1f}x)"


JOURNEYS: dict[int, Callable[[Path], str]] = dict(
    enumerate(
        (install_lines, source_distribution, other_torch, quantized_in_memory, from_somebody, experts, adapters,
         families, head, without_python, other_layers, backward), 1,
    )
)  # fmt: skip


def take(number: int) -> tuple[bool, str]:
    """Runs the function of one user. Returns True if it ended as it must, and what happened."""
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        try:
            return True, JOURNEYS[number](Path(folder))
        except Exception as error:
            return False, traceback.format_exception_only(error)[-1].strip()


def main(numbers: list[int]) -> int:
    failed = 0
    for number in numbers or list(JOURNEYS):
        went, told = take(number)
        failed += not went
        print(f"{number:2} {JOURNEYS[number].__name__:20} {'' if went else 'FAILED: '}{told}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
