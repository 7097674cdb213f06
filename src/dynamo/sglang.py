"""`python -m dynamo.sglang`: a worker with SGLang as its engine."""

import sys

from dynamo.worker import main

if __name__ == "__main__":
    sys.exit(main.main("sglang"))
