"""What the tests of several hosts share; they start real processes, as those of `tests/system` do."""

import pytest

COLUMNS = (
    "| mix | fault | answers | wrong, hung, failed | longest pause, s | found again, s | stall, s |"
)


def pytest_collection_modifyitems(config, items):
    """Leave out the faults that are not of a mix: the clusters of the mixes can be shared by the others."""
    foreign = []
    for item in items:
        if "tests/host_faults" in item.path.as_posix():
            item.add_marker(pytest.mark.system)
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if "fault" in params and not params["fault"].is_for(params["cluster"]):
                foreign.append(item)
    config.hook.pytest_deselected(items=foreign)
    items[:] = [item for item in items if item not in foreign]


@pytest.fixture(scope="session")
def show(request):
    """Write a line to the terminal, at once: the whole of it takes an hour."""
    plugins = request.config.pluginmanager
    reporter = plugins.get_plugin("terminalreporter")  # none under xdist

    def write(line):
        if reporter is not None:
            with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
                reporter.ensure_newline()
                reporter.write_line(line)

    return write


@pytest.fixture(scope="session")
def show_row(show):
    """Write a row of the table, under its head."""
    head = [COLUMNS, "|---|---|---|---|---|---|---|"]

    def write(row):
        while head:
            show(head.pop(0))
        show(row)

    return write
