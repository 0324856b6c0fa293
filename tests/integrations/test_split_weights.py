"""Weights that transformers splits from one tensor of the checkpoint (q, k and v), some of them excluded."""

import pytest
import torch
from torch import nn
from transformers import AutoModel

from tests.journeys.architectures import class_of, shrunken
from torch_marlin_metal import MarlinLinear, quantize_model
from torch_marlin_metal.integrations.transformers import MarlinConfig

PARTS = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gte")
    model = class_of("gte")(shrunken("gte")).eval()
    model.save_pretrained(folder)  # saves q, k and v in one tensor, under the original name
    return folder


@pytest.mark.parametrize("excluded", [*PARTS, "none"])
def test_each_part_is_quantized_unless_it_is_excluded(directory, excluded, tmp_path) -> None:
    floats = AutoModel.from_pretrained(directory)
    config = MarlinConfig("uint4", 32, modules_to_not_convert=f"*.{excluded}" if excluded != "none" else None)
    model = AutoModel.from_pretrained(directory, quantization_config=config)
    quantize_model(floats, "uint4", 32, exclude=f"*.{excluded}" if excluded != "none" else (), progress=False)
    found = {}
    for name, layer in model.named_modules():
        part = name.rpartition(".")[2]
        if part in PARTS:
            expected = floats.get_submodule(name)
            assert type(layer) is (nn.Linear if part == excluded else MarlinLinear), name
            assert type(expected) is type(layer)
            assert all(torch.equal(value, expected.state_dict()[key]) for key, value in layer.state_dict().items())
            found[part] = found.get(part, 0) + 1
    assert set(found) == set(PARTS)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
