"""Routing: which replica a request goes to, so that what it begins with is there already and none is much busier.

A prompt's beginning is known by digests, one for each block of it, each of everything up to the block's end. The router
remembers, for each replica, the digests of what went there, in order of use and no more than its pages hold: a picture
of its prefix cache, kept up by what comes back. Where a request found less than the picture promised, what is as old as
that has been evicted; a replica that restarts is removed and added, with nothing in its picture.

A request goes to the replica that holds most of its prompt, as long as the work that lies before it there is at most

    (1 + EPSILON) * the average over all replicas + the tokens that it need not compute there

which is consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads,
2016), with a prefix's worth added: to wait behind so many more tokens takes no longer than to compute them again. And
where its seats are taken, so that the request would wait, no more than that above one that has a seat.
Among equals, and where none holds enough of it to matter, the first block that does not tell them apart decides: the
hashes of its digest and each replica name two, the highest (Thaler, Ravishankar: A Name-Based Mapping Scheme for
Rendezvous, 1996), and the less busy of them gets the request (Mitzenmacher: The Power of Two Choices in Randomized Load
Balancing, 2001). So drivers that know nothing of each other mostly agree, and a replica that comes or goes moves its
own share only. If all that have room are over their bound, the least busy gets it. Nothing here is random, and nobody
but one thread may call.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import inf
from typing import Any

from scheduler.desk import AnyRequest, LineRequest, Result
from scheduler.openai import CHAT, COMPLETIONS
from scheduler.outputs import RequestOutput
from scheduler.text import prompt_salt

EPSILON = 0.5
WORTH = 8  # a prefix counts if it is at least one part in so many of the request
TOKEN_BYTES = 4  # of text, about
ANSWER = 128  # tokens, about, of a chat that sets no limit; a completion's limit is then 16
# Tokens in each block that has a digest: fine at the beginning, where prompts part, and few for long ones.
BLOCKS = tuple(64 << i // 16 for i in range(64))
ENDS = (0, *accumulate(BLOCKS))  # tokens before each block
_MOST = ENDS[-1]

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio
_LENGTH_MOST = 1 << 40  # tokens that a max_tokens is believed to mean


def digests(prompt: Any, chat: bool = False) -> tuple[int, ...]:
    """One 64-bit digest for each full block of a prompt's beginning, of all up to the block's end; at most 64.

    prompt: as LLM.generate takes it, or with `chat` a conversation. Text counts as TOKEN_BYTES bytes of UTF-8 a token;
    token ids are never equal to the text they stand for. What is no prompt has none.
    """
    return _outline(prompt, chat)[0]


def outline(request: AnyRequest) -> tuple[tuple[int, ...], int]:
    """The digests of a request's prompt, and its size: tokens of prompt and answer, about.

    Nothing is checked here: of what will be refused there may be no digests, and any size. Who wants prompt_logprobs
    computes the whole prompt wherever it is, so it has none.
    """
    if isinstance(request, LineRequest):
        body, chat = request.body, request.url == CHAT
        if not isinstance(body, dict) or not (chat or request.url == COMPLETIONS):
            return (), 1
        found, size = _outline(body.get("messages") if chat else _only(body.get("prompt")), chat)
        limit = body.get("max_completion_tokens") if chat else None
        limit = body.get("max_tokens") if limit is None else limit
        whole = body.get("prompt_logprobs") is not None
    else:
        params, chat = request.params, request.chat
        found, size = _outline(request.prompt, chat)
        limit = None if params is None else params.max_tokens
        whole = params is not None and params.prompt_logprobs is not None
    return () if whole else found, size + _answer(limit, chat)


def _only(prompt: Any) -> Any:
    """The one prompt of a completion, which may stand in a list."""
    one = isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int)
    return prompt[0] if one else prompt


def _answer(limit: Any, chat: bool) -> int:
    if isinstance(limit, int):
        return min(max(limit, 1), _LENGTH_MOST)
    return ANSWER if chat else 16


def _outline(prompt: Any, chat: bool) -> tuple[tuple[int, ...], int]:
    """The digests and the tokens of a prompt, about."""
    try:
        salt = prompt_salt(prompt) or ""
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if chat:
            prompt = "".join([_message(message) for message in prompt[: len(prompt)]])  # an endless one has no length
        if isinstance(prompt, str):
            data, block = prompt[: _MOST * TOKEN_BYTES].encode("utf-8", "surrogatepass"), TOKEN_BYTES
            tokens, kind = len(prompt) // TOKEN_BYTES, b"chat" if chat else b"text"
        else:
            data, block = _ids(prompt[:_MOST]), 8
            tokens, kind = len(prompt), b"ids"
        chain = blake2b(kind + b"\0" + salt.encode("utf-8", "surrogatepass") + b"\0", digest_size=8)
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return (), 1
    found, view, start = [], memoryview(data), 0
    for tokens_in_block in BLOCKS:
        end = start + tokens_in_block * block
        if end > len(data):
            break
        chain.update(view[start:end])
        found.append(int.from_bytes(chain.digest(), "big"))
        start = end
    return tuple(found), max(tokens, 1)


def _ids(tokens: Any) -> bytes:
    if hasattr(tokens, "astype"):  # an array
        return bytes(tokens.astype("int64", casting="same_kind").tobytes())
    return array("q", tokens).tobytes()


def _message(message: Any) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = "".join([part["text"] for part in content])
    return f"\x02{message['role']}\x03{content}"


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer says of its request, in tokens. cached: of the prompt, found in the replica's prefix cache."""

    prompt: int
    cached: int
    output: int


