"""Text: prompts to token ids, token ids to text as they come, stop strings, chat templates.

Owns the tokenizer (the `tokenizers` library, read from tokenizer.json) and the rules of what a stream may show: never
half a character, never the beginning of what may become a stop string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

from paged.errors import CheckpointError, RequestError, shown
from worker.step import SamplingParams

LONGEST_PHRASE = 256  # tokens that one of bad_words is sure to have at most
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character (yet) decode to


class Tokenizer:
    """The tokenizer of one checkpoint and its chat template."""

    def __init__(self, tokenizer: FastTokenizer, chat_template: str | None, special: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._special = special  # bos_token and its like, which templates use by name
        self._longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self._single: dict[tuple[int, bool], str] = {}
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._bytes = _byte_tokens(tokenizer)
        tokenizer.no_truncation()  # a file may ask for them, for the training that it comes from
        tokenizer.no_padding()

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Read the tokenizer of the checkpoint in the folder `path`. Raises CheckpointError."""
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{path} has no tokenizer.json: save it there with transformers' save_pretrained")
        try:
            tokenizer = FastTokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001  the library raises plain Exception for what it cannot read
            raise CheckpointError(f"{file} is no tokenizer: {error}") from None
        config_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
        try:
            config = dict(json.loads(config_file.read_bytes())) if config_file.is_file() else {}
            template = template_file.read_text("utf-8") if template_file.is_file() else config.get("chat_template")
            if isinstance(template, list):  # several, by name
                template = {one["name"]: one["template"] for one in template}.get("default")
            special = {
                name: value["content"] if isinstance(value, dict) else value
                for name, value in config.items()
                if name.endswith("_token") and isinstance(value, (str, dict))
            }
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"the tokenizer's settings in {path} cannot be read: {error!r}") from None
        return cls(tokenizer, template, special)

    def encode(self, text: str, most: int | None = None) -> npt.NDArray[np.int32]:
        """Token ids, int32 [n], with the special tokens that the tokenizer itself adds.

        most: refuse, before it is tokenised, a text that is sure to have more tokens. Raises RequestError.
        """
        return self._encode(text, True, "prompt", most)

    def encode_chat(self, messages: SequenceOf[Mapping[str, Any]], most: int | None = None) -> npt.NDArray[np.int32]:
        """Token ids of a conversation, int32 [n], up to where the assistant's answer begins; `most` as for `encode`.

        The template writes the special tokens, so none are added again. Raises RequestError.
        """
        return self._encode(self._render(checked_messages(messages)), False, "messages", most)

    def decode(self, token_ids: SequenceOf[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the tokenizer does not know are nothing.

        As transformers decodes, but for byte tokens (of tokenizers with byte fallback) that are no UTF-8: of those
        each that belongs to no character is one U+FFFD here. There the whole run of bytes becomes that, characters
        before the fault too, and those a stream has long shown.
        """
        ids = list(token_ids)
        if self._bytes and not self._bytes.keys().isdisjoint(ids):
            return self._decode_bytes(ids, skip_special_tokens)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_one(self, token_id: int, skip_special_tokens: bool) -> str:
        """`decode` of one token, remembered."""
        text = self._single.get((token_id, skip_special_tokens))
        if text is None:
            text = self._single[token_id, skip_special_tokens] = self.decode((token_id,), skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones too; bytes that are no character show as U+FFFD."""
        return self.decode_one(token_id, skip_special_tokens=False)

    def phrases(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each of SamplingParams.bad_words, as it is and behind a space. Raises RequestError."""
        result: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ") or word
            for text in (bare, f" {bare}"):
                ids = tuple(
                    self._encode(text, add_special_tokens=False, param="bad_words", most=LONGEST_PHRASE).tolist()
                )
                if not ids:
                    raise RequestError(f"bad_words: {shown(word)} has no tokens", "bad_words")
                result[ids] = None
        return tuple(result)

    def copy(self) -> FastTokenizer:
        """A copy of the library's tokenizer, for others to change."""
        return FastTokenizer.from_str(self._tokenizer.to_str())

    def min_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`, without tokenising it; 0 where the text may be shortened first."""
        # Every token stands for at most as many bytes as its name has characters, and a character is at least a byte.
        return 0 if self._tokenizer.normalizer is not None else -(-len(text) // self._longest)

    def _decode_bytes(self, ids: list[int], skip_special_tokens: bool) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        named = ((i, self._tokenizer.id_to_token(i)) for i in ids if i not in hidden)
        known = [(i, name) for i, name in named if name is not None]
        names: list[str] = []
        for are_bytes, run in groupby(known, lambda token: token[0] in self._bytes):
            start, some = len(names), list(run)
            names += (name for _, name in some)
            if are_bytes:
                for at in _no_characters(bytes(self._bytes[i] for i, _ in some)):
                    names[start + at] = _REPLACEMENT
        text: str = self._tokenizer.decoder.decode(names)
        return text

    def _encode(self, text: str, add_special_tokens: bool, param: str, most: int | None) -> npt.NDArray[np.int32]:
        if most is not None and (least := self.min_tokens(text)) > most:
            raise RequestError(
                f"the {param} {'have' if param == 'messages' else 'has'} {len(text)} characters, which are at least "
                f"{least} tokens, and {most} are the most that fit: shorten it",
                param,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"character {error.start} is half a surrogate pair, which is no text", param) from None
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # noqa: BLE001  the library raises plain Exception, of a vocabulary without unknowns
            raise RequestError(f"the tokenizer cannot encode this text: {error}", param) from None
        return np.asarray(ids, dtype=np.int32)

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._chat_template is None:
            raise RequestError("this model has no chat template: give a prompt, not messages", "messages")
        from transformers.utils.chat_template_utils import render_jinja_template  # 2 s, only for chats

        try:
            rendered, _ = render_jinja_template(
                [messages], chat_template=self._chat_template, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # noqa: BLE001  a template is a program, of the checkpoint's author
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from None
        return str(rendered[0])


def prompt_tokens(prompt: Any, chat: bool, tokenizer: Tokenizer | None, most: int) -> tuple[str | None, Any]:
    """The text of a prompt, where it is one, and its token ids, which are not looked at here.

    prompt: text, token ids, or a dict with either, as in vLLM; with `chat` a conversation. A text that is sure to have
    more than `most` tokens is refused before it is tokenised, which takes seconds for megabytes. Raises RequestError.
    """
    if not chat and isinstance(prompt, Mapping):
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
    if (chat or isinstance(prompt, str)) and tokenizer is None:
        raise RequestError("text needs a tokenizer, and this engine has none: give token ids", "prompt")
    if chat:
        assert tokenizer is not None
        return None, tokenizer.encode_chat(prompt, most)
    if isinstance(prompt, str):
        assert tokenizer is not None
        return prompt, tokenizer.encode(prompt, most)
    if not isinstance(prompt, (list, tuple, np.ndarray)):
        raise RequestError(f"a prompt is text or a list of token ids, not {shown(prompt)}", "prompt")
    return None, prompt


def prompt_salt(prompt: Any) -> str | None:
    """`cache_salt` of a prompt that is a dict, as in vLLM."""
    return prompt.get("cache_salt") if isinstance(prompt, Mapping) else None


def checked_messages(messages: Any) -> list[dict[str, str]]:
    """Messages as templates take them, text parts joined. Raises RequestError, which names the message at fault."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of at least one message", "messages")
    result = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{i}] must be an object with a role and a content", "messages")
        content = message.get("content")
        if isinstance(content, list) and all(_is_text_part(part) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise RequestError(f"messages[{i}].content must be text, or a list of text parts", "messages")
        result.append({"role": message["role"], "content": content})
    return result


def _byte_tokens(tokenizer: FastTokenizer) -> dict[int, int]:
    """Token id -> byte, where the tokenizer falls back to tokens of single bytes; else empty."""
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    capital_a = ids[ord("A")]
    if capital_a is None or tokenizer.decode([capital_a]) != "A":
        return {}
    return {i: byte for byte, i in enumerate(ids) if i is not None}


def _no_characters(data: bytes) -> Iterator[int]:
    """Places of the bytes that belong to no UTF-8 character. More bytes behind change this of the last three only."""
    start = 0
    while True:
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            yield from range(start + error.start, start + error.end)
            start += error.end
        else:
            return


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


class TextStream:
    """The text of one sequence while its tokens come.

    Tokens are decoded in a window: from the group shown last to the newest. A group is shown once its text no longer
    ends in U+FFFD, which is what a character's first bytes decode to; what stands before the U+FFFD is shown at once,
    and `finish` shows what is left. So the deltas together are what decoding all ids at once gives. Without stop
    strings tokens are decoded when somebody asks for text, or all at the end; eager: as they come, for a stream.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, eager: bool = False) -> None:
        self._tokenizer = tokenizer
        self.eager = eager or bool(params.stop_strings)  # tokens must be pushed as they come
        self._skip_special = params.skip_special_tokens
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._free = params.min_tokens  # tokens whose text cannot end this
        self._ids: list[int] = []
        # ids[before:read] were shown last; they are decoded again, for what a decoder does at a text's beginning.
        self._before = self._read = 0
        self._ahead = 0  # characters after ids[:read] that are in `text` too
        self._taken = 0  # characters of `text` that were given out
        self._ended = False
        self._decoded = 0  # ids that were looked at
        self._text = ""  # everything decoded so far
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> bool:
        """Take the next token. True when a stop string is complete: the text ends there, and no more may be pushed."""
        self._free -= 1
        if token_id in self._hidden:
            return False
        self._ids.append(token_id)
        return self.eager and self._decode()

    @property
    def text(self) -> str:
        """Everything that can be read so far."""
        self._decode()
        return self._text

    def finish(self) -> None:
        """No more tokens: show what is held back."""
        self._decode()
        if not self._ended and self._read < len(self._ids):
            shown, text = self._window()
            self._text += text[len(shown) + self._ahead :]
        self._ended = True

    def take_delta(self) -> str:
        """What may be shown and was not yet."""
        self._decode()
        end = len(self._text) - (0 if self._ended else self._held_back())
        delta = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return delta

    def _decode(self) -> bool:
        """Take what has come into the text. True when a stop string is complete."""
        if self._ended or self._decoded == len(self._ids):
            return False
        self._decoded = len(self._ids)
        shown, text = self._window()
        whole = text.rstrip(_REPLACEMENT)
        new = whole[len(shown) + self._ahead :]
        self._ahead += len(new)
        if whole == text and len(text) > len(shown):
            self._before, self._read, self._ahead = self._read, len(self._ids), 0
        return self._append(new) if new else False

    def _window(self) -> tuple[str, str]:
        """The text of the group shown last, and of it with all that came after."""
        ids, before, read = self._ids, self._before, self._read
        decode, skip = self._tokenizer.decode, self._skip_special
        shown = self._tokenizer.decode_one(ids[before], skip) if read - before == 1 else decode(ids[before:read], skip)
        return shown, decode(ids[before:], skip)

    def _append(self, new: str) -> bool:
        before = len(self._text)
        self._text += new
        if self._free >= 0:
            return False
        # A match ends in what is new.
        found = [(at, s) for s in self._stops if (at := self._text.find(s, max(0, before - len(s) + 1))) >= 0]
        if not found:
            return False
        at, self.stop_reason = min(found)
        self._text = self._text[: at + len(self.stop_reason) if self._include_stop else at]
        self._ended = True
        return True

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        return max((_overlap(self._text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    lengths: Iterable[int] = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
