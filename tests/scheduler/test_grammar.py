"""Constrained output: masks of small vocabularies, what a real model writes under them, and what is refused before."""

from __future__ import annotations

import json
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import fake_engine, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from paged import LLM, BeamSearchParams, RequestError, RequestFailed, SamplingParams, StructuredOutputsParams
from scheduler import cli, openai
from scheduler.grammar import MAX_CHARACTERS, Grammars, Matcher
from scheduler.jobs import run_job
from scheduler.text import Tokenizer
from worker.checkpoints import Checkpoint

Constraint = StructuredOutputsParams
PERSON = Path(__file__).parents[2] / "examples" / "person.schema.json"
PROMPT = "A person:"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
DAYS = ["monday", "tuesday, but late", "é🙂", 'a "quoted"\nline', "mon"]


@pytest.fixture(scope="module")
def llm(smollm2: Checkpoint) -> LLM:
    return LLM("smollm2", dtype="float32", kv_memory="64MiB", max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Checkpoint) -> Tokenizer:
    return Tokenizer.from_dir(smollm2.path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 49152)


def params(constraint: Constraint, seed: int = 1, max_tokens: int = 60, **more: Any) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, structured_outputs=constraint, **more)


def allowed(matcher: Matcher) -> set[int]:
    bits = int.from_bytes(matcher.mask, "little")
    return {i for i in range(8 * len(matcher.mask)) if bits >> i & 1}


# Masks of a small vocabulary

_WORDS = ["a", "b", "c", "Ã", "©", "ab", "bc", "abc", "Ã©", "aÃ"]  # byte-level: é is the bytes Ã ©
_END, _ROWS = 37, 38  # an end token and rows of the model that the tokenizer does not know


