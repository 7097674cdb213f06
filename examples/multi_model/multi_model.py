"""One frontend, and two models behind it, each with workers of its own.

dynamo serve multi_model:Frontend -f config.yaml
"""

from dynamo.sdk import service
from dynamo.sdk.settings import render_flags


class Worker:
    """A worker, whose section in the YAML file has its flags."""

    @classmethod
    def arguments(cls, config):
        return render_flags(config.section(cls.__name__))


@service(dynamo={"namespace": "dynamo"}, resources={"cpu": 1}, module="dynamo.native")
class SmallModel(Worker):
    """Answers requests for the first model."""


@service(dynamo={"namespace": "dynamo"}, resources={"cpu": 1}, module="dynamo.mocker")
class LargeModel(Worker):
    """Answers requests for the second model."""


@service(dynamo={"namespace": "dynamo"}, module="dynamo.frontend", port=8000)
class Frontend:
    """The HTTP API: the field `model` of a request says which workers get it."""

    @classmethod
    def arguments(cls, config):
        return ["--http-port", str(config.section("Frontend")["port"])]


Frontend.link(SmallModel).link(LargeModel)
