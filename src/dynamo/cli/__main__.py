"""The script `dynamo`, and `python -m dynamo.cli`: Ctrl-C ends it without a trace while its modules are loaded."""

import importlib
import signal


def main() -> None:
    """Run the command and exit."""
    former = signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = importlib.import_module("dynamo.cli.main")
    signal.signal(signal.SIGINT, former)
    command.main()


if __name__ == "__main__":
    main()
