"""The commands, as a stranger runs them: real processes, one clear line for what is wrong, exit code 2."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged import ConfigError, __version__
from paged.sizing import parse_memory
from scheduler import cli, job_files
from scheduler.config import EngineConfig
from worker.checkpoints import Checkpoint

GOOD = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0},
}


def paged(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from scheduler.cli import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environ}
    )


def write(file: Path, *lines: str) -> str:
    file.write_text("\n".join(lines))
    return str(file)


def test_generate_streams_the_text_alone_to_stdout(smollm2: Checkpoint) -> None:
    done = paged("generate", "The capital of France is", "--max-tokens", "3", "--temperature", "0")
    assert (done.returncode, done.stdout) == (0, " Paris.\n\n")
    assert len(done.stderr.splitlines()) == 1
    assert re.match(r"paged: [\d,]+ pages and the null page \([\d,]+ bytes\), [\d,]+ tokens; sequences", done.stderr)


def test_generate_answers_a_chat_the_same_with_the_same_seed(smollm2: Checkpoint) -> None:
    first, second = (paged("generate", "--chat", "Hi", "--max-tokens", "8", "--seed", "5") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout != "\n"


def test_batch_answers_a_file_and_sums_up(smollm2: Checkpoint, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", json.dumps(GOOD)), tmp_path / "out.jsonl"
    done = paged("batch", source, "-o", str(target), "--max-num-seqs", "2", "--metrics", str(tmp_path / "x.prom"))
    assert done.returncode == 0, done.stderr
    assert "paged_generation_tokens_total 4.0\n" in (tmp_path / "x.prom").read_text()
    assert json.loads(target.read_text())["response"]["body"]["choices"][0]["text"].startswith(" Paris")
    assert done.stderr.startswith("paged: ")
    for word in (
        "sequences of max_model_len 8,192 that fit at once: 2",
        "1 ok, 0 failed",
        "prompt tokens",
        "tokens/s",
        "first token    p50 ",
        "between tokens p50 ",
        "step time      schedule ",
        "prefix hits",
        "preemptions",
        "waste",
    ):
        assert word in done.stderr
    again = paged("batch", source, "-o", str(target), "--max-num-seqs", "4")
    assert again.returncode == 0
    assert again.stderr == "paged: all lines (1) are answered already: 1 ok, 0 failed\n"


def test_batch_with_lines_that_were_refused_ends_with_three(smollm2: Checkpoint, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", "{broken", json.dumps(GOOD))
    done = paged("batch", source, "-o", str(tmp_path / "out.jsonl"))
    assert done.returncode == 3, done.stderr
    assert "1 ok, 1 failed" in done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_batch_refuses_a_place_for_metrics_before_anything_is_loaded(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", json.dumps(GOOD))
    done = paged("batch", source, "-o", str(tmp_path / "out.jsonl"), "--metrics", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"paged: error: metrics {tmp_path} is a folder")


def test_info_says_what_would_be_used_and_downloads_nothing(tmp_path: Path) -> None:
    done = paged("info", "--kv-memory", "512MiB", "--dtype", "float32", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    native = "native (native kernels, "
    for text in ("float32 (as set)", native, "threads", "not here yet", "46,080", "727 pages and the null page"):
        assert text in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_info_of_an_unknown_hub_model_fetches_nothing(tmp_path: Path) -> None:
    done = paged("info", "--model", "org/name", XDG_CACHE_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "not known before the model is here" in done.stdout


BAD = [
    (["batch", "none.jsonl", "-o", "out.jsonl"], "none.jsonl does not exist"),
    (["batch", "empty.jsonl", "-o", "out.jsonl"], "has no request"),
    (["batch", "good.jsonl"], "--output"),
    (["batch", "good.jsonl", "-o", "out.jsonl", "--model", "nope"], "unknown model 'nope'"),
    (["batch", "good.jsonl", "-o", "out.jsonl", "--max-num-seq", "3"], "--max-num-seqs"),
    (["batch", "good.jsonl", "-o", "out.jsonl", "--page-size", "3"], "power of two"),
    (["batch", "good.jsonl", "-o", "out.jsonl", "--max-num-seqs", "many"], "--max-num-seqs"),
    (["batch", "good.jsonl", "-o", "out.jsonl", "--kv-memory", "1kB"], "raise kv_memory"),
    (["generate", "Hello", "--max-tokens", "-1"], "max_tokens"),
    (["generate", "Hello", "--min-tokens", "17"], "min_tokens 17 is more than max_tokens 16"),
    (["generate", "Hello", "--repetition-penalty", "0"], "repetition_penalty"),
    (["generate", "Hello", "--presence-penalty", "3"], "presence_penalty"),
    (["generate", "Hello " * 9000], "8192"),
    (["generate", ""], "empty"),
    (["generate", "Hello", "--dtype", "float8"], "dtype must be one of"),
    (["generate", "Hello", "--device", "cuda"], "no CUDA device"),
    (["generate", "Hello", "--max-model-len", "9000"], "8192"),
    (["generate", "Hello", "--max-model-len", "4000", "--kv-memory", "64MiB"], "the longest that fits"),
    (["generate", "Hello", "--kv-memory", "9000000GiB"], "bytes are available"),
    (["nonsense"], "nonsense"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD)
def test_bad_input_is_one_clear_line(smollm2: Checkpoint, tmp_path: Path, arguments: list[str], text: str) -> None:
    write(tmp_path / "good.jsonl", json.dumps(GOOD))
    write(tmp_path / "empty.jsonl", "")
    arguments = [str(tmp_path / a) if a.endswith(".jsonl") else a for a in arguments]
    done = paged(*arguments)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("paged: error: ")
    assert done.stdout == ""
    assert not (tmp_path / "out.jsonl").exists()


def test_help_and_version_need_no_torch() -> None:
    for arguments in ([], ["--help"], ["batch", "--help"]):
        done = paged(*arguments)
        assert done.returncode == 0
        assert "Usage" in done.stdout
    assert paged("--version").stdout == f"paged {__version__}\n"


def test_a_reader_that_goes_away_ends_us_without_another_word(smollm2: Checkpoint) -> None:
    code = "from scheduler.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", "Hello", "--max-tokens", "40", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert len(process.stderr.read().splitlines()) == 1  # what the pool is
    process.stderr.close()
    assert process.wait() == 1


def test_ctrl_c_is_one_line(smollm2: Checkpoint) -> None:
    code = "from scheduler.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", "Hello", "--max-tokens", "4000", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(1)  # it has begun to answer
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[1:] == [b"paged: stopped"]  # after what the pool is


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.jsonl")

    monkeypatch.setattr(job_files, "JobFiles", full)
    assert cli.run(["batch", "in.jsonl", "-o", "out.jsonl"]) == 2
    assert capsys.readouterr().err == "paged: error: out.jsonl: No space left on device\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), (1000, 1000), ("30%", 0.3), ("100 %", 1.0)],
)
def test_kv_memory_in_bytes_or_as_a_share(value: str | int, expected: int | float) -> None:
    assert parse_memory(value) == expected


@pytest.mark.parametrize("value", ["", "much", "0", "-5", "0%", "120%", "5XB", "1e9"])
def test_kv_memory_that_makes_no_sense_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        EngineConfig.from_settings(kv_memory=value)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean max_num_seqs\?"):
        EngineConfig.from_settings(max_num_seq=3)


@pytest.mark.parametrize(
    "bad",
    [{"page_size": 3}, {"page_size": 512}, {"max_num_seqs": 0}, {"threads": -1}, {"seed": "a"}, {"max_model_len": 1.5}],
)
def test_a_setting_out_of_range_is_named(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        EngineConfig.from_settings(**bad)


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl", "hard.jsonl", "soft.jsonl", "fifo"])
def test_metrics_take_the_place_of_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    (tmp_path / "hard.jsonl").hardlink_to(source)
    (tmp_path / "soft.jsonl").symlink_to(source)
    os.mkfifo(tmp_path / "fifo")
    code = cli.run(["batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--metrics", str(tmp_path / name)])
    assert code == 2
    assert f"metrics {tmp_path / name} " in capsys.readouterr().err
    assert source.read_text() == "{}\n"
    assert (tmp_path / "fifo").is_fifo()
