"""A Ray Serve deployment around AsyncLLM, and a few requests to it.

    pip install 'paged-kv[ray]' 'ray[serve]'
    python examples/ray_serve.py

POST {"prompt": ..., "max_tokens": ...} gives {"text": ..., "finish_reason": ..., "prompt_tokens": ...}. Starts a Ray of
its own, without a dashboard, with Serve's proxy on loopback, and ends both. Ray's own ports listen on all interfaces.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import ray
from ray import serve
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from paged import AsyncLLM, RequestError, SamplingParams


@serve.deployment(num_replicas=1, max_ongoing_requests=64, ray_actor_options={"num_cpus": 1})
class Completions:
    """One AsyncLLM in each replica: the requests that come to it run together."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.llm = AsyncLLM(model, **settings)

    async def __call__(self, request: HTTPRequest) -> JSONResponse:
        try:
            body = await request.json()
            params = SamplingParams(temperature=0, max_tokens=body.get("max_tokens", 16))
            output = await self.llm.generate(body["prompt"], params)
        except (ValueError, AttributeError, KeyError, RequestError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        answer, tokens = output.outputs[0], len(output.prompt_token_ids)
        return JSONResponse({"text": answer.text, "finish_reason": answer.finish_reason, "prompt_tokens": tokens})


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data = json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=120) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # on a busy machine it takes more than 5 s
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    port = free_port()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    llm = Completions.bind("smollm2", kv_memory="64MiB", max_model_len=512, threads=1)  # type: ignore[attr-defined]  # by the decorator
    serve.run(llm)
    print(f"serving on http://127.0.0.1:{port}/", flush=True)
    prompts = ["The capital of France is", "Water boils at", "One, two, three,", None]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(
            lambda prompt: post(f"http://127.0.0.1:{port}/", {"prompt": prompt, "max_tokens": 8}), prompts
        )
        for prompt, (status, answer) in zip(prompts, answers, strict=True):
            print(status, repr(prompt), answer)
    ray.shutdown()  # Serve with it


if __name__ == "__main__":
    main()
