"""Cluster: replicas as Ray actors, killed in every way, cost no request its answer, and leave nothing behind.

All but R04's tests share one Ray, whose replicas have no model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from fakes import solo
from replicas import BROKEN, POISON, DyingReplica, FakeReplica, text

from paged import CheckpointError, ClusterError, EngineConfig, RequestError, RequestFailed, SamplingParams
from scheduler import placement
from scheduler.cluster import Cluster
from scheduler.desk import LineRequest, Response
from worker.head import join_ray

pytestmark = pytest.mark.ray
TESTS = str(Path(__file__).parents[1])
NAME = f"test-{os.getpid()}"  # others of this user may test meanwhile
TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)  # workers find our fakes
        join_ray("local", num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20)
        yield
        ray.shutdown()


def launched(folder: Path, replicas: int, name: str = NAME) -> Cluster:
    config = EngineConfig(str(folder), max_num_seqs=4, threads=1)
    return Cluster.launch_config(config, replicas=replicas, name=name, _replica=FakeReplica)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    with launched(tmp_path, 2) as cluster:
        yield cluster
    nothing_is_left()


def nothing_is_left() -> None:
    until(lambda: not ray.util.list_named_actors(all_namespaces=True))
    until(lambda: ray.available_resources().get("CPU") == 8)


def until(true: Callable[[], object], seconds: float = 60) -> float:
    """Wait for something; how long it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() < began + seconds, "it did not come about"
        time.sleep(0.02)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def prompt(i: int) -> list[int]:
    return [i % 500, 2, 3, 4, i % 500]


def line(tokens: list[int], count: int = TOKENS) -> LineRequest:
    return LineRequest("POST", "/v1/completions", {"prompt": text(tokens), "temperature": 0, "max_tokens": count})


def shown(response: Response) -> str:
    assert response.body is not None, response
    assert response.status == 200
    answer: str = response.body["choices"][0]["text"]
    return answer


def pids(cluster: Cluster) -> list[int]:
    return [one.pid for one in cluster.status() if one.pid is not None]


def job(cluster: Cluster, lines: dict[str, LineRequest], meanwhile: Callable[[int], None]) -> dict[str, Response]:
    """Run lines as a job does. meanwhile: called with the number of answers whenever some have come."""
    answers: dict[str, Response] = {}
    waiting = list(lines.items())
    pending = set[str]()
    while len(answers) < len(lines):
        while waiting and len(pending) < max(1, cluster.room):
            key, request = waiting.pop(0)
            pending.add(key)
            cluster.add(key, request)
        for key, response in cluster.take(1.0):
            assert key in pending, "answered twice"
            pending.remove(key)
            answers[key] = response
            meanwhile(len(answers))
    return answers


