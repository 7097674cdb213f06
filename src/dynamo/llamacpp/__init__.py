"""The name `python -m dynamo.llamacpp`: a worker with llama.cpp as its engine."""
