"""`python -m dynamo.sdk module:Class --service-name NAME`: one service of a graph."""

import sys

from dynamo.sdk import process

if __name__ == "__main__":
    sys.exit(process.main())
