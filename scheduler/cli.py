"""The command line: paged generate, paged batch, paged info, paged plan, paged bench.

Settings are the fields of EngineConfig as options. Whatever is wrong with what the user gave is one line on stderr and
exit code 2. Answers go to stdout or a file, everything else to stderr.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from paged import __version__
from paged.errors import ConfigError, PagedError
from scheduler import bench_scripts
from scheduler.config import EngineConfig

STOPPED = 130  # exit code after Ctrl-C, as in a shell
# Newer typers bring their own copy of click: its base of all usage errors is found through what typer shows of them.
ClickException: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, help="Batched generation over a paged KV cache."
)


class _Ended(Exception):
    """A command has ended, with its exit code, and has said what there is to say."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every setting of EngineConfig as an option, and pass it the config they make."""
    parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "config"]
    hints = get_type_hints(command, include_extras=True)
    parameters = [p.replace(annotation=hints[p.name]) for p in parameters]
    types = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        kind = str if field.name == "kv_memory" else types[field.name]
        option = typer.Option(help=field.metadata["help"], rich_help_panel="Settings")
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
            )
        )

    def run(**given: Any) -> None:
        settings = {field.name: given.pop(field.name) for field in fields(EngineConfig)}
        command(**given, config=EngineConfig.from_settings(**settings))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads the options from it
    return run


@app.command()
@with_settings
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue, or with --chat the message to answer")],
    *,
    config: EngineConfig,
    chat: Annotated[bool, typer.Option("--chat", help="apply the model's chat template")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="most tokens to generate [16, with --chat what fits]")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="keep the k likeliest tokens")] = None,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens up to this probability")] = 1.0,
    min_p: Annotated[float, typer.Option(help="keep tokens at least this fraction as likely as the likeliest")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="over 1: less of what is there already")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="taken from logits of tokens in the output")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="the same for each time that they are there")] = 0.0,
    bad_words: Annotated[list[str] | None, typer.Option(help="text that must not come; may be given again")] = None,
    min_tokens: Annotated[int, typer.Option(help="do not end before so many tokens")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be given again")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on past the model's end tokens")] = False,
    json_schema: Annotated[Path | None, typer.Option(metavar="FILE", help="write JSON by this schema")] = None,
    regex: Annotated[str | None, typer.Option(help="write what this regular expression matches")] = None,
) -> None:
    """Continue a prompt; the text is streamed to stdout. --seed fixes what is sampled."""
    from worker.step import SamplingParams, StructuredOutputsParams

    schema = None if json_schema is None else _text(json_schema)
    constrained = schema is not None or regex is not None

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=config.seed,
        max_tokens=max_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        bad_words=bad_words,
        min_tokens=min_tokens,
        structured_outputs=StructuredOutputsParams(json=schema, regex=regex) if constrained else None,
    )
    from scheduler.llm import LLM

    llm = LLM.from_config(config)
    wanted: Any = [{"role": "user", "content": prompt}] if chat else prompt
    outputs = llm.stream(wanted, params, chat=chat)
    print(f"paged: {llm.plan.sizing}", file=sys.stderr)
    for output in outputs:
        print(output.outputs[0].text, end="", flush=True)
    print()


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text: {error}") from None


@app.command()
@with_settings
def batch(
    input_path: Annotated[
        str,
        typer.Argument(metavar="IN.jsonl", help="requests, in OpenAI's batch format: a file, - or a URL; .gz, .zst"),
    ],
    *,
    config: EngineConfig,
    output_path: Annotated[
        str | None, typer.Option("--output", "-o", metavar="OUT.jsonl", help="where answers go: a file, - or a URL")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an output that exists")] = False,
    ordered: Annotated[bool, typer.Option("--ordered", help="answers in the order of the input")] = False,
    retry_failed: Annotated[
        str | None,
        typer.Option(metavar="OLD.jsonl", help="copy the answers of this output, run its failed lines again"),
    ] = None,
    group: Annotated[bool, typer.Option("--group/--no-group", help="bring shared prefixes together")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check every line, estimate the time, run nothing")
    ] = False,
    metrics_path: Annotated[
        Path | None, typer.Option("--metrics", metavar="FILE.prom", help="write Prometheus metrics there at the end")
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="send the job to this running cluster")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="make a Ray cluster of so many for the job")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDR", help="of the Ray cluster [one on this machine]")
    ] = None,
) -> None:
    """Answer a file of requests, each line once: killed or stopped, the same command goes on.

    Exit code 0: every line was answered; 3: some were refused, and say why; 2: it could not
    begin or go on; 130, 143: stopped by Ctrl-C or SIGTERM.
    """
    from scheduler import batch_cli
    from scheduler.job_files import JobFiles
    from scheduler.lines import is_url

    if dry_run:
        from scheduler import dry_run as dry

        raise typer.Exit(dry.run(input_path, config))
    if output_path is None:
        raise ConfigError("say where answers go: --output OUT.jsonl, or - for stdout")
    url = output_path if is_url(output_path) else None
    place = str(batch_cli.local_output(url, overwrite)) if url else output_path
    files = JobFiles(input_path, place, overwrite, ordered, group, retry_failed)
    where = batch_cli.Where(cluster, replicas, address)
    raise _Ended(batch_cli.run(files, url, config, where, metrics_path))


