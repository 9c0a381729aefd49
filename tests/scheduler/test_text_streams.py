"""Streams of text over tokenizers of bytes (SmolLM2) and with byte fallback (Gemma 3). Cases T01 T05 T06 T07 T08."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from fakes import FakeExecutor, fake_engine
from hypothesis import given
from hypothesis import strategies as st

from paged import LLM, RequestError, RequestOutput, SamplingParams
from scheduler import openai
from scheduler.outputs import join
from scheduler.text import TextStream, Tokenizer
from worker.checkpoints import Checkpoint, resolve
from worker.step import Row

MARK = "\ufffd"
# SmolLM2's vocabulary lacks some control characters, and the first bytes of what lies above; Gemma's has no U+2581.
LETTERS = st.sampled_from("\n\t ") | st.characters(
    exclude_categories=["Cs", "Cc"], exclude_characters=MARK + "\u2581", max_codepoint=0x1FFFF
)
BOTH = pytest.mark.parametrize("name", ["smollm2", "gemma3"])
PEPPER, ASTRONAUT = "\U0001f336", "\U0001f469\u200d\U0001f680"


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_dir(resolve(name).path)


@functools.cache
def byte_ids(name: str) -> dict[int, int]:
    """byte -> the token that is this byte alone."""
    if name == "gemma3":
        return {byte: 238 + byte for byte in range(256)}
    # Byte-level vocabularies write a byte that is no visible letter as the next free one from 256 on.
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte if byte in visible else 256 + others.index(byte)) for byte in range(256)}
    vocabulary = tokenizer(name)._tokenizer.get_vocab()
    return {byte: vocabulary[letter] for byte, letter in letters.items() if letter in vocabulary}


def as_bytes(name: str, text: str) -> list[int]:
    return [byte_ids(name)[byte] for byte in text.encode()]


def stream(own: Tokenizer, ids: list[int], takes: Any = None, **params: Any) -> list[str]:
    """The deltas, the last of them after the end; `takes` says after which tokens somebody asks."""
    text, deltas = TextStream(own, SamplingParams(**params), eager=takes is not None), []
    for i, token in enumerate(ids):
        text.push(token)
        if takes is None or takes[i % len(takes)]:
            deltas.append(text.take_delta())
    text.finish()
    assert text.text == own.decode(ids, params.get("skip_special_tokens", True))
    return [*deltas, text.take_delta()]


@BOTH
def test_a_byte_is_what_the_tests_take_it_for(name: str) -> None:
    for text in ("A", "é", "你", PEPPER):
        assert tokenizer(name).decode(as_bytes(name, text)) == text


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Words, spaces, special tokens, whole characters and single bytes, ids beyond the vocabulary."""
    own = tokenizer(name)
    last = own.encode("a").max().item() + 1 if name == "smollm2" else 262_143
    spaces = [int(i) for text in (" ", "  ", "\n", " a") for i in own.encode(text)]
    some = st.one_of(
        st.integers(0, last).map(lambda i: [i]),
        st.sampled_from(sorted(own.special_ids)[:40]).map(lambda i: [i]),
        st.sampled_from(spaces).map(lambda i: [i]),
        st.sampled_from([PEPPER, "é", "你", "A"]).map(lambda text: as_bytes(name, text)),
        st.sampled_from(sorted(byte_ids(name).values())).map(lambda i: [i]),
        st.integers(300_000, 300_100).map(lambda i: [i]),
    )
    return st.lists(some, max_size=14).map(lambda parts: [i for part in parts for i in part])


@BOTH
@given(data=st.data(), skip=st.booleans(), takes=st.none() | st.lists(st.booleans(), min_size=1, max_size=7))
def test_t06_deltas_are_decoding_at_once_whoever_asks_when(
    name: str, data: st.DataObject, skip: bool, takes: list[bool] | None
) -> None:
    """And until the end none shows a character that is not whole."""
    own, ids = tokenizer(name), data.draw(ids_of(name))
    deltas = stream(own, ids, takes, skip_special_tokens=skip)
    assert "".join(deltas) == own.decode(ids, skip)
    assert not any(delta.endswith(MARK) for delta in deltas[:-1])