def usage(result: Result) -> Usage | None:
    """None for what was refused or failed."""
    if isinstance(result, RequestOutput):
        return Usage(len(result.prompt_token_ids), result.num_cached_tokens, result.num_output_tokens)
    body = getattr(result, "body", None)
    if body is None or "usage" not in body:
        return None
    said = body["usage"]
    return Usage(said["prompt_tokens"], said["prompt_tokens_details"]["cached_tokens"], said["completion_tokens"])


class _Replica:
    """What the router knows of one."""

    __slots__ = ("bit", "capacity", "foreign", "held", "held_tokens", "keys", "load", "others", "room", "seats", "seed")

    def __init__(self, number: int, room: int, capacity: int, seats: int) -> None:
        self.bit = 1 << number
        self.seed = int.from_bytes(blake2b(b"replica %d" % number, digest_size=8).digest(), "big")
        self.room, self.capacity, self.seats = room, capacity, seats
        self.keys: set[str] = set()  # in flight
        self.others = 0  # other drivers' requests
        self.load = 0  # tokens to be computed, of those in flight and of other drivers' requests
        self.foreign = 0  # of `load`, other drivers'
        # The picture of its cache: digest -> (when it was last used, tokens of its block), oldest first. What has no
        # digest is there under numbers below 0.
        self.held: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.held_tokens = 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A request that a replica has. promised: tokens that its cache should hold; since: when those were last used."""

    replica: int
    digests: tuple[int, ...]
    work: int
    promised: int
    since: int


class Router:
    """Sends requests, known by keys, to replicas, known by small numbers. epsilon: as EPSILON above."""

    def __init__(self, epsilon: float = EPSILON) -> None:
        self._epsilon = epsilon
        self._replicas: dict[int, _Replica] = {}
        self._flights: dict[str, _Flight] = {}
        self._holders: dict[int, int] = {}  # digest -> a bit for each replica that holds it
        self._open = 0  # a bit for each replica that has room
        self._load = 0  # of all replicas
        self._now = 0  # counts uses

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    def add(self, replica: int, room: int, capacity: int, seats: int | None = None) -> None:
        """A replica whose cache is empty. room: most requests it may have of this router's; capacity: tokens its pages
        hold; seats: requests that run there at once, max_num_seqs (unless given, as many as there is room for).

        A driver that keeps all replicas busy gives each twice the room of its share in what it has in flight: where all
        are full but the one that has just answered, there is nothing to choose.
        """
        assert replica not in self._replicas, f"replica {replica} is there"
        one = self._replicas[replica] = _Replica(replica, room, capacity, room if seats is None else seats)
        if room > 0:
            self._open |= one.bit

    def remove(self, replica: int) -> list[str]:
        """Forget a replica, and its requests: the keys that were in flight there, in the order in which they began."""
        one = self._replicas.pop(replica)
        self._open &= ~one.bit
        self._load -= one.load
        for digest in one.held:
            self._let_go(one, digest)
        lost = [key for key in self._flights if key in one.keys]
        for key in lost:
            del self._flights[key]
        return lost

    def load(self, replica: int) -> tuple[int, int]:
        """Requests that this router has in flight there, and the tokens to be computed there, other drivers' too."""
        one = self._replicas[replica]
        return len(one.keys), one.load

    def known(self, replica: int, digests: tuple[int, ...]) -> int:
        """Tokens of a prompt that the replica should have in its cache."""
        return ENDS[self._depth(self._replicas[replica], digests)]

    def bound(self) -> float:
        """The load up to which a replica gets requests of which it holds nothing."""
        return (1 + self._epsilon) * self._load / max(len(self._replicas), 1)

    def pick(self, digests: tuple[int, ...], size: int) -> int | None:
        """The replica for a request of `size` tokens; None where each has as many as it has room for."""
        free = self._open
        if not free:
            return None
        levels, holders, mask = [(0, free)], self._holders, free  # levels: who holds so many of the first blocks
        for depth, digest in enumerate(digests, 1):
            closer = mask & holders.get(digest, 0)
            if not closer:
                break
            if closer == mask:
                levels[-1] = depth, mask
            else:
                levels.append((depth, closer))
                mask = closer
        bound, seated = self.bound(), self._least_seated()
        for depth, mask in reversed(levels):
            worth = ENDS[depth]
            if worth * WORTH < size:
                break
            fit = self._fit(mask & free, bound + worth, seated + worth)
            if fit:
                return self._choose(fit, digests[min(depth, len(digests) - 1)])
            free &= ~mask
        fit = self._fit(self._open, bound, seated) if digests else []
        if fit:
            return self._choose(fit, digests[min(levels[-1][0], len(digests) - 1)])
        return self._least_busy()

    def started(self, key: str, replica: int, digests: tuple[int, ...], size: int) -> None:
        """The request is the replica's now, wherever `pick` would have it."""
        assert key not in self._flights, f"request {key} is in flight"
        one = self._replicas[replica]
        depth = self._depth(one, digests)
        since = one.held[digests[depth - 1]][0] if depth else 0
        work = max(size - ENDS[depth], 1)
        self._flights[key] = _Flight(replica, digests, work, ENDS[depth], since)
        one.keys.add(key)
        one.load += work
        self._load += work
        if len(one.keys) >= one.room:
            self._open &= ~one.bit
        self._use(one, digests, 0)

    def finished(self, key: str, usage: Usage | None = None) -> None:
        """The request has its answer, or is given up; usage: what the answer says. Unknown keys are none."""
        flight = self._flights.pop(key, None)
        if flight is None:
            return
        one = self._replicas[flight.replica]
        one.keys.remove(key)
        one.load -= flight.work
        self._load -= flight.work
        if len(one.keys) < one.room:
            self._open |= one.bit
        if usage is None:
            return
        if usage.cached < flight.promised // 2:  # sizes of text are not exact
            self._drop(one, flight.since)
        self._use(one, flight.digests, max(usage.prompt + usage.output - ENDS[len(flight.digests)], 0))

    def report(self, replica: int, requests: int) -> None:
        """How many requests the replica has, of all drivers; others' count as heavy as the average one of ours."""
        one = self._replicas[replica]
        others = one.others = max(requests - len(one.keys), 0)
        ours = self._load - sum(each.foreign for each in self._replicas.values())
        foreign = others * (ours // len(self._flights) if self._flights else 1)
        change, one.foreign = foreign - one.foreign, foreign
        one.load += change
        self._load += change

    def check(self) -> None:
        """Recompute every sum and mask from scratch; AssertionError names what is wrong."""
        for number, one in self._replicas.items():
            mine = {key: flight for key, flight in self._flights.items() if flight.replica == number}
            assert one.keys == set(mine), f"replica {number}: keys"
            assert one.load == one.foreign + sum(flight.work for flight in mine.values()), f"replica {number}: load"
            assert bool(self._open & one.bit) == (len(one.keys) < one.room), f"replica {number}: open"
            assert one.held_tokens == sum(tokens for _, tokens in one.held.values()), f"replica {number}: held tokens"
            assert one.held_tokens <= one.capacity, f"replica {number}: more is held than there are pages"
            times = [time for time, _ in one.held.values()]
            assert times == sorted(times), f"replica {number}: order of use"
            held = {digest for digest, mask in self._holders.items() if mask & one.bit}
            assert held == {digest for digest in one.held if digest >= 0}, f"replica {number}: holders"
        live = sum(one.bit for one in self._replicas.values())
        assert not self._open & ~live, "a replica that is gone has room"
        assert all(mask and not mask & ~live for mask in self._holders.values()), "one that is gone holds something"
        assert self._load == sum(one.load for one in self._replicas.values()), "load of all"
        assert all(flight.replica in self._replicas for flight in self._flights.values()), "in flight at none"

    # Who

    def _fit(self, mask: int, bound: float, waiting: float) -> list[_Replica]:
        """Of these replicas those with no more load than that; `waiting` is for those without a seat."""
        return [
            one
            for one in self._replicas.values()
            if mask & one.bit and one.load <= bound and (one.load <= waiting or len(one.keys) + one.others < one.seats)
        ]

    def _least_seated(self) -> float:
        """The least load where there is a seat."""
        seated = [one.load for one in self._replicas.values() if len(one.keys) + one.others < one.seats]
        return min(seated, default=inf)

    def _choose(self, some: list[_Replica], digest: int) -> int:
        """Of the two with the highest hashes the less busy one."""
        best = second = some[0]
        most = more = -1
        if len(some) > 1:
            for one in some:
                mixed = (digest ^ one.seed) * _ODD & _MASK
                mixed = (mixed ^ mixed >> 32) * _ODD & _MASK
                if mixed > most:
                    second, more = best, most
                    best, most = one, mixed
                elif mixed > more:
                    second, more = one, mixed
        return (second if second.load < best.load else best).bit.bit_length() - 1

    def _least_busy(self) -> int:
        some = [one for one in self._replicas.values() if self._open & one.bit]
        return min(some, key=lambda one: (one.load, len(one.keys), one.bit)).bit.bit_length() - 1

    # What a replica holds

    def _depth(self, one: _Replica, digests: tuple[int, ...]) -> int:
        held = one.held
        for depth, digest in enumerate(digests):
            if digest not in held:
                return depth
        return len(digests)

    def _use(self, one: _Replica, digests: tuple[int, ...], rest: int) -> None:
        """A prompt is in the cache, and `rest` tokens behind its last digest. Evicted are the ends of prompts first."""
        held, holders, bit = one.held, self._holders, one.bit
        self._now += 1
        now = self._now
        if rest:
            held[-now] = now, rest
            one.held_tokens += rest
        for i in range(len(digests) - 1, -1, -1):
            digest, tokens = digests[i], BLOCKS[i]
            if digest in held:
                held.move_to_end(digest)
            else:
                holders[digest] = holders.get(digest, 0) | bit
                one.held_tokens += tokens
            held[digest] = now, tokens
        while one.held_tokens > one.capacity:
            self._evict_oldest(one)

    def _drop(self, one: _Replica, time: int) -> None:
        """All that was not used after that time."""
        while one.held and next(iter(one.held.values()))[0] <= time:
            self._evict_oldest(one)

    def _evict_oldest(self, one: _Replica) -> None:
        digest, (_, tokens) = one.held.popitem(last=False)
        one.held_tokens -= tokens
        self._let_go(one, digest)

    def _let_go(self, one: _Replica, digest: int) -> None:
        if digest >= 0:
            left = self._holders[digest] & ~one.bit
            if left:
                self._holders[digest] = left
            else:
                del self._holders[digest]
