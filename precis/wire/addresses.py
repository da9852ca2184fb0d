"""Where Redis is, read from a URL: one server, a cluster, or the one that sentinels name.

    redis://host:6379/0, rediss://..., unix://...                   one server, as redis-py has it
    redis+cluster://user:password@host:6379,host:6380               a cluster; any of its nodes
    redis+sentinel://user:password@host:26379,host:26380/NAME/0     the master called NAME; the user is the master's

`rediss+cluster` and `rediss+sentinel` talk TLS. Options follow after `?` as for one server; for sentinels with a
password of their own there are `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

_PORTS = {"one": 6379, "cluster": 6379, "sentinel": 26379}
_OWN = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True)
class Address:
    """A URL taken apart.

    Attributes:
        kind: what it leads to.
        plain: a URL of one server, of the first host: user, database and options of all.
        hosts: names and ports, of a cluster's nodes or of sentinels.
        service: the master's name at the sentinels.
        sentinel_login: username and password of the sentinels themselves.
    """

    kind: Literal["one", "cluster", "sentinel"]
    plain: str
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_login: tuple[tuple[str, str], ...] = ()

    @property
    def is_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.plain.startswith("rediss://")


def address_of(url: str) -> Address:
    """Take a URL apart.

    Raises:
        ValueError: saying what is wrong with it.
    """
    scheme, _, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    if scheme in ("redis", "rediss", "unix"):
        return Address("one", url)
    if base not in ("redis", "rediss") or kind not in ("cluster", "sentinel"):
        raise ValueError(
            f"{scheme}:// is no way to Redis: use redis://, rediss://, unix://, redis+cluster:// or redis+sentinel:// "
            "(rediss+... for TLS)"
        )
    parts = urlsplit(f"{base}://{rest}")
    login, _, listed = parts.netloc.rpartition("@")
    hosts = tuple(_host_of(each, _PORTS[kind]) for each in listed.split(","))
    service, _, database = parts.path.strip("/").partition("/")
    if kind == "cluster":
        service, database = "", service
        if database not in ("", "0"):
            raise ValueError("a cluster has database 0 only")
    elif not service:
        raise ValueError(
            "redis+sentinel:// needs the master's name after the hosts: redis+sentinel://host:26379/mymaster"
        )
    options = parse_qsl(parts.query)
    (host, port), user = hosts[0], f"{login}@" if login else ""
    query = urlencode([pair for pair in options if pair[0] not in _OWN])
    plain = f"{base}://{user}{_quoted(host)}:{port}/{database or 0}" + (f"?{query}" if query else "")
    own = tuple((_OWN[name], value) for name, value in options if name in _OWN)
    return Address("cluster" if kind == "cluster" else "sentinel", plain, hosts, service, own)


def _host_of(text: str, default: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no host: give host:port, several by commas")
    return parts.hostname, parts.port or default


def _quoted(host: str) -> str:
    return f"[{host}]" if ":" in host else host