@BOTH
@given(text=st.text(LETTERS, max_size=30))
def test_t01_text_comes_back_without_a_mark(name: str, text: str) -> None:
    """Emoji, CJK and the like, of however many tokens."""
    own = tokenizer(name)
    ids = own.encode(text).tolist()
    for way in (ids, as_bytes(name, text)):
        deltas = stream(own, way)
        assert "".join(deltas) == text
        assert not any(MARK in delta for delta in deltas)


@BOTH
@given(data=st.data(), skip=st.booleans())
def test_decoding_is_that_of_transformers_but_for_bytes_that_are_no_character(
    name: str, data: st.DataObject, skip: bool
) -> None:
    """For those too with byte-level tokenizers. Where bytes are the fallback, transformers marks the whole run."""
    ids = data.draw(ids_of(name))
    ours = tokenizer(name).decode(ids, skip)
    theirs = in_transformers(name).decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    if name == "smollm2" or MARK not in ours:
        assert ours == theirs
    assert (MARK in ours) == (MARK in theirs)


@functools.cache
def in_transformers(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(name).path)


def test_t01_byte_tokens_wait_for_the_character() -> None:
    own = tokenizer("gemma3")
    assert stream(own, [478, 397, 394, 416]) == ["", "", "", "\U0001f732", ""]


def test_t01_what_was_shown_of_a_run_of_bytes_stays() -> None:
    """A whole character, then a cut one: the run is no UTF-8, and transformers would make it five marks."""
    own, pepper = tokenizer("gemma3"), as_bytes("gemma3", PEPPER)
    assert stream(own, [*pepper, pepper[0]]) == ["", "", "", PEPPER, "", MARK]
    assert own.decode([*pepper, *pepper[:3]]) == PEPPER + 3 * MARK
    a = byte_ids("gemma3")[ord("A")]
    assert stream(own, [a, pepper[0], a]) == ["A", "", MARK + "A", ""]
    assert own.decode([a, 2, pepper[0], 1902]) == f"A{MARK} world"  # a special token parts no run
    assert own.decode([a, 2, pepper[0]], skip_special_tokens=False) == f"A<bos>{MARK}"


@pytest.mark.parametrize(
    ("name", "ids", "shown"),
    [
        ("smollm2", [38699, 905], " Hello world"),
        ("smollm2", [216, 905], "  world"),
        ("smollm2", [2, 38699], " Hello"),
        ("gemma3", [26352, 1902], " Hello world"),
        ("gemma3", [236743, 1902], "  world"),
        ("gemma3", [106, 26352], " Hello"),
    ],
)
def test_t06_leading_spaces_are_kept(name: str, ids: list[int], shown: str) -> None:
    own = tokenizer(name)
    assert "".join(stream(own, ids)) == own.decode(ids) == shown


class Scripted(FakeExecutor):
    """Samples what the test says, whatever the prompt, by the first token of which it is chosen."""

    scripts: dict[int, list[int]]

    def _run(self, row: Row, state: Any) -> list[int]:
        sampled = super()._run(row, state)
        if sampled:
            sampled = [self.scripts[state.tokens[0]][len(state.tokens) - state.reset.num_prompt - 1]]
            state.tokens[-1] = sampled[0]
        return sampled