def tiny(*special: str) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(_WORDS)}
    fast = FastTokenizer(models.BPE(vocab, [("a", "b"), ("b", "c"), ("ab", "c"), ("Ã", "©"), ("a", "Ã")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(special))
    return Tokenizer(fast, None, {})


_BYTES = [b"a", b"b", b"c", b"\xc3", b"\xa9", b"ab", b"bc", b"abc", b"\xc3\xa9", b"a\xc3"]


def reachable(constraint: Constraint, ends: tuple[int, ...]) -> Iterator[tuple[bytes, Matcher]]:
    """Every state of its matcher, with the bytes that lead there."""
    grammar, todo = Grammars(tiny(), _ROWS).get(constraint), [(b"", list[int]())]
    while todo:
        text, tokens = todo.pop()
        matcher = grammar.matcher(ends)
        for token in tokens:
            matcher.take(token)
        yield text, matcher
        todo += [(text + _BYTES[i], [*tokens, i]) for i in sorted(allowed(matcher) - set(ends))]


@pytest.mark.parametrize("ends", [(), (_END,), (_END, 1000)])
@settings(max_examples=25)
@given(choices=st.lists(st.text("abcé", min_size=1, max_size=5), min_size=1, max_size=4))
def test_masks_hold_the_tokens_that_a_choice_can_go_on_with(choices: list[str], ends: tuple[int, ...]) -> None:
    """By brute force. Where the next byte is sure, the library may ask for what the tokenizer would write."""
    wanted = [choice.encode() for choice in choices]
    found = set()
    for text, matcher in reachable(Constraint(choice=choices), ends):
        more = {i for i, token in enumerate(_BYTES) if any(one.startswith(text + token) for one in wanted)}
        assert matcher.complete == (text in wanted)
        assert matcher.ended == (text in wanted and not more and not ends)
        assert len(matcher.mask) % 4 == 0
        own = allowed(matcher) - {_END}
        assert own <= more
        assert bool(own) == bool(more)
        if matcher.complete or len({_BYTES[i][0] for i in more}) > 1:
            assert own == more
        assert (_END in allowed(matcher)) == (bool(ends) and text in wanted)
        found |= {text} & set(wanted)
    assert found == set(wanted)


def test_special_tokens_are_never_part_of_the_text() -> None:
    matcher = Grammars(tiny("<abc>"), _ROWS).get(Constraint(regex="(?s:.)*")).matcher((_END,))
    assert len(_WORDS) not in allowed(matcher)
    assert allowed(matcher) >= {0, 1, 2, 3, 5, 6, 7, 8, _END}


def test_an_end_token_that_is_plain_text_is_no_part_of_a_text() -> None:
    matcher = Grammars(tiny(), _ROWS).get(Constraint(regex="[ab]{2}c?")).matcher((2,))
    assert allowed(matcher) == {0, 1, 5, 7}
    matcher.take(5)
    assert allowed(matcher) == {2}


def test_a_matcher_refuses_what_its_mask_does_not_hold() -> None:
    matcher = Grammars(tiny(), _ROWS).get(Constraint(choice=["ab"])).matcher(())
    for token in (2, _END, 1000, -1):
        with pytest.raises(RequestFailed, match=f"token {token} was sampled, which the constraint does not allow"):
            matcher.take(token)
    for token in [5] if 5 in allowed(matcher) else [0, 1]:
        matcher.take(token)
    assert matcher.ended


def test_what_the_models_tokens_cannot_write_is_an_error() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs.* no token of the model can write"):
        engine_of(tiny()).resolve("r", [1], params(Constraint(choice=["z"])))
    matcher = Grammars(tiny(), _ROWS).get(Constraint(choice=["az"])).matcher(())
    with pytest.raises(RequestFailed, match="no token of the model can write"):
        matcher.take(0)


def test_a_constraint_that_grows_too_large_ends_in_an_error(grammars: Grammars) -> None:
    """No hang: the library counts what it does."""
    matcher, draw = grammars.get(Constraint(regex="([a-z]+ ?(a|b|cc)*){500}z")).matcher((2,)), random.Random(1)

    def follow() -> None:
        for _ in range(200):
            matcher.take(draw.choice(sorted(allowed(matcher))))

    with pytest.raises(RequestFailed, match="cannot be followed: lexer error"):
        follow()


# Against re


# Some control characters are in none of its tokens.
_WRITABLE = st.one_of(st.characters(min_codepoint=0x20, max_codepoint=0x7E), st.sampled_from("\n\té漢🙂ß"))


def expressions() -> st.SearchStrategy[str]:
    pieces = st.sampled_from(["a", "b", "é", "[xyz]", " ", r"\.", "[^a-z\n]", "the", "/"])
    return st.recursive(
        pieces,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(lambda two: f"(?:{two[0]}){two[1]}"),
        ),
        max_leaves=6,
    )


def walk(matcher: Matcher, tokenizer: Tokenizer, ends: set[int], draw: random.Random) -> str:
    """A text of random tokens that the masks allow, ended where it may end after 20."""
    tokens: list[int] = []
    while len(tokens) < 200:
        choices = allowed(matcher)
        token = min(ends) if choices & ends and len(tokens) >= 20 else draw.choice(sorted(choices))
        if token in ends:
            assert matcher.complete
            return tokenizer.decode(tokens, skip_special_tokens=False)
        matcher.take(token)
        tokens.append(token)
    raise AssertionError("it does not end")


@settings(max_examples=40)
@given(regex=expressions(), seed=st.integers(0, 2**32))
def test_random_texts_match_the_regular_expression(
    regex: str, seed: int, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.get(Constraint(regex=regex)).matcher((2,))
    text = walk(matcher, tokenizer, {2}, random.Random(seed))
    assert re.fullmatch(regex, text), (regex, text)


@settings(max_examples=40)
@given(choices=st.lists(st.text(_WRITABLE, max_size=12), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_random_texts_are_one_of_the_choices(
    choices: list[str], seed: int, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = grammars.get(Constraint(choice=choices)).matcher((2,))
    assert walk(matcher, tokenizer, {2}, random.Random(seed)) in choices


# What a real model writes


def is_person(text: str) -> bool:
    person, schema = json.loads(text), json.loads(PERSON.read_text())["properties"]
    assert list(person) == ["name", "age", "job"]
    assert re.search(schema["name"]["pattern"], person["name"])
    assert json.dumps(person, separators=(",", ":")) == text
    return 0 <= person["age"] <= 120 and person["job"] in schema["job"]["enum"]


def is_point(text: str) -> bool:
    point = json.loads(text)
    return list(point) == ["x", "on"] and -9 <= point["x"] <= 9 and isinstance(point["on"], bool)


CASES: list[tuple[Constraint, Callable[[str], bool]]] = [
    (Constraint(json=PERSON.read_text()), is_person),
    (Constraint(json=POINT), is_point),
    (Constraint(json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}), json.loads),
    (Constraint(regex=r"\d{4}-\d{2}-\d{2}"), lambda text: bool(re.fullmatch(r"\d{4}-\d{2}-\d{2}", text))),
    (Constraint(regex="(ab|c){3,5}é"), lambda text: bool(re.fullmatch("(ab|c){3,5}é", text))),
    (Constraint(choice=DAYS), lambda text: text in DAYS),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 8.0])
def test_answers_are_what_the_constraint_says(llm: LLM, temperature: float) -> None:
    wanted = [(constraint, good, seed) for constraint, good in CASES for seed in range(1 if temperature == 0 else 3)]
    outputs = llm.generate(PROMPT, params(CASES[0][0], temperature=temperature)) + llm.generate(
        [PROMPT] * len(wanted), [params(c, seed, temperature=temperature) for c, _, seed in wanted]
    )
    for output, (constraint, good, _) in zip(outputs[1:], wanted, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop"
        assert answer.stop_reason is None
        assert good(answer.text), (constraint, answer.text)
    assert is_person(outputs[0].outputs[0].text)


def test_any_object_is_a_json_object(llm: LLM) -> None:
    for seed in range(4):
        (answer,) = llm.generate("An empty object: {}\nAn object:", params(Constraint(json_object=True), seed))[
            0
        ].outputs
        assert answer.text.startswith("{")
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_tokens_are_the_same_alone_in_a_batch_preempted_streamed_and_among_others(llm: LLM) -> None:
    """And those of unconstrained neighbours are what they are without."""
    free = [SamplingParams(seed=seed, max_tokens=20, temperature=0.8) for seed in range(3)]
    constraints = [params(constraint, 7) for constraint, _ in CASES]
    alone = [llm.generate(PROMPT, one)[0].outputs[0].token_ids for one in [*free, *constraints]]
    mixed = [one for pair in zip(constraints, [*free, *free], strict=True) for one in pair]
    outputs = llm.generate([PROMPT] * len(mixed), mixed)
    assert [output.outputs[0].token_ids for output in outputs[::2]] == alone[len(free) :]
    assert [output.outputs[0].token_ids for output in outputs[1::2]] == alone[: len(free)] * 2
    for one, expected in list(zip(constraints, alone[len(free) :], strict=True))[:3]:
        assert llm.generate(PROMPT, replace(one, n=2))[0].outputs[0].token_ids == expected
        tokens: list[int] = []
        text = ""
        preempted = 0
        for output in llm.stream(PROMPT, one):
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
            if len(tokens) in {1, 4} and not output.finished:
                llm.engine.scheduler._preempt(llm.engine.scheduler.running[0])
                preempted += 1
        assert tokens == expected
        assert preempted
        assert text == llm.tokenizer.decode(expected)


def test_continuations_of_one_prompt_have_matchers_of_their_own(llm: LLM) -> None:
    answers = llm.generate(PROMPT, params(Constraint(json=PERSON.read_text()), n=4))[0].outputs
    assert all(is_person(answer.text) for answer in answers)
    assert len({answer.text for answer in answers}) > 1


def test_speculation_brings_no_drafts_under_a_constraint(llm: LLM) -> None:
    quick = LLM("smollm2", dtype="float32", kv_memory="64MiB", max_num_batched_tokens=64, num_speculative_tokens=4)
    prompt = "[true,false,true][true,false,true][true,false,true]"
    constraint = Constraint(regex=r"(\[true,false,true\]){3}")
    expected = llm.generate(prompt, params(constraint, 3))[0].outputs[0]
    found = quick.generate(prompt, params(constraint, 3))[0].outputs[0]
    assert found.token_ids == expected.token_ids
    assert found.text == "[true,false,true]" * 3
    assert quick.engine.stats.draft_tokens == 0
    quick.generate(prompt, SamplingParams(temperature=0, max_tokens=20))
    assert quick.engine.stats.draft_tokens > 0
    quick.close()


def test_without_end_tokens_a_complete_text_ends_by_itself(llm: LLM) -> None:
    for constraint, good in CASES[1:4]:
        (free,) = llm.generate(PROMPT, params(constraint, ignore_eos=True))[0].outputs
        (ended,) = llm.generate(PROMPT, params(constraint))[0].outputs
        assert (free.finish_reason, ended.finish_reason) == ("stop", "stop")
        assert good(free.text)
        assert free.token_ids == ended.token_ids[:-1]


def test_a_stop_string_ends_a_constrained_text(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPT, params(Constraint(regex="[a-z]{3}, [a-z]{9}"), stop=", "))[0].outputs
    assert re.fullmatch("[a-z]{3}", answer.text)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", ", ")


def test_max_tokens_cuts_a_constrained_text(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPT, params(Constraint(json=POINT), max_tokens=4))[0].outputs
    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 4
    assert answer.text.startswith('{"x"')


def test_the_constraint_binds_more_than_bans_and_min_tokens(llm: LLM) -> None:
    more: list[dict[str, Any]] = [{"min_tokens": 30}, {"bad_words": ["monday"]}, {"allowed_token_ids": [9]}]
    for some in more:
        (answer,) = llm.generate(PROMPT, params(Constraint(choice=["monday"]), **some))[0].outputs
        assert (answer.text, answer.finish_reason) == ("monday", "stop")


def test_logprobs_of_constrained_tokens_are_those_of_the_raw_distribution(llm: LLM) -> None:
    (answer,) = llm.generate(PROMPT, params(Constraint(choice=["zebra crossing"]), logprobs=1))[0].outputs
    assert answer.logprobs is not None
    first = answer.logprobs[0]
    assert first[answer.token_ids[0]].rank > 1
    assert max(first.values(), key=lambda entry: entry.logprob).rank == 1


# What goes wrong


def engine_of(tokenizer: Tokenizer, eos: tuple[int, ...] = ()) -> Any:
    return fake_engine(64, 4, tokenizer=tokenizer, eos=eos)[0]


def test_a_token_that_the_grammar_has_no_place_for_ends_only_its_request(tokenizer: Tokenizer) -> None:
    """The fake worker does not look at masks."""
    engine = engine_of(tokenizer)
    assert not tokenizer.token_text(next_token(3, 2)).isdigit()
    engine.add("free", [1, 2, 3], SamplingParams(max_tokens=6, temperature=0))
    engine.add("bound", [1, 2, 3], params(Constraint(regex="[0-9]+")))
    outputs = []
    with pytest.raises(RequestFailed, match="does not allow"):
        engine.step()  # the first
    assert engine.failed == ("bound",)
    while engine.has_work:
        outputs += engine.step()
    ended = {output.request_id: output.outputs[0].finish_reason for output in outputs}
    assert ended == {"free": "length", "bound": "abort"}
    engine.scheduler.check()


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint(regex="("), "structured_outputs.regex.*unclosed group"),
        (Constraint(regex="(?=a)b"), "structured_outputs.regex.*look-around"),
        (Constraint(regex="a" * (MAX_CHARACTERS + 1)), "structured_outputs.regex has 1048577 characters, at most"),
        (Constraint(choice=["a", "\ud800"]), "structured_outputs.choice"),
        (Constraint(json={"type": "animal"}), "structured_outputs.json.*animal"),
        (Constraint(json={"not": {"type": "string"}}), "structured_outputs.json.*not"),
        (Constraint(json={"$ref": "http://127.0.0.1:1/x"}), "structured_outputs.json"),
        (Constraint(json={"type": "string", "pattern": "("}), "structured_outputs.json.*unclosed group"),
        (
            Constraint(json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20000)}}),
            "structured_outputs.json.*too large",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(constraint: Constraint, message: str, tokenizer: Tokenizer) -> None:
    engine = engine_of(tokenizer)
    with pytest.raises(RequestError, match=message) as caught:
        engine.add("r", [1, 2], params(constraint))
    assert caught.value.param == "structured_outputs"
    assert not engine.has_work


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "choice": ["a"]},
        {"json_object": False},
        {"json_object": 1},
        {"json": "{"},
        {"json": "[1]"},
        {"json": 5},
        {"json": {"a": object()}},
        {"json": {"a": float("nan")}},
        {"regex": 5},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", 5]},
    ],
)
def test_a_constraint_of_the_wrong_kind_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        Constraint(**fields)
    assert caught.value.param == "structured_outputs"


