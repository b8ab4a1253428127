"""The embedded model's training: what decodes, what spells, and what the polish learns from."""

import random
from itertools import islice

import pytest
import torch
from tokenizers import Tokenizer

from bench.demo import corpus as corpora
from bench.demo import packing, polish
from bench.demo.decode import decode
from bench.demo.evaluate import load, unknown_words
from bench.demo.model import Model, Packing
from bench.demo.packing import entries_as_text, pack
from bench.demo.polish import SLOT, between, loss_of, made_up, speak
from bench.demo.spelling import Speller
from bench.demo.tokenizer import IM_END, render
from bench.demo.wordnet import Sense, Word
from hybserve.launch.prepare import EMBEDDED_DIR

torch.set_num_threads(1)

TEXTS = {
    "banana": "a yellow fruit",
    "bandana": "a large handkerchief",
    "candle": "a stick of wax",
    "kindness": "the quality of being kind",
    "manager": "someone who controls something",
    "standard": "a basis for comparison",
}


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, Tokenizer]:
    return load(EMBEDDED_DIR, "cpu")


@pytest.fixture
def corpus() -> corpora.Corpus:
    senses = {word: Sense(word, "n", (word,), text, "", (), (), {}) for word, text in TEXTS.items()}
    words = {word: Word(word, {"n": [sense]}, use=5) for word, sense in senses.items()}
    return corpora.Corpus(words, {}, senses, list(words))


def test_decoding_by_steps_says_what_the_whole_form_says(loaded):
    model, tokenizer = loaded
    prompts = [
        tokenizer.encode(render([("user", text)], answer=True)).ids for text in ("What is a dictionary?", "Define big.")
    ]
    answers, ended = decode(model, prompts, 60, "cpu")
    assert ended == [True, True]
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = torch.tensor([[*prompt, *answer, *[0] * (-(len(prompt) + len(answer)) % 64)]])
        with torch.no_grad():
            logits = model(whole, Packing(torch.arange(whole.shape[1])[None]))[0]
        assert logits.argmax(-1)[len(prompt) - 1 :][: len(answer) + 1].tolist() == [*answer, IM_END]
    assert decode(model, prompts, 5, "cpu") == ([answer[:5] for answer in answers], [False, False])


def test_a_speller_allows_words_of_the_vocabulary_and_nothing_else(loaded):
    tokenizer = loaded[1]
    speller = Speller(tokenizer, {"the", "noun", "dog", "dogs"})
    for text, stays in {
        "The noun dog.": True,
        " the dogs (the dog)": True,
        "": True,
        " the dogma": False,
        " 2 dogs; the do": False,
        "The nouns": False,
    }.items():
        tokens = [*tokenizer.encode(text).ids, IM_END]
        rows = speller.follow(tokens)
        assert (len(rows) == len(tokens) and bool(speller.masks[rows[-1]][tokens[-1]])) == stays, text


def test_unknown_words_are_neither_known_nor_asked():
    assert unknown_words("What is a zorb?", "A zorb is a zurb.", {"a", "is"}) == {"zurb"}


def test_made_up_words_are_new(corpus):
    taken = set(TEXTS) | {"banandana"}
    words = list(islice(made_up(corpus, taken, random.Random(1)), 50))
    assert not taken & {word.text for word in words}
    assert {word.text[:2] for word in words} <= {known[:2] for known in TEXTS}
    assert {word.senses["n"][0].text for word in words} <= set(TEXTS.values())


def test_a_polish_step_lowers_what_it_is_to_lower(loaded, corpus, monkeypatch):
    """The start of an answer is learned, tokens of the model's own by masks, up to the first that leaves the words."""
    row = 256
    monkeypatch.setattr(packing, "ROW", row)
    monkeypatch.setattr(polish, "ROW", row)
    tokenizer = loaded[1]
    torch.manual_seed(0)
    model = Model()
    model.load_state_dict(loaded[0].state_dict())
    speller = Speller(tokenizer, corpora.vocabulary(iter([*map(corpora.entry, corpus.train.values()), "means is"])))
    draw = random.Random(2)
    words = list(islice(made_up(corpus, set(TEXTS), draw), 2))
    talks, share = speak(model, tokenizer, speller, words, draw, "cpu")
    assert 0 <= share < 1
    assert talks.tokens.shape == talks.masks.shape == (2, SLOT + 1)
    assert not (talks.taught & (talks.masks >= 0)).any()
    masks = torch.stack([torch.from_numpy(mask) for mask in speller.masks])
    for word, tokens, taught, names in zip(words, talks.tokens, talks.taught, talks.masks, strict=True):
        assert word.text in tokenizer.decode(tokens[taught].tolist())
        stays = masks[names[names >= 0], tokens[names >= 0]]
        assert stays[:-1].all()
    rows = pack(tokenizer, entries_as_text([corpora.entry(word) for word in corpus.train.values()]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        loss = loss_of(model, rows, torch.tensor([0]), talks, torch.arange(2), masks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_weights_between_are_part_of_the_way():
    before, after = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([3.0, -2.0])}
    assert between(before, after, 0.5)["w"].tolist() == [2.0, -1.0]
    assert between(before, after, 1.0)["w"].tolist() == [3.0, -2.0]
