"""Every entry point follows the same plan: each case ends in the same way, with the same error, wherever it can occur.

`python -m tests.load.test_entry_points` writes the table of docs/use/what-loads.md.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.distributed import DistributedConfig

from scripts import page_section
from tests.integrations.test_beside_transformers import e5m2, packed, scheme
from tests.support import entry_points
from tests.support.entry_points import ENTRY_POINTS, IDS, UNTIED, Saved, quietly, saved
from tests.support.processes import meshes, run
from torch_marlin_metal import MarlinEmbedding, MarlinExperts, MarlinLinear
from torch_marlin_metal.parallel import MarlinColwiseParallel, MarlinRowwiseParallel, SplitPlan
from torch_marlin_metal.parallel.styles import ColumnPart, RowPart

PAGE = Path(__file__).parents[2] / "docs/use/what-loads.md"
SECTION = "tests.load.test_entry_points"
HOSTS = ("from_pretrained", "diffusers")
LOADS, STOPS, HOST, NONE = "loads", "stops", "the library", "-"


@dataclass(frozen=True)
class Case:
    """A difference between the checkpoint and the model.

    Attributes:
        what: the case, for the page.
        change: changes the checkpoint before it is written.
        sentence: what happens, for the page.
        message: a regular expression for the errors of all entry points at which the load stops. "WAY(argument)" stands
            for the text that a user types at this entry point.
        ends: the end of the load by entry point, if it is not "loads"; "*" means all other entry points.
        options: arguments, for the entry points that accept arguments.
        floats: the layers that are floats afterwards.
        written: changes the files.
    """

    what: str
    change: Callable[[Saved], Any]
    sentence: str
    message: str = ""
    ends: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    floats: tuple[str, ...] = ()
    written: Callable[[Path], None] = lambda path: None

    def end(self, entry_point: str) -> str:
        return self.ends.get(entry_point, self.ends.get("*", LOADS))


def further_block(made: Saved) -> None:
    made.pack("block.mtp", 64, 64)


def shape(made: Saved) -> None:
    made.pack("block.up", 64, 64)


def part_of_a_stack(made: Saved) -> None:
    made.drop("experts.1.w2")


def e5m2_layer(made: Saved) -> None:
    """Stores two layers in compressed-tensors' layout: one in 4 bit, one in E5M2."""
    bias = {"block.up.bias": made.weights["block.up"].bias}
    made.floats |= bias | {name: value.float().contiguous() for name, value in stacks(made).items()}
    made.weights.clear()
    parts = {
        "block.up": packed(made.exact["block.up"].float(), 4),
        "block.down": e5m2(made.exact["block.down"].float()),
    }
    made.floats |= {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
    made.settings = scheme("mixed-precision", 4)


def stacks(made: Saved) -> dict[str, torch.Tensor]:
    """Returns the float tensors of the table, the head and the experts."""
    exact = made.exact
    both = [torch.cat([exact[f"experts.{i}.w1"], exact[f"experts.{i}.w3"]]) for i in range(entry_points.EXPERTS)]
    down = [exact[f"experts.{i}.w2"] for i in range(entry_points.EXPERTS)]
    named = {"experts.gate_up_proj": torch.stack(both), "experts.down_proj": torch.stack(down)}
    return named | {"table.weight": exact["table"]}


def lacks_a_shard(path: Path) -> None:
    entry_points.in_shards(path, lambda shard, table: table.update({"norm.bias": shard.name}))


def has_another_shard(path: Path) -> None:
    entry_points.in_shards(
        path, lambda shard, table: save_file({"norm.extra": torch.zeros(3)}, shard, {"format": "pt"})
    )


def drop_float(made: Saved) -> None:
    del made.floats["norm.bias"]


NO_ARGUMENT = {"sentence-transformers": NONE}
NO_DEVICE = NO_ARGUMENT | {"inspect --model": NONE}
MAPPED = {"*": NONE, "from_pretrained": STOPS, "diffusers": STOPS}
LOST = r"has no place for block.mtp \(packed layer\); its own Linear layers are for example .*WAY(ignore='block.mtp') leaves"
CONFIG = "quantization_config=MarlinConfig({})"
WAYS = {
    "from_pretrained": CONFIG,
    "diffusers": CONFIG,
    "sentence-transformers": "load_quantized(model, path, {})",
    "load_quantized": "{}",
    "load_quantized, meta": "{}",
}
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
        r"names begin with '_orig_mod.llm.'",
        {"diffusers": STOPS},
    ),
    "names": Case(
        "no packed layer has a place",
        lambda made: made.renamed(
            lambda name: (
                name.replace("block", "blk").replace("table", "tab").replace("head", "out").replace("experts", "mix")
            )
        ),
        "The load stops and names layers of both sides.",
        r"has no place for .*blk.down \(packed layer\).*its own Linear layers are for example",
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
        r"has no place for score \(packed layer\)",
        {"*": STOPS, "from_pretrained": LOADS, "diffusers": LOADS},
    ),
    "lost layer": Case(
        "the checkpoint lacks a layer",
        lambda made: made.drop("block.down"),
        "The load stops, or the library treats the layer like one of floats that is missing.",
        "the checkpoint lacks block.down.weight",
        {"*": STOPS, "from_pretrained": HOST, "diffusers": HOST},
    ),
    "other shape": Case(
        "a layer has another shape",
        shape,
        "The load stops with both shapes. `inspect --model` does not see it, because it reads only headers.",
        r"layer 'block.up': expected a weight of \[128, 64\] as in the model, the checkpoint's is \[64, 64\]",
        {"*": STOPS, "inspect --model": NONE},
    ),
    "partly packed": Case(
        "a mixture that is packed in part",
        part_of_a_stack,
        "The load stops and names the experts' layers that are not packed.",
        r"the experts of a mixture lack the layers experts.1.w2",
        {"*": STOPS},
    ),
    "unsupported kind": Case(
        'a layer of an unsupported kind, such as E5M2, and `on_unsupported="error"`',
        e5m2_layer,
        "The load stops and names the layer. Without the argument, the layer becomes floats, with a warning.",
        r"layer 'block.down'.*E5M2.*WAY(on_unsupported='dequantize') decodes it to floats",
        {"*": STOPS, "inspect --model": NONE, "diffusers": NONE, "sentence-transformers": NONE},
        {"on_unsupported": "error"},
    ),
    "lost shard": Case(
        "the checkpoint lacks a shard",
        lambda made: None,
        "The load stops and names the shard.",
        r"00002-of-00002.safetensors",
        {"*": STOPS, "sentence-transformers": NONE},
        written=lacks_a_shard,
    ),
    "further shard": Case(
        "a shard that the index does not list",
        lambda made: None,
        "The file is not read.",
        ends={"sentence-transformers": NONE},
        written=has_another_shard,
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
        "The load stops, or the library treats it as in a checkpoint of floats.",
        "the checkpoint lacks norm.bias",
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
    "device": Case(
        '`device="mps"`, `device_map={"": "mps"}`',
        lambda made: None,
        "Layers and tensors are loaded to that device.",
        ends=NO_DEVICE,
        options={"device": "mps"},
    ),
    "offload": Case(
        "`device_map` with the disk or with a device that has no kernels",
        lambda made: None,
        "The load stops and names both kinds of device that it expects.",
        r"device_map: expected cpu or mps, got 'disk' for 'block'",
        MAPPED,
        {"device_map": dict.fromkeys(("table", "norm", "experts", "head"), "cpu") | {"block": "disk"}},
    ),
}

