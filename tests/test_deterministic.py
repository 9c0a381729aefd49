"""N3: the bits of a request's logits, alone and in random batches; and that nothing starts that would not keep them.

Logits follow from the tokens before them, and so do their bits: whatever runs, wherever the same tokens come first, the
logits must be the same. `Recorder` keeps what every step gave; the request alone, in one piece, says what is right.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import tiny

from paged import LLM, ConfigError, SamplingParams
from paged.attention.backends import BACKENDS
from paged.kernels import Team, library
from paged.pool import KVPool
from scheduler.config import EngineConfig
from scheduler.engine import Engine
from scheduler.llm import kv_layout, plan
from scheduler.policy import VICTIMS, Limits, Rules
from worker.checkpoints import Checkpoint, resolve
from worker.executor import LocalExecutor
from worker.models.decoder import Decoder
from worker.native_model import NativeModel
from worker.packing import pack_weights
from worker.runner import ModelRunner
from worker.weights import load_weights

NATIVE = library()
assert NATIVE is not None
VOCAB, LONGEST = 131, 416  # of the tiny models; attention splits K and V every 256 tokens
Bits = dict[bytes, bytes]  # of the logits after some tokens, both as digests


class Recorder:
    """Keeps of every step of an executor the bits of all logits, by the tokens that they come after."""

    def __init__(self, executor: LocalExecutor) -> None:
        assert executor._runner is not None
        self.bits: Bits = {}
        self.differing = 0  # logits that were not those of the same tokens earlier
        self._runner = executor._runner
        self._execute, self._compute = self._runner.execute, self._runner._compute
        vars(self._runner).update(execute=self._on_execute, _compute=self._on_compute)

    def _on_execute(self, step: Any) -> Any:
        self._step = step
        return self._execute(step)

    def _on_compute(self, inputs: Any) -> Any:
        logits, best = self._compute(inputs)
        rows = torch.searchsorted(inputs.metas[0].query_start, inputs.sampled, right=True) - 1
        positions = inputs.positions[inputs.sampled]
        for row, position, values in zip(rows.tolist(), positions.tolist(), logits.numpy(), strict=True):
            tokens = self._runner._states[self._step.rows[row].seq_id].tokens[: position + 1]  # drafts too
            digest = hashlib.blake2b(values.tobytes()).digest()
            self.differing += self.bits.setdefault(key(tokens.tolist()), digest) != digest
        return logits, best


def key(tokens: list[int]) -> bytes:
    return hashlib.blake2b(repr(tokens).encode()).digest()


@dataclass(frozen=True)
class Target:
    """A request, and the tokens that it gives alone."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)


class Subject:
    """A tiny model, its weights packed once, and the targets alone on one thread, in one piece, nothing cached."""

    def __init__(self, folder: Path, kind: str, backend: str = "native", instructions: str | None = None) -> None:
        self.config = resolve(str(folder)).config
        self.dtype = kind if kind in ("float32", "bfloat16", "float16") else "float32"
        self.quantization = None if kind == self.dtype else kind
        self.backend, self.instructions = backend, instructions
        weights, dtype = load_weights(folder, self.config), getattr(torch, self.dtype)
        if backend == "native":
            self._parts = dict(pack_weights(weights, self.config, dtype, self.quantization))
        else:
            self._decoder = Decoder(self.config, weights, LONGEST, dtype, torch.device("cpu"))
        self.bits: Bits = {}
        self.differing = 0  # logits of what targets have in common
        self.targets: list[Target] = []
        for target in targets():
            engine, recorder = self.engine(1, 16, 2.0, 512, Rules(), caching=False)
            engine.add("alone", target.prompt, replace(target.params, prompt_logprobs=0))
            tokens = run(engine)["alone"]
            for before, bits in recorder.bits.items():
                self.differing += self.bits.setdefault(before, bits) != bits
            self.targets.append(replace(target, tokens=tokens))

    def engine(
        self, threads: int, page_size: int, share: float, budget: int, rules: Rules, caching: bool = True
    ) -> tuple[Engine, Recorder]:
        """Its pool has `share` times the pages of the longest sequence."""
        layout = kv_layout(self.config, self.dtype, page_size)
        one = Limits(LONGEST, 10**6, page_size, layout.windows, 12, budget).pages(LONGEST)
        limits = Limits(LONGEST, int(one * share), page_size, layout.windows, 12, budget)
        pool = KVPool(layout, limits.num_pages + 1)
        model: Any
        if self.backend == "native":
            team = Team(threads, len(layout.windows), self.instructions)
            model = NativeModel(self.config, self._parts, pool, LONGEST, team, self.quantization)
        else:
            model = self._decoder
        executor = LocalExecutor(ModelRunner(model, pool, BACKENDS[self.backend]), lambda *_: model)
        recorder = Recorder(executor)
        engine = Engine(
            executor, None, limits, vocab_size=VOCAB, enable_prefix_caching=caching, rules=rules, seed=threads
        )
        return engine, recorder


