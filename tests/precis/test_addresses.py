"""URLs of Redis: what each part becomes, and what is refused."""

from __future__ import annotations

import pytest

from precis.wire.addresses import address_of


@pytest.mark.parametrize("url", ["redis://h:1/2?socket_timeout=3", "rediss://u:p@h", "unix:///run/redis.sock?db=1"])
def test_one_server_is_as_it_was_given(url: str) -> None:
    found = address_of(url)
    assert (found.kind, found.plain, found.hosts) == ("one", url, ())


def test_a_cluster() -> None:
    found = address_of("rediss+cluster://user:p%40ss@one:7000,two,[::1]:7002/0?ssl_ca_certs=%2Fca.pem")
    assert found.hosts == (("one", 7000), ("two", 6379), ("::1", 7002))
    assert found.plain == "rediss://user:p%40ss@one:7000/0?ssl_ca_certs=%2Fca.pem"
    assert (found.kind, found.is_tls) == ("cluster", True)


def test_sentinels() -> None:
    found = address_of("redis+sentinel://:secret@a,b:26380/mymaster/3?sentinel_password=own&client_name=x")
    assert found.hosts == (("a", 26379), ("b", 26380))
    assert (found.service, found.sentinel_login) == ("mymaster", (("password", "own"),))
    assert found.plain == "redis://:secret@a:26379/3?client_name=x"
    assert not found.is_tls


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis+sentinel://a:26379", "master's name"),
        ("redis+cluster://a:1/2", "database 0 only"),
        ("redis+cluster://", "is no host"),
        ("redis+cluster://a,,b", "is no host"),
        ("http+cluster://a", "is no way to Redis"),
        ("localhost:6379", "is no way to Redis"),
        ("redis+magic://a", "is no way to Redis"),
    ],
)
def test_what_leads_nowhere_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        address_of(url)
