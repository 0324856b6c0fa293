"""A pytest plugin: a run takes a sample of the cases; with --everything it takes all."""

from collections import defaultdict

import pytest

from tests.support.samples import covering

SAMPLE = pytest.StashKey[tuple[int, int]]()  # the number of cases in the sample, and of all

# What shows that a test uses the software Metal device: fixtures, and folders whose tests launch kernels.
SLOW = {"device", "mps", "kernels", "softmetal"}


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="all cases (make test-all) instead of a sample")


def pytest_configure(config):
    config.addinivalue_line("markers", "whole: beyond the sample that make test takes; only --everything runs it")
    config.addinivalue_line("markers", "beyond_sample: on mps only with --everything")


def pytest_collection_modifyitems(config, items):
    """Deselects the cases beyond the sample, unless --everything asks for them.

    The sample has all cases on the CPU. Of a product of lists of arguments, it has so few cases on the software Metal
    device that each value of each list occurs.
    """
    collected = len(items)
    if not config.getoption("--everything"):
        beyond, products = set(), defaultdict(list)
        for item in items:
            lists = item.callspec._idlist if hasattr(item, "callspec") else ()  # the name of the chosen value of each
            device = item.callspec.params.get("device", "mps") if lists else "cpu"
            if item.get_closest_marker("whole") or (device == "mps" and item.get_closest_marker("beyond_sample")):
                beyond.add(item)
            elif device == "mps" and len(lists) > 1 and SLOW & {*item.fixturenames, *item.nodeid.split("/")}:
                products[item.parent, item.originalname].append((item, set(enumerate(lists))))
        for cases in products.values():
            sample = covering([parts for _, parts in cases])
            beyond |= {item for i, (item, _) in enumerate(cases) if i not in sample}
        config.hook.pytest_deselected(items=list(beyond))
        items[:] = [item for item in items if item not in beyond]
    config.stash[SAMPLE] = (len(items), collected)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["sample"] = session.config.stash.get(SAMPLE, (0, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Keeps what a worker of pytest-xdist collected: each of them collects all cases."""
    node.config.stash[SAMPLE] = tuple(getattr(node, "workeroutput", {}).get("sample", (0, 0)))


def pytest_terminal_summary(terminalreporter, config):
    taken, collected = config.stash.get(SAMPLE, (0, 0))
    if taken < collected:
        terminalreporter.write_line(
            f"sample: {taken:,} of {collected:,} cases; `make test-all` (--everything) runs all"
        )
