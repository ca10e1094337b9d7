"""`python -m tunekit.cli`, for launchers that run modules."""

import sys

from tunekit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
