"""Makes transformers' `Trainer` log which weights cannot be trained, if a packed model has no adapters.

transformers refuses a model without adapters if one of its own quantizers packed the model. A model with this package's
layers is accepted, because a new head or other float layers can be trained.
"""

import functools
import sys
from typing import Any

import transformers.trainer_utils as trainer_utils
from transformers.utils import logging

from torch_marlin_metal.integrations.counting import packed_weights

CHECK = "validate_quantization_for_training"
logger = logging.get_logger(__name__)


def install() -> None:
    """Wraps the check that `Trainer` applies to its model. A second call does nothing."""
    original = getattr(trainer_utils, CHECK)
    if getattr(original, "names_packed_weights", False):
        return

    @functools.wraps(original)
    def validate_quantization_for_training(model: Any) -> None:
        original(model)
        if not (hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)):
            say_what_stays(model)

    validate_quantization_for_training.names_packed_weights = True  # type: ignore[attr-defined]
    for name in ("transformers.trainer_utils", "transformers.trainer"):  # the second has imported the function by name
        if (module := sys.modules.get(name)) is not None:
            setattr(module, CHECK, validate_quantization_for_training)


def say_what_stays(model: Any) -> None:
    """Logs a warning with the numbers of packed weights and of trained parameters.

    Raises:
        ValueError: the model has packed weights but no parameter that can be trained.
    """
    packed = packed_weights(model.modules())
    if not packed:
        return
    trained = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    what = (
        "packed weights are constant; to train them, add adapters of peft (import torch_marlin_metal.integrations.peft)"
    )
    if not trained:
        raise ValueError(f"Trainer: model: expected a parameter to train, got none: its {packed:,} {what}")
    largest = sorted(trained, key=lambda name: -trained[name])[:3]
    logger.warning(
        f"Trainer: only {sum(trained.values()):,} parameters in floats are trained ({', '.join(largest)}"
        f"{', ...' if len(trained) > 3 else ''}): this model's {packed:,} {what}"
    )
