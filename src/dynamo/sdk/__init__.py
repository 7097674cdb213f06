"""Services as Python classes: a way to write commands, with the names of NVIDIA Dynamo's SDK of 0.3 (docs/sdk.md).

This module is the public face: `from dynamo.sdk import service, endpoint, depends`.
"""

from dynamo.sdk.declaration import DYNAMO_IMAGE as DYNAMO_IMAGE
from dynamo.sdk.declaration import api as api
from dynamo.sdk.declaration import async_on_shutdown as async_on_shutdown
from dynamo.sdk.declaration import async_on_start as async_on_start
from dynamo.sdk.declaration import depends as depends
from dynamo.sdk.declaration import dynamo_context as dynamo_context
from dynamo.sdk.declaration import dynamo_endpoint as dynamo_endpoint
from dynamo.sdk.declaration import endpoint as endpoint
from dynamo.sdk.declaration import liveness as liveness
from dynamo.sdk.declaration import on_shutdown as on_shutdown
from dynamo.sdk.declaration import readiness as readiness
from dynamo.sdk.declaration import service as service
from dynamo.sdk.settings import ServiceConfig as ServiceConfig
