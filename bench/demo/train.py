"""Train the embedded model from the raw package on one GPU.

``python -m bench.demo.train --source DEB --out DIRECTORY``: corpus, tokenizer, training, evaluation; nothing else is
read. Seeded; writes a whole checkpoint directory with training_log.json, training_curve.svg and
evaluation.json beside the weights.

Training goes on past the lowest held-out loss: a dictionary is to know its words by heart, which comes after the point
from which on entries of words it has never seen get less likely. The log has both. A last minute (``polish``) teaches
the model to stay within the words of the corpus when it is asked what it cannot know.
"""

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bench.demo import corpus as corpora
from bench.demo import tokenizer as tokenizers
from bench.demo import wordnet
from bench.demo.corpus import Corpus
from bench.demo.curve import draw_curve
from bench.demo.evaluate import evaluate, load
from bench.demo.model import Model
from bench.demo.packing import Rows, entries_as_text, pack
from bench.demo.polish import polish

SPLIT_SEED = 7
SEED = 11
ROUNDS = 2  # different conversations about each word
BATCH = 16  # rows a step
PEAK, WARMUP, DECAY, DROPOUT = 2.5e-3, 200, 0.1, 0.05
TIMED = 100  # after so many steps it is known how long one takes
POLISHING = 90  # seconds that the polish takes
CLOSING = 20  # seconds that evaluation and writing take
_START = time.monotonic()


def training_texts(corpus: Corpus, rounds: int) -> tuple[list[str], list[str]]:
    """Plain entries, and rendered conversations; the words people use most are spoken of most."""
    draw = random.Random(SEED)
    entries = [corpora.entry(word) for word in corpus.train.values()]
    talks = []
    for _ in range(rounds):
        for word in corpus.train.values():
            times = 12 if word.use >= 30 else 6 if word.use >= 10 else 3 if word.use >= 3 else draw.random() < 0.6
            for _ in range(times):
                talks.append(tokenizers.render(corpora.conversation(word, corpus, draw)))
        talks += [tokenizers.render(corpora.small_talk(corpus, draw)) for _ in range(3000)]
        talks += [tokenizers.render(corpora.long_conversation(corpus, draw)) for _ in range(1500)]
    return entries, talks


def learning_rate(step: int, steps: int) -> float:
    """Linear up, then a cosine down to a fiftieth."""
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return PEAK * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def loss_of(model: Model, rows: Rows, chosen: Tensor, device: str) -> Tensor:
    tokens, targets, packing = rows.batch(chosen)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(tokens, packing)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def held_out_loss(model: Model, rows: Rows, device: str) -> float:
    """Nats a token over the held-out rows; each batch weighs the same."""
    model.eval()
    with torch.no_grad():
        losses = [
            loss_of(model, rows, torch.arange(first, min(first + 8, len(rows)), device=device), device)
            for first in range(0, len(rows), 8)
        ]
    model.train()
    return torch.stack(losses).mean().item()


def fit(
    model: Model, rows: Rows, held_out: Rows, steps: int, seconds: float, batch: int, device: str
) -> list[dict[str, float]]:
    """Train the model; returns the log of training and held-out loss.

    ``steps`` 0: as many as end ``seconds`` after the start of the program, found out during the warm-up.
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    order = torch.Generator().manual_seed(SEED)
    queue = torch.empty(0, dtype=torch.long)
    log: list[dict[str, float]] = []
    every = max(1, (steps or 10_000) // 25)
    total, began = torch.zeros((), device=device), time.monotonic()
    step, last = 0, steps or 10_000
    while step < last:
        if step == TIMED // 2:
            total.item()  # what was launched has run
            began = time.monotonic()
        if step == TIMED and not steps:
            total.item()
            pace = (time.monotonic() - began) / (TIMED - TIMED // 2)
            last = step + int((seconds - (time.monotonic() - _START)) / (pace * 1.03))
            every = max(1, last // 25)
            say(f"{last} steps of {pace * 1000:.1f} ms will end at {seconds:.0f} s")
        if len(queue) < batch:
            queue = torch.cat((queue, torch.randperm(len(rows), generator=order)))
        chosen, queue = queue[:batch].to(device), queue[batch:]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, last)
        loss = loss_of(model, rows, chosen, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        step += 1
        if step % every == 0 or step == last:
            held = held_out_loss(model, held_out, device)
            since = step - (log[-1]["step"] if log else 0)
            log.append({"step": step, "train": round(total.item() / since, 4), "held_out": round(held, 4)})
            say(f"step {step}/{last} train {log[-1]['train']} held out {held:.4f}")
            total.zero_()
    return log


def say(text: str) -> None:
    print(f"{time.monotonic() - _START:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="the wordnet-base package, or its files' directory")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: what --seconds allow; the log says how many")
    parser.add_argument("--seconds", type=float, default=560.0, help="the whole program, evaluation included")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--start", type=Path, help="a checkpoint that was trained: only polish it")
    parser.add_argument("--polish", type=int, default=10, help="rounds of the last part")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = True

    corpus = corpora.split(wordnet.read(options.source), SPLIT_SEED)
    entries, talks = training_texts(corpus, options.rounds)
    fresh = corpora.fresh_entries(corpus.held_out)
    say(f"{len(corpus.train)} words, {len(corpus.held_out)} held out, {len(entries)} entries, {len(talks)} talks")
    known = corpora.vocabulary(iter(entries + talks))
    model = Model(DROPOUT)
    if options.start:
        started, tokenizer = load(options.start, "cpu")
        model.load_state_dict(started.state_dict())
    else:
        tokenizer = tokenizers.train(entries + talks[:60_000])
    tokenizers.write_files(options.out, tokenizer)
    texts = entries_as_text(entries) * options.rounds + talks
    random.Random(SEED).shuffle(texts)
    rows, held_out = pack(tokenizer, texts).to(device), pack(tokenizer, entries_as_text(fresh)).to(device)
    say(f"{len(rows)} rows of {rows.tokens.shape[1] - 1} tokens, {len(held_out)} held out")

    model.to(device)
    if device == "cuda":
        model.compile_layers()
    if options.start:
        log = json.loads((options.start / "training_log.json").read_text())
    else:
        ends = options.seconds - CLOSING - POLISHING
        log = fit(model, rows, held_out, options.steps, ends, options.batch, device)
    say("trained")
    polished = []
    for point in polish(model, tokenizer, corpus, known, rows, options.polish, device):
        polished.append(point)
        say(json.dumps(point))
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.public_weights().items()}
    save_file(weights, options.out / "model.safetensors", metadata={"format": "pt"})
    (options.out / "training_log.json").write_text(json.dumps(log) + "\n")
    (options.out / "training_curve.svg").write_text(draw_curve(log))
    model.load_state_dict(weights, strict=False)
    report: dict[str, Any] = {
        "command": " ".join(["python -m bench.demo.train", *sys.argv[1:]]),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training_words": len(corpus.train),
        "held_out_words": len(corpus.held_out),
        "training_bytes": {"entries": sum(map(len, entries)), "conversations": sum(map(len, talks))},
        "steps": log[-1]["step"],
        "lowest_held_out": min(log, key=lambda point: point["held_out"]),
        "last": log[-1],
        "polish": polished,
        **evaluate(model.eval(), tokenizer, corpus, known, device),
    }
    say(json.dumps(report))
    report["seconds"] = round(time.monotonic() - _START, 1)
    (options.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    say("done")


if __name__ == "__main__":
    main()
