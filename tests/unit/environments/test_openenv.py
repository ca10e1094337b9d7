"""OpenEnv environments, with the client of the package and a server of its protocol on this machine."""

import json
import threading
from collections.abc import Iterator

import pytest

from tests.helpers.wait import wait_until
from tunekit.environments import openenv
from tunekit.environments.config import OpenEnvConfig
from tunekit.errors import FieldError, UserError

serving = pytest.importorskip("websockets.sync.server")


OPEN: set[object] = set()  # connections that the client has not closed


def serve(connection) -> None:
    """Count up to three: each step adds the number in the action, and its reward is that number."""
    OPEN.add(connection)
    try:
        answer_messages(connection)
    finally:
        OPEN.discard(connection)


def answer_messages(connection) -> None:
    total = 0
    for text in connection:
        message = json.loads(text)
        if message["type"] == "close":
            return
        data = message["data"]
        total = data.get("seed", 0) if message["type"] == "reset" else total + int(data["n"])
        observation = {"total": total, "hint": "add"}
        reward = None if message["type"] == "reset" else float(data["n"])
        answer = {"observation": observation, "reward": reward, "done": total >= 3}
        connection.send(json.dumps({"type": "observation", "data": answer}))


@pytest.fixture
def url() -> Iterator[str]:
    with serving.serve(serve, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openenv", None)
    with pytest.raises(UserError, match="openenv-core"):
        OpenEnvConfig("http://localhost:1").check()
    with pytest.raises(FieldError):
        OpenEnvConfig("localhost")


def test_episode_on_a_server(url: str) -> None:
    pytest.importorskip("openenv.core.generic_client")
    for config, answers in (
        (OpenEnvConfig(url), ('{"n": 1}', "one", '{"n": 2}')),
        (OpenEnvConfig(url, action_field="n", observation_field="total"), ("1", "0", "2")),
    ):
        config.check()
        environment = config.create()
        first = environment.reset(answer=3)
        assert first == ("0" if config.observation_field else '{"total": 0, "hint": "add"}')
        observations = [environment.step(answer) for answer in answers]
        assert observations[0] == first.replace("0", "1") and observations[2] is None
        assert environment.get_reward() == 3 and environment.done
        environment.close()


def test_check_closes_the_connection_of_a_failed_reset(url: str) -> None:
    pytest.importorskip("openenv.core.generic_client")
    config = OpenEnvConfig(url, observation_field="missing")
    with pytest.raises(UserError, match=r"environment\.base_url: .*missing"):
        config.check()
    wait_until(lambda: not OPEN)


def test_server_that_is_not_there_is_named() -> None:
    pytest.importorskip("openenv.core.generic_client")
    with pytest.raises(UserError, match=r"environment\.base_url: .*127\.0\.0\.1:9"):
        OpenEnvConfig("http://127.0.0.1:9").check()
    assert openenv.load_client().__name__ == "GenericEnvClient"
