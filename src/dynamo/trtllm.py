"""`python -m dynamo.trtllm`: a worker with TensorRT-LLM as its engine."""

import sys

from dynamo.worker import main

if __name__ == "__main__":
    sys.exit(main.main("trtllm"))
