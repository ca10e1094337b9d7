"""Property tests draw the same examples each time; new ones in each run with TUNEKIT_RANDOM=1. None has a deadline.

Every test begins with the same random numbers too, whatever has run before it in its process, and so does every fixture
that several tests share: what a test draws does not depend on how tests were divided among processes.

No test leaves prepared rows behind: they are kept only where one names a folder for them.
"""

import os
import random
import sys
import zlib

import pytest
from hypothesis import settings

FIXED = os.environ.get("TUNEKIT_RANDOM") != "1"
settings.register_profile("tunekit", derandomize=FIXED, deadline=None)
settings.load_profile("tunekit")
os.environ["TUNEKIT_CACHE"] = "off"


def seed(name: str) -> None:
    """By a name; 0 by none. Of what a test has not imported it draws nothing."""
    number = zlib.crc32(name.encode()) if FIXED else random.SystemRandom().getrandbits(32)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed("")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    if fixturedef.scope != "function":
        seed(fixturedef.argname)
