"""`[cluster]` of a recipe: every key acts or is an error, and a run may go on elsewhere."""

from pathlib import Path

import pytest
from rl_runs import make_recipe

from etude.cluster.settings import ClusterSettings
from etude.errors import InputError
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tasks=8, held_out=1)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["cluster.address=rays"], 'address is "rays"; expected local, ray, ray://HOST:PORT or HOST:PORT'),
        (["cluster.workers_per_node=2"], 'workers_per_node would not be used: address is "local"'),
        (["cluster.worker.cpus=2"], 'worker would not be used: address is "local"'),
        (
            ["cluster.address=ray", "rl.sampler.device=cuda:1"],
            "rl.sampler.device = cuda:1 names a GPU of one machine, but cluster.address is ray, which chooses GPUs",
        ),
        (["cluster.address=ray", "cluster.nodes=2"], "nodes"),
    ],
)
def test_keys_that_would_not_act_are_refused(overrides: list[str], problem: str, recipe: Path) -> None:
    with pytest.raises(InputError) as refused:
        load_recipe(recipe, overrides)
    assert problem in str(refused.value)


def test_a_cluster_without_services_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('name = "a"\nstages = ["base"]\n[base]\nsource = "./m"\n[cluster]\naddress = "ray"\n')
    with pytest.raises(InputError, match="cluster would not be used: neither rl nor evaluation is in stages"):
        load_recipe(path)


def test_resources_are_those_of_the_table(recipe: Path) -> None:
    given = ["cluster.address=ray://head:10001", "cluster.worker={cpus=4, memory_gib=16}"]
    cluster = load_recipe(recipe, given).cluster
    assert isinstance(cluster, ClusterSettings)
    assert str(cluster.worker.resources(having="pods")) == "4 CPUs, 16 GiB, the resource pods"
    assert str(cluster.trainer.resources(gpus=1)) == "1 CPU, 1 GPU"


def test_a_run_continues_on_another_cluster(recipe: Path, tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path / "run", load_recipe(recipe)) as run:
        run.log("rl", 1, reward=0.0)
    elsewhere = load_recipe(recipe, ["cluster.address=ray", "cluster.workers_per_node=3"])
    with Run.create_or_resume(tmp_path / "run", elsewhere, resume=True):
        assert load_recipe(run.layout.recipe).cluster == elsewhere.cluster
