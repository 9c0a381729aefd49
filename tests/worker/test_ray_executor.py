"""Workers as Ray actors: where they are placed, and that they end with rank 0 whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from oracles import tiny_llama
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paged import LLM, ConfigError, SamplingParams, WorkerLost
from worker import ray_executor
from worker.head import join_ray
from worker.ray_executor import RayExecutor

pytestmark = pytest.mark.ray
SETTINGS: dict[str, Any] = {"kv_memory": "1MiB", "max_model_len": 128, "threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SECONDS = 15.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the tokenizer that a folder needs."""
    from worker.checkpoints import resolve

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = resolve("smollm2").path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(tokenizer / name)
    tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    join_ray("local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for_the_end(pids: list[int]) -> float:
    """Seconds until all have ended."""
    began = time.monotonic()
    while any(map(is_alive, pids)):
        assert time.monotonic() - began < SECONDS, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.05)
    return time.monotonic() - began


def workers(llm: LLM) -> list[int]:
    """Process ids of the ranks from 1 on."""
    executor = llm.engine.executor
    assert isinstance(executor, RayExecutor)
    return executor.pids


@pytest.mark.usefixtures("cluster")
def test_a_ray_that_is_there_is_used_and_stays(folder: Path) -> None:
    llm = LLM(str(folder), tensor_parallel_size=2, **SETTINGS)
    (answer,) = llm.generate([[5, 6, 7]], GREEDY)
    assert len(answer.outputs[0].token_ids) == 8
    pids = workers(llm)
    assert len(pids) == 1
    assert pids[0] != os.getpid()
    llm.close()
    wait_for_the_end(pids)
    assert ray.is_initialized()


def replica(folder: Path, bundles: int, size: int) -> tuple[Any, Any]:
    """An engine in an actor on the first bundle of a placement group, as a cluster has it; and the group."""

    class Replica:
        def __init__(self) -> None:
            self.llm = LLM(str(folder), tensor_parallel_size=size, **SETTINGS)

        def generate(self, prompt: list[int]) -> list[int]:
            return self.llm.generate([prompt], GREEDY)[0].outputs[0].token_ids

        def pids(self) -> list[int]:
            executor: Any = self.llm.engine.executor
            return [os.getpid(), *executor.pids]

    group = placement_group([{"CPU": 1}] * bundles, strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=30)
    bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return ray.remote(Replica).options(num_cpus=1, scheduling_strategy=bundle).remote(), group


@pytest.mark.usefixtures("cluster")
def test_in_a_placement_group_each_worker_takes_its_bundle_and_ends_with_its_replica(folder: Path) -> None:
    actor, group = replica(folder, 2, 2)
    try:
        assert len(ray.get(actor.generate.remote([5, 6, 7]), timeout=60)) == 8
        pids = ray.get(actor.pids.remote())
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        wait_for_the_end(pids)
    finally:
        ray.kill(actor)
        remove_placement_group(group)


@pytest.mark.usefixtures("cluster")
def test_a_placement_group_with_too_few_bundles_is_refused(folder: Path) -> None:
    actor, group = replica(folder, 1, 2)
    with pytest.raises(ray.exceptions.ActorDiedError, match=r"tensor_parallel_size is 2, .* has 1 bundles"):
        ray.get(actor.pids.remote(), timeout=60)
    remove_placement_group(group)


@pytest.mark.usefixtures("cluster")
def test_workers_that_ray_has_no_place_for_are_an_error_with_the_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "PLACING", 1.0)
    with pytest.raises(ConfigError, match=r"has not started 2 workers here in 1 seconds; free in all of it: .* CPU"):
        LLM(str(folder), tensor_parallel_size=3, **SETTINGS | {"threads": 3})


@pytest.mark.usefixtures("cluster")
def test_what_a_worker_raises_while_it_loads_is_raised_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what comes of it, and not after a minute."""
    began = time.monotonic()
    spec = ray_executor.Spec

    def wrong(path: Path, config: Any, layout: Any, shard: Any, settings: Any) -> Any:
        return spec(path if shard.rank == 0 else path / "gone", config, layout, shard, settings)

    monkeypatch.setattr(ray_executor, "Spec", wrong)
    with pytest.raises(WorkerLost, match=r"rank 1: CheckpointError: .*gone has no model\.safetensors"):
        LLM(str(folder), tensor_parallel_size=2, **SETTINGS)
    assert time.monotonic() - began < 30


SCRIPT = """
import sys, time
from paged import LLM, SamplingParams
import ray
if __name__ == "__main__":
    llm = LLM(sys.argv[1], tensor_parallel_size=2, kv_memory="1MiB", max_model_len=128, threads=1)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    print(*llm.engine.executor.pids, flush=True)
    if sys.argv[2] == "close":
        llm.close()
        print("ray" if ray.is_initialized() else "no ray", flush=True)
    else:
        time.sleep(600)
"""


def family(pid: int) -> list[int]:
    """Every process that comes from this one."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


@pytest.mark.parametrize("how", ["close", "kill"])
def test_workers_and_our_ray_end_with_rank_0(folder: Path, how: str) -> None:
    """It starts Ray itself. No worker is left after `close`, nor after SIGKILL."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        line = process.stdout.readline()
        pids = [*map(int, line.split()), *family(process.pid)]
        assert len(pids) > 2, process.stderr.read()
        if how == "kill":
            process.kill()
        wait_for_the_end(pids)
        rest = process.stdout.read(), process.stderr.read()
    assert rest == ("no ray\n" if how == "close" else "", "")