@app.command()
@with_settings
def info(*, config: EngineConfig) -> None:
    """What this machine would use. Downloads and loads nothing."""
    from scheduler.llm import plan
    from worker.checkpoints import is_here

    it = plan(config)
    rows = [
        ("paged", __version__),
        ("device", it.device),
        ("dtype", f"{it.dtype} ({it.dtype_reason})"),
        ("attention backend", f"{it.backend} ({it.backend_reason})"),
        *([("workers", f"{it.tensor_parallel_size}")] if it.tensor_parallel_size > 1 else []),
        ("threads", f"{it.threads} ({it.threads_reason})"),
        ("model", f"{it.model_name} ({'here' if is_here(config.model) else 'not here yet: fetched on first use'})"),
        ("page size", f"{it.page_size} tokens"),
        ("kv memory", f"{it.kv_bytes / 2**30:.2f} GiB allowed ({config.kv_memory})"),
    ]
    if it.layout is not None:
        rows.append(("bytes per token", f"{it.layout.bytes_per_token:,}"))
    rows.append(("pool", it.sizing))
    for name, value in rows:
        print(f"{name:18} {value}")


@app.command("plan")
@with_settings
def plan_command(
    *,
    config: EngineConfig,
    trace: Annotated[Path, typer.Option("--trace", metavar="FILE", help="JSONL of ours or Mooncake's, CSV of Azure's")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT.html", help="write a report")] = None,
    ttft_p99: Annotated[float, typer.Option(help="target: seconds to the first token, 99th percentile")] = 5.0,
    itl_p99: Annotated[float, typer.Option(help="target: seconds between tokens, 99th percentile")] = 0.5,
    max_replicas: Annotated[int, typer.Option(min=1, help="most replicas to try")] = 16,
    cost: Annotated[str | None, typer.Option(help="file, or step=s,token=s,... [measured here, in 20 s]")] = None,
    save_cost: Annotated[Path | None, typer.Option(metavar="FILE", help="write what was measured, for --cost")] = None,
) -> None:
    """How many pages and replicas hold a given wait: replays a trace without the model. --kv-memory may be any."""
    from scheduler import plan_cli

    plan_cli.run(config, trace, output, ttft_p99, itl_p99, max_replicas, cost, save_cost)


_Name = Annotated[str, typer.Option("--name", help="of the cluster")]
_Address = Annotated[str | None, typer.Option("--address", metavar="HOST:PORT", help="of the head of a running Ray")]


@app.command()
@with_settings
def launch(
    *,
    config: EngineConfig,
    replicas: Annotated[int, typer.Option(min=1, help="engines, each with the whole model")] = 1,
    name: _Name = "default",
    address: _Address = None,
    detach: Annotated[bool, typer.Option("--detach", help="leave it running, until `paged stop`")] = False,
) -> None:
    """Start a Ray cluster of replicas, or join one; wait until they are warm, and stay. Settings are of one replica."""
    from scheduler import cluster_cli

    if code := cluster_cli.launch(config, replicas, name, address, detach):
        raise typer.Exit(code)


@app.command()
def status(*, name: _Name = "default", address: _Address = None) -> None:
    """The replicas of a cluster, and how they stand."""
    from scheduler import cluster_cli

    cluster_cli.status(name, address)


@app.command()
def scale(
    replicas: Annotated[int, typer.Argument(min=1, help="how many there are to be")],
    *,
    name: _Name = "default",
    address: _Address = None,
) -> None:
    """Start more replicas of a cluster that runs, or end some."""
    from scheduler import cluster_cli

    cluster_cli.scale(replicas, name, address)


@app.command()
def stop(*, name: _Name = "default", address: _Address = None) -> None:
    """End a cluster: its replicas, and Ray where `paged launch` started it."""
    from scheduler import cluster_cli

    cluster_cli.stop(name, address)


bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
# All that stands behind these commands is for the script, --help too.
_PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,  # nothing is touched behind the first word
    "help_option_names": [],
}


