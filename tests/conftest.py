"""Property tests draw the same examples each time; new ones in each run with TUNEKIT_RANDOM=1. None has a deadline.

No test leaves prepared rows behind: they are kept only where one names a folder for them.
"""

import os

from hypothesis import settings

settings.register_profile("tunekit", derandomize=os.environ.get("TUNEKIT_RANDOM") != "1", deadline=None)
settings.load_profile("tunekit")
os.environ["TUNEKIT_CACHE"] = "off"
