"""Everything that paged raises on purpose.

    PagedError
    ├── ConfigError      a setting is unknown or has a value that cannot work      (also a ValueError)
    │   └── ClusterError     of a Ray cluster: there is none, it has no room, or versions differ
    ├── CheckpointError  a model cannot be found, fetched or loaded as it is
    ├── RequestError     a request is refused; no other request notices            (also a ValueError)
    ├── RequestFailed    a request was accepted and ended without its answer; the cause is chained
    ├── EngineClosed     the engine that a request was sent to, or was in, is closed
    ├── OutOfPages       not enough free pages; nothing was changed
    ├── PageStateError   a page or sequence is not in the state that the call needs; nothing was changed
    ├── StepError        a worker got steps out of order, or one that does not fit its state
    └── InvariantError   check() found state that must never be; the message names the invariant

`assert` is for our own faults; these are for the caller's. Every message says what, the numbers, and the way out.
"""

from __future__ import annotations


class PagedError(Exception):
    """Base of all errors below."""


class ConfigError(PagedError, ValueError):
    """A setting is unknown or has a value that cannot work."""


class ClusterError(ConfigError):
    """A Ray cluster cannot be had as it was asked for: there is none, it has no room, or versions differ."""


class CheckpointError(PagedError):
    """A model cannot be found, fetched or loaded as it is."""


class RequestError(PagedError, ValueError):
    """A request is refused. `param` names the field at fault, where one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestFailed(PagedError):
    """A request was accepted and ended without its answer. `__cause__` is what was raised; it may be sent again."""


class EngineClosed(PagedError):
    """The engine that a request was sent to, or was in, is closed."""


class OutOfPages(PagedError):
    """Not enough free pages. Nothing was changed."""

    def __init__(self, wanted: int, available: int, total: int) -> None:
        super().__init__(wanted, available, total)  # as they came, so that it can be pickled
        self.wanted, self.available, self.total = wanted, available, total

    def __str__(self) -> str:
        return (
            f"{self.wanted} pages wanted, {self.available} available of {self.total}: "
            "free a sequence first, or raise kv_memory"
        )


class PageStateError(PagedError):
    """A page or sequence is not in the state that the call needs. Nothing was changed."""


class StepError(PagedError):
    """A worker got steps out of order, or one that does not fit its state."""


class InvariantError(PagedError):
    """`check()` found state that must never be; the message names the invariant and the page."""


def shown(value: object) -> str:
    """A value as a message shows it: 80 characters, whatever it is (some have no text, as a number of 5,000 digits)."""
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001  of any __repr__
        return f"a {type(value).__name__} that cannot be shown"
