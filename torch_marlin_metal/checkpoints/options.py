"""`ReadOptions`: the caller's choices for reading a checkpoint, which every reader takes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from torch_marlin_metal.repack import ZerosRule

OnUnsupported = Literal["error", "dequantize", "skip"]
GgufNames = Literal["gguf", "hf"]


@dataclass(frozen=True)
class ReadOptions:
    """How `read_layers`, `open_reader` and `load_quantized` read a checkpoint.

    Attributes:
        on_unsupported: what happens if the operators cannot represent a layer without loss. "error" raises an error,
            "dequantize" decodes the layer to floats, and "skip" leaves it out. None means "dequantize" if the
            checkpoint is loaded into a model, and otherwise "error".
        allow_pickle: whether to read PyTorch pickles too, by `torch.load(weights_only=True)`.
        gptq_zeros_rule: how zero points of GPTQ's version 1 are read if a stored nibble is 15: "word", "masked" or
            "unmasked", see `gptq_unpack_zeros`.
        gptq_version: the version of a GPTQ checkpoint, 1 or 2. None uses the version in its settings, which can be
            wrong.
        gguf_names: "gguf" for the tensor names of a GGUF file, "hf" for transformers' names. "hf" also restores
            transformers' order of rows in the q and k projections of the architecture "llama".

    Raises:
        ValueError: a value is unknown; the message names the field.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "options", "gptq")
        >>> options = tmm.convert.ReadOptions(on_unsupported="skip")
        >>> len(list(tmm.convert.read_layers("options", options)))
        1
    """

    on_unsupported: OnUnsupported | None = None
    allow_pickle: bool = False
    gptq_zeros_rule: ZerosRule = "word"
    gptq_version: int | None = None
    gguf_names: GgufNames = "gguf"

    def __post_init__(self) -> None:
        check_choice("on_unsupported", self.on_unsupported, (None, *get_args(OnUnsupported)))
        check_choice("gptq_zeros_rule", self.gptq_zeros_rule, get_args(ZerosRule))
        check_choice("gptq_version", self.gptq_version, (None, 1, 2))
        check_choice("gguf_names", self.gguf_names, get_args(GgufNames))

    @classmethod
    def of(cls, options: "ReadOptions | None", changes: Mapping[str, Any]) -> "ReadOptions":
        """Returns `options` (None means the defaults) with some fields changed.

        Raises:
            TypeError: `options` is not a `ReadOptions`, or a field is unknown.
            ValueError: a value is unknown.
        """
        if options is not None and not isinstance(options, cls):
            raise TypeError(f"options: expected ReadOptions, got {options!r}")
        known = [field.name for field in fields(cls)]
        for name in changes:
            if name not in known:
                raise TypeError(f"expected an option of {', '.join(known)}, got {name!r}")
        return replace(options or cls(), **changes)


def typed(option: str, value: object = None) -> str:
    """Spells an option for a message as the user types it: as an argument of Python, unless `spelled` says more."""
    return _spelling.get()(option, value)


@contextmanager
def spelled(spelling: "Spelling") -> Iterator[None]:
    """Within the block, messages spell options as the caller's users type them.

    Args:
        spelling: a function of the option's name and its value; None stands for a value that the user chooses.
    """
    token = _spelling.set(spelling)
    try:
        yield
    finally:
        _spelling.reset(token)


def _argument(option: str, value: object) -> str:
    return option if value is None else f"{option}={value!r}"


Spelling = Callable[[str, object], str]
_spelling: ContextVar[Spelling] = ContextVar("spelling", default=_argument)


def check_choice(argument: str, value: object, allowed: tuple[object, ...]) -> None:
    """Checks that a value is one of the allowed ones.

    Raises:
        ValueError: the value is not allowed. The message names the argument, the allowed values and the value.
    """
    if value not in allowed or isinstance(value, float):
        shown = [str(item) if item is None else repr(item) for item in allowed]
        raise ValueError(f"{argument}: expected {', '.join(shown[:-1])} or {shown[-1]}, got {value!r}")
