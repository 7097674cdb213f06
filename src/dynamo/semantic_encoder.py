"""`python -m dynamo.semantic_encoder`: the semantic router's encoder models, in a process of their own."""

import sys

from dynamo.worker import semantic_encoder

if __name__ == "__main__":
    sys.exit(semantic_encoder.main())
