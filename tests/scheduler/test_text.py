"""Text: stop strings, chats, what a tokenizer may be like (cases T03 T05 T08)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import tiny_llama
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from paged import LLM, CheckpointError, RequestError, SamplingParams
from scheduler.text import TextStream, Tokenizer
from worker.checkpoints import Checkpoint, resolve

ALPHABET = "Here is the English alphabet: A B C"


@pytest.fixture(scope="session")
def tokenizer(smollm2: Checkpoint) -> Tokenizer:
    return Tokenizer.from_dir(smollm2.path)


@pytest.fixture(scope="module")
def llm(smollm2: Checkpoint) -> LLM:
    return LLM("smollm2", dtype="float32", kv_memory="256MiB")


def stream(tokenizer: Tokenizer, ids: list[int], **params: Any) -> tuple[list[str], TextStream]:
    """What each token shows, what the end shows, and the stream."""
    text, deltas = TextStream(tokenizer, SamplingParams(**params)), []
    for token in ids:
        if text.push(token):
            break
        deltas.append(text.take_delta())
    text.finish()
    return [*deltas, text.take_delta()], text


STOPS = [
    ({"stop": "G H"}, " D E F ", 5),
    ({"stop": " G H I"}, " D E F", 6),
    ({"stop": ["H", "G H"]}, " D E F ", 5),
    ({"stop": "G H", "include_stop_str_in_output": True}, " D E F G H", 5),
]


@pytest.mark.parametrize(("params", "text", "count"), STOPS)
def test_t03_a_stop_string_across_tokens(llm: LLM, params: dict[str, Any], text: str, count: int) -> None:
    """Streamed and at once."""
    wanted = SamplingParams(temperature=0, max_tokens=12, **params)
    output = llm.generate(ALPHABET, wanted)[0].outputs[0]
    assert (output.text, output.finish_reason, len(output.token_ids)) == (text, "stop", count)
    parts = list(llm.stream(ALPHABET, wanted))
    assert "".join(part.outputs[0].text for part in parts) == text
    assert [part.outputs[0].finish_reason for part in parts] == [None] * (count - 1) + ["stop"]


def test_t03_the_prompt_is_not_searched(llm: LLM) -> None:
    output = llm.generate(ALPHABET, SamplingParams(temperature=0, max_tokens=12, stop="A B"))[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 12)


def test_t05_a_chat_begins_with_one_bos(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    assert ids[0] == 1
    assert ids[1] != 1
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    assert tokenizer.encode_chat(parts).tolist() == ids


def test_t05_a_tokenizer_that_adds_bos_does_not_double_it(tmp_path: Path, smollm2: Checkpoint) -> None:
    """A template that begins with the BOS, over a tokenizer whose own post-processor adds one."""
    content = json.loads((smollm2.path / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = {"bos_token": {"content": "<|endoftext|>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("Hello").tolist() == [0, 19556]
    assert tokenizer.encode_chat([{"role": "user", "content": "Hello"}]).tolist() == [0, 19556]


# Bytes that begin characters, special tokens, spaces and ordinary words, all likely.
TOKENS = st.one_of(st.integers(0, 300), st.sampled_from([10813, 235, 119, 321, 231, 2, 1]), st.integers(0, 49151))


# Few words, so that stop strings come again; 459 is a space and the first bytes of a character.
WORDS = st.sampled_from([330, 389, 340, 30, 28, 198, 38699, 905, 459])


@given(ids=st.lists(WORDS | TOKENS, max_size=30), include=st.booleans(), data=st.data())
def test_a_stop_string_ends_the_text_where_it_first_stands(ids: list[int], include: bool, data: st.DataObject) -> None:
    tokenizer = cached_tokenizer()
    whole = tokenizer.decode(ids)
    start, length = data.draw(st.integers(0, max(len(whole) - 1, 0))), data.draw(st.integers(1, 5))
    drawn = (whole[start : start + length], data.draw(st.text("ABC., ", max_size=3)))
    stops = [stop for stop in drawn if stop and "\ufffd" not in stop]
    deltas, text = stream(tokenizer, ids, stop=stops, include_stop_str_in_output=include)
    expected, reason = cut(tokenizer, ids, stops)
    assert text.stop_reason == reason
    assert "".join(deltas) == text.text == expected + (reason if include and reason else "")


def cut(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string, and that, by decoding all ids again after each."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n]).rstrip("\ufffd")  # which may be the beginning of a character
        if found := [(text.find(stop), stop) for stop in stops if stop in text]:
            at, stop = min(found)
            return text[:at], stop
    return tokenizer.decode(ids), None


def cached_tokenizer() -> Tokenizer:
    if not _cache:
        _cache.append(Tokenizer.from_dir(resolve("smollm2").path))
    return _cache[0]


_cache: list[Tokenizer] = []


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", {}, [1], [{}], [{"role": 1, "content": "a"}], [{"role": "user"}], [{"role": "a", "content": 5}]],
)
def test_messages_that_are_none_are_refused(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.param == "messages"


def test_what_a_template_refuses_is_an_error_of_the_request(tmp_path: Path, smollm2: Checkpoint) -> None:
    (tmp_path / "tokenizer.json").symlink_to(smollm2.path / "tokenizer.json")
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_dir(tmp_path).encode_chat(messages)
    for template in ("{{ raise_exception('roles must alternate') }}", "{% if %}", "{{ messages[0].content + 1 }}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(RequestError, match="the chat template refuses"):
            Tokenizer.from_dir(tmp_path).encode_chat(messages)


def test_half_a_surrogate_pair_is_no_prompt(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud83d")


def test_the_lower_bound_of_tokens_holds(tokenizer: Tokenizer) -> None:
    for text in ("", "a", " " * 500, "internationalization " * 30, "\U0001f336" * 20, "=" * 300, "\n" * 77):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.min_tokens("a" * 5_000_000) > 8192


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("settings", ["{broken", "5", '{"chat_template": [{"name": "default"}]}'])
def test_settings_of_a_tokenizer_that_cannot_be_read_are_an_error(
    tmp_path: Path, smollm2: Checkpoint, settings: str
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(smollm2.path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.from_dir(tmp_path)


def test_of_several_templates_the_default_is_taken(tmp_path: Path, smollm2: Checkpoint) -> None:
    (tmp_path / "tokenizer.json").symlink_to(smollm2.path / "tokenizer.json")
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.from_dir(tmp_path).encode_chat([{"role": "user", "content": "Hello"}]).tolist() == [19556]


def test_a_prompt_is_neither_cut_nor_padded(tmp_path: Path, smollm2: Checkpoint) -> None:
    """Whatever the tokenizer was saved with: fine-tuned checkpoints often are cut at their training length."""
    content = json.loads((smollm2.path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] = padding | {"pad_id": 2, "pad_type_id": 0, "pad_token": "<|im_end|>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert [len(tokenizer.encode(text)) for text in ("a b", "a b c d e f")] == [2, 6]


def test_t08_an_output_layer_with_more_rows_than_the_tokenizer_has_ids(tmp_path: Path) -> None:
    """Such an id is nothing as text, ends no request, and disturbs nobody; one beyond the rows is refused."""
    model = tiny_llama(tmp_path)  # 131 rows
    words = {f"w{i}": i for i in range(120)}
    made = FastTokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    weights = load_file(tmp_path / "model.safetensors")
    hidden = weights["model.embed_tokens.weight"].shape[1]
    # Whatever follows token 5 is the padded 125, and after that nothing that is known.
    weights["model.embed_tokens.weight"][5] = weights["model.embed_tokens.weight"][125] = 100 * torch.ones(hidden)
    weights["lm_head.weight"][125] = 100 * weights["model.norm.weight"].sign()
    save_file(weights, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), dtype="float32", kv_memory="1MiB")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts: list[list[int]] = [[9, 9, 9, 5], [3, 77, 12, 60], [125, 5]]
    padded, other, prompted = llm.generate(prompts, params)
    assert padded.outputs[0].token_ids == [125] * 6
    assert (padded.outputs[0].text, padded.outputs[0].finish_reason) == ("", "length")
    assert prompted.finished
    assert other.outputs[0].token_ids == llm.generate(prompts[1], params)[0].outputs[0].token_ids
    with pytest.raises(RequestError, match="token id 131 is not one of the model's, 0 to 130"):
        llm.generate([131], params)
    assert model.config.vocab_size == 131


@pytest.mark.parametrize("settings", ['{"bos_token": {"x": 1}}', "[" * 100_000, "[5]"])
def test_odd_settings_of_a_tokenizer_are_one_clear_error(tmp_path: Path, smollm2: Checkpoint, settings: str) -> None:
    (tmp_path / "tokenizer.json").symlink_to(smollm2.path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(CheckpointError, match=r"settings in .* cannot be read"):
        Tokenizer.from_dir(tmp_path)


def test_a_text_that_a_tokenizer_cannot_encode_is_refused(tmp_path: Path) -> None:
    made = FastTokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="none"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("b a").tolist() == [1, 0]
    with pytest.raises(RequestError, match="the tokenizer cannot encode this text"):
        tokenizer.encode("b c")
