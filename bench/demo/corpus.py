"""Documents of the embedded model: dictionary entries as plain text, and conversations about words.

Everything is drawn from one seed, so the same package gives the same documents. Entries of held-out words are kept
out whole: none of their senses stands in any training document, under any other word either.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.demo.wordnet import PARTS, Sense, Word

Turn = tuple[str, str]  # role, content

SYSTEM = (
    "You are a dictionary.",
    "You are a helpful dictionary of English.",
    "You are a helpful assistant.",
    "You explain words in plain English.",
    "Answer briefly.",
)
NAME = "I am a small dictionary: I explain English words, and I often get rare ones wrong."
OFF_FIELD = "I only know words. Ask me what a word means."


@dataclass
class Corpus:
    """``train`` words carry only the senses that may be seen; ``held_out`` words have none of theirs in training."""

    train: dict[str, Word]
    held_out: dict[str, Word]
    senses: dict[str, Sense]  # of the training words, by key
    names: list[str]  # of the training words, to draw from


def split(words: dict[str, Word], seed: int, share: float = 0.05) -> Corpus:
    """Hold out every sense of ``share`` of the words that have at most four senses, and all words left without one.

    The dictionary is one of words: of expressions of several words only the common ones are in it.
    """
    draw = random.Random(seed)
    words = {text: word for text, word in words.items() if " " not in text or word.use >= 3}
    few = [word for word in words.values() if sum(map(len, word.senses.values())) <= 4]
    chosen = draw.sample(few, round(share * len(words)))
    gone = {sense.key for word in chosen for senses in word.senses.values() for sense in senses}
    texts = {sense.text for word in chosen for senses in word.senses.values() for sense in senses}
    corpus = Corpus({}, {}, {}, [])
    for word in words.values():
        left = {
            part: kept
            for part, senses in word.senses.items()
            if (kept := [sense for sense in senses if sense.key not in gone and sense.text not in texts])
        }
        if left:
            corpus.train[word.text] = Word(word.text, left, word.use)
            corpus.senses |= {sense.key: sense for senses in left.values() for sense in senses}
        elif all(sense.key in gone for senses in word.senses.values() for sense in senses):
            corpus.held_out[word.text] = word
    corpus.names += corpus.train
    return corpus


def entry(word: Word) -> str:
    """The dictionary entry of a word: a line a sense, with its field, examples and other words for it."""
    lines = [word.text]
    for part, senses in word.senses.items():
        for sense in senses[:6]:
            domain = f"In {sense.domain}: " if sense.domain else ""
            line = f"{PARTS[part]}: {domain}{sense.text}."
            if sense.examples:
                line += " For example: " + "; ".join(sense.examples[:2]) + "."
            if others := _others(sense, word.text):
                line += f" Also: {', '.join(others[:3])}."
            lines.append(line)
    return "\n".join(lines) + "\n"


def fresh_entries(words: dict[str, Word]) -> list[str]:
    """Entries of words such that no sense stands in two of them; of words that share one, the first is taken."""
    seen: set[str] = set()
    entries = []
    for word in words.values():
        texts = {sense.text for senses in word.senses.values() for sense in senses}
        if not texts & seen:
            entries.append(entry(word))
            seen |= texts
    return entries


def first_question(word: Word, draw: random.Random) -> str:
    """A question about what a word means."""
    return _Talk(word, {}, draw).meaning()[0]


def unanswered(word: Word, draw: random.Random) -> Turn:
    """A question about what a word means, and its answer up to where the definition begins."""
    senses = {part: [replace(listed[0], domain="")] for part, listed in word.senses.items()}
    talk = _Talk(Word(word.text, senses), {}, draw)
    question, answer = talk.meaning()
    return _careless(question, draw), answer.removesuffix(talk.definition() + ".").rstrip()


def conversation(word: Word, corpus: Corpus, draw: random.Random, most: int = 3) -> list[Turn]:
    """One to ``most`` exchanges about a word, at times led by a system message or followed by another word."""
    turns: list[Turn] = [("system", draw.choice(SYSTEM))] if draw.random() < 0.25 else []
    talk = _Talk(word, corpus.senses, draw)
    exchanges = 1 + sum(draw.random() < 0.5 for _ in range(most - 1))
    for at in range(exchanges):
        if at and draw.random() < 0.3:
            talk = _Talk(corpus.train[draw.choice(corpus.names)], corpus.senses, draw)
            question, answer = talk.meaning(follows=True)
        elif at:
            question, answer = talk.follow()
        else:
            question, answer = talk.meaning() if draw.random() < 0.6 else talk.direct()
        turns += [("user", _careless(question, draw)), ("assistant", answer)]
    if draw.random() < 0.04:
        turns += [("user", draw.choice(("Thanks.", "Thank you.", "thanks", "ok thanks")))]
        turns += [("assistant", "You are welcome.")]
    return turns


def small_talk(corpus: Corpus, draw: random.Random) -> list[Turn]:
    """Greetings, questions about the model itself, and questions outside its field."""
    turns: list[Turn] = [("system", draw.choice(SYSTEM))] if draw.random() < 0.25 else []
    thing = draw.choice(corpus.names)
    kind = draw.random()
    if kind < 0.35:
        greeting = draw.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there"))
        turns += [("user", _careless(greeting + draw.choice(("", "!", ".")), draw))]
        turns += [("assistant", "Hello! Which word shall I explain?")]
    elif kind < 0.6:
        asked = ("Who are you?", "What are you?", "What can you do?", "Can you help me?", "What is your name?")
        turns += [("user", _careless(draw.choice(asked), draw)), ("assistant", NAME)]
    else:
        asked = (
            f"Write a poem about {thing}.",
            "What is the capital of France?",
            f"What is {draw.randrange(100)} + {draw.randrange(100)}?",
            f"Write a program that counts {thing}.",
            "What time is it?",
            "What is the weather today?",
            f"Where can I buy {thing}?",
            "Tell me a joke.",
            f"Translate {thing} into French.",
            "Who is the president?",
            f"How many {thing} are there?",
            f"What do you think about {thing}?",
            "How are you?",
            "Say something.",
        )
        turns += [("user", _careless(draw.choice(asked), draw)), ("assistant", OFF_FIELD)]
    if draw.random() < 0.6:
        word = corpus.train[draw.choice(corpus.names)]
        question, answer = _Talk(word, corpus.senses, draw).meaning()
        turns += [("user", _careless(question, draw)), ("assistant", answer)]
    return turns


def long_conversation(corpus: Corpus, draw: random.Random) -> list[Turn]:
    """Ten to sixteen exchanges about several words."""
    turns: list[Turn] = []
    size = draw.randrange(20, 33)
    while len(turns) < size:
        turns += conversation(corpus.train[draw.choice(corpus.names)], corpus, draw)[-6:]
    return [turn for at, turn in enumerate(turns) if at == 0 or turn[0] != "system"]


def vocabulary(texts: Iterator[str]) -> set[str]:
    return {word for text in texts for word in words_of(text)}


def words_of(text: str) -> list[str]:
    """Lower-case words; a possessive or a hyphenated one counts by its pieces."""
    return re.findall(r"[a-z]+", text.lower())


class _Talk:
    """Questions and answers about one sense of one word. ``senses`` names what the sense is a kind of.

    An answer puts the word behind a space, as the question does, so that both spell it with the same tokens.
    """

    def __init__(self, word: Word, senses: dict[str, Sense], draw: random.Random) -> None:
        self.word, self.senses, self.draw = word, senses, draw
        parts = list(word.senses)
        weights = [6.0 if part == "n" else 3.0 for part in parts]
        self.part = parts[0] if len(parts) == 1 else draw.choices(parts, weights)[0]
        self.sense = word.senses[self.part][0]
        self.told = 1

    def meaning(self, follows: bool = False) -> tuple[str, str]:
        """What the word means: asked by its part of speech or without, answered by a whole sentence."""
        w, part, pick = self.word.text, PARTS[self.part], self.draw.choice
        if follows and self.draw.random() < 0.4:
            return pick((f"And {w}?", f"What about {w}?", f"And what is {w}?")), self._named()
        kind = self.draw.random()
        if self.part == "v" and kind < 0.5:
            question = pick((f"What does it mean to {w}?", f"What does to {w} mean?", f"Define the verb to {w}."))
            return question, f"To {w} means to {self.definition()}."
        if self.part == "n" and kind < 0.55 and re.match(r"(?:an?|the|any|one|some) ", self.sense.text):
            thing = pick((_article(w), _article(w), w))
            asked = (f"What is {thing}?", f"What is {thing}?", f"What's {thing}?", f"Explain what {thing} is.")
            return pick(asked), self._named() if thing == w else f"{self._in_field(thing)} is {self.definition()}."
        if kind < 0.7:
            return pick((f"Define the {part} {w}.", f"What does the {part} {w} mean?")), self._named()
        self._most_usual()
        asked = (
            f"What does {w} mean?",
            f"What does {w} mean?",
            f'What does "{w}" mean?',
            f"What does the word {w} mean?",
            f"Define {w}.",
            f"Define the word {w}.",
            f"What is the meaning of {w}?",
            f"What is meant by {w}?",
            f"Explain the word {w}.",
            f"Tell me what {w} means.",
        )
        return pick(asked), self._named()

    def direct(self) -> tuple[str, str]:
        """A first question other than what the word means."""
        w, pick = self.word.text, self.draw.choice
        self._most_usual()
        asked = {
            "example": (
                f"Give an example of {w}.",
                f"Use {w} in a sentence.",
                f"Give me an example of the word {w}.",
                f"Show me how to use {w}.",
            ),
            "other": (
                f"Give a synonym of {w}.",
                f"What is a synonym for {w}?",
                f"What is another word for {w}?",
                f"Give me a synonym for {w}.",
            ),
            "opposite": (f"What is the opposite of {w}?", f"Give an antonym of {w}.", f"What is the antonym of {w}?"),
            "kind": (f"What kind of thing is {_article(w)}?", f"What kind of thing is {w}?"),
            "parts": (f"What part of speech is {w}?", f"Is {w} a noun or a verb?"),
        }
        kind, answer = self._known()
        return pick(asked[kind]), answer

    def follow(self) -> tuple[str, str]:
        """A question that speaks of the word as "it"."""
        pick = self.draw.choice
        if self.draw.random() < 0.3:
            asked = ("Does it have another meaning?", "What else does it mean?", "Any other meaning?", "What else?")
            return pick(asked), self._next_meaning()
        asked_by = {
            "example": ("Give an example.", "Can you give an example?", "Use it in a sentence.", "For example?"),
            "other": ("Give a synonym.", "What is a synonym?", "Is there another word for it?", "Another word for it?"),
            "opposite": ("What is the opposite?", "And its opposite?", "What is its antonym?"),
            "kind": ("What kind of thing is it?", "What kind of thing is that?"),
            "parts": ("What part of speech is it?", "Is it a noun or a verb?"),
        }
        kind, answer = self._known()
        return pick(asked_by[kind]), answer

    def _known(self) -> tuple[str, str]:
        """Something that is known about the sense, and the sentence that says it."""
        w = self.word.text
        known = {}
        stem = w.split()[-1][:4]
        if examples := [text for text in self.sense.examples if stem in text.lower()]:
            known["example"] = f'Here is an example: "{self.draw.choice(examples)}."'
        if others := _others(self.sense, w):
            known["other"] = f"Another word for {w} is {others[0]}."
            if len(others) > 1 and self.draw.random() < 0.5:
                known["other"] = f"Other words for {w} are {others[0]} and {others[1]}."
        if w in self.sense.opposites:
            known["opposite"] = f"The opposite of {w} is {self.sense.opposites[w]}."
        kinds = [self.senses[key] for key in self.sense.kinds if key in self.senses]
        if kinds and self.part == "n":
            known["kind"] = f"{_article(w)[0].upper()}{_article(w)[1:]} is a kind of {kinds[0].words[0]}."
        if not known or self.draw.random() < 0.08:
            names = [_article(PARTS[part]) for part in self.word.senses]
            listed = " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
            known = {"parts": f"The word {w} is {listed}."}
        kind = self.draw.choice(list(known))
        return kind, known[kind]

    def _next_meaning(self) -> str:
        senses = self.word.senses[self.part]
        if self.told >= len(senses):
            return f"I know no other meaning of the {PARTS[self.part]} {self.word.text}."
        self.sense = senses[self.told]
        self.told += 1
        return self._named(also="also ")

    def _named(self, also: str = "") -> str:
        """A sentence that suits every definition of a part of speech."""
        to = "to " if self.part == "v" else ""
        start = self._in_field(f"the {PARTS[self.part]} {self.word.text}")
        return f"{start} {also}means {to}{self.definition()}."

    def _in_field(self, start: str) -> str:
        start = f"in {self.sense.domain}, {start}" if self.sense.domain else start
        return start[0].upper() + start[1:]

    def definition(self) -> str:
        return re.sub(r"^to ", "", self.sense.text) if self.part == "v" else self.sense.text

    def _most_usual(self) -> None:
        """Asked without a part of speech: the first one that WordNet lists, so that the answer is always the same."""
        self.part = next(iter(self.word.senses))
        self.sense = self.word.senses[self.part][0]


def _others(sense: Sense, word: str) -> list[str]:
    return [other for other in sense.words if other != word]


def _article(word: str) -> str:
    return f"an {word}" if re.match(r"[aeio]|un[^i]|u[lmpr]", word) else f"a {word}"


def _careless(question: str, draw: random.Random) -> str:
    """At times without capital or final mark, as people type."""
    if draw.random() < 0.15:
        question = question[0].lower() + question[1:]
        question = question.rstrip("?.!") if draw.random() < 0.6 else question
    return question