@bench_app.command("cache", context_settings=_PASSED_ON)
def bench_cache(context: typer.Context) -> None:
    """What the cache saves: time with and without it, beside the ratio of operations."""
    bench_scripts.run("cache", context.args)


@bench_app.command("sweep", context_settings=_PASSED_ON)
def bench_sweep(context: typer.Context) -> None:
    """Our pages beside transformers' caches, as batch and prompt grow."""
    bench_scripts.run("sweep", context.args)


@bench_app.command("peers", context_settings=_PASSED_ON)
def bench_peers(context: typer.Context) -> None:
    """The workloads on the engines that are installed here, in turn."""
    bench_scripts.run("peers", context.args)


@bench_app.command("offline")
@with_settings
def bench_offline(
    *,
    config: EngineConfig,
    workload: Annotated[Path, typer.Option("--workload", metavar="FILE", help="as benchmarks/workloads has them")],
    reference: Annotated[Path | None, typer.Option(help="tokens to compare with [the file beside it]")] = None,
    only: Annotated[list[str] | None, typer.Option(help="this workload alone; may be given again")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="runs of each; the best counts")] = 3,
    profile: Annotated[bool, typer.Option("--profile", help="say where the time of a run went")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write all figures there")] = None,
) -> None:
    """Run workloads, at most 32 sequences at once, beside what this machine can do at most."""
    from scheduler import bench

    workloads = bench.read_workloads(workload)
    wanted = bench.read_reference(workload, reference, workloads)
    if only:
        if missing := [name for name in only if name not in workloads]:
            raise ConfigError(f"{workload} has no workload {missing[0]}: it has {', '.join(workloads)}")
        workloads = {name: workloads[name] for name in (*only, bench.WARM) if name in workloads}
    if not workloads.keys() - {bench.WARM}:
        raise ConfigError(f"there is nothing to measure: {bench.WARM} only warms up")
    if json_path is not None:
        try:
            json_path.open("a").close()
        except OSError as error:
            raise ConfigError(f"{json_path} cannot be written: {error}") from None
    from scheduler.llm import LLM
    from worker.ceilings import measure

    llm = LLM.from_config(replace(config, max_num_seqs=min(config.max_num_seqs, bench.MAX_RUNNING)))
    bench.check(llm, workloads)
    if profile and llm.plan.backend != "native":
        raise ConfigError(f"a profile needs the native kernels, and the backend is {llm.plan.backend}")
    found = measure(llm.plan.threads * llm.plan.tensor_parallel_size, dict.fromkeys(bench.formats(llm)))
    print(f"{'memory read, GB/s':34}{found['read_bytes_per_s'] / 1e9:8.1f}")
    for format_ in dict.fromkeys(bench.formats(llm)):
        name = f"{format_} multiply, 10^9 operations/s"
        print(f"{name:34}{found[f'{format_}_operations_per_s'] / 1e9:8.0f}")
    kind, size = config.quantization or llm.plan.dtype, llm.plan.tensor_parallel_size
    workers = f"{size} workers of " if size > 1 else ""
    print(f"{llm.model_name}, {kind}, {workers}{llm.plan.threads} threads, {llm.plan.backend_reason}", flush=True)

    def report(name: str, turn: int, sample: bench.Sample) -> None:
        print(f"paged: {name} run {turn + 1}: {sample.wall_s:.2f} s", file=sys.stderr, flush=True)

    results = bench.run_all(llm, workloads, wanted, found, repeat, profile, report)
    for text in bench.table(results):
        print(text)
    if json_path is not None:
        json_path.write_text(json.dumps(bench.about() | {"ceilings": found, "results": results}, indent=1) + "\n")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    if version:
        print(f"paged {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Entry point of the command `paged`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run a command line; returns its exit code."""
    try:
        result = app(arguments, standalone_mode=False)
    except ClickException as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]  # all click errors have it
    except _Ended as ended:
        return ended.code
    except PagedError as error:
        return _fail(str(error))
    except OSError as error:  # a file that may not be read, a full disk
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (KeyboardInterrupt, typer.Abort):
        result = STOPPED
    if result == STOPPED:  # which newer typers make of Ctrl-C themselves
        print("paged: stopped", file=sys.stderr)
    return result if isinstance(result, int) else 0


def _fail(message: str) -> int:
    print(f"paged: error: {' '.join(message.split())}", file=sys.stderr)
    return 2
