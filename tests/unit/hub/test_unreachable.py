"""Without a network, requests to the Hub fail at once."""

import pytest

from tunekit.hub import errors

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


def test_unknown_host_is_refused_unless_a_proxy_resolves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    errors.require_network("localhost")
    with pytest.raises(errors.HubUnreachableError):
        errors.require_network("hub.invalid")  # RFC 2606: never exists
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    errors.require_network("hub.invalid")
