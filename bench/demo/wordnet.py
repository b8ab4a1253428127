"""WordNet 3.0 as words and senses, read from the Debian package ``wordnet-base`` or a directory with its files.

Left out: proper names (instances, words with capitals, digits or dots, and senses whose text looks like a person's
dates), and examples that are attributed quotations. The index spells all words small: a word counts only where the
sense itself spells it so.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PARTS = {"n": "noun", "v": "verb", "a": "adjective", "r": "adverb"}
_FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
_WORD = re.compile(r"[a-z][a-z'-]*(?: [a-z][a-z'-]*){0,3}")
_DATES = re.compile(r"\(\d{3,4}|\bborn\b.*\d{4}|@")
_EXAMPLE = re.compile(r'"([^"]+)"')
_LEAD = re.compile(r"^\(([^()]+)\)\s*")


@dataclass
class Sense:
    """One synset. ``domain`` is the field its text names first ("computer science"), "" if none."""

    key: str
    part: str  # n v a r
    words: tuple[str, ...]
    text: str
    domain: str
    examples: tuple[str, ...]
    kinds: tuple[str, ...]  # keys of the senses it is a kind of
    opposites: dict[str, str]  # word of this sense -> word that means the opposite


@dataclass
class Word:
    """``senses``: by part of speech, in WordNet's order, the most usual first. ``use``: how common the word is."""

    text: str
    senses: dict[str, list[Sense]] = field(default_factory=dict)
    use: int = 0


def read(source: Path) -> dict[str, Word]:
    """Words by spelling, in alphabetical order. ``source``: the .deb, or a directory that holds data.noun and so on."""
    if source.is_dir():
        return _read(source)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["dpkg", "-x", str(source), work], check=True)
        return _read(Path(work) / "usr/share/wordnet")


def _read(directory: Path) -> dict[str, Word]:
    senses = {sense.key: sense for part in PARTS for sense in _senses(directory, part)}
    _name_opposites(senses)
    words: dict[str, Word] = {}
    for part in PARTS:
        for lemma, keys in _index(directory, part):
            listed = [senses[key] for key in keys if key in senses and lemma in senses[key].words]
            if listed:
                words.setdefault(lemma, Word(lemma)).senses[part] = listed
    _count_uses(directory, words, senses)
    return dict(sorted(words.items()))


def _senses(directory: Path, part: str) -> Iterator[Sense]:
    for line in _lines(directory / f"data.{_FILES[part]}"):
        head, _, gloss = line.partition("|")
        fields = head.split()
        count = int(fields[3], 16)
        names = [re.sub(r"\((?:a|p|ip)\)$", "", name) for name in fields[4 : 4 + 2 * count : 2]]
        first = 4 + 2 * count + 1
        pointers = [fields[at : at + 4] for at in range(first, first + 4 * int(fields[first - 1]), 4)]
        words = tuple(word for name in names if _WORD.fullmatch(word := name.replace("_", " ")))
        if not words or any(pointer[0] == "@i" for pointer in pointers) or _DATES.search(gloss):
            continue
        text, examples = _split(gloss)
        lead = _LEAD.match(text)
        domain = lead.group(1) if lead and any(pointer[0] == ";c" for pointer in pointers) else ""
        if domain and (len(domain) > 24 or re.match(r"of |used|usually|often|especially|with |in |not |as ", domain)):
            domain = ""
        text = text[lead.end() :] if lead and domain else text
        if not re.match(r"[a-z(]", text) or not text.isascii() or not 8 <= len(text) <= 300:
            continue
        kinds = tuple(_key(p[2], p[1]) for p in pointers if p[0] == "@")
        opposites = {
            names[int(p[3][:2], 16) - 1].replace("_", " "): f"{_key(p[2], p[1])} {int(p[3][2:], 16) - 1}"
            for p in pointers
            if p[0] == "!" and p[3] != "0000"
        }
        yield Sense(_key(part, fields[0]), part, words, text, domain, examples, kinds, opposites)


def _key(part: str, offset: str) -> str:
    return f"{'a' if part == 's' else part}{offset}"


def _split(gloss: str) -> tuple[str, tuple[str, ...]]:
    """The definition, and the examples that are not attributed to anybody."""
    gloss = gloss.strip().replace("`", "'").replace("''", "'")
    at = gloss.find('"')
    text = (gloss if at < 0 else gloss[:at]).strip(" ;:,.-")
    found = []
    for match in _EXAMPLE.finditer(gloss if at >= 0 else ""):
        example, after = match.group(1).strip(" ,;.!"), gloss[match.end() : match.end() + 4]
        if re.match(r"\s*-|\s*\(", after) or re.search(r"- ?[A-Z]", example) or not example.isascii():
            continue
        if 8 <= len(example) <= 160:
            found.append(example)
    return text, tuple(found[:3])


def _name_opposites(senses: dict[str, Sense]) -> None:
    """Pointers to the word of the other sense become that word; those to a word that is left out go."""
    for sense in senses.values():
        named = {}
        for word, pointer in sense.opposites.items():
            key, _, at = pointer.partition(" ")
            if word in sense.words and key in senses and int(at) < len(senses[key].words):
                named[word] = senses[key].words[int(at)]
        sense.opposites = named


def _index(directory: Path, part: str) -> Iterator[tuple[str, list[str]]]:
    for line in _lines(directory / f"index.{_FILES[part]}"):
        fields = line.split()
        lemma = fields[0].replace("_", " ")
        if _WORD.fullmatch(lemma):
            yield lemma, [_key(part, offset) for offset in fields[-int(fields[2]) :]]


def _count_uses(directory: Path, words: dict[str, Word], senses: dict[str, Sense]) -> None:
    """How often WordNet's tagged texts use a word, and how often WordNet's own definitions do."""
    for line in (directory / "cntlist.rev").read_text(encoding="latin-1").splitlines():
        key, _, count = line.split()
        word = words.get(key.partition("%")[0].replace("_", " "))
        if word is not None:
            word.use += int(count)
    for sense in senses.values():
        for spelled in re.findall(r"[a-z]+", sense.text):
            if spelled in words:
                words[spelled].use += 1


def _lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="latin-1").splitlines():
        if not line.startswith("  "):
            yield line
