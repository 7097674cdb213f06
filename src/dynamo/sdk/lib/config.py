"""`ServiceConfig` where graphs for NVIDIA Dynamo import it."""

from dynamo.sdk import settings

ServiceConfig = settings.ServiceConfig