def targets() -> list[Target]:
    """Requests of all kinds; half of them begin with the same 230 tokens."""
    rng = random.Random(3)
    common = rng.choices(range(VOCAB), k=230)
    prompts = [rng.choices(range(VOCAB), k=length) for length in (1, 7, 64)]
    prompts += [common + rng.choices(range(VOCAB), k=length) for length in (15, 40, 90)]
    few = [None, [5, 7], None, None, None, [0, 9]]  # of so few tokens, drafts are often right
    return [
        Target(
            prompt,
            SamplingParams(
                temperature=i % 2, seed=i, max_tokens=14 + 7 * (i % 3), ignore_eos=True, allowed_token_ids=few[i]
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


def run(engine: Engine, between: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.has_work:
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        between()
    return found


def run_batch(subject: Subject, seed: int, seen: Counter[str]) -> int:
    """Some targets beside others in an engine drawn at random. How many logits, and answers, differ."""
    rng = random.Random(seed)
    rules = Rules(
        admission=rng.choice(["optimistic", "guaranteed"]),
        victim=rng.choice(list(VICTIMS.values())),
        num_speculative_tokens=rng.choice([0, 0, 1, 5]),
    )
    threads, budget, share = rng.choice([1, 2]), rng.choice([13, 40, 100, 512]), rng.uniform(1.1, 3)
    engine, recorder = subject.engine(
        threads, rng.choice([4, 16, 64]), share, budget, rules, caching=rng.random() < 0.8
    )

    def disturb() -> None:
        running = engine.scheduler.running
        if running and rng.random() < 0.03:
            engine.scheduler._preempt(rng.choice(running))

    chosen = rng.sample(range(len(subject.targets)), rng.randint(1, len(subject.targets)))
    if rng.random() < 0.5:  # find them cached
        for i in chosen:
            engine.add(f"warm {i}", subject.targets[i].prompt, SamplingParams(temperature=0, max_tokens=1))
        run(engine)
    wanted = [(f"target {i}", subject.targets[i].prompt, subject.targets[i].params) for i in chosen]
    for i in range(rng.randint(0, 8)):
        start = rng.choice(subject.targets).prompt
        prompt = start[: rng.randint(0, len(start))] + rng.choices(range(VOCAB), k=rng.randint(1, 60))
        more: dict[str, Any] = rng.choice([{}, {}, {"n": 1 + (share > 2.1)}, {"prompt_logprobs": 1}, {"min_p": 0.1}])
        params = SamplingParams(temperature=rng.choice([0, 1]), max_tokens=rng.randint(1, 30), ignore_eos=True, **more)
        wanted.append((f"other {i}", prompt, params))
    rng.shuffle(wanted)
    found: dict[str, list[int]] = {}
    for request in wanted:  # some come while others run
        engine.add(*request)
        for _ in range(rng.choice([0, 0, 1, 5])):
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
            disturb()
    found |= run(engine, disturb)

    compared = recorder.bits.keys() & subject.bits.keys()
    others = [i for i in chosen if found[f"target {i}"] != subject.targets[i].tokens]
    for i in set(chosen) - set(others):
        prompt, tokens = subject.targets[i].prompt, subject.targets[i].tokens
        assert all(key(prompt + tokens[:length]) in compared for length in range(len(tokens)))
    seen["batches"] += 1
    seen["compared"] += len(compared)
    for name in ("preemptions", "recomputed_tokens", "cached_tokens", "accepted_tokens"):
        seen[name] += getattr(engine.stats, name)
    return sum(recorder.bits[before] != subject.bits[before] for before in compared) + recorder.differing + len(others)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For what torch computes; native kernels have a team of their own. An LLM sets what it wants."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tiny(family, made[family], vocab_size=VOCAB)
        return made[family]

    return folder


def check_batches(subject: Subject, seeds: range) -> None:
    assert subject.differing == 0
    seen = Counter[str]()
    for seed in seeds:
        assert run_batch(subject, seed, seen) == 0, f"in batch {seed} logits have other bits than alone"
    assert len(seen) == 6
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "float32"), ("llama", "bfloat16"), ("llama", "int8"), ("gemma3", "bfloat16")],
)
def test_n03_logits_have_the_bits_that_they_have_alone_in_any_batch(
    folder: Callable[[str], Path], family: str, kind: str
) -> None:
    """Ten random batches each; chunked, cached, preempted, forked, speculated, on one thread or two."""
    check_batches(Subject(folder(family), kind), range(10))


@pytest.mark.slow
@pytest.mark.parametrize("instructions", NATIVE.sets)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_n03_logits_have_the_bits_that_they_have_alone_in_hundreds_of_batches(
    folder: Callable[[str], Path], family: str, kind: str, instructions: str
) -> None:
    """Twenty batches of each of 45 cases: 900."""
    check_batches(Subject(folder(family), kind, instructions=instructions), range(1000, 1020))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_torchs_bits_do_differ_and_the_check_sees_it(folder: Callable[[str], Path], backend: str) -> None:
    """What `deterministic` refuses: its products are rounded in one way for one row, in another for many."""
    subject = Subject(folder("llama"), "bfloat16", backend)
    assert subject.differing + sum(run_batch(subject, seed, Counter()) for seed in range(3)) > 0


@pytest.mark.parametrize("fault", ["rows", "place", "reused"])
def test_a_fault_in_the_last_bit_of_one_logit_is_seen(
    monkeypatch: pytest.MonkeyPatch, folder: Callable[[str], Path], fault: str
) -> None:
    """It depends on how many rows there are, on a row's place, or on what the step before had."""
    subject = Subject(folder("llama"), "float32")
    step, before = NativeModel.step, [0]

    def faulty(self: NativeModel, inputs: Any, seconds: Any = None) -> Any:
        logits, best = step(self, inputs, seconds)
        wrong = {"rows": len(inputs.token_ids) == 3, "place": len(logits) > 4, "reused": before[0] > 90}[fault]
        before[0] = len(inputs.token_ids)
        if wrong:
            logits[-1, 5] = torch.nextafter(logits[-1, 5], torch.tensor(9e9))
        return logits, best

    monkeypatch.setattr(NativeModel, "step", faulty)
    assert sum(run_batch(subject, seed, Counter()) for seed in range(10)) > 0


REAL: list[dict[str, Any]] = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}]


