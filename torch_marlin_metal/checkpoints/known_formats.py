"""The list of checkpoint formats, and the function that selects a format for a checkpoint's settings."""

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, Format
from torch_marlin_metal.checkpoints.formats import (
    auto_round,
    awq,
    bitsandbytes,
    comfyui,
    compressed_tensors,
    fp8,
    gguf,
    gpt_oss,
    gptq,
    hqq,
    mlx,
    modelopt,
    native,
    quanto,
    torchao,
)

DIRECTORY_FORMATS: tuple[DirectoryFormat, ...] = (
    native.FORMAT,
    gptq.FORMAT,
    awq.FORMAT,
    auto_round.FORMAT,
    compressed_tensors.FORMAT,
    modelopt.FORMAT,
    bitsandbytes.FORMAT,
    hqq.FORMAT,
    mlx.FORMAT,
    torchao.FORMAT,
    gpt_oss.FORMAT,
    fp8.FORMAT,
    quanto.FORMAT,
    comfyui.FORMAT,
)
FORMATS: tuple[Format, ...] = (*DIRECTORY_FORMATS, gguf.FORMAT)


def find_format(checkpoint: Checkpoint) -> DirectoryFormat:
    """Returns the format of a checkpoint's quantization settings. Checks the settings first.

    Raises:
        UnsupportedFormat: the method or its variant is not supported, or the settings name no method and match no
            format.
    """
    settings = checkpoint.settings
    method = settings.text("quant_method", "method").lower()
    if method:
        found = [fmt for fmt in DIRECTORY_FORMATS if method in fmt.methods]
    else:
        found = [fmt for fmt in DIRECTORY_FORMATS if fmt.implied(checkpoint)]
    if not found:
        known = ", ".join(sorted(method for fmt in DIRECTORY_FORMATS for method in fmt.methods))
        if method:
            raise UnsupportedFormat(f"{settings.file}: quant_method {method!r} is not read; known: {known}")
        raise UnsupportedFormat(f"{settings.file}: the quantization settings name no quant_method; known: {known}")
    chosen = found[0].resolve(settings)
    chosen.check(checkpoint, settings)
    return chosen
