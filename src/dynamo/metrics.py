"""`python -m dynamo.metrics`: the load of all workers of a component as one page of metrics, as in Dynamo 0.3."""

import sys

from dynamo.router import load_metrics

if __name__ == "__main__":
    sys.exit(load_metrics.main())
