"""KVLayout's arithmetic (case M01), and what memory this process may use (case M02)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paged import ConfigError, KVLayout
from paged.layout import available_memory

MIB, GIB = 2**20, 2**30
# hidden 640, 4 heads: the wrong width would be 160
GEMMA = KVLayout(num_layers=18, kv_heads=1, head_dim=256, dtype="bfloat16", page_size=16)
SMOLLM2 = KVLayout(num_layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", page_size=16)


@pytest.mark.parametrize(
    ("layout", "token", "page", "pages"),
    [
        pytest.param(GEMMA, 18_432, 294_912, 355, id="gemma-3-270m"),
        pytest.param(SMOLLM2, 23_040, 368_640, 284, id="smollm2"),
        pytest.param(replace(SMOLLM2, dtype="float16"), 23_040, 368_640, 284, id="smollm2-float16"),
        pytest.param(replace(SMOLLM2, dtype="float32"), 46_080, 737_280, 142, id="smollm2-float32"),
    ],
)
def test_m01_bytes_of_a_token_and_a_page_and_pages_in_100_mib(
    layout: KVLayout, token: int, page: int, pages: int
) -> None:
    assert (layout.bytes_per_token, layout.bytes_per_page, layout.pages_in(100 * MIB)) == (token, page, pages)


def test_pages_never_take_more_than_the_bytes_given() -> None:
    exact = 7 * GEMMA.bytes_per_page
    assert [GEMMA.pages_in(exact + more) for more in (-1, 0, 1)] == [6, 7, 7]


@pytest.mark.parametrize("pages", [0, 1])
def test_memory_for_less_than_the_null_page_and_one_more_is_refused_with_the_numbers(pages: int) -> None:
    with pytest.raises(ConfigError, match=f"holds {pages} pages of 294,912 bytes, 2 are the least: raise kv_memory"):
        GEMMA.pages_in(pages * GEMMA.bytes_per_page)


def test_the_null_page_and_one_more_are_enough() -> None:
    assert GEMMA.pages_in(2 * GEMMA.bytes_per_page) == 2


class Machine:
    """A fake root with 64 GiB of free memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        kib = GIB // 1024
        self.write("proc/meminfo", f"MemTotal: {80 * kib} kB\nMemAvailable: {64 * kib} kB\nSwapFree: 0 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, path: str, limit: int | str, used: int) -> None:
        self.write(f"sys/fs/cgroup/{path}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup/{path}/memory.current", f"{used}\n")

    def join(self, path: str) -> None:
        self.write("proc/self/cgroup", f"0::/{path}\n")

    @property
    def available(self) -> int:
        return available_memory(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_m02_without_cgroups_it_is_what_the_host_has_free(machine: Machine) -> None:
    assert machine.available == 64 * GIB


def test_m02_a_group_without_its_files_limits_nothing(machine: Machine) -> None:
    machine.join("job")
    assert machine.available == 64 * GIB


def test_m02_the_limit_of_the_group_less_what_it_uses(machine: Machine) -> None:
    machine.join("job")
    machine.group("job", 4 * GIB, used=1 * GIB)
    assert machine.available == 3 * GIB


def test_m02_inside_a_container_the_groups_own_folder_is_the_root(machine: Machine) -> None:
    machine.join("")
    machine.group("", 4 * GIB, used=1 * GIB)
    assert machine.available == 3 * GIB


def test_m02_where_the_own_group_is_not_said_the_root_counts(machine: Machine) -> None:
    machine.group("", 4 * GIB, used=1 * GIB)
    assert machine.available == 3 * GIB


def test_m02_max_is_no_limit(machine: Machine) -> None:
    machine.join("job")
    machine.group("job", "max", used=1 * GIB)
    assert machine.available == 64 * GIB


@pytest.mark.parametrize(("outer", "inner"), [(8, 2), (2, 8)])
def test_m02_of_nested_groups_the_tightest_counts(machine: Machine, outer: int, inner: int) -> None:
    machine.join("slice/job")
    machine.group("slice", outer * GIB, used=0)
    machine.group("slice/job", inner * GIB, used=0)
    assert machine.available == 2 * GIB


def test_m02_an_outer_group_that_others_fill_counts_more_than_a_tight_inner_one(machine: Machine) -> None:
    machine.join("slice/job")
    machine.group("slice", 8 * GIB, used=7 * GIB)
    machine.group("slice/job", 2 * GIB, used=GIB // 2)
    assert machine.available == 1 * GIB


def test_m02_a_limit_above_the_hosts_free_memory_changes_nothing(machine: Machine) -> None:
    machine.join("job")
    machine.group("job", 128 * GIB, used=1 * GIB)
    assert machine.available == 64 * GIB


def test_m02_a_group_over_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.join("job")
    machine.group("job", 4 * GIB, used=5 * GIB)
    assert machine.available == 0


def test_m02_groups_of_version_1_are_left_out(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:memory:/job\n1:cpu:/job\n")
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    assert machine.available == 64 * GIB


def test_a_machine_that_does_not_say_what_is_free_asks_for_bytes(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 1 kB\n")
    with pytest.raises(ConfigError, match="give kv_memory in bytes"):
        _ = machine.available


def test_this_machine_has_some_memory_left() -> None:
    assert available_memory() > 0
