"""The command ``muster``, also as ``python -m torchmuster``."""

import signal
import sys


def main() -> int:
    """Import and run the command; Ctrl-C during the imports ends the process without a traceback."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torchmuster.cli.main import main as run_command

    signal.signal(signal.SIGINT, before)
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