def scripted(scripts: dict[int, list[int]], stream: bool, **params: Any) -> dict[str, list[RequestOutput]]:
    """What an engine gives of SmolLM2's text where these tokens are sampled, by request."""
    fake = Scripted(41, 4)
    fake.scripts = scripts
    engine, _ = fake_engine(40, 4, executor=fake, tokenizer=tokenizer("smollm2"))
    for first, script in scripts.items():
        sampling = SamplingParams(temperature=0, max_tokens=len(script), ignore_eos=True, **params)
        engine.add(str(first), [first, 8, 9], sampling, stream=stream)
    found: dict[str, list[RequestOutput]] = {str(first): [] for first in scripts}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output)
    return found


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_t01_a_character_that_max_tokens_cuts_is_one_mark_in_the_last_chunk() -> None:
    pepper = [10813, 230, 131]
    woman = [10813, 235, 119, 321, 231, 10813, 244, 218]
    scripts = {1: pepper, 2: pepper[:2], 3: woman}
    streamed, whole = scripted(scripts, stream=True), scripted(scripts, stream=False)
    assert texts(streamed["1"]) == ["", "", PEPPER]
    assert texts(streamed["2"]) == ["", MARK]
    assert streamed["2"][-1].outputs[0].finish_reason == "length"
    assert MARK not in "".join(texts(streamed["3"]))
    for request_id, expected in (("1", PEPPER), ("2", MARK), ("3", ASTRONAUT)):
        assert "".join(texts(streamed[request_id])) == texts(whole[request_id])[0] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_t08_an_id_beyond_the_tokenizer_is_nothing_and_ends_nothing(stream: bool) -> None:
    """SmolLM2's tokenizer has 49,152 ids; a matrix padded to 49,216 rows can have 49,160 sampled."""
    found = scripted({1: [38699, 49160, 905], 2: [49160] * 3, 3: [38699, 905]}, stream, logprobs=1)
    assert ["".join(texts(outputs)) for outputs in found.values()] == [" Hello world", "", " Hello world"]
    assert [outputs[-1].outputs[0].finish_reason for outputs in found.values()] == ["length"] * 3
    assert tokenizer("smollm2").token_text(49160) == ""


@pytest.fixture(scope="module")
def llm(smollm2: Checkpoint) -> LLM:
    return LLM("smollm2", dtype="float32", kv_memory="64MiB", max_model_len=512)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ({"stop": "G H"}, " D E F "),
        ({"stop": ["E F G I", "G H"]}, " D E F "),  # text is held back long before it ends
        ({"stop_token_ids": [407]}, " D E F G"),
    ],
)
def test_t07_ids_logprobs_and_offsets_are_as_long_as_one_another(llm: LLM, ends: dict[str, Any], text: str) -> None:
    """Where a stop string or token ends the text: nothing is cut from one of them only, streamed or not."""
    prompt = "Here is the English alphabet: A B C"  # goes on: D E F G H
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, **ends)
    whole = llm.generate(prompt, params)[0]
    parts = list(llm.stream(prompt, params))
    for part in parts:  # every entry comes once, with its token
        assert len(part.outputs[0].token_ids) == len(part.outputs[0].logprobs or []) == 1
    joined = parts[0]
    for part in parts[1:]:
        join(joined, part)
    choices = [
        openai.answer_body(output, params, False, "m", llm.tokenizer)["choices"][0] for output in (whole, joined)
    ]
    assert choices[0] == choices[1]
    assert (choices[0]["text"], choices[0]["finish_reason"]) == (text, "stop")
    logprobs = choices[0]["logprobs"]
    lengths = {name: len(values) for name, values in logprobs.items()}
    assert set(lengths.values()) == {len(whole.outputs[0].token_ids)} == {5}, lengths
    assert logprobs["text_offset"] == [0, 2, 4, 6, 8]
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert all(value <= 0 for top in logprobs["top_logprobs"] for value in top.values())
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 5
    assert whole.outputs[0].logprobs == joined.outputs[0].logprobs


def test_t05_usage_counts_the_bos_once(llm: LLM) -> None:
    chat = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=1))[0]
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    assert ids[0] == 1
    assert ids[1] != 1
    assert chat.prompt_token_ids == ids
    body = openai.answer_body(chat, SamplingParams(), True, "m", llm.tokenizer)
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_a_conversation_that_cannot_fit_is_refused_before_it_is_tokenised(llm: LLM) -> None:
    messages = [{"role": "user", "content": "a" * 20_000_000}]
    with pytest.raises(
        RequestError, match=r"the messages have 20000\d* characters, which are at least \d+ tokens, and 512"
    ):
        llm.chat(messages)
