"""The last minute of training: asked about words that do not exist, the model learns to answer in words that do.

A made-up word is spliced from two training words. The model is asked what it means; the start of the answer, which
repeats the word, is taught; the rest it finds itself, greedily. There the loss, in nats, is how unlikely it is that
the next token stays within the words of the training documents (``spelling``), up to the first one that does not. What
the model says is its own affair as long as it says it in words. Half of every step are rows of the training before.

That costs some of what the model knows by heart. Kept are therefore weights between those before and those of the
best round, as few of the way as the validation asks for: questions about held-out words that are not among those of
the evaluation. No held-out word is among the made-up ones.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from bench.demo import corpus as corpora
from bench.demo.corpus import Corpus
from bench.demo.decode import decode
from bench.demo.evaluate import answers, held_out_questions, unknown_words
from bench.demo.model import Model, Packing
from bench.demo.packing import ROW, Rows
from bench.demo.spelling import Speller
from bench.demo.tokenizer import END_OF_TEXT, IM_END, render
from bench.demo.wordnet import Word

SEED = 13
GOAL = 0.95  # of the validation's answers in words of the training documents
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of the way, tried in this order
PEAK, WARMUP = 3e-4, 20
STEPS = 60  # a round
ORDINARY, TALKS = 8, 128  # rows, and talks in as many rows, a step
SLOT = 128  # tokens of a talk, padding included; whole slots make up a row
SPOKEN = 80  # tokens of the model's own


@dataclass
class Talks:
    """tokens [N, SLOT + 1]; taught marks tokens of the answer's start; masks names a row of allowed tokens, or -1."""

    tokens: Tensor
    taught: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def made_up(corpus: Corpus, taken: set[str], draw: random.Random) -> Iterator[Word]:
    """Words that are not in ``taken``: the start of one training word, the end and the senses of another."""
    words = [word for word in corpus.train.values() if word.text.isalpha() and len(word.text) >= 4]
    by_pair: dict[str, list[tuple[Word, int]]] = {}
    for word in words:
        for at in range(1, len(word.text) - 2):
            by_pair.setdefault(word.text[at : at + 2], []).append((word, at))
    while True:
        first = draw.choice(words).text
        cut = draw.randrange(2, len(first))
        ends = by_pair.get(first[cut - 2 : cut])
        if ends:
            last, at = draw.choice(ends)
            text = first[:cut] + last.text[at + 2 :]
            if text not in taken and len(text) <= 18:
                yield Word(text, last.senses)


def speak(
    model: Model, tokenizer: Tokenizer, speller: Speller, words: list[Word], draw: random.Random, device: str
) -> tuple[Talks, float]:
    """Talks about words that do not exist, and the share of them that stay in the vocabulary."""
    heads, starts = [], []
    for word in words:
        question, start = corpora.unanswered(word, draw)
        system = [("system", draw.choice(corpora.SYSTEM))] if draw.random() < 0.25 else []
        heads.append(render([*system, ("user", question)], answer=True))
        starts.append(start)
    before = [len(encoding.ids) for encoding in tokenizer.encode_batch(heads)]
    prompts = [e.ids for e in tokenizer.encode_batch([a + b for a, b in zip(heads, starts, strict=True)])]
    spoken, ended = decode(model, prompts, SPOKEN, device)
    tokens = np.full((len(words), SLOT + 1), END_OF_TEXT, dtype=np.int64)
    taught = np.zeros(tokens.shape, dtype=bool)
    masks = np.full(tokens.shape, -1, dtype=np.int64)
    good = 0
    for row, (prompt, own, over) in enumerate(zip(prompts, spoken, ended, strict=True)):
        own = [*own, IM_END] if over else own
        rows = speller.follow(own)
        good += over and len(rows) == len(own) and bool(speller.masks[rows[-1]][own[-1]])
        kept = [*prompt, *own][: SLOT + 1]
        tokens[row, : len(kept)] = kept
        taught[row, before[row] : len(prompt)] = True
        rows = rows[: SLOT + 1 - len(prompt)]
        masks[row, len(prompt) : len(prompt) + len(rows)] = rows
    return Talks(*(torch.from_numpy(array).to(device) for array in (tokens, taught, masks))), good / len(words)