# Rows of the table whose cells are tested elsewhere.
TENSOR_PARALLEL = Case(
    "`DistributedConfig(tp_size=2)`, `split=SplitPlan(...)`",
    lambda made: None,
    "Each process reads its parts of the layers that the plan splits.",
    ends={"*": NONE, "from_pretrained": LOADS, "load_quantized": LOADS, "load_quantized, meta": LOADS},
)
THREADS = Case(
    "`load_quantized` loads another model in a second thread",
    lambda made: None,
    "Both models are right.",
    ends={"inspect --model": NONE},
)


def outcome(entry_point: str, case: Case, path: Path) -> nn.Module:
    made = saved(tied=entry_point not in UNTIED)
    case.change(made)
    made.write(path)
    case.written(path)
    return quietly(lambda: ENTRY_POINTS[entry_point](path, **case.options))


def message(case: Case, entry_point: str) -> str:
    """Returns the regular expression for the error at an entry point."""

    def way(found: re.Match[str]) -> str:
        name, value = found[1].split("=")
        words = (
            f"--{name.replace('_', '-')} {value.strip(chr(39))}"
            if entry_point not in WAYS
            else WAYS[entry_point].format(found[1])
        )
        return re.escape(words)

    return re.sub(r"WAY\((.*?)\)", way, case.message).replace("\\ ", " ").replace(" ", r"\s+")


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("name", CASES)
def test_a_case_ends_as_the_page_says(name, entry_point, tmp_path, request) -> None:
    case = CASES[name]
    if case.end(entry_point) == NONE:
        pytest.skip("the case cannot occur at this entry point")
    if case.end(entry_point) == STOPS:
        with pytest.raises((ValueError, OSError), match=message(case, entry_point)):
            outcome(entry_point, case, tmp_path / "saved")
        return
    device = request.getfixturevalue("mps") if "device" in case.options else "cpu"
    model = outcome(entry_point, case, tmp_path / "saved")
    assert type(model.block["up"]) is MarlinLinear
    empty = {tensor for tensor, value in model.state_dict().items() if value.is_meta}
    if case.end(entry_point) == HOST:
        assert empty == ({case.message.rpartition(" ")[2]} if entry_point == "diffusers" else set())
        return
    assert {tensor.device.type for tensor in model.state_dict().values()} == {device}
    floats = [name for name in case.floats if name != "head" or entry_point not in UNTIED]
    for layer in entry_points.PACKED:
        kind = (MarlinEmbedding, nn.Embedding) if layer == "table" else (MarlinLinear, nn.Linear)
        assert type(model.get_submodule(layer)) is kind[layer in floats]
    assert isinstance(model.experts, MarlinExperts)
    assert model.norm.weight.dtype == case.options.get("dtype", torch.float32)
    if entry_point not in UNTIED:
        table, head = model.table, model.head
        assert head.weight is table.weight if floats else head.b_packed is table.b_packed
    with torch.no_grad():
        found, expected = model.eval()(IDS.to(device)).cpu().double(), saved(tied=entry_point not in UNTIED).logits()
    assert float((found - expected).norm() / expected.norm()) < (0.02 if "dtype" in case.options else 1e-5)


