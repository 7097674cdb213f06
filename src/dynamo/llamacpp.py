"""`python -m dynamo.llamacpp --model FILE.gguf`: a worker with llama.cpp as its engine."""

from dynamo.base import process_setup
from dynamo.worker import main

if __name__ == "__main__":
    process_setup.end_now(main.main("llamacpp"))
