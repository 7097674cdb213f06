"""Prefill workers beside decode workers.

dynamo serve graphs.disagg:Frontend -f configs/disagg.yaml
"""

from components.services import Frontend, PrefillWorker, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker).link(PrefillWorker)
