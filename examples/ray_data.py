"""Answers for every row of a Ray Data dataset, from actors that each hold a model.

    pip install 'paged-kv[ray]'
    python examples/ray_data.py

Starts a Ray of its own, without a dashboard, and ends it. A row that cannot be answered says why, and the others are
answered. batch_format="pyarrow" keeps the types of all columns, those of conversations too.
"""

from __future__ import annotations

import logging

import ray
import ray.data

from paged import Generate, SamplingParams

SYSTEM = (
    "You are the help desk of a shop that rents bicycles: 12 euros a day, a helmet is free. Answer in one sentence."
)
QUESTIONS = ["What does a bicycle cost?", "Is a helmet included?", None, "What do two days cost?", "Do you sell boats?"]


def main() -> None:
    rows = [
        {"number": i, "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]}
        for i, question in enumerate(QUESTIONS)
    ]
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    answers = ray.data.from_items(rows).map_batches(
        Generate,
        fn_constructor_kwargs={
            "model": "smollm2",
            "sampling_params": SamplingParams(temperature=0, max_tokens=24),
            "messages_column": "messages",
            "output_column": "answer",
            "kv_memory": "64MiB",
            "max_model_len": 512,
        },
        batch_format="pyarrow",
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=1),  # actors, each with a model
        num_cpus=1,  # of an actor, which computes with as many threads
    )
    for row in sorted(answers.take_all(), key=lambda row: row["number"]):
        tokens = f"{row['prompt_tokens']} + {row['output_tokens']} tokens"
        said = repr(row["answer"]) if row["error"] is None else f"error: {row['error']}"
        print(f"{row['number']} ({tokens}, {row['finish_reason']}): {said}")
    ray.shutdown()


if __name__ == "__main__":
    main()
