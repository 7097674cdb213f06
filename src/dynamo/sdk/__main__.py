"""`python -m dynamo.sdk module:Class --service-name NAME`: one service of a graph."""

import signal
import sys

from dynamo.base import errors
from dynamo.observability import logs
from dynamo.sdk import process

if __name__ == "__main__":
    try:
        logs.configure()
        sys.exit(process.main())
    except errors.DynamoError as error:
        sys.stderr.write(f"python -m dynamo.sdk: {error}\n")
        sys.exit(2 if isinstance(error, errors.ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
