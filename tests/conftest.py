"""Seeds of all tests. Property tests use the same examples in each run; set TUNEKIT_RANDOM=1 for new ones.

Each test and each shared fixture starts from a fixed seed. Random values therefore do not depend on which tests ran
before in the same process.

The cache of tokenized rows is off unless a test sets its directory.
"""

import gc
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import settings

from tests.helpers import plain_plots

DETERMINISTIC = os.environ.get("TUNEKIT_RANDOM") != "1"
settings.register_profile("tunekit", derandomize=DETERMINISTIC, deadline=None)
settings.load_profile("tunekit")
os.environ["TUNEKIT_CACHE"] = "off"
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored
# Inductor would compile a program for each instruction set of the CPU to test the compiler, 7 CPU seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Transformers and TRL import these if they can, which takes 4 CPU seconds. Tests that need them import them later.
TRACKERS = ("comet_ml", "mlflow", "trackio", "wandb")
# Each takes long: started first, the workers of pytest-xdist finish at the same time.
LONG_FILES = (
    "tests/recipes/test_methods.py",
    "tests/recipes/test_quickstart_example.py",
    "tests/recipes/test_preference_example.py",
    "tests/gpu/test_triton_compiles.py",
    "tests/distributed/layouts/test_two_ranks.py",
    "tests/distributed/layouts/test_preference.py",
    "tests/distributed/recipes/test_killed_ranks.py",
    "tests/distributed/recipes/test_inference.py",
)


def set_seed(name: str) -> None:
    """Seed all random generators that are imported. The seed is a hash of `name`; 0 for the empty name."""
    value = zlib.crc32(name.encode()) if DETERMINISTIC else random.SystemRandom().getrandbits(32)
    random.seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(value)  # torch.manual_seed formats the stack for each type of device
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(value)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    set_seed("")


@pytest.fixture(autouse=True, scope="module")
def fast_plots(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs in this process draw their metrics only in the tests of plots and model cards."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "publishing":
            patch.setitem(sys.modules, plain_plots.PLOTS, plain_plots)
        yield


def pytest_collection() -> None:
    """Hide packages that imports would import without need."""
    sys.modules.update({name: None for name in TRACKERS if name not in sys.modules})  # pyright: ignore


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first in the equal parts of the tests with which the workers of pytest-xdist start."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    files = {name: [item for item in items if item.nodeid.startswith(f"{name}::")] for name in LONG_FILES}
    parts = [[item for name in LONG_FILES[i::count] for item in files[name]] for i in range(count)]
    moved = {item for part in parts for item in part}
    others = iter([item for item in items if item not in moved])
    for i, part in enumerate(parts):
        end = len(items) * (i + 1) // count
        size = max(0, end - sum(map(len, parts[:i])) - len(part))
        part += islice(others, size)
    items[:] = [item for part in parts for item in part] + [*others]


def pytest_collection_finish() -> None:
    """Exclude all that is imported and collected from garbage collection, which would take half a second each time."""
    for name in TRACKERS:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    if fixturedef.scope != "function":
        set_seed(fixturedef.argname)
