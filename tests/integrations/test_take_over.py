"""The integration replaces entries of transformers' quantizer tables, restores them, and refuses old versions."""

import importlib
import os
import sys

import pytest
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto as tables
from transformers.quantizers import register_quantization_config, register_quantizer

import torch_marlin_metal.integrations.transformers as integration
from tests.support.llama import MODELS
from tests.support.programs import run_python
from torch_marlin_metal.integrations import with_peft
from torch_marlin_metal.integrations.transformers import MarlinConfig, restore, restored, take_over, taken_over
from torch_marlin_metal.integrations.transformers.take_over import STOPS

os.environ["HF_HUB_OFFLINE"] = "1"
GPTQ = MODELS / "gptq-sym-g32-actorder"


def test_the_take_over_leaves_the_tables_of_transformers_and_comes_undone() -> None:
    own = {"torch_marlin_metal"}
    methods = {"gptq", "awq", "compressed-tensors", "auto-round", "hqq", "torchao", "metal", "mxfp4", "bitsandbytes"}
    for table in (tables.AUTO_QUANTIZATION_CONFIG_MAPPING, tables.AUTO_QUANTIZER_MAPPING):
        ours = {name for name, cls in table.items() if cls in (MarlinConfig, integration.MarlinQuantizer)}
        assert ours == own
        assert all(
            cls.__module__.startswith("transformers.") for name, cls in table.items() if name not in own | {STOPS}
        )
    assert methods | {"gguf", "bitsandbytes_4bit"} <= set(taken_over()) and not own & set(taken_over())
    restore()
    try:
        assert taken_over() == []
        with pytest.raises(ValueError, match="GPTQConfig but you are passing a MarlinConfig"):
            AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=MarlinConfig())
    finally:
        take_over()
    with restored():
        assert taken_over() == []
        with pytest.raises(ImportError, match="optimum"):
            AutoModelForCausalLM.from_pretrained(GPTQ)
    assert isinstance(AutoModelForCausalLM.from_pretrained(GPTQ).hf_quantizer, integration.MarlinQuantizer)


def test_transformers_own_rules_for_names() -> None:
    with pytest.raises(ValueError, match="already registered"):
        register_quantizer("torch_marlin_metal")(integration.MarlinQuantizer)
    with pytest.raises(ValueError, match="already registered"):
        register_quantization_config("gptq")(MarlinConfig)


@pytest.mark.parametrize("version", ["4.57.1", "5.22.0"])
def test_an_old_transformers_is_named(version, monkeypatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=rf"needs transformers >= 5.23 .*found {version}"):
        importlib.reload(integration)


def test_a_missing_transformers_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5.23' accelerate.*not installed"):
        importlib.reload(integration)


def test_an_old_peft_is_named_when_it_is_imported(monkeypatch) -> None:
    monkeypatch.setattr("peft.__version__", "0.20.1")
    monkeypatch.delitem(sys.modules, "torch_marlin_metal.integrations.peft", raising=False)
    with pytest.warns(UserWarning, match=r"integrations.peft needs peft >= 0.21 \(.*; found 0.20.1"):
        with_peft.register()


def test_the_import_works_after_that_of_a_module_of_transformers() -> None:
    """transformers may then not have the imported module as an attribute."""
    first = "import transformers.modeling_gguf_pytorch_utils, transformers.modeling_utils, transformers.trainer_utils"
    lacking = 'assert not {"modeling_gguf_pytorch_utils", "modeling_utils"} & vars(transformers).keys()'
    done = run_python("-c", f"{first}\n{lacking}\nimport torch_marlin_metal.integrations.transformers")
    assert done.returncode == 0, done.stderr
