"""`python -m dynamo.trtllm`: a worker with TensorRT-LLM as its engine."""

from dynamo.base import process_setup
from dynamo.worker import main

if __name__ == "__main__":
    process_setup.end_now(main.main("trtllm"))
