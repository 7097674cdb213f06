"""`python -m dynamo.sglang`, or `python -m dynamo.sglang.worker`: a worker with SGLang as its engine."""
