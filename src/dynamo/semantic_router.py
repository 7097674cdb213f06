"""`python -m dynamo.semantic_router`: the semantic router for Envoy, with its classification API and metrics."""

import sys

from dynamo.gateway import main

if __name__ == "__main__":
    sys.exit(main.main())
