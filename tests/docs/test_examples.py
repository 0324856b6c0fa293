"""Every public function and class has an example in its docstring, and the examples pass as doctests."""

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_marlin_metal as tmm

MODULES = (tmm, tmm.ops, tmm.xlstm, tmm.convert, tmm.profiling, tmm.tuning, tmm.layers)
TIMES_A_GPU = {"tune", "trace"}


def public_objects() -> Iterator[tuple[str, object]]:
    for module in MODULES:
        for name in module.__all__:
            found = getattr(module, name)
            if not callable(found) or name in TIMES_A_GPU:
                continue
            if not (inspect.isclass(found) and issubclass(found, Exception) and found.__module__.endswith("errors")):
                yield f"{module.__name__}.{name}", found


@pytest.mark.parametrize(("name", "found"), [pytest.param(*pair, id=pair[0]) for pair in public_objects()])
def test_the_example_does_what_it_says(name: str, found: object, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(found) or "")
    assert examples, f"{name} has no example"
    names = {"torch": torch, "nn": nn, "tmm": tmm}
    test = doctest.DocTest(examples, names, name, None, 0, None)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(test, out=report.append).failed == 0, "".join(report)
