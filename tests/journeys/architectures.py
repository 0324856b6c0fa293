"""Tries a tiny random model of every architecture that transformers can build: loads it in 4 bit, runs it, saves it,
and loads the saved model.

    python -m tests.journeys.architectures [FAMILY ...]

The command prints the result of each family. "right" means that the model ran, that the saved model has the same bits
and gives the same results, and that a compressed-tensors checkpoint of the model loads as well. "loads" means the same
without a run, because this script cannot run the model in floats. "refused" models have no layer that could be
quantized. "WRONG" and "CRASH" are faults of this package. "not built" is none: a package is missing, or the shrunken
config does not fit together.
"""

import contextlib
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from torch_marlin_metal import MarlinLinear
from torch_marlin_metal.convert import export_checkpoint, open_reader
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.report import module_bytes

SIZES = {
    "hidden_size": 64, "hidden_size_global": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 128, "d_ff": 128, "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "d_kv": 32, "head_dim": 32, "projection_dim": 64, "projection_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_heads": 2, "n_head": 2, "n_heads": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "vocab_size": 128, "max_position_embeddings": 64, "n_positions": 64, "image_size": 32, "patch_size": 8,
    "time_step_rank": 8, "state_size": 16, "expand": 2, "type_vocab_size": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1, "embedding_size": 64, "hidden_size_per_layer_input": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "image_token_id": 3, "image_token_index": 3,
    "video_token_id": 4, "vocab_size_per_layer_input": 128, "max_source_positions": 32, "max_target_positions": 32,
}  # fmt: skip
HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
LARGEST = 240_000_000  # in bytes; larger models are skipped
FIRST = ("clip", "siglip", "llava", "gemma3", "t5", "modernbert", "wav2vec2", "mamba", "mamba2")


def families() -> list[str]:
    """Returns every model type with a base class or a language-model class in transformers."""
    known = {name for table in HEADS for name in getattr(auto, table)}
    return [*FIRST, *sorted(known - set(FIRST))]


def shrunken(family: str) -> PreTrainedConfig:
    """Returns the default config of a family with small sizes, including those of its sub-configs."""
    return smaller(CONFIG_MAPPING[family]())


def smaller(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a new config with small sizes, from which the class computes its other values.

    If the class refuses the sizes, this function changes the given config instead.
    """
    inside = {name: smaller(value) for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if isinstance(getattr(config, name, None), int)}
    if config.model_type == "blt":
        sizes["encoder_hash_byte_group_vocab"] = 64  # the default of 500,002 is needed six times
    if config.model_type in ("mamba2", "bamba"):
        sizes |= {"num_heads": 4, "n_groups": 1}
    if isinstance(getattr(config, "initializer_range", None), float):
        sizes["initializer_range"] = 0.02  # with BLIP's default of 1e-10, no fp16 scale could represent the weights
    with contextlib.suppress(Exception):
        return type(config)(**sizes, **inside)
    before = getattr(config, "num_hidden_layers", None)
    for name, value in (sizes | inside).items():
        with contextlib.suppress(Exception):
            setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:  # the list has one entry per layer
            with contextlib.suppress(AttributeError):  # some configs compute this value and raise if it is set
                setattr(config, name, value[: config.num_hidden_layers])
    return config


def class_of(family: str) -> Any:
    for table in HEADS:
        name = getattr(auto, table).get(family)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise KeyError(family)


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Returns a small input for the model's main argument."""
    ids = torch.arange(5, 13)[None]
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        given = {"pixel_values": torch.randn(1, 3, 32, 32)}
    elif main in ("input_values", "input_features"):
        given = {main: torch.randn(1, 2000) if main == "input_values" else torch.randn(1, 80, 64)}
    else:
        given = {"input_ids": ids}
    if type(model).__name__ in ("CLIPModel", "SiglipModel"):
        given = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids[:, :4]
    return given


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict | transformers.utils.ModelOutput):
        for name, value in output.items():
            if name not in ("past_key_values", "cache_params"):
                yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)


@torch.no_grad()
def run(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(tensors_in(model(**given)))


def packed_in(model: Any) -> int:
    return sum(isinstance(module, MarlinLinear) for module in model.modules())


def close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Compares up to rounding errors, because the kernel of a dense product depends on the addresses of its tensors."""
    pairs = zip(one, other, strict=True)
    return len(one) == len(other) and all(torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in pairs)


def journey(family: str) -> tuple[str, str]:
    """Returns the result of one family, and a note about the result."""
    torch.manual_seed(0)
    try:
        cls = class_of(family)
        with torch.device("meta"):
            size = module_bytes(cls(shrunken(family)))
        if size > LARGEST:
            return "too large", f"{size / 1e6:.0f} MB although shrunken"
        model = cls(shrunken(family)).eval()
        given = inputs_of(model)
    except Exception as error:
        return "not built", first_line(error)
    try:
        run(model, given)
        runs = ""
    except Exception as error:
        runs = first_line(error)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        path = Path(folder)
        try:
            model.save_pretrained(path / "floats")
            cls.from_pretrained(path / "floats")
        except Exception as error:
            return "not built", f"floats are not saved and loaded: {first_line(error)}"
        try:
            loaded = cls.from_pretrained(path / "floats", quantization_config=MarlinConfig("uint4", 32)).eval()
        except ValueError as error:
            if "no layer was quantized" not in str(error):
                raise
            return "refused", first_line(error)
        before = [] if runs else run(loaded, given)
        loaded.save_pretrained(path / "saved")
        again = cls.from_pretrained(path / "saved").eval()
        state, other = loaded.state_dict(), again.state_dict()
        if state.keys() != other.keys() or not all(torch.equal(state[key], other[key]) for key in state):
            return "WRONG", "the reloaded model has other tensors"
        if not runs and not close(before, run(again, given)):
            return "WRONG", "the reloaded model computes something else"
        reader = open_reader(path / "saved")
        others = reader.other_tensors()
        export_checkpoint(reader, path / "gptq", "compressed-tensors", other_tensors=others, config=reader.config)
        foreign = cls.from_pretrained(path / "gptq").eval()
        if packed_in(foreign) != packed_in(loaded):
            return "WRONG", f"{packed_in(foreign)} of {packed_in(loaded)} layers of a packed checkpoint"
        little = [
            str(warning.message) for warning in said if "of the matrix weights were quantized" in str(warning.message)
        ]
    note = f"{packed_in(loaded)} layers"
    if little:
        note += ", " + little[0].split(":")[1].split(";")[0].strip()
    return ("loads" if runs else "right"), note + (f"; does not run in floats: {runs}" if runs else "")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def result_of(family: str) -> tuple[str, str]:
    """Calls `journey` without the output of the libraries. An exception becomes the result."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        try:
            return journey(family)
        except Exception as error:
            return "CRASH", first_line(error)


def main(names: list[str]) -> int:
    transformers.utils.logging.set_verbosity(50)
    transformers.utils.logging.disable_progress_bar()
    counts: dict[str, int] = {}
    for family in names or families():
        result, note = result_of(family)
        counts[result] = counts.get(result, 0) + 1
        print(f"{family:28} {result:10} {note}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    return int(any(result.isupper() for result in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
