"""Property tests draw the same examples each time; new ones in each run with TUNEKIT_RANDOM=1. None has a deadline.

Every test begins with the same random numbers, whatever has run before it in its process, and so does every fixture
that several tests share: what a test draws does not depend on how tests were divided among processes.

No test leaves prepared rows behind: they are kept only where one names a folder for them.
"""

import os
import random
import sys

import pytest
from hypothesis import settings

settings.register_profile("tunekit", derandomize=os.environ.get("TUNEKIT_RANDOM") != "1", deadline=None)
settings.load_profile("tunekit")
os.environ["TUNEKIT_CACHE"] = "off"


def seed() -> None:
    """Of what a test has not imported it draws nothing."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    if fixturedef.scope != "function":
        seed()