def test_constraints_hash_and_pickle_and_keep_the_order_of_a_schema() -> None:
    for constraint, _ in CASES:
        one = params(constraint)
        assert pickle.loads(pickle.dumps(one)) == one
        assert hash(one) == hash(params(constraint))
    assert Constraint(json=POINT) == Constraint(json=json.dumps(POINT, indent=1))
    assert Constraint(json={"b": 1, "a": 2}).json == '{"b":1,"a":2}'
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_equal_constraints_are_compiled_once(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, 49152)
    assert grammars.get(Constraint(json=POINT)) is grammars.get(Constraint(json=json.dumps(POINT)))
    assert grammars.get(Constraint(regex="a")) is not grammars.get(Constraint(choice=["a"]))


def test_without_the_library_the_request_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'paged-kv\[structured\]'"):
        engine_of(tokenizer).resolve("r", [1], params(Constraint(regex="a")))


def test_a_constraint_without_a_tokenizer_or_with_only_an_empty_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="need a tokenizer"):
        fake_engine(16, 4)[0].resolve("r", [1], params(Constraint(regex="a")))
    with pytest.raises(RequestError, match="only an empty text"):
        engine_of(tokenizer).resolve("r", [1], params(Constraint(regex="")))
    assert engine_of(tokenizer, eos=(2,)).resolve("r", [1], params(Constraint(regex=""))).grammar is not None


