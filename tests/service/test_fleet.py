"""What the API knows of models before anybody asks."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from precis.text import Prompter
from service import fleet
from service.fleet import Fleet
from tests.stack import Stack


def test_tokenizers_are_ready_before_the_first_request(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Prompter] = []
    whole = fleet._use

    def noted(prompter: Prompter) -> None:
        used.append(prompter)
        whole(prompter)

    monkeypatch.setattr(fleet, "_use", noted)

    async def run() -> None:
        client = Redis.from_url(stack.server.url)
        known = Fleet(client, grace_s=1.0)
        await known.prepare()
        await known.prepare()
        assert len(used) == 1  # once
        (name,) = await known.models()
        assert await known.prompter(await known.card(name)) is used[0]
        await client.aclose()

    asyncio.run(run())
