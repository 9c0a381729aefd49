"""llama.cpp's server, as a child of bench_peers.py (child.py says how it is spoken to).

MODEL is a GGUF file; what its matrices are stored in decides how llama.cpp multiplies, and the dtype only that of the
cache: float32, else its default, float16. Each of the 32 slots has room for the longest sequence. The server is a
process of this one, and ends with it.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from peers.child import MAX_RUNNING, Answer, Request, parser, serve


class LlamaCpp:
    def __init__(self, args: argparse.Namespace, scratch: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        cache = "f32" if args.dtype == "float32" else "f16"
        command = [args.server, "--model", args.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", str(args.threads), "--threads-batch", str(args.threads)]
        command += ["--parallel", str(MAX_RUNNING), "--ctx-size", str(args.max_len * MAX_RUNNING), "--no-kv-unified"]
        command += ["--cache-type-k", cache, "--cache-type-v", cache]
        command += ["--cache-ram", "0"]  # no prompts kept beside those of the slots
        command += ["--slot-save-path", scratch]  # without it no slot can be emptied
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        while not self._healthy():
            time.sleep(0.1)
        build = self._ask("/props")["build_info"]
        self.about = {
            "version": build,
            "dtype": f"weights of {Path(args.model).name}, cache {cache}",
            "threads": args.threads,
        }

    def _healthy(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {self.process.returncode}")
        try:
            self._ask("/health")
        except urllib.error.HTTPError as error:
            if error.code != 503:  # it is loading
                raise
        except urllib.error.URLError:  # it does not listen yet
            pass
        else:
            return True
        return False

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    def renew(self) -> None:
        for slot in range(MAX_RUNNING):
            self._ask(f"/slots/{slot}?action=erase", {})

    def prepare(self, requests: list[Request]) -> Callable[[], Answer]:
        self.renew()
        bodies = [
            {
                "prompt": request["prompt"],
                "n_predict": request["out"],
                "ignore_eos": True,
                "samplers": ["top_k"],  # the best one, and no other sampler takes time
                "top_k": 1,
                "return_tokens": True,
            }
            for request in requests
        ]

        def run() -> Answer:
            with ThreadPoolExecutor(MAX_RUNNING) as clients:
                outputs = list(clients.map(lambda body: self._ask("/completion", body), bodies))
            # Of a prompt its time is known, not how long it waited, which one alone does not.
            alone = [output["timings"]["prompt_ms"] / 1000 for output in outputs] if len(outputs) == 1 else []
            return [output["tokens"] for output in outputs], alone

        return run


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--server", required=True, help="the program llama-server")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        peers: list[LlamaCpp] = []

        def load() -> LlamaCpp:
            peers.append(LlamaCpp(args, scratch))
            return peers[0]

        try:
            serve(load)
        finally:
            for peer in peers:
                peer.process.kill()
                peer.process.wait()


if __name__ == "__main__":
    main()
