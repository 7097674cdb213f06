"""`python -m dynamo.semantic_encoder`: the semantic router's encoder models, in a process of their own."""

from dynamo.base import process_setup
from dynamo.worker import semantic_encoder

if __name__ == "__main__":
    process_setup.end_now(semantic_encoder.main())