@pytest.mark.parametrize("settings", REAL, ids=str)
def test_n03_the_real_models_logits_have_the_same_bits_alone_and_beside_others(
    smollm2: Checkpoint, settings: dict[str, Any]
) -> None:
    """By LLM, as people start it; its chunks, threads and neighbours differ."""
    prompts: Any = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n    "]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for threads, budget, drafts, asked in ((1, 512, 0, prompts[:1]), (2, 7, 4, prompts), (2, 64, 0, prompts[::-1])):
        llm = LLM(
            deterministic=True,
            kv_memory="64MiB",
            max_model_len=256,
            threads=threads,
            max_num_batched_tokens=budget,
            num_speculative_tokens=drafts,
            **settings,
        )
        assert isinstance(llm.engine.executor, LocalExecutor)
        recorder = Recorder(llm.engine.executor)
        output = llm.generate(asked, params)[asked.index(prompts[0])]
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        assert recorder.differing == 0
        ends = range(len(output.prompt_token_ids), len(tokens))
        found.append([recorder.bits[key(tokens[:end])] for end in ends])
        assert len(set(found[-1])) == 12
        llm.engine.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_n03_what_cannot_keep_the_bits_does_not_start_and_says_why(backend: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"deterministic needs the native kernels, .* is {backend} \(as set\): leave"
    ):
        LLM(deterministic=True, attention_backend=backend, device="cpu")


def test_n03_without_native_kernels_nothing_deterministic_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.library", lambda: None)
    monkeypatch.setattr("worker.device.why_not", lambda: "there was no compiler")
    assert plan(EngineConfig(device="cpu")).backend == "sdpa"
    with pytest.raises(ConfigError, match=r"deterministic needs .* is sdpa \(.*there was no compiler\)"):
        plan(EngineConfig(deterministic=True, device="cpu"))


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_n03_the_command_line_has_the_same_promise(backend: str) -> None:
    command = [sys.executable, "-c", "from scheduler.cli import main; main()", "info", "--deterministic"]
    command += ["--device", "cpu", "--attention-backend", backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if backend == "auto":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert "deterministic needs the native kernels" in done.stderr
