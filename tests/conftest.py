import pytest


def pytest_addoption(parser):
    parser.addoption("--everything", action="store_true", help="whole matrices of shapes instead of samples")


@pytest.fixture(scope="session")
def everything(request) -> bool:
    """Whether whole matrices of shapes are asked for (make test-all)."""
    return request.config.getoption("--everything")
