"""peft and Trainer with a complete model: counts of parameters, preparation, prompts, and trained parameters."""

import copy
import sys

import pytest
import torch

# The order of most scripts: peft and its functions first, this package later.
from peft import (
    LoraConfig,
    PeftMixedModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import nn
from transformers import Trainer, TrainingArguments

from tests.support.adapters import IDS, config, layers_of, llama, packed_model
from tests.support.mixtures import family
from tests.support.programs import run_python
from torch_marlin_metal import MarlinLinear, quantize_model
from torch_marlin_metal.integrations import peft as integration
from torch_marlin_metal.layers.embedding import MarlinEmbedding


def packed_all(model: nn.Module) -> nn.Module:
    quantize_model(model, "uint4", vocabulary_format="uint4", progress=False)
    return model


KINDS = {
    "lora": config(),
    "dora": config(use_dora=True),
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack", [lambda model: packed_model(), lambda model: packed_all(model)], ids=["layers", "all"])
def test_peft_counts_the_parameters_of_the_model_in_floats(pack, kind, capsys):
    packed, floats = (get_peft_model(model, copy.deepcopy(KINDS[kind])) for model in (pack(llama()), llama()))
    assert packed.get_nb_trainable_parameters() == floats.get_nb_trainable_parameters()
    packed.print_trainable_parameters()
    floats.print_trainable_parameters()
    one, other = capsys.readouterr().out.splitlines()
    assert one == other
    assert packed.get_base_model().num_parameters() == floats.get_base_model().num_parameters()


def test_other_ways_to_the_count():
    mixed = [PeftMixedModel(model, config(), "default") for model in (packed_model(), llama())]
    assert mixed[0].get_nb_trainable_parameters() == mixed[1].get_nb_trainable_parameters()
    statuses = [get_peft_model(model, config()).get_model_status() for model in (packed_model(), llama())]
    assert statuses[0].total_params == statuses[1].total_params
    merged = get_peft_model(packed_model(), config())
    before = merged.get_nb_trainable_parameters()
    merged.merge_adapter()
    assert merged.get_nb_trainable_parameters() == before


def test_experts_are_counted():
    settings = LoraConfig(target_modules=["q_proj"], r=2)
    packed, floats = family("mixtral"), family("mixtral")
    quantize_model(packed, "uint4", 32, progress=False)
    counts = [
        get_peft_model(model, copy.deepcopy(settings)).get_nb_trainable_parameters() for model in (packed, floats)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_peft_prepares_a_packed_model_without_widening_it(reentrant):
    model = packed_model().bfloat16()
    kwargs = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert prepare_model_for_kbit_training(model, **kwargs) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert not hasattr(model, "hqq_quantized")
    adapted = get_peft_model(model, config()).train()
    adapted(IDS, labels=IDS).loss.backward()
    grads = [parameter.grad for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(grads) == 2 * 6
    assert all(grad is not None for grad in grads)
    assert sum(float(grad.abs().sum()) for grad in grads) > 0


def test_peft_prepares_a_model_in_floats_as_before():
    model = prepare_model_for_kbit_training(llama().bfloat16())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    integration.restore()
    try:
        model = prepare_model_for_kbit_training(packed_model().bfloat16())
        from peft import prepare_model_for_kbit_training as again

        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert again is not prepare_model_for_kbit_training or not hasattr(again, "without_marlin")
    finally:
        integration.install()
    assert {
        p.dtype for p in sys.modules[__name__].prepare_model_for_kbit_training(packed_model().half()).parameters()
    } == {torch.float16}


PROMPTS = {
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="SAMPLE_VOCAB"),
    "p-tuning": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_of_a_packed_table_are_those_of_the_decoded_one(kind):
    base = packed_all(llama())
    decoded = copy.deepcopy(base)
    table = decoded.model.embed_tokens
    assert isinstance(table, MarlinEmbedding)
    decoded.model.embed_tokens = nn.Embedding.from_pretrained(table.dequantize().contiguous())
    results = []
    for model in (base, decoded):
        torch.manual_seed(1)
        adapted = get_peft_model(model, copy.deepcopy(PROMPTS[kind])).eval()
        loss = adapted(IDS, labels=IDS).loss
        loss.backward()
        grads = [parameter.grad for parameter in adapted.parameters() if parameter.requires_grad]
        assert grads and all(grad is not None for grad in grads)
        results.append((loss, *grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert "weight" not in base.model.embed_tokens._parameters


def trainer(model: nn.Module, folder) -> Trainer:
    arguments = TrainingArguments(output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True)
    return Trainer(model=model, args=arguments)


@pytest.fixture
def said(caplog):
    """Returns Trainer's log messages."""
    return lambda: [record.getMessage() for record in caplog.records if "Trainer" in record.getMessage()]


def test_trainer_says_which_weights_stay(tmp_path, said):
    model = packed_model()
    packed = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, MarlinLinear))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    trainer(model, tmp_path)
    (message,) = said()
    assert f"only {trained:,} parameters in floats are trained" in message
    assert f"{packed:,} packed weights are constant" in message
    assert "adapters of peft" in message


def test_trainer_refuses_a_packed_model_with_nothing_to_train(tmp_path):
    model = packed_model()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"^Trainer: model: expected a parameter to train, got none: its .* packed"):
        trainer(model, tmp_path)


@pytest.mark.parametrize("make", [lambda: get_peft_model(packed_model(), config()), llama], ids=["adapters", "floats"])
def test_trainer_says_nothing_otherwise(make, tmp_path, said):
    trainer(make(), tmp_path)
    assert said() == []


def test_trainer_says_nothing_of_adapters_that_transformers_added(tmp_path, said):
    model = packed_model()
    model.add_adapter(config())
    assert len(layers_of(model)) == 6
    trainer(model, tmp_path)
    assert said() == []


# A fork of run_python has imported peft, so the program first removes the modules of peft.
WITHOUT_IMPORT = """
import sys
for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]: del sys.modules[name]
{first}
import torch_marlin_metal
assert ("peft" in sys.modules) == {is_first}
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
torch_marlin_metal.quantize_model(model, progress=False)
from peft import LoraConfig, get_peft_model
print(type(get_peft_model(model, LoraConfig(target_modules=["0"])).base_model.model[0]).__name__)
"""


@pytest.mark.parametrize("first", ["import peft", ""], ids=["peft first", "peft last"])
def test_peft_needs_no_import_of_this_package(first):
    done = run_python("-c", WITHOUT_IMPORT.format(first=first, is_first=bool(first)))
    assert done.stdout == "MarlinLoraLinear\n", done.stderr
