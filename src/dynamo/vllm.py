"""`python -m dynamo.vllm`: a worker with vLLM as its engine.

Python imports this module in vLLM's processes, too, before vLLM: there it sets up their logs.
"""

from dynamo.base import process_setup
from dynamo.engine.adapters.vllm import plugin
from dynamo.worker import main

if __name__ == "__main__":
    process_setup.end_now(main.main("vllm"))
elif __name__ == "__mp_main__":
    plugin.log_handler()
