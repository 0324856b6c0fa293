"""Every door takes the same plan: each case ends in the same way, with the same sentence, wherever it can occur.

`python -m tests.load.test_doors` writes the table of docs/use/what-loads.md.
"""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import doors
from tests.support.doors import DOORS, IDS, UNTIED, Saved, quietly, saved
from torch_marlin_metal import MarlinEmbedding, MarlinLinear

PAGE = Path(__file__).parents[2] / "docs/use/what-loads.md"
BEGIN, END = "<!-- table of doors -->", "<!-- end of the table -->"
HOSTS = ("from_pretrained", "diffusers")
LOADS, STOPS, HOST, NONE = "loads", "stops", "the library", "-"


@dataclass(frozen=True)
class Case:
    """One way in which a checkpoint differs from the model.

    Attributes:
        what: the case, for the page.
        change: changes the checkpoint before it is written.
        sentence: what happens, for the page.
        message: a regular expression for the errors of all doors at which the load stops.
        ends: how the load ends at each door that differs from "loads"; "*" stands for all others.
        options: arguments, for the doors that take arguments.
        floats: the layers that are floats afterwards.
    """

    what: str
    change: Callable[[Saved], Any]
    sentence: str
    message: str = ""
    ends: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    floats: tuple[str, ...] = ()

    def end(self, door: str) -> str:
        return self.ends.get(door, self.ends.get("*", LOADS))


def further_block(made: Saved) -> None:
    made.pack("block.mtp", 64, 64)


def shape(made: Saved) -> None:
    made.pack("block.up", 64, 64)


def drop_float(made: Saved) -> None:
    del made.floats["norm.bias"]


NO_ARGUMENT = {"sentence-transformers": NONE}
LOST = r"has no place for block.mtp \(4-bit layer\); its own Linear layers are for example .*ignore[= ]'?block.mtp'?\)? leaves"
CASES = {
    "fits": Case(
        "everything fits",
        lambda made: None,
        "Layers and embeddings stay packed; a head that is tied to an embedding shares its tensors.",
    ),
    "prefix": Case(
        'all names begin with "module.", "_orig_mod.", "llm." or the like',
        lambda made: made.renamed(lambda name: f"_orig_mod.llm.{name}"),
        "The prefix is removed, with a warning. diffusers cannot rename its own part, so there the load stops.",
        r"all names begin with '_orig_mod.llm.'",
        {"diffusers": STOPS},
    ),
    "names": Case(
        "no packed layer has a place",
        lambda made: made.renamed(
            lambda name: name.replace("block", "blk").replace("table", "tab").replace("head", "out")
        ),
        "The load stops and names layers of both sides.",
        r"has no place for .*blk.down \(4-bit layer\).*its own Linear layers are for example",
        {"*": STOPS},
    ),
    "further block": Case(
        "a layer that a part of the model lacks, such as a further block (MTP)",
        further_block,
        "The load stops and names the argument that leaves it out.",
        LOST,
        {"*": STOPS},
    ),
    "further block, ignored": Case(
        'the same with `ignore=["block.mtp"]`',
        further_block,
        "The layer is left out.",
        ends=NO_ARGUMENT,
        options={"ignore": ["block.mtp"]},
    ),
    "other head": Case(
        "a layer of a part that the model's class lacks, such as another head",
        lambda made: made.pack("score", 8, 64),
        "Libraries with several classes for one checkpoint leave it out, with a warning; elsewhere the load stops.",
        r"has no place for score \(4-bit layer\)",
        {"*": STOPS, "from_pretrained": LOADS, "diffusers": LOADS},
    ),
    "lost layer": Case(
        "the checkpoint lacks a layer",
        lambda made: made.drop("block.down"),
        "The load stops, or the library reports and initializes the layer as it does for floats.",
        r"the checkpoint lacks block.down.weight",
        {"*": STOPS, "from_pretrained": HOST, "diffusers": HOST},
    ),
    "other shape": Case(
        "a layer has another shape",
        shape,
        "The load stops with both shapes. `inspect --model` does not see it, because it reads only headers.",
        r"layer 'block.up': expected a weight of \[96, 64\] as in the model, the checkpoint's is \[64, 64\]",
        {"*": STOPS, "inspect --model": NONE},
    ),
    "more floats": Case(
        "a tensor of floats that the model lacks",
        lambda made: made.floats.update({"norm.extra": torch.zeros(3)}),
        "The load stops, or the library reports it.",
        r"has no place for norm.extra;",
        {"*": STOPS, "from_pretrained": LOADS, "diffusers": LOADS},
    ),
    "lost floats": Case(
        "the checkpoint lacks a tensor of floats",
        drop_float,
        "The load stops, or the library reports and initializes it.",
        r"the checkpoint lacks norm.bias",
        {"*": STOPS, "from_pretrained": HOST, "diffusers": HOST},
    ),
    "excluded": Case(
        "`exclude` (`modules_to_not_convert`) names a layer",
        lambda made: None,
        "The layer is decoded; modules that share a weight become floats together.",
        ends=NO_ARGUMENT | {"inspect --model": NONE},
        options={"exclude": ["block.down", "table"]},
        floats=("block.down", "table", "head"),
    ),
    "wrong pattern": Case(
        "such a pattern matches nothing",
        lambda made: None,
        "The load stops.",
        r"'nothing' matches none of the",
        {"*": STOPS, "sentence-transformers": NONE, "inspect --model": NONE},
        {"exclude": ["nothing"]},
    ),
    "bfloat16": Case(
        "`dtype=torch.bfloat16`",
        lambda made: None,
        "Tensors of floats are converted; codes and scales keep their types.",
        ends=NO_ARGUMENT | {"inspect --model": NONE},
        options={"dtype": torch.bfloat16},
    ),
}


