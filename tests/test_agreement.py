"""Cached and uncached generation agree, at full length: the test that open_lm's pull request 74 cut to 32 tokens.

One uncached forward of transformers over a whole sequence gives the logits that every step should have had. Those of
the engine's steps and of PagedCache's steps, along what each has generated, are compared with it: each token is the
greedy one, or that of the best beam, and no logit differs by more than 1e-3. Loops without any cache say the same up to
128 tokens, twice. All in float32; the largest differences are reported at the end of the run.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import save_words, tiny
from torch import Tensor

from paged import LLM, BeamSearchParams, SamplingParams
from paged.hf import NAME, PagedCache

CONTEXTS, NEW, BEAMS = (4, 8, 128, 256), (4, 8, 128, 256, 1024), (1, 4)
LONGEST = max(CONTEXTS) + max(NEW)
OPEN_LM = 8  # contexts and new tokens up to here, their cases, run in the plain test run
UNCACHED = 128  # most new tokens of the loops without a cache
TOLERANCE = 1e-3  # of logits, which reach 30 and more
TIE = 1e-4  # of two logits, or of two beams' scores


class Subject:
    """A model in transformers and in our engine, and a prompt."""

    def __init__(self, model: Any, folder: Path, prompt: list[int]) -> None:
        self.model, self.prompt = model, prompt
        model.generation_config.eos_token_id = None  # as ignore_eos
        self.engine = LLM(str(folder), dtype="float32", max_model_len=LONGEST, kv_memory="512MiB")
        self._seen: dict[tuple[int, ...], Tensor] = {}  # what a step gave, by the tokens that it came after
        runner: Any = self.engine.engine.executor._runner  # type: ignore[attr-defined]  # of LocalExecutor
        execute, compute = runner.execute, runner._compute

        def on_execute(step: Any) -> Any:
            self._step = step
            return execute(step)

        def on_compute(inputs: Any) -> Any:
            logits, best = compute(inputs)
            rows = torch.searchsorted(inputs.metas[0].query_start, inputs.sampled, right=True) - 1
            for row, position, values in zip(rows, inputs.positions[inputs.sampled], logits, strict=True):
                tokens = runner._states[self._step.rows[row].seq_id].tokens[: position + 1]
                self._seen[tuple(tokens.tolist())] = values.clone()
            return logits, best

        vars(runner).update(execute=on_execute, _compute=on_compute)

    def close(self) -> None:
        self.engine.engine.scheduler.manager.check(idle=True)
        self.engine.close()

    def of_engine(self, context: int, new: int, beams: int) -> tuple[list[int], float, Tensor]:
        """New tokens, score, and logits of their steps [new, vocab]."""
        prompt = self.prompt[:context]
        self._seen.clear()
        if beams == 1:
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            choice = self.engine.generate([prompt], params)[0].outputs[0]
        else:
            search = BeamSearchParams(beam_width=beams, max_tokens=new, ignore_eos=True)
            choice = self.engine.beam_search([prompt], search)[0].outputs[0]
        tokens = list(choice.token_ids)
        steps = [self._seen[(*prompt, *tokens[:i])] for i in range(new)]
        self._seen.clear()
        return tokens, choice.score if beams > 1 and choice.score is not None else 0.0, torch.stack(steps)

    def of_cache(self, context: int, new: int, beams: int) -> tuple[list[int], float, Tensor]:
        """The same of transformers' generate over a PagedCache, in place."""
        cache = PagedCache(self.model.config, kv_memory="512MiB")
        found = self.generate(NAME, context, new, beams, cache=cache, output_logits=True)
        assert cache.bytes_gathered == 0
        rows = [0] * new if beams == 1 else found.beam_indices[0, :new].tolist()
        return (
            found.sequences[0, context:].tolist(),
            0.0 if beams == 1 else found.sequences_scores[0].item(),
            torch.stack([step[row] for step, row in zip(found.logits, rows, strict=True)]),
        )

    def generate(self, attention: str, context: int, new: int, beams: int, **more: Any) -> Any:
        self.model.set_attn_implementation(attention)
        prompt = torch.tensor([self.prompt[:context]])
        wanted = {"return_dict_in_generate": True, "output_scores": beams > 1, "num_beams": beams, "pad_token_id": 0}
        return self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False, **wanted, **more
        )

    def uncached(self, context: int, tokens: list[int]) -> Tensor:
        """Logits [new, vocab] of one forward over the whole sequence."""
        self.model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            whole = torch.tensor([self.prompt[:context] + tokens])
            logits: Tensor = self.model(whole, use_cache=False, logits_to_keep=len(tokens) + 1).logits
        return logits[0, :-1]


