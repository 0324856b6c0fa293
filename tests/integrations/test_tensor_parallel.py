"""transformers' own tensor parallelism is refused by name: it would leave packed buffers whole."""

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from tests.support.models import SIZES
from torch_marlin_metal.integrations.transformers import MarlinConfig


def test_a_plan_of_transformers_is_refused(tmp_path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig("uint4", 32))
    plan = model._expand_parallel_plan(model.tp_plan)  # as from_pretrained does for tp_size > 1
    assert any("q_proj" in name for name in plan)
    for name, style in plan.items():
        with pytest.raises(
            NotImplementedError, match=r"distributed_config: expected tp_size=1 .*torch_marlin_metal\.par"
        ):
            apply_tensor_parallelism(model, None, {name: style})