def test_a_beam_search_takes_no_constraint() -> None:
    with pytest.raises(TypeError, match="structured_outputs"):
        BeamSearchParams(2, 4, structured_outputs=Constraint(regex="a"))  # type: ignore[call-arg]


# OpenAI's fields, jobs and the command line


def test_response_formats_become_constraints() -> None:
    def of(**body: Any) -> StructuredOutputsParams | None:
        return openai.sampling_params(body, chat=True).structured_outputs

    assert of() is of(response_format=None) is of(response_format={"type": "text"}) is None
    assert of(response_format={"type": "json_object"}) == Constraint(json_object=True)
    schema = {"name": "point", "strict": True, "schema": POINT}
    assert of(response_format={"type": "json_schema", "json_schema": schema}) == Constraint(json=POINT)
    assert of(structured_outputs={"choice": ["a", "b"]}) == Constraint(choice=("a", "b"))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "response_format"),
    ],
)
def test_a_wrong_response_format_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        openai.sampling_params(body, chat=False)
    assert caught.value.param == field


def test_a_bad_schema_in_a_job_is_the_error_of_its_line(llm: LLM, tmp_path: Path) -> None:
    def line(name: str, schema: Any) -> str:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {"prompt": PROMPT, "max_tokens": 30, "seed": 1, "response_format": wanted}
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join((line("bad", {"type": "animal"}), line("good", POINT))))
    progress = run_job(llm, source, target)
    assert (progress.ok, progress.failed) == (1, 1)
    answers = [json.loads(text) for text in target.read_text().splitlines()]
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    assert "animal" in bodies["bad"]["error"]["message"]
    assert bodies["bad"]["error"]["param"] == "response_format"
    assert is_point(bodies["good"]["choices"][0]["text"])


