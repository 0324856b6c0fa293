"""quantize_model, load_quantized and FloatReader accept the same name patterns."""

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.models import make_model, packed_layers
from torch_marlin_metal import convert, load_quantized, quantize_model

NAMES = [f"{block}.{name}" for block in range(3) for name in ("up", "down")]
CHOICES = {
    "a pattern": ("*.up", ["0.up", "1.up", "2.up"]),
    "a list": (["0.*", "2.down"], ["0.up", "0.down", "2.down"]),
    "a character class": ("[01].down", ["0.down", "1.down"]),
    "a regular expression": (r"re:[12]\.(up|down)", ["1.up", "1.down", "2.up", "2.down"]),
    "a regular expression matches the whole name": ("re:.*up", ["0.up", "1.up", "2.up"]),
    "a function": (lambda name, *module: name.startswith("1"), ["1.up", "1.down"]),
}


@pytest.fixture
def floats(tmp_path):
    folder = tmp_path / "floats"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    save_file(make_model("cpu").state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def packed(floats, tmp_path):
    return convert.write_checkpoint(convert.FloatReader(floats, group_size=32, include="*"), tmp_path / "packed")


@pytest.mark.parametrize("case", CHOICES)
def test_three_functions_choose_the_same_layers(case, floats, packed) -> None:
    choice, chosen = CHOICES[case]
    rest = [name for name in NAMES if name not in chosen]
    included, excluded, loaded = make_model("cpu"), make_model("cpu"), make_model("cpu")
    quantize_model(included, group_size=32, include=choice, progress=False)
    quantize_model(excluded, group_size=32, exclude=choice, progress=False)
    load_quantized(loaded, packed, exclude=choice, progress=False)
    assert list(packed_layers(included)) == chosen
    assert list(packed_layers(excluded)) == list(packed_layers(loaded)) == rest
    assert sorted(convert.FloatReader(floats, group_size=32, include=choice).layer_names) == sorted(chosen)
    reader = convert.FloatReader(floats, group_size=32, include="*", exclude=choice)
    assert sorted(reader.layer_names) == sorted(rest)


def test_a_pattern_without_a_match_is_reported_by_each(floats, packed) -> None:
    message = r"'lm_head' matches none of the 6 layers"
    for call in (
        lambda **filters: quantize_model(make_model("cpu"), group_size=32, progress=False, **filters),
        lambda **filters: convert.FloatReader(floats, group_size=32, **{"include": "*", **filters}),
    ):
        for argument in ("include", "exclude"):
            with pytest.raises(ValueError, match=f"{argument}: {message}"):
                call(**{argument: "lm_head"})
    with pytest.raises(ValueError, match="load_quantized: exclude: " + message):
        load_quantized(make_model("cpu"), packed, exclude="lm_head", progress=False)


def test_a_malformed_regular_expression_is_one_clear_error(packed) -> None:
    with pytest.raises(ValueError, match=r"pattern 're:\(': not a regular expression"):
        quantize_model(make_model("cpu"), include="re:(", progress=False)
    with pytest.raises(ValueError, match=r"pattern 're:\(': not a regular expression"):
        load_quantized(make_model("cpu"), packed, exclude="re:(", progress=False)


def test_ignore_and_keep_take_functions_and_regular_expressions(packed) -> None:
    model = nn.Sequential(*make_model("cpu"), nn.LayerNorm(4))
    before = model[3].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_quantized(model, packed, keep=r"re:3\.(weight|bias)", progress=False)
    assert torch.equal(model[3].weight, before)
    smaller = make_model("cpu", blocks=2)
    load_quantized(smaller, packed, ignore=lambda name: name.startswith("2."), progress=False)
    assert list(packed_layers(smaller)) == NAMES[:4]
