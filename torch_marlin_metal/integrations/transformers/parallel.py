"""Refuses the tensor parallelism of transformers, which shards parameters and would leave packed buffers whole."""

from typing import Any, NoReturn

from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

NAME = "marlin_refused"


class _Refusal(TensorParallelLayer):  # type: ignore[misc]
    """A style that no layer takes."""

    def validate_param(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error for every parameter that a plan names."""
        raise NotImplementedError(
            "from_pretrained: distributed_config: expected tp_size=1 and ep_size=1 for a model with packed weights, "
            "got a plan that splits it; load each process's part by load_quantized(split=) with a SplitPlan of "
            "torch_marlin_metal.parallel"
        )

    def install_forward(self, module: Any, mesh: Any) -> NoReturn:
        """Raises an error for every module that a plan names."""
        self.validate_param()


def refusing_style() -> str:
    """Registers the style with transformers and returns its name."""
    ALL_PARALLEL_STYLES.register(NAME, _Refusal())
    return NAME
