"""KVLayout: how many bytes a token's K and V take, and how many pages fit into how much memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from paged.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one group's pages. head_dim and kv_heads are the model's own, not hidden size over heads."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size

    def pages_in(self, num_bytes: int) -> int:
        """Pages, the null page counted, that fit into `num_bytes`. Raises ConfigError if no page is left to use."""
        pages = num_bytes // self.bytes_per_page
        if pages < 2:
            raise ConfigError(
                f"kv_memory of {num_bytes:,} bytes holds {pages} pages of {self.bytes_per_page:,} bytes, "
                "2 are the least: raise kv_memory, or lower page_size"
            )
        return pages


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still use: free memory of the host, cut to what its cgroup (version 2) has left."""
    meminfo = (root / "proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if match is None:
        raise ConfigError("the free memory of this machine is not known: give kv_memory in bytes, as 2GiB")
    available = int(match[1]) * 1024
    cgroup = root / "sys/fs/cgroup"
    own = root / "proc/self/cgroup"
    path = re.search(r"^0::/(.*)$", own.read_text(), re.MULTILINE) if own.exists() else None
    folder = cgroup / path[1] if path else cgroup
    while True:  # every group above limits this one too
        limit, used = folder / "memory.max", folder / "memory.current"
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            available = min(available, max(0, int(text) - int(used.read_text())))
        if folder == cgroup:
            return available
        folder = folder.parent
