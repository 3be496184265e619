"""Fixtures that every test may use."""

from collections.abc import Iterator

import pytest

from deltamesh.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Up to 8 local gloo ranks, started when a test first asks for them and shared by the session."""
    with RankPool(8) as pool:
        yield pool