def test_the_command_writes_json_by_a_schema(smollm2: Checkpoint, capfd: pytest.CaptureFixture[str]) -> None:
    common = ("generate", PROMPT, "--max-tokens", "60", "--kv-memory", "64MiB")
    assert cli.run([*common, "--json-schema", str(PERSON)]) == 0
    assert is_person(capfd.readouterr().out.strip())
    assert cli.run([*common, "--regex", "("]) == 2
    assert "unclosed group" in capfd.readouterr().err
    assert cli.run([*common, "--json-schema", str(PERSON), "--regex", "a"]) == 2
    assert "exactly one of" in capfd.readouterr().err
    assert cli.run([*common, "--json-schema", "/no/such/file"]) == 2


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"json": {"type": "number", "multipleOf": 1234567}}, "multiples of 1,234,567"),
        ({"json": {"items": [{"multipleOf": 0.97}, {"multipleOf": 997}]}}, "multiples of 96,709 together"),
        ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}}, "too big"),
    ],
)
def test_what_costs_too_much_to_follow_is_refused(llm: LLM, constraint: dict[str, Any], reason: str) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    with pytest.raises(RequestError, match=reason):
        llm.generate("x", params)


@pytest.mark.parametrize(
    ("constraint", "begins"),
    [
        ({"regex": "(a{1000}){1000}b"}, "aaaa"),
        ({"choice": ["abc " * 20_000]}, "abc abc"),
        ({"json": {"type": "string", "minLength": 100_000}}, '"'),
    ],
)
def test_much_certain_text_is_followed_token_by_token(llm: LLM, constraint: dict[str, Any], begins: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(**constraint))
    (answer,) = llm.generate("x", params)[0].outputs
    assert answer.text.startswith(begins)
    assert answer.finish_reason == "length"
