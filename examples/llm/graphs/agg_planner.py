"""One kind of worker, as many as the load needs.

dynamo serve graphs.agg_planner:Frontend -f configs/agg_planner.yaml
"""

from components.services import Frontend, Planner, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker)
Frontend.link(Planner)
