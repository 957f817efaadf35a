"""The mesh: which rank is in which group, and what a job that does not fit its settings says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, open_ranks

from etude.errors import InputError
from etude.parallel.mesh import open_mesh
from etude.parallel.settings import ParallelSettings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with open_ranks(4) as ranks:
        yield ranks


def members(settings: ParallelSettings) -> dict[str, list[int]]:
    with open_mesh(settings, CPU) as mesh:
        assert mesh is not None
        groups = {
            "experts": mesh.expert_group,
            "context": mesh.context_group,
            "replica": mesh.replica_group,
            "expert_shard": mesh.experts.get_group("expert_shard"),
        }
        assert mesh.share("leader" if mesh.leads else None) == "leader"
        assert mesh.sum(torch.tensor(mesh.rank)).item() == 6
        return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def test_expert_groups_are_independent_of_data_and_context_ranks(four: Ranks) -> None:
    found = four.run(members, ParallelSettings(dp_shard=2, cp=2, ep=4))
    assert [each["context"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(each["experts"] == each["replica"] == [0, 1, 2, 3] for each in found)
    assert [each["expert_shard"] for each in found] == [[0], [1], [2], [3]]
    found = four.run(members, ParallelSettings(dp_replicate=2, dp_shard=2, ep=2))
    assert [each["experts"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["replica"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    found = four.run(members, ParallelSettings(dp_shard=4, ep=2))
    assert [each["experts"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["expert_shard"] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_job_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = r"describes 4 processes \(dp_replicate 1 x dp_shard 2 x cp 2\), but the job has 3"
    with pytest.raises(InputError, match=message), open_mesh(ParallelSettings(dp_shard=2, cp=2), CPU):
        pass
    with open_mesh(ParallelSettings(), CPU) as mesh:
        assert mesh is None
