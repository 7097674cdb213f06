"""`python -m dynamo.vllm`: a worker with vLLM as its engine."""

import sys

from dynamo.worker import main

if __name__ == "__main__":
    sys.exit(main.main("vllm"))