def test_prompts_are_answered_in_their_order_and_what_is_wrong_with_one_names_it(two: Cluster) -> None:
    outputs = two.generate([prompt(i) for i in range(20)], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [solo(prompt(i), TOKENS) for i in range(20)]
    assert two.generate(text(prompt(1)), GREEDY)[0].outputs[0].text == text(solo(prompt(1), TOKENS))
    with pytest.raises(RequestError, match="prompt 3: token id 5000"):
        two.generate([[1], [2], [3], [5000]], GREEDY)
    with pytest.raises(RequestError, match="2 prompts and 1 sampling_params"):
        two.generate([[1], [2]], [GREEDY])
    with pytest.raises(RequestError, match="prompt 0: the request cannot be sent"):
        two.generate([{"prompt": lambda: 0}], GREEDY)
    assert two.generate([], GREEDY) == []
    until(lambda: two.stats.running == 0)


def test_coroutines_of_any_loop_submit_and_one_that_is_cancelled_gives_up(two: Cluster) -> None:
    async def some() -> None:
        outputs = await asyncio.gather(*(two.submit(prompt(i), GREEDY) for i in range(10)))
        assert [one.outputs[0].token_ids for one in outputs] == [solo(prompt(i), TOKENS) for i in range(10)]
        with pytest.raises(RequestError, match="token id 5000"):
            await two.submit([5000], GREEDY)
        task = asyncio.create_task(two.submit(prompt(1), SamplingParams(temperature=0, max_tokens=1000)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(two._driver._dispatcher) == 0

    for _ in range(2):
        asyncio.run(some())


def test_r03_every_answer_is_its_own_lines(tmp_path: Path) -> None:
    """R03: answers come in another order than lines, and each under its own key."""
    order = []
    with launched(tmp_path, 3) as cluster:
        lines = {f"{i}": line(prompt(i), 20 * (1 + i % 3)) for i in range(12)}
        for part in (list(lines)[:7], list(lines)[7:]):
            found = job(cluster, {key: lines[key] for key in part}, lambda count: None)
            order += list(found)
            for key, response in found.items():
                assert shown(response) == text(solo(prompt(int(key)), 20 * (1 + int(key) % 3)))
    assert sorted(order, key=int) == list(lines)


@pytest.mark.parametrize("kills", ["one, once", "one, four times", "both at once"])
def test_r01_a_job_whose_replicas_are_killed_has_the_answers_of_one_undisturbed(two: Cluster, kills: str) -> None:
    """R01: killed with SIGKILL between the first and the last answer."""
    times, each = {"one, once": (1, 10), "one, four times": (4, 5), "both at once": (1, 5)}[kills]

    killed: list[int] = []
    due = [each * (i + 1) for i in range(times)]

    def alive() -> list[int]:
        return [pid for pid in pids(two) if is_alive(pid) and pid not in killed]

    def kill(count: int) -> None:
        if due and count >= due[0]:
            assert count < 40
            until(alive)
            now = alive() if "both" in kills else alive()[:1]
            for pid in now:
                os.kill(pid, signal.SIGKILL)
            killed.extend(now)
            del due[0]

    answers = job(two, {f"{i}": line(prompt(i)) for i in range(40)}, kill)
    assert {key: shown(one) for key, one in answers.items()} == {
        f"{i}": text(solo(prompt(i), TOKENS)) for i in range(40)
    }
    assert len(killed) == (2 if "both" in kills else times)
    until(lambda: len(pids(two)) == 2)
    assert sum(one.restarts or 0 for one in two.status()) == len(killed)


def test_a_replica_that_dies_whenever_it_loads_ends_the_launch(tmp_path: Path) -> None:
    config = EngineConfig(str(tmp_path), max_num_seqs=4, threads=1)
    with pytest.raises(ClusterError, match=r"replica 0 has died [3-9] times while it loaded"):
        Cluster.launch_config(config, name=NAME, _replica=DyingReplica)
    nothing_is_left()


def test_r01_when_no_replacement_starts_every_line_has_an_error_soon(two: Cluster, tmp_path: Path) -> None:
    """R01, failing constructor: what is not answered is lost, and so is what comes later."""
    ended: list[float] = []

    def kill(count: int) -> None:
        if count >= 5 and not ended:
            ended.append(time.monotonic())
            (tmp_path / BROKEN).touch()
            for pid in pids(two):
                os.kill(pid, signal.SIGKILL)

    answers = job(two, {f"{i}": line(prompt(i)) for i in range(60)}, kill)
    assert time.monotonic() - ended[0] < 60
    lost = [one for one in answers.values() if one.status != 200]
    assert len(lost) >= 20
    for response in lost:
        assert (response.status, response.body) == ("cluster_lost", None)
        assert "none of its replicas can be restarted" in response.message
    with pytest.raises(RequestFailed, match="prompt 0: the cluster was lost"):
        two.generate([1, 2, 3], GREEDY)


def test_a_line_that_kills_its_replica_is_answered_so_and_no_other_notices(two: Cluster) -> None:
    lines = {f"{i}": line(prompt(i)) for i in range(20)}
    lines["poison"] = line(POISON)
    answers = job(two, lines, lambda count: None)
    poisoned = answers.pop("poison")
    assert (poisoned.status, poisoned.body) == ("request_kills_worker", None)
    assert {key: shown(one) for key, one in answers.items()} == {
        f"{i}": text(solo(prompt(i), TOKENS)) for i in range(20)
    }
    until(lambda: len(pids(two)) == 2)
    assert 2 <= sum(one.restarts or 0 for one in two.status()) <= 4


def test_a_replica_that_cannot_load_raises_its_own_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / BROKEN).touch()
    with pytest.raises(CheckpointError, match="is broken"):
        launched(tmp_path, 2)
    nothing_is_left()


def test_replicas_that_come_late_are_taken_and_those_that_are_dismissed_lose_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, 1) as cluster:
        other = Cluster.connect(NAME)
        cluster.scale(3)
        until(lambda: [one.state for one in other.status()] == ["warm"] * 3)
        until(lambda: len(pids(cluster)) == 3)
        assert (cluster.room, other.room) == (48, 48)
        lines = {f"{i}": line(prompt(i), 200) for i in range(40)}
        answers = job(other, lines, lambda count: cluster.scale(1) if count == 1 else None)
        assert {key: shown(one) for key, one in answers.items()} == {
            f"{i}": text(solo(prompt(i), 200)) for i in range(40)
        }
        assert [one.index for one in cluster.status()] == [0]
        other.close()
        assert cluster.generate(prompt(1), GREEDY)[0].outputs[0].token_ids == solo(prompt(1), TOKENS)


def test_who_scales_knows_of_replicas_that_another_has_just_started(tmp_path: Path) -> None:
    with launched(tmp_path, 1) as cluster:
        other = Cluster.connect(NAME)
        other._replica = FakeReplica
        cluster.scale(2)
        other.scale(3)
        until(lambda: [one.state for one in cluster.status()] == ["warm"] * 3)
        cluster.scale(1)
        other.scale(2)
        until(lambda: [(one.index, one.state) for one in cluster.status()] == [(0, "warm"), (1, "warm")])
        assert cluster.num_replicas == 2
        other.close()
    nothing_is_left()


def test_room_that_another_is_making_is_his(two: Cluster) -> None:
    with pytest.raises(ClusterError, match="somebody else is making room for t/a"):
        placement.place([placement.Need(1, 0, 0, 1)] * 2, 5.0, ["t/a", "t/a"], detached=False)


def test_replicas_that_compute_otherwise_are_told_of(two: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    two.compare("by a fake")
    assert capsys.readouterr().err == ""
    two.compare("in bfloat16 by native kernels")
    line = "computes by a fake, this process in bfloat16 by native kernels: the same request may get other tokens there"
    assert capsys.readouterr().err.count(line) == 2


CLIENT = """
import ray, sys
from scheduler.cluster import Cluster
from paged import SamplingParams
ray.init(sys.argv[1], log_to_driver=False)
cluster = Cluster.connect(sys.argv[2])
cluster.generate([[i, 2, 3] for i in range(100)], SamplingParams(temperature=0, max_tokens=900))
"""


def test_requests_of_a_client_that_was_killed_are_given_up(two: Cluster) -> None:
    address = ray.get_runtime_context().gcs_address
    client = subprocess.Popen([sys.executable, "-c", CLIENT, address, NAME])
    try:
        until(lambda: two.stats.running == 8)
    finally:
        client.kill()
        client.wait()
    until(lambda: two.stats.running == 0)
    assert two.stats.output_tokens < 100 * 900


# R04

DRIVER = """
import sys
from paged import EngineConfig
from replicas import FakeReplica
from scheduler.cluster import Cluster
from scheduler.desk import LineRequest
if __name__ == "__main__":
    config = EngineConfig(sys.argv[1], max_num_seqs=4, threads=1)
    with Cluster.launch_config(config, replicas=2, _replica=FakeReplica) as cluster:
        body = {"prompt": "1 2 3", "temperature": 0, "max_tokens": 100}
        for i in range(10000):
            cluster.add(str(i), LineRequest("POST", "/v1/completions", body))
        count = 0
        while True:
            count += len(cluster.take(1.0))
            if count >= 5:
                print("answers", *(one.pid for one in cluster.status()), flush=True)
"""


def descendants(pid: int) -> set[int]:
    """Every process below this one."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 60), (signal.SIGINT, 15), (signal.SIGTERM, 15)])
def test_r04_a_driver_that_ends_leaves_nothing(tmp_path: Path, number: signal.Signals, seconds: float) -> None:
    """R04: no process and no shared memory of a run is left, whatever ends its driver."""
    shared = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    try:
        replicas = {int(pid) for pid in driver.stdout.readline().split()[1:]}
        below = descendants(driver.pid)
        assert len(replicas) == 2
        assert replicas <= below
        driver.send_signal(number)
        until(lambda: not any(map(is_alive, {driver.pid, *below})), seconds)
        assert set(Path("/dev/shm").iterdir()) <= shared
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
