"""Stop strings, matched across token borders.

All stop strings of a request form one automaton whose state is the longest end of the text that begins a stop string:
that much is held back, nothing more, and each character costs a step or two however long the text and the strings are.
The match that ends first wins; of several ending at the same character, the longest. So the outcome depends on the
characters alone, not on how they were cut into tokens.
"""

from collections import deque
from functools import lru_cache


class StopStrings:
    """The automaton of a set of stop strings; shared by the choices of a request."""

    __slots__ = ("depth", "fail", "matched", "next")

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.matched = [0]  # length of the longest stop string that ends in this state, 0 = none
        for text in strings:
            self._insert(text)
        self.fail = [0] * len(self.next)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.matched.append(0)
            state = self.next[state][character]
        self.matched[state] = len(text)

    def _link(self) -> None:
        """Set where each state falls back to when no character continues it, nearest to the root first."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                self.matched[child] = self.matched[child] or self.matched[self.fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


@lru_cache(maxsize=32)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """Compiled and remembered: requests of one client carry the same list."""
    return StopStrings(strings)


class StopMatcher:
    """Passes the text of one choice through and ends it at the first stop string."""

    __slots__ = ("_held", "_include", "_state", "_strings", "hit")

    def __init__(self, strings: StopStrings, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """The text that can be shown now. Once ``hit`` is set the choice has ended; push nothing more."""
        strings, state = self._strings, self._state
        transitions, matched = strings.next, strings.matched
        for position, character in enumerate(text, 1):
            state = transitions[state].get(character) or (state and strings.step(state, character))
            if matched[state]:
                return self._end(text[:position], matched[state])
        self._state = state
        held = strings.depth[state]
        whole = self._held + text
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held]

    def _end(self, text: str, length: int) -> str:
        self.hit = True
        whole, self._held = self._held + text, ""
        return whole if self._include else whole[: len(whole) - length]

    def flush(self) -> str:
        """The text that was held back in vain; call when the choice ends otherwise."""
        held, self._held, self._state = self._held, "", 0
        return held