@pytest.mark.parametrize(
    "entry_point", [entry_point for entry_point in ENTRY_POINTS if THREADS.end(entry_point) == LOADS]
)
def test_two_loads_in_two_threads_give_the_same(entry_point, tmp_path) -> None:
    made, other = saved(tied=entry_point not in UNTIED), saved(tied=True)
    path, second = made.write(tmp_path / "first"), other.write(tmp_path / "second")
    # While a library creates a model, it replaces functions of torch in all threads. This model is created before the
    # threads start, so that it gets torch's own functions.
    own = entry_points.SmallNet(entry_points.net_config(second)).float()
    loads = [(lambda: ENTRY_POINTS[entry_point](path), made), (lambda: entry_points.into(own, second, {}), other)]
    found: dict[int, torch.Tensor] = {}

    def load(index: int) -> None:
        with torch.no_grad():
            found[index] = loads[index][0]().eval()(IDS).double()

    threads = [threading.Thread(target=load, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (_, source) in enumerate(loads):
        assert float((found[index] - source.logits()).norm() / source.logits().norm()) < 1e-5


def in_parts(rank: int, world: int, path: Path, expected: torch.Tensor) -> None:
    """Runs in each process."""
    styles = {"block.up": MarlinColwiseParallel(), "block.down": MarlinRowwiseParallel()}
    options = {
        "from_pretrained": {"distributed_config": DistributedConfig(tp_size=world)},
        "load_quantized": {"split": SplitPlan(meshes(world)[-1], styles)},
        "load_quantized, meta": {"split": SplitPlan(meshes(world)[-1], styles)},
    }
    assert options.keys() == {entry_point for entry_point in ENTRY_POINTS if TENSOR_PARALLEL.end(entry_point) == LOADS}
    for entry_point, given in options.items():
        model = ENTRY_POINTS[entry_point](path, **given)
        assert (type(model.block["up"]), type(model.block["down"])) == (ColumnPart, RowPart)
        with torch.no_grad():
            assert float((model.eval()(IDS).double() - expected).norm() / expected.norm()) < 1e-5


def test_processes_load_parts(tmp_path) -> None:
    made = saved(tied=True)
    run(in_parts, 2, tmp_path, made.write(tmp_path / "saved"), made.logits())


def table() -> str:
    shown = [entry_point for entry_point in ENTRY_POINTS if entry_point != "load_quantized, meta"]
    lines = [f"| case | {' | '.join(shown)} | what happens |", "|---" * (len(shown) + 2) + "|"]
    for case in (*CASES.values(), TENSOR_PARALLEL, THREADS):
        ends = [case.end(entry_point) for entry_point in shown]
        lines.append(f"| {case.what} | {' | '.join(ends)} | {case.sentence} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert page_section.section(PAGE, SECTION) == table()


if __name__ == "__main__":
    page_section.main(PAGE, SECTION, table)
