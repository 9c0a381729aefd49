"""What memory this process may use, on made-up machines, and what a pool gets of it (case M02)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged import ConfigError
from paged.sizing import Memory, cuda_memory, host_memory, pool_bytes

MIB, GIB = 2**20, 2**30
NO_LIMIT: dict[int, int | str] = {1: 9223372036854771712, 2: "max"}  # as each version of cgroups says it
FILES = {
    1: ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


class Machine:
    """A fake root with 64 GiB, and this process, which holds 1 GiB."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host(available=64 * GIB)
        kib = GIB // 1024
        self.write("proc/self/status", f"Name:\tpy 1\nVmRSS:\t{kib} kB\nRssAnon:\t{kib - 4} kB\nRssShmem:\t4 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def host(self, available: int) -> None:
        total = 64 * GIB // 1024
        self.write("proc/meminfo", f"MemTotal: {total} kB\nMemFree: 0 kB\nMemAvailable: {available // 1024} kB\n")

    def group(self, path: str, limit: int | str, used: int, inactive: int = 0, version: int = 2) -> None:
        mount, limit_file, used_file, inactive_file = FILES[version]
        folder = f"sys/fs/cgroup/{mount}{path}"
        self.write(f"{folder}/{limit_file}", f"{limit}\n")
        self.write(f"{folder}/{used_file}", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 7\n{inactive_file} {inactive}\nactive_file 9\n")

    def join(self, path: str, version: int = 2) -> None:
        self.write("proc/self/cgroup", f"0::/{path}\n" if version == 2 else f"5:cpu:/else\n4:memory:/{path}\n0::/\n")

    @property
    def memory(self) -> Memory:
        memory = host_memory(self.root)
        assert memory is not None
        return memory


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


versions = pytest.mark.parametrize("version", [1, 2])


# The lines of M02: the basis, and the pool of a share of a half while 1 GiB is in use


def half(machine: Machine) -> int:
    return pool_bytes(0.5, machine.memory, weights=0)


def test_m02_memory_max(machine: Machine) -> None:
    machine.join("job")
    machine.group("job", 4294967296, used=GIB)
    assert machine.memory == Memory(basis=4 * GIB, available=3 * GIB, own=GIB)
    assert half(machine) == 1 * GIB


@versions
def test_m02_no_limit(machine: Machine, version: int) -> None:
    machine.join("job", version)
    machine.group("job", NO_LIMIT[version], used=GIB, version=version)
    assert machine.memory == Memory(basis=64 * GIB, available=64 * GIB, own=GIB)
    assert half(machine) == 31 * GIB


@versions
def test_m02_a_group_of_2_gib_below_one_of_8(machine: Machine, version: int) -> None:
    machine.join("slice/job", version)
    machine.group("slice", 8 * GIB, used=GIB, version=version)
    machine.group("slice/job", 2 * GIB, used=GIB, version=version)
    assert machine.memory == Memory(basis=2 * GIB, available=1 * GIB, own=GIB)
    with pytest.raises(ConfigError, match="kv_memory of 50% leaves no memory for pages: that is 1,073,741,824 bytes"):
        half(machine)


@pytest.mark.parametrize("lines", [None, "", "0::/\n", "0::/job\n", "4:memory:/job\n0::/\n", "5:cpu:/\n"])
def test_m02_no_files(machine: Machine, lines: str | None) -> None:
    if lines is not None:
        machine.write("proc/self/cgroup", lines)
    assert machine.memory == Memory(basis=64 * GIB, available=64 * GIB, own=GIB)
    assert half(machine) == 31 * GIB


# Layouts


@versions
def test_m02_in_a_container_the_groups_own_folder_is_the_top(machine: Machine, version: int) -> None:
    machine.join("" if version == 2 else "docker/0123", version)
    machine.group("", 4 * GIB, used=GIB, version=version)
    assert (machine.memory.basis, machine.memory.available) == (4 * GIB, 3 * GIB)


def test_m02_where_the_own_group_is_not_said_the_top_counts(machine: Machine) -> None:
    machine.group("", 4 * GIB, used=GIB)
    assert machine.memory.basis == 4 * GIB


def test_m02_both_versions_mounted_side_by_side(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/a\n4:memory:/one\n3:cpu,cpuacct:/\n0::/two\n")
    machine.group("one", 8 * GIB, used=0, version=1)
    assert machine.memory.basis == 8 * GIB
    machine.write("sys/fs/cgroup/unified/two/memory.max", f"{4 * GIB}\n")
    assert machine.memory.basis == 4 * GIB


def test_m02_another_controllers_group_is_not_ours(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/job\n3:cpu:/other\n0::/\n")
    machine.group("other", 4 * GIB, used=0, version=1)
    machine.group("job/child", 4 * GIB, used=0, version=1)
    assert machine.memory.basis == 64 * GIB


def test_m02_a_group_outside_what_is_mounted(machine: Machine) -> None:
    machine.join("../../else")
    machine.group("", 4 * GIB, used=0)
    assert machine.memory.basis == 4 * GIB


@versions
@pytest.mark.parametrize(("outer", "inner"), [(8, 2), (2, 8)])
def test_m02_of_nested_groups_the_tightest_counts(machine: Machine, outer: int, inner: int, version: int) -> None:
    machine.join("a/b/c", version)
    machine.group("a", outer * GIB, used=0, version=version)
    machine.group("a/b/c", inner * GIB, used=0, version=version)
    assert (machine.memory.basis, machine.memory.available) == (2 * GIB, 2 * GIB)


# What is available


@versions
def test_m02_an_outer_group_that_others_fill_leaves_less_than_the_tight_inner_one(
    machine: Machine, version: int
) -> None:
    machine.join("slice/job", version)
    machine.group("slice", 8 * GIB, used=7 * GIB, version=version)
    machine.group("slice/job", 2 * GIB, used=GIB // 2, version=version)
    assert machine.memory.basis == 2 * GIB
    assert machine.memory.available == 1 * GIB


@versions
def test_m02_file_pages_that_can_be_given_back_are_available(machine: Machine, version: int) -> None:
    machine.join("job", version)
    machine.group("job", 4 * GIB, used=3 * GIB, inactive=2 * GIB, version=version)
    assert machine.memory.available == 3 * GIB


def test_m02_a_limit_above_what_the_host_has_free_changes_nothing(machine: Machine) -> None:
    machine.join("job")
    machine.group("job", 128 * GIB, used=GIB)
    machine.host(available=10 * GIB)
    assert machine.memory == Memory(basis=64 * GIB, available=10 * GIB, own=GIB)


@versions
def test_m02_a_group_over_its_limit_has_nothing_left(machine: Machine, version: int) -> None:
    machine.join("job", version)
    machine.group("job", 4 * GIB, used=5 * GIB, version=version)
    assert machine.memory.available == 0


def test_m02_a_limit_without_the_files_beside_it(machine: Machine) -> None:
    machine.write("sys/fs/cgroup/memory.max", f"{4 * GIB}\n")
    assert (machine.memory.basis, machine.memory.available) == (4 * GIB, 4 * GIB)


@pytest.mark.parametrize("text", ["", "\n", "-1\n", "lots\n", "4 GiB\n"])
def test_a_limit_that_is_no_number_limits_nothing(machine: Machine, text: str) -> None:
    machine.write("sys/fs/cgroup/memory.max", text)
    assert machine.memory.basis == 64 * GIB


def test_a_process_without_its_numbers_holds_nothing(machine: Machine) -> None:
    (machine.root / "proc/self/status").unlink()
    assert machine.memory.own == 0


def test_names_that_are_no_text_do_not_matter(machine: Machine) -> None:
    (machine.root / "proc/self/status").write_bytes(b"Name:\t\xff\xfe\nRssAnon:\t8 kB\n")
    assert machine.memory.own == 8192


def test_this_machine_has_some_memory_left() -> None:
    memory = host_memory()
    assert memory is not None
    assert 0 < memory.available <= memory.basis
    assert 0 < memory.own < memory.basis


def test_cuda_counts_what_this_process_holds_and_not_what_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    assert cuda_memory() == Memory(basis=80 * GIB, available=30 * GIB, own=2 * GIB)


# What a pool gets


@given(
    share=st.floats(0, 1, exclude_min=True),
    basis=st.integers(0, 2**50),
    available=st.integers(0, 2**50),
    own=st.integers(0, 2**45),
    weights=st.integers(0, 2**45),
)
def test_m02_a_share_never_exceeds_its_part_of_the_basis_less_what_is_in_use_nor_what_is_there(
    share: float, basis: int, available: int, own: int, weights: int
) -> None:
    most = min(int(share * basis) - own, available - weights)
    memory = Memory(basis, available, own)
    if most > 0:
        assert pool_bytes(share, memory, weights) == most
    else:
        with pytest.raises(ConfigError, match="raise kv_memory, or free memory"):
            pool_bytes(share, memory, weights)


def test_a_share_leaves_room_for_the_model_that_is_to_be_loaded() -> None:
    assert pool_bytes(0.5, Memory(64 * GIB, 64 * GIB, GIB), weights=10 * GIB) == 31 * GIB
    assert pool_bytes(0.5, Memory(64 * GIB, 16 * GIB, GIB), weights=10 * GIB) == 6 * GIB


@pytest.mark.parametrize(("own", "weights"), [(1024, 1000), (100, 3000)])
def test_a_share_that_leaves_nothing_is_refused_with_the_numbers(own: int, weights: int) -> None:
    with pytest.raises(ConfigError) as error:
        pool_bytes(0.25, Memory(4096, 3000, own), weights)
    assert str(error.value) == (
        f"kv_memory of 25% leaves no memory for pages: that is 1,024 bytes of 4,096, this process holds {own:,}, "
        f"3,000 bytes are available, and the model takes {weights:,}: raise kv_memory, or free memory"
    )


@pytest.mark.parametrize("wanted", [1, 2000])
def test_bytes_are_taken_as_they_are(wanted: int) -> None:
    assert pool_bytes(wanted, Memory(basis=10_000, available=3000, own=2500), weights=1000) == wanted


def test_bytes_that_are_not_there_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="2,001 bytes is too much, 3,000 bytes are available, and the model takes 1"):
        pool_bytes(2001, Memory(basis=10_000, available=3000, own=0), weights=1000)
    with pytest.raises(ConfigError, match="kv_memory of 3,001 bytes is too much, 3,000 bytes are available: lower it"):
        pool_bytes(3001, Memory(basis=10_000, available=3000, own=0), weights=0)


@pytest.mark.parametrize("meminfo", [None, "", "MemTotal: 1 kB\n", "MemAvailable: 1 kB\n"])
def test_a_machine_that_does_not_say_what_it_has_takes_bytes_only(machine: Machine, meminfo: str | None) -> None:
    if meminfo is None:
        (machine.root / "proc/meminfo").unlink()
    else:
        machine.write("proc/meminfo", meminfo)
    memory = host_memory(machine.root)
    assert memory is None
    assert pool_bytes(5 * GIB, memory, weights=7) == 5 * GIB
    with pytest.raises(ConfigError, match="give kv_memory in bytes, as 2GiB"):
        pool_bytes(0.3, memory, weights=0)
