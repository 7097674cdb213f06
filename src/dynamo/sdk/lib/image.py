"""`DYNAMO_IMAGE` where graphs for NVIDIA Dynamo import it."""

from dynamo.sdk import declaration

DYNAMO_IMAGE = declaration.DYNAMO_IMAGE
