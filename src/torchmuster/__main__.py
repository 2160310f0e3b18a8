"""``python -m torchmuster`` is the same as ``muster``."""

import sys

from torchmuster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
