"""Prefill workers beside decode workers, chosen by cached prefixes.

dynamo serve graphs.disagg_router:Frontend -f configs/disagg_router.yaml
"""

from components.services import Frontend, PrefillWorker, Processor, Router, VllmWorker

Frontend.link(Processor).link(Router).link(VllmWorker).link(PrefillWorker)
