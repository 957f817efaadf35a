"""RL over two network namespaces without Ray, weights and traces in S3, with kills and cuts (`two_hosts.py`)."""

import random
from pathlib import Path

import pytest

from benchmarks import two_hosts

MINUTES = 2.0


@pytest.mark.slow
def test_nothing_is_lost_when_hosts_are_cut_off_and_processes_killed(tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="needs the extra test-slow")
    pytest.importorskip("moto.server", reason="needs the extra test-slow")
    if reason := two_hosts.why_not():
        pytest.skip(reason)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    account = two_hosts.drill(tmp_path, 60.0 * MINUTES, seed)
    print(two_hosts.report(account))
    assert not account.wrong
    assert account.kills.total() > 2
    assert account.cuts.total() > 2
    assert account.steps > 2
