"""The fixture of the articles' calls: real processes, as in the system tests."""

import pytest
from deployment import Deployment


@pytest.fixture
def deployment(tmp_path):
    deployment = Deployment(tmp_path)
    yield deployment
    deployment.end()
