"""Where the server is that outside clients' suites run against."""

from pathlib import Path

import pytest
import pytest_asyncio


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--url", help="of a running server with the default model, e.g. http://localhost:8000")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One event loop for all tests here: clients keep their connections from one to the next.

    pytest hands over the items of the whole run; elsewhere a test and its fixtures share a loop of their own.
    """
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest) -> str:
    """Without one there is nothing to test."""
    url = request.config.getoption("--url", default=None)
    if not url:
        pytest.skip("needs --url of a running server")
    return str(url)
