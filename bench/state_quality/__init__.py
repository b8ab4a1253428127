"""What bf16 costs as dtype of the recurrent state (``memory.state_dtype``), beside fp32.

    python -m bench state_quality --source DEB [--only model|recurrence] [--entries N] [--rows N] [--tokens N]

The GPU forms write bf16 states rounded up or down by chance; to the nearest is the yardstick, and what the torch forms
for CPU do. Without a GPU the Triton forms run under the interpreter (TRITON_INTERPRET=1), for small sizes only.

model       the embedded model, activations in fp32, over held-out text: bits per byte, divergence from fp32 state (mean
            KL in nats a token) and how often the likeliest token is the same. ``entries``: each dictionary entry by
            itself (so what is said of its first token, always the same, counts as often as there are entries);
            ``long``: the same entries one after another in texts of 2,048 tokens. Decoded, the state is rounded at
            every token; prefilled, here in chunks of 64 tokens, after every chunk, while a prompt that fits in one
            chunk never reads a rounded state. ``answers``: greedy answers to questions about held-out words. bf16 as
            the model's own dtype is the last line, to compare with.
recurrence  ``decode_rows`` at the shape of Qwen3.5-9B against fp64: relative error of the layer's (normed) outputs,
            over the last 16 tokens, and of the state, median and worst of all heads, after up to 32,768 tokens. A head
            forgets between a tenth and 1e-4 of its state at a token, and writes much (beta 1/2) or little (1/400).

``--source``: the package ``wordnet-base`` of Debian (bench.demo.wordnet).
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench import record
from bench.demo import corpus as corpora
from bench.demo import wordnet
from bench.demo.evaluate import LONGEST, held_out_questions
from bench.demo.packing import ROW, entries_as_text
from bench.demo.tokenizer import render
from bench.demo.train import SPLIT_SEED
from bench.state_quality.model import KINDS, Reader, Score, bits_per_byte
from bench.state_quality.recurrence import M1, MARKS, WINDOW, Error, measure
from hybserve.launch.prepare import EMBEDDED_DIR

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Sequences of the recurrence: with 32 heads each, 128 matrices.
SEQUENCES = 4
#: Heads and marks that the interpreter gets through.
SMALL, FEW = (1, 4, 16, 16), (WINDOW, 4 * WINDOW)


def of_model(source: Path, entries: int, rows: int, tokens: int) -> dict[str, Any]:
    corpus = corpora.split(wordnet.read(source), SPLIT_SEED)
    tokenizer = Tokenizer.from_file(str(EMBEDDED_DIR / "tokenizer.json"))
    texts = corpora.fresh_entries(corpus.held_out)[:entries]
    split = [encoding.ids for encoding in tokenizer.encode_batch(entries_as_text(texts))]
    whole = [token for text in split for token in text]
    long = [whole[low : low + tokens + 1] for low in range(0, len(whole) - tokens, tokens)][:rows]
    questions = held_out_questions(corpus)[0][:rows]
    prompts = [render([("user", question)], answer=True) for question in questions]
    asked = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
    longest = min(LONGEST, tokens - max(map(len, asked)))
    reader = Reader(EMBEDDED_DIR, rows, tokens + 1, DEVICE)
    long_bytes = sum(len(tokenizer.decode(text[1:], skip_special_tokens=False).encode()) for text in long)
    return {
        "entries, decoded": _table(reader.decoded(sorted(split, key=len)), sum(len(text.encode()) for text in texts)),
        "long, decoded": _table(reader.decoded(long), long_bytes),
        "long, prefilled in chunks of 64": _table(reader.prefilled(long), long_bytes),
        "answers": _agreement(reader.continued(asked, longest)),
    }


def _table(scores: list[Score], size: int) -> dict[str, Any]:
    return {
        score.kind: {
            "bits_per_byte": round(bits_per_byte(score, size), 5),
            "divergence": score.divergence,
            "same_token": round(score.same, 5),
            "tokens": score.tokens,
        }
        for score in scores
    }


def _agreement(answers: list[list[list[int]]]) -> dict[str, Any]:
    """How many answers are those of the first kind, token by token."""
    equal = [sum(ours == truth for ours, truth in zip(of, answers[0], strict=True)) for of in answers]
    return {kind.name: {"equal": count, "of": len(answers[0])} for kind, count in zip(KINDS, equal, strict=True)}


def of_recurrence() -> dict[str, Any]:
    if DEVICE == "cpu":
        errors, forgets = measure(SMALL, 1, FEW, DEVICE)
    else:
        errors, forgets = measure(M1, SEQUENCES, MARKS, DEVICE)
    return {
        "forgotten_at_a_token": [float(f"{share:.3g}") for share in forgets],
        "errors": [_summary(error) for error in errors],
    }


def _summary(error: Error) -> dict[str, Any]:
    return {
        "writes": error.writes,
        "tokens": error.tokens,
        "state": error.state,
        "outputs": _spread(error.outputs),
        "states": _spread(error.matrices),
        "outputs_by_head": [float(f"{share:.3g}") for share in error.outputs.mean(0)],
    }


def _spread(errors: torch.Tensor) -> dict[str, float]:
    return {"median": float(errors.median()), "worst": float(errors.max())}


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    for what, kinds in figures.get("model", {}).items():
        for kind, of in kinds.items():
            if what == "answers":
                yield f"{what:<33}{kind:<25}{of['equal']:>5} of {of['of']} the same"
            else:
                yield (
                    f"{what:<33}{kind:<25}{of['bits_per_byte']:9.4f} bit/B  KL {of['divergence']:9.2e}  "
                    f"same {100 * of['same_token']:7.3f} %  of {of['tokens']}"
                )
    for of in figures.get("recurrence", {}).get("errors", ()):
        spreads = (f"{what} {of[what]['median']:8.1e} worst {of[what]['worst']:8.1e}" for what in ("outputs", "states"))
        yield f"{of['writes']:<7} after {of['tokens']:>5}  {of['state']:<18} {'  '.join(spreads)}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench state_quality")
    parser.add_argument("--source", type=Path, help="the wordnet-base package, or its files' directory")
    parser.add_argument("--only", choices=("model", "recurrence"))
    parser.add_argument("--entries", type=int, default=1 << 30, help="at most so many held-out entries")
    parser.add_argument("--rows", type=int, default=256, help="texts at a time")
    parser.add_argument("--tokens", type=int, default=ROW, help="of a long text, a multiple of 64")
    options = parser.parse_args(arguments)
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("without a GPU the Triton forms need TRITON_INTERPRET=1")
    if options.only != "recurrence" and options.source is None:
        parser.error("the model reads text of --source")
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"}
    began = time.perf_counter()
    if options.only != "model":
        figures["recurrence"] = of_recurrence()
        figures["recurrence"]["seconds"] = round(time.perf_counter() - began, 1)
    began = time.perf_counter()
    if options.only != "recurrence":
        figures["model"] = of_model(options.source, options.entries, options.rows, options.tokens)
    print("\n".join(_lines(figures)))
    print(record("state_quality", figures, ["python", "-m", "bench", "state_quality", *arguments], ("torch", "triton")))
    return 0