def loss_of(model: Model, rows: Rows, chosen: Tensor, talks: Talks, spoken: Tensor, masks: Tensor) -> Tensor:
    """Nats a token of ordinary rows and of the starts of answers, and nats a talk of leaving the vocabulary.

    chosen [R]: rows; spoken [S * ROW / SLOT]: talks that make up S rows. masks [M, vocabulary].
    """
    tokens, targets, packing = rows.batch(chosen)
    own, shape = talks.tokens[spoken], (-1, ROW)
    places = torch.arange(SLOT, device=own.device).repeat(len(own) * SLOT // ROW, ROW // SLOT)
    joined = Packing(torch.cat((packing.places, places)))
    with torch.autocast(own.device.type, torch.bfloat16, enabled=own.device.type == "cuda"):
        logits = model(torch.cat((tokens, own[:, :-1].reshape(shape))), joined).float()
    ordinary, logits = logits[: len(chosen)], logits[len(chosen) :].reshape(-1, logits.shape[-1])
    starts = own[:, 1:].where(talks.taught[spoken, 1:], -100).flatten()
    at = talks.masks[spoken, 1:].flatten()
    where = at >= 0
    heard = logits[where]
    leaving = heard.logsumexp(-1) - heard.masked_fill(~masks[at[where]], -torch.inf).logsumexp(-1)
    return (
        F.cross_entropy(ordinary.flatten(0, 1), targets.flatten())
        + F.cross_entropy(logits, starts)
        + leaving.sum() / len(own)
    )


def polish(
    model: Model, tokenizer: Tokenizer, corpus: Corpus, known: set[str], rows: Rows, rounds: int, device: str
) -> Iterator[dict[str, float]]:
    """Trains the model, then takes it part of the way back; yields what each round and each such part gave.

    known: the words of the training documents; rows: of the training before.
    """
    draw, order = random.Random(SEED), torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), fused=device == "cuda")
    speller = Speller(tokenizer, known)
    taken = known | {word for text in corpus.held_out for word in corpora.words_of(text)}
    inventor = made_up(corpus, taken, draw)
    _, asked = held_out_questions(corpus)
    queue = torch.empty(0, dtype=torch.long)
    before = _weights(model)
    best, kept = -1.0, before
    for turn in range(rounds):
        words = [next(inventor) for _ in range(STEPS * TALKS)]
        talks, share = speak(model, tokenizer, speller, words, draw, device)
        masks = torch.from_numpy(np.stack(speller.masks)).to(device)
        total = torch.zeros((), device=device)
        model.train()
        for step, spoken in enumerate(torch.arange(len(talks), device=device).split(TALKS)):
            if len(queue) < ORDINARY:
                queue = torch.randperm(len(rows), generator=order)
            chosen, queue = queue[:ORDINARY].to(device), queue[ORDINARY:]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(turn * STEPS + step, rounds * STEPS)
            loss = loss_of(model, rows, chosen, talks, spoken, masks)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        model.eval()
        right = in_vocabulary(model, tokenizer, asked, known, device)
        if right >= best:
            best, kept = right, _weights(model)
        yield {
            "round": turn + 1,
            "loss": round(total.item() / STEPS, 4),
            "made_up_in_vocabulary_before": round(share, 4),
            "validation_in_vocabulary": round(right, 4),
        }
    for way in SHARES:
        model.load_state_dict(between(before, kept, way))
        right = in_vocabulary(model, tokenizer, asked, known, device)
        yield {"way": way, "validation_in_vocabulary": round(right, 4)}
        if right >= GOAL:
            return
    model.load_state_dict(kept)


def between(before: dict[str, Tensor], after: dict[str, Tensor], way: float) -> dict[str, Tensor]:
    """Weights ``way`` of the way from those before to those after, in fp32."""
    return {name: torch.lerp(value.float(), after[name].float(), way) for name, value in before.items()}


def in_vocabulary(model: Model, tokenizer: Tokenizer, asked: list[str], known: set[str], device: str) -> float:
    """The share of questions whose answer ends by itself and has only words that are known or in the question."""
    given = zip(asked, answers(model, tokenizer, asked, device), strict=True)
    good = [ended and not unknown_words(question, answer, known) for question, (answer, ended) in given]
    return sum(good) / len(good)


def _weights(model: Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def learning_rate(step: int, steps: int) -> float:
    """Linear up, then a cosine down to nothing."""
    return PEAK * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))
