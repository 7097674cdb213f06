"""One kind of worker, chosen by cached prefixes.

dynamo serve graphs.agg_router:Frontend -f configs/agg_router.yaml
"""

from components.services import Frontend, Processor, Router, VllmWorker

Frontend.link(Processor).link(Router).link(VllmWorker)
