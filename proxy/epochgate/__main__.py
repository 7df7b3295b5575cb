"""`python -m epochgate`."""

import sys

from epochgate.cli import main

if __name__ == "__main__":
    sys.exit(main())
