"""What the model card claims, measured: bits per byte of held-out entries, and answers about held-out words."""

import argparse
import json
import lzma
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bench.demo import corpus as corpora
from bench.demo import wordnet
from bench.demo.corpus import Corpus
from bench.demo.decode import decode
from bench.demo.model import Model
from bench.demo.packing import entries_as_text, pack
from bench.demo.tokenizer import render

SEED = 2026
QUESTIONS = 240
VALIDATION = 600
LONGEST = 160  # tokens of an answer


def bits_per_byte(model: Model, tokenizer: Tokenizer, entries: list[str], device: str) -> dict[str, float]:
    """Each entry by itself, its end included, against ``xz -9e`` on all of them in one piece."""
    rows = pack(tokenizer, entries_as_text(entries)).to(device)
    nats = 0.0
    for first in range(0, len(rows), 8):
        tokens, targets, packing = rows.batch(torch.arange(first, min(first + 8, len(rows)), device=device))
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens, packing)
        nats += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum").item()
    data = "".join(entries).encode()
    packed = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    model_bits, xz_bits = nats / 0.6931471805599453 / len(data), 8 * packed / len(data)
    return {
        "documents": len(entries),
        "bytes": len(data),
        "bits_per_byte": round(model_bits, 4),
        "xz_9e_bits_per_byte": round(xz_bits, 4),
        "ratio": round(model_bits / xz_bits, 4),
    }


def answers(model: Model, tokenizer: Tokenizer, questions: Sequence[str], device: str) -> list[tuple[str, bool]]:
    """Greedy answers and whether the model ended them itself."""
    prompts = [render([("user", question)], answer=True) for question in questions]
    given, ended = decode(model, [encoding.ids for encoding in tokenizer.encode_batch(prompts)], LONGEST, device)
    return list(zip(tokenizer.decode_batch(given), ended, strict=True))


def held_out_questions(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Questions about held-out words: those of the evaluation, and as many about other words, to choose by."""
    draw = random.Random(SEED)
    single = [word for word in corpus.held_out.values() if word.text.isalpha()]
    asked = draw.sample(single, QUESTIONS)
    names = {word.text for word in asked}
    questions = [corpora.first_question(word, draw) for word in asked]
    others = draw.sample([word for word in single if word.text not in names], VALIDATION)
    return questions, [corpora.first_question(word, draw) for word in others]


def unknown_words(question: str, answer: str, known: set[str]) -> set[str]:
    """Words of an answer that are neither known nor in the question."""
    return set(corpora.words_of(answer)) - known - set(corpora.words_of(question))


def is_loop(text: str) -> bool:
    """Four words in a row that come three times, or one word four times running."""
    words = re.findall(r"\S+", text.lower())
    groups = [tuple(words[at : at + 4]) for at in range(len(words) - 3)]
    return any(groups.count(group) >= 3 for group in groups) or any(len(set(group)) == 1 for group in groups)


def evaluate(model: Model, tokenizer: Tokenizer, corpus: Corpus, known: set[str], device: str) -> dict[str, Any]:
    """All figures. ``known``: the words of the training documents."""
    asked, _ = held_out_questions(corpus)
    given = answers(model, tokenizer, asked, device)
    unknown = [unknown_words(question, answer, known) for question, (answer, _) in zip(asked, given, strict=True)]
    good = [ended and not words for (_, ended), words in zip(given, unknown, strict=True)]
    loops = [not ended or is_loop(answer) for answer, ended in given]
    return {
        "held_out_entries": bits_per_byte(model, tokenizer, corpora.fresh_entries(corpus.held_out), device),
        "held_out_questions": {
            "questions": len(asked),
            "self_terminated_in_vocabulary": round(sum(good) / len(asked), 4),
            "self_terminated": round(sum(ended for _, ended in given) / len(asked), 4),
            "loops": round(sum(loops) / len(asked), 4),
            "unknown_words": sorted({word for words in unknown for word in words}),
        },
        "recall": _recall(model, tokenizer, corpus, device),
        "samples": [[question, answer] for question, (answer, _) in list(zip(asked, given, strict=True))[:12]],
    }


def _recall(model: Model, tokenizer: Tokenizer, corpus: Corpus, device: str) -> dict[str, Any]:
    """How often the definition of a word it was trained on is WordNet's, letter by letter; common words and all."""
    draw = random.Random(SEED)
    groups = {
        "common": [word for word in corpus.train.values() if word.use >= 30 and word.text.isalpha()],
        "all": list(corpus.train.values()),
    }
    found: dict[str, Any] = {}
    for name, words in groups.items():
        chosen = draw.sample(words, 200)
        given = answers(model, tokenizer, [f"What does {word.text} mean?" for word in chosen], device)
        right = [
            any(answer.removesuffix(".").endswith(sense.text) for senses in word.senses.values() for sense in senses)
            for word, (answer, _) in zip(chosen, given, strict=True)
        ]
        found[name] = {"of": len(words), "asked": len(chosen), "word_for_word": round(sum(right) / len(right), 4)}
    return found


def load(directory: Path, device: str) -> tuple[Model, Tokenizer]:
    model = Model()
    weights = load_file(directory / "model.safetensors")
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    assert all(".mixer." in name for name in missing.missing_keys)
    return model.to(device).eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))


def main() -> None:
    from bench.demo.train import ROUNDS, SPLIT_SEED, training_texts

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="the wordnet-base package, or its files' directory")
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    corpus = corpora.split(wordnet.read(options.source), SPLIT_SEED)
    entries, talks = training_texts(corpus, ROUNDS)
    known = corpora.vocabulary(iter(entries + talks))
    model, tokenizer = load(options.model, device)
    print(json.dumps(evaluate(model, tokenizer, corpus, known, device), indent=1))


if __name__ == "__main__":
    main()