Subjects = Callable[[str], Subject]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Subjects]:
    """Each made when it is first asked for."""
    made: dict[str, Subject] = {}

    def make(name: str) -> Subject:
        if name == "smollm2":
            workload = Path(__file__).parent.parent / "benchmarks" / "workloads" / "workload_smollm2.json"
            prompt = json.loads(workload.read_text())["W4"][0]["prompt"]  # real text
            return Subject(
                request.getfixturevalue("transformers_smollm2"), request.getfixturevalue("smollm2").path, prompt
            )
        folder = tmp_path_factory.mktemp(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = tiny(name, folder, max_position_embeddings=LONGEST)
        save_words(folder)
        prompt = torch.randint(3, 131, (max(CONTEXTS),), generator=torch.Generator().manual_seed(0)).tolist()
        return Subject(model, folder, prompt)

    def get(name: str) -> Subject:
        if name not in made:
            made[name] = make(name)
        return made[name]

    yield get
    for subject in made.values():
        subject.close()


def cases(most_new: int) -> list[Any]:
    """Context, new tokens and beams; those that are not open_lm's are slow."""
    result = []
    for context, new, beams in itertools.product(CONTEXTS, NEW, BEAMS):
        marks = () if max(context, new) <= OPEN_LM else pytest.mark.slow
        if new <= most_new:
            result.append(pytest.param(context, new, beams, marks=marks))
    return result


def check_greedy(tokens: list[int], uncached: Tensor) -> None:
    """Each token has the greatest uncached logit, or is one of two that tie."""
    best = uncached.amax(-1)
    chosen = uncached.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (best - chosen).max().item() < TIE
    different = [i for i, token in enumerate(uncached.argmax(-1).tolist()) if token != tokens[i]]
    assert len(different) <= len(tokens) // 100, f"ties at {different}"


@pytest.mark.parametrize(("context", "new", "beams"), cases(max(NEW)))
@pytest.mark.parametrize("name", ["smollm2", "llama", "gemma3"])
def test_cached_logits_of_every_step_are_the_uncached_ones(
    subjects: Subjects, name: str, context: int, new: int, beams: int, record_property: Callable[[str, Any], None]
) -> None:
    subject = subjects(name)
    answers = {"engine": subject.of_engine(context, new, beams), "PagedCache": subject.of_cache(context, new, beams)}
    tokens, score, _ = answers["engine"]
    uncached = subject.uncached(context, tokens)
    for who, (own, own_score, logits) in answers.items():
        if own != tokens:  # only where two beams, or two tokens, are as good
            assert beams > 1, f"tokens {own} and {tokens}"
            assert own_score == pytest.approx(score, abs=TIE)
            uncached = subject.uncached(context, own)
        difference = (logits - uncached).abs().max().item()
        record_property(f"largest difference of a logit, {name}, {who}", difference)
        assert difference < TOLERANCE
        if beams == 1:
            check_greedy(own, uncached)


@pytest.mark.parametrize(("context", "new", "beams"), cases(UNCACHED))
@pytest.mark.parametrize("name", ["smollm2", "llama", "gemma3"])
def test_loops_without_a_cache_give_the_same_tokens_twice(
    subjects: Subjects, name: str, context: int, new: int, beams: int
) -> None:
    subject = subjects(name)
    tokens, score, _ = subject.of_engine(context, new, beams)
    for _ in range(2):
        found = subject.generate("sdpa", context, new, beams, use_cache=False)
        assert found.sequences[0, context:].tolist() == tokens
        if beams > 1:
            assert found.sequences_scores[0].item() == pytest.approx(score, abs=TIE)


def test_a_logit_that_is_wrong_is_seen(subjects: Subjects) -> None:
    """A planted fault: K of one token, in one layer, is off."""
    subject = subjects("llama")
    update = PagedCache._write

    def wrong(cache: PagedCache, key: Tensor, value: Tensor, layer: int) -> None:
        update(cache, key * (1.01 if cache.get_seq_length() == 12 and layer == 1 else 1.0), value, layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedCache, "_write", wrong)
        tokens, _, logits = subject.of_cache(8, 8, 1)
    assert (logits - subject.uncached(8, tokens)).abs().max().item() > TOLERANCE
