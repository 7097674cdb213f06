"""`python -m dynamo.mocker`: a worker that simulates an engine: real scheduling and timing, made-up tokens."""

from dynamo.base import process_setup
from dynamo.worker import main

if __name__ == "__main__":
    process_setup.end_now(main.main("mocker"))
