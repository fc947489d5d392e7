"""What the Redis tier makes of a server's answers, without a server."""

from __future__ import annotations

import numpy as np
import pytest

from kvweave.errors import TierError
from kvweave.store.tier import ABSENT, UNREADABLE

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvweave[redis]'")

from kvweave.store.redis_tier import RedisTier  # noqa: E402

WRONG_TYPE = redis.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")


class Server:
    """Answers what it is told to, as redis-py does: an error is raised, unless it is asked not to."""

    def __init__(self, *answers: object) -> None:
        self.answers = [*answers]

    def pipeline(self, transaction: bool) -> Server:
        return self

    def get(self, key: bytes) -> None: ...

    def execute(self, raise_on_error: bool = True) -> list[object]:
        wrong = [answer for answer in self.answers if isinstance(answer, Exception)]
        if wrong and raise_on_error:
            raise wrong[0]
        return self.answers

    def close(self) -> None: ...


def lengths(*answers: object) -> list[int]:
    tier = RedisTier("redis://127.0.0.1:1")
    tier._client = Server(*answers)
    keys = [bytes([number]) * 48 for number in range(len(answers))]
    return tier.get(keys, [np.empty(3, np.uint8) for _ in keys])


def test_a_key_of_another_type_costs_only_itself() -> None:
    assert lengths(b"abc", WRONG_TYPE, None, b"four") == [3, UNREADABLE, ABSENT, 4]


def test_any_other_error_is_the_servers() -> None:
    with pytest.raises(TierError, match="LOADING"):
        lengths(b"abc", redis.ResponseError("LOADING the data set"))


def test_a_server_that_does_not_know_clusters_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RedisTier("redis://127.0.0.1:1")
    monkeypatch.setattr(tier._node, "info", lambda _: {})
    assert tier._server is tier._node
