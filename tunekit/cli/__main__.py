"""`python -m tunekit.cli`, for launchers that run modules."""

import sys

from tunekit.distributed.worker_env import end_with_launcher

if __name__ == "__main__":
    end_with_launcher(sys.argv[1:])  # first: further imports take seconds on a busy machine
    from tunekit.cli.main import main

    sys.exit(main())
