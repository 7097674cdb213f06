"""`python -m dynamo.sglang.worker`: the same as `python -m dynamo.sglang`, under a name that articles use."""

from dynamo.base import process_setup
from dynamo.worker import main

if __name__ == "__main__":
    process_setup.end_now(main.main("sglang"))
