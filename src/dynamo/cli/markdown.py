"""Markdown on a terminal, word by word as it is written: styles for its marks, and lines that break between words.

A word is shown when it is complete, so it stands whole on one line; a word that is longer than a line is broken.
Within code nothing is broken, because its lines are its meaning. Without styles the marks stay as they are. Control
characters are left out, because a terminal obeys them.
"""

import re
import unicodedata

from rich import cells

_RESET = "\x1b[0m"
_STYLES = {"bold": "\x1b[1m", "italic": "\x1b[3m", "code": "\x1b[36m", "heading": "\x1b[1;4m"}
_MARKED = {1: ("italic",), 2: ("bold",), 3: ("bold", "italic")}  # styles by length of the mark
_OPENING = re.compile(r"([(\[\"']*)(\*{1,3}|_{1,2})(?=[^\s*_])")
_CLOSING = re.compile(r"(\*{1,3}|_{1,2})([)\]\"'.,:;!?]*)\Z")
_HEADING = re.compile(r"#{1,6}\Z")
_BULLETS = ("*", "-", "+")
_FENCE = "```"


class MarkdownWriter:
    """Turns Markdown into text for a terminal of `width` columns. Several at a time do not disturb each other."""

    def __init__(self, width: int, *, has_styles: bool) -> None:
        self._width = max(width, 20)
        self._has_styles = has_styles
        self._word = ""  # incomplete
        self._blanks = ""  # before it
        self._column = 0
        self._is_line_start = True
        self._is_fenced = False
        self._active: list[str] = []  # styles, in the order in which they began

    def push(self, text: str) -> str:
        """Add text; return what can be shown now."""
        return "".join(map(self._push_char, text))

    def finish(self) -> str:
        """End the text; return what was held back. No style goes on, also if the text ended within code."""
        shown = self._end_line().removesuffix("\n")
        return shown + (_RESET if self._is_fenced and self._has_styles else "")

    def _push_char(self, char: str) -> str:
        if char == "\n":
            return self._end_line()
        has_fence = self._is_line_start and self._word.startswith(_FENCE)
        if char in " \t" and not has_fence:  # the line of a fence is one word
            shown = self._end_word()
            self._blanks += char
            return shown
        if unicodedata.category(char) == "Cc":
            return ""
        if cells.cell_len(char) > 1 and not self._is_fenced:  # each may stand alone in a line
            return self._end_word() + self._place(char, char)
        self._word += char
        is_long = len(self._word) >= self._width - 1 and not self._is_fenced
        return self._end_word() if is_long else ""

    def _end_line(self) -> str:
        is_fence = self._word.startswith(_FENCE) and "`" not in self._word.lstrip("`")
        if self._is_line_start and is_fence:
            self._is_fenced = not self._is_fenced
            shown = "" if self._has_styles else self._word + "\n"
            self._word = self._blanks = ""
            if self._has_styles:
                shown = _STYLES["code"] if self._is_fenced else _RESET
            return shown
        shown = self._end_word()
        styles_end = _RESET if self._active and self._has_styles else ""
        self._active, self._blanks, self._column, self._is_line_start = [], "", 0, True
        return shown + styles_end + "\n"

    def _end_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        if self._is_fenced:
            blanks, self._blanks, self._is_line_start = self._blanks, "", False
            return blanks + word
        if not self._has_styles:
            return self._place(word, word)
        if self._is_line_start and _HEADING.match(word):
            self._is_line_start, self._blanks = False, ""
            return self._begin("heading")
        if self._is_line_start and word in _BULLETS:
            word = "•"
        return self._place(*self._styled(word))

    def _place(self, word: str, visible: str) -> str:
        """Return the word behind its blanks, or at the beginning of a new line."""
        width = cells.cell_len(visible)
        before, self._blanks = self._blanks, ""
        if not self._column and "heading" in self._active:
            before = ""  # between its mark and its first word
        if self._column and self._column + len(before) + width > self._width:
            before, self._column = "\n", 0
        self._column += width + (len(before) if before != "\n" else 0)
        self._is_line_start = False
        return before + word

    def _styled(self, word: str) -> tuple[str, str]:
        """Return a word with its marks replaced by styles, and what of it is visible."""
        opened, closed, after = "", "", ""
        if "code" not in self._active:
            if match := _OPENING.match(word):
                opened, word = (
                    "".join(map(self._begin, _MARKED[len(match[2])])),
                    match[1] + word[match.end() :],
                )
            if (match := _CLOSING.search(word)) and self._active:
                closed = "".join(map(self._end, _MARKED[len(match[1])]))
                word, after = word[: match.start()], match[2]
        parts = word.split("`")
        styled = parts[0]
        for part in parts[1:]:
            styled += self._end("code") if "code" in self._active else self._begin("code")
            styled += part
        return opened + styled + closed + after, "".join(parts) + after

    def _begin(self, style: str) -> str:
        self._active.append(style)
        return _STYLES[style]

    def _end(self, style: str) -> str:
        """Return the codes that end this style; others go on."""
        if style in self._active:
            self._active.remove(style)
        return _RESET + "".join(_STYLES[name] for name in self._active)
