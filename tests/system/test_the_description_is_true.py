"""`schemathesis` asks a frontend whatever `/openapi.json` allows, and much that it forbids.

Whatever it asks: no 5xx, a status and a body that are described, and what is forbidden is refused.
"""

from unittest import mock

import pytest
import requests
import schemathesis
import schemathesis.specs.openapi.schemas  # here, in one thread: imported late, its syntax trees meet others
from deployment import MODEL, Deployment
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from dynamo.frontend import service
from dynamo.frontend.apis import openapi
from dynamo.frontend.console import api as console

NUM_EXAMPLES = 6  # of each kind for each operation
# It makes bodies that the schema allows and that mean nothing (unknown tools, parameters that contradict each other): a
# 400 is right for them.
load_all_checks()
LEFT_OUT = CHECKS.get_by_names(["positive_data_acceptance"])
CASES = [
    (operation.method, openapi.openapi_path(operation.path), mode)
    for operation in service.Frontend._declare_operations(*[mock.MagicMock()] * 6)
    if operation.path != console.EVENTS  # its answer does not end
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or operation.request is not None
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    deployment = Deployment(tmp_path_factory.mktemp("description"))
    frontend = deployment.frontend()
    frontend.others = [deployment.mocker("--speedup-ratio", "1000000")]
    frontend.await_models([MODEL])
    yield frontend
    deployment.end()


@pytest.fixture(scope="module")
def described(served):
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def keep_it_short(body):
    """Ask for the model that there is, and for few tokens; what is wrong stays wrong."""
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str) and body["model"]:
        body["model"] = MODEL
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int) and 8 < body[name] < 2**31:
            body[name] = 8
    if isinstance(body.get("n"), int) and 2 < body["n"] <= 128:
        body["n"] = 2


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_whatever_is_asked_the_answer_is_as_described(described, served, method, path, mode):
    operation = described[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case):
        keep_it_short(case.body)
        case.call_and_validate(base_url=served.url, session=session, excluded_checks=LEFT_OUT)

    with requests.Session() as session:
        ask()
