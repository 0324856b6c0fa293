"""Importing this package does not change what diffusers loads and saves: floats and directories of every method."""

import json
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from tests.integrations.test_diffusers import transformer
from tests.support.diffusers_outcomes import outcomes
from tests.support.programs import run_python

# The packages of these methods are not installed in the test environment. diffusers' own error must be raised.
SETTINGS = {
    "bitsandbytes_4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes_8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "quanto": {"quant_method": "quanto", "weights_dtype": "int8"},
    "torchao": {"quant_method": "torchao", "quant_type": "int4wo"},
    "modelopt": {"quant_method": "modelopt", "quant_type": "NVFP4"},
    "gguf": {"quant_method": "gguf"},
    "unknown": {"quant_method": "something"},
}


def test_the_import_changes_nothing_for_other_directories(tmp_path) -> None:
    folder = tmp_path / "saved"
    model = transformer()
    for name, size in (("floats", "10GB"), ("shards", "20KB")):
        model.save_pretrained(folder / name, max_shard_size=size)
    for name, settings in SETTINGS.items():
        model.save_pretrained(folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    root = Path(__file__).parents[2]
    done = run_python("-m", "tests.support.diffusers_outcomes", folder, tmp_path / "without", cwd=root)
    assert done.returncode == 0, done.stderr
    found = outcomes(folder, tmp_path / "with")
    assert found == json.loads(done.stdout.splitlines()[-1])
    assert {name for name, (kind, *_) in found.items() if kind == "FluxTransformer2DModel"} >= {"floats", "shards"}
    assert "bitsandbytes" in found["bitsandbytes_4bit"][1]
