"""`ReadOptions`: the options for reading a checkpoint, common to all readers."""

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
    """The options of `read_layers`, `open_reader` and `load_quantized` for reading a checkpoint.

    Attributes:
        on_unsupported: the action for a layer that the operators cannot represent without loss. "error" raises an
            error, "dequantize" decodes the layer to floats, and "skip" omits the layer. None means "dequantize" if the
            checkpoint is loaded into a model, else "error".
        allow_pickle: True to read PyTorch pickles too, with `torch.load(weights_only=True)`.
        gptq_zeros_rule: the rule for zero points in GPTQ version 1 if a stored nibble is 15: "word", "masked" or
            "unmasked", see `gptq_unpack_zeros`.
        gptq_version: the version of a GPTQ checkpoint, 1 or 2. None takes the version from the settings, which can be
            wrong.
        gguf_names: "gguf" for the tensor names in a GGUF file, "hf" for transformers' names. "hf" also restores
            transformers' row order in the q and k projections of the architecture "llama".

    Raises:
        ValueError: a field has an unknown value. The message names the field.

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
        """Returns a copy of `options` with some fields changed. None means the defaults.

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
    """Formats an option for a message: as a Python argument, unless `spelled` has set another form."""
    return _spelling.get()(option, value)


@contextmanager
def spelled(spelling: "Spelling") -> Iterator[None]:
    """Inside the block, messages show options in the form that the program's users type.

    Args:
        spelling: formats an option from its name and its value. If the value is None, the message names only the
            option, for the user to choose a value.
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
    """Checks that a value is among the allowed values.

    Raises:
        ValueError: the value is not allowed. The message names the argument, the allowed values and the value.
    """
    if value not in allowed or isinstance(value, float):
        shown = [str(item) if item is None else repr(item) for item in allowed]
        raise ValueError(f"{argument}: expected {', '.join(shown[:-1])} or {shown[-1]}, got {value!r}")
