"""`python -m dynamo.sglang`: a worker with SGLang as its engine."""

from dynamo.base import process_setup
from dynamo.worker import main

if __name__ == "__main__":
    process_setup.end_now(main.main("sglang"))
