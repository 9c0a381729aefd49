"""WaitingQueue: the families that wait, in the order in which they are to be admitted, and by age."""

from __future__ import annotations

from bisect import bisect_left, insort

from scheduler.request import Family


class WaitingQueue:
    """Sorted lists: entries come and go near their ends, and moving the rest is one copy of memory."""

    def __init__(self) -> None:
        self._by_key: list[tuple[tuple[float, int], Family]] = []  # a key holds the number, so no family is compared
        self._by_age: list[tuple[int, Family]] = []

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def oldest(self) -> Family:
        """The one that arrived first. Raises IndexError if there is none."""
        return self._by_age[0][1]

    def add(self, family: Family) -> None:
        insort(self._by_key, (family.key, family))
        insort(self._by_age, (family.number, family))

    def remove(self, family: Family) -> None:
        """Take out a family that is in it."""
        for entries, entry in ((self._by_key, (family.key,)), (self._by_age, (family.number,))):
            i = bisect_left(entries, entry)  # a prefix of what it stands before
            assert entries[i][1] is family
            del entries[i]

    def first(self, count: int) -> list[Family]:
        """So many that come first, by key."""
        return [family for _, family in self._by_key[:count]]
