"""Property tests draw the same examples each time in CI (`CI` is set there), new ones everywhere else.

No test leaves prepared rows behind: they are kept only where one names a folder for them.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
os.environ["TUNEKIT_CACHE"] = "off"
