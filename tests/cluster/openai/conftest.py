"""The clusters of the directory above, with an HTTP door."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost


@pytest.fixture
async def split(start_cluster: StartCluster) -> FakeCluster:
    """One context worker and one generation worker."""
    peers: Peers = {}
    return await start_cluster(FakeHost("context", peers), FakeHost("generation", peers), http=True)


@pytest.fixture
async def aggregated(start_cluster: StartCluster) -> FakeCluster:
    """One worker that does both."""
    return await start_cluster(FakeHost("aggregated"), route="aggregated", http=True)
