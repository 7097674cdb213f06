"""`DynamoConnector` under the name that vLLM's --kv-transfer-config has for it with NVIDIA Dynamo."""

from dynamo.engine.adapters.vllm import tier_connector

DynamoConnector = tier_connector.DynamoConnector
