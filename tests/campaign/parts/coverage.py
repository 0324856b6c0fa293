"""Coverage-guided fuzzing of the parsers with atheris, which keeps and mutates inputs that execute new lines."""

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.fixture_layers import DATA

# `config` has fewer runs, because each of its inputs reads a complete checkpoint.
RUNS = {"safetensors": 20_000, "gguf": 20_000, "config": 1000}
CODE = """
import sys, atheris
from pathlib import Path
import torch
with atheris.instrument_imports(include=["torch_marlin_metal.checkpoints"]):
    from torch_marlin_metal import convert
    from torch_marlin_metal.checkpoints.files.gguf import read_gguf
    from torch_marlin_metal.checkpoints.files.safetensors import read_header
target, work = sys.argv[1], Path(sys.argv[2])

def one(data):
    try:
        if target == "config":
            (work / "model/config.json").write_bytes(data)
            for _ in convert.read_layers(work / "model"):
                pass
        else:
            (work / "file").write_bytes(data)
            (read_header if target == "safetensors" else read_gguf)(work / "file")
    except convert.CheckpointError:
        pass

atheris.Setup([sys.argv[0], *sys.argv[3:]], one)
atheris.Fuzz()
"""


def case(rng: random.Random, work: Path) -> Counter[str]:
    """Runs the fuzzer once, with the real files as corpus.

    If the fuzzer fails, the error contains the input as bytes.
    """
    target = rng.choice(sorted(RUNS))
    corpus, model = work / "corpus", work / "model"
    corpus.mkdir()
    model.mkdir()
    pattern = {"safetensors": "*/*/model.safetensors", "gguf": "*/*/model.gguf", "config": "*/*/config.json"}[target]
    files = sorted(DATA.glob(pattern))
    for number, file in enumerate(files):
        (corpus / str(number)).write_bytes(file.read_bytes()[:20_000])
    chosen = rng.choice(sorted(DATA.glob("*/*/model.safetensors")))
    (model / "model.safetensors").write_bytes(chosen.read_bytes())
    options = [
        f"-seed={rng.randrange(1, 1 << 31)}",
        f"-runs={RUNS[target]}",
        "-max_len=20000",
        "-rss_limit_mb=4000",
        "-timeout=60",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, target, str(work), *options, f"-artifact_prefix={work}/", str(corpus)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        found = [file.read_bytes() for file in work.glob("*-*")]
        raise AssertionError(
            f"{target}: {json.dumps([repr(content[:2000]) for content in found])} {done.stderr[-1500:]}"
        )
    return Counter({f"inputs of {target}": RUNS[target]})
