"""One kind of worker.

dynamo serve graphs.agg:Frontend -f configs/agg.yaml
"""

from components.services import Frontend, Processor, VllmWorker

Frontend.link(Processor).link(VllmWorker)