def outcome(door: str, case: Case, path: Path) -> nn.Module:
    made = saved(tied=door not in UNTIED)
    case.change(made)
    made.write(path)
    return quietly(lambda: DOORS[door](path, **case.options))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_a_case_ends_as_the_page_says(name, door, tmp_path) -> None:
    case = CASES[name]
    if case.end(door) == NONE:
        pytest.skip("the case cannot occur at this door")
    if case.end(door) == STOPS:
        with pytest.raises(ValueError, match=case.message.replace(" ", r"\s+")):
            outcome(door, case, tmp_path / "saved")
        return
    model = outcome(door, case, tmp_path / "saved")
    assert type(model.block["up"]) is MarlinLinear
    if case.end(door) == HOST:
        return
    floats = [name for name in case.floats if name != "head" or door not in UNTIED]
    for layer in doors.PACKED:
        kind = (MarlinEmbedding, nn.Embedding) if layer == "table" else (MarlinLinear, nn.Linear)
        assert type(model.get_submodule(layer)) is kind[layer in floats]
    if door not in UNTIED:
        table, head = model.table, model.head
        assert head.weight is table.weight if floats else head.b_packed is table.b_packed
    with torch.no_grad():
        found, expected = model.eval()(IDS).double(), saved(tied=door not in UNTIED).logits()
    assert float((found - expected).norm() / expected.norm()) < (0.02 if "dtype" in case.options else 1e-5)


def test_two_loads_in_two_threads_give_the_same(tmp_path) -> None:
    made = saved(tied=True)
    path = made.write(tmp_path / "saved")
    # transformers replaces torch's functions while it makes a model, in all threads: these models are made before.
    own, other = (doors.DoorsNet(doors.net_config(path)).float() for _ in range(2))
    loads = {
        "first": lambda: doors.from_pretrained(path),
        "second": lambda: doors.into(own, path, {}),
        "third": lambda: doors.into(other, path, {}),
    }
    found: dict[str, torch.Tensor] = {}

    def load(name: str) -> None:
        with torch.no_grad():
            found[name] = loads[name]()(IDS)

    threads = [threading.Thread(target=load, args=(name,)) for name in loads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == loads.keys()
    for result in found.values():
        assert float((result.double() - made.logits()).norm() / made.logits().norm()) < 1e-5


def test_a_shard_that_is_missing_stops_the_load(tmp_path) -> None:
    path = saved(tied=True).write(tmp_path / "saved") / "model"
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    index = {
        "metadata": {},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for door in ("from_pretrained", "load_quantized", "load_quantized, meta", "inspect --model"):
        with pytest.raises((ValueError, OSError), match=r"model-00002-of-00002.safetensors"):
            quietly(lambda door=door: DOORS[door](path.parent))


def table() -> str:
    """Returns the table of the page."""
    shown = [door for door in DOORS if door != "load_quantized, meta"]
    lines = [f"| case | {' | '.join(shown)} | what happens |", "|---" * (len(shown) + 2) + "|"]
    for case in CASES.values():
        ends = [case.end(door) for door in shown]
        lines.append(f"| {case.what} | {' | '.join(ends)} | {case.sentence} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert re.search(f"{BEGIN}\n\n(.*)\n\n{END}", text, re.DOTALL)[1] == table()


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
