"""A pytest plugin: a run contains a sample of the cases; with --everything it contains all cases."""

from collections import defaultdict

import pytest

from tests.support.samples import covering

SAMPLE = pytest.StashKey[tuple[int, int]]()  # the numbers of cases in the sample and in total

# A test uses the software Metal device if it has one of these fixtures or is in one of these folders.
SLOW = {"device", "mps", "kernels", "softmetal"}


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="all cases (make test-all) instead of a sample")


def pytest_configure(config):
    config.addinivalue_line("markers", "whole: beyond the sample that make test takes; only --everything runs it")
    config.addinivalue_line("markers", "beyond_sample: on mps only with --everything")


def pytest_collection_modifyitems(config, items):
    """Deselects the cases outside of the sample, unless --everything is given.

    The sample has all cases on the CPU. If a test combines lists of arguments, the sample has only enough cases on the
    software Metal device for each value of each list to occur.
    """
    collected = len(items)
    if not config.getoption("--everything"):
        beyond, products = set(), defaultdict(list)
        for item in items:
            # the name of the chosen value of each list
            lists = item.callspec._idlist if hasattr(item, "callspec") else ()
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
    """Stores the numbers that a worker of pytest-xdist reports. Each worker collects all cases."""
    node.config.stash[SAMPLE] = tuple(getattr(node, "workeroutput", {}).get("sample", (0, 0)))


def pytest_terminal_summary(terminalreporter, config):
    taken, collected = config.stash.get(SAMPLE, (0, 0))
    if taken < collected:
        terminalreporter.write_line(
            f"sample: {taken:,} of {collected:,} cases; `make test-all` (--everything) runs all"
        )
