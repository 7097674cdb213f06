"""What a question means, as far as words tell: two questions of one meaning may share an answer in the cache.

A wrong join is worse than a missed one. The questions are first brought into one wording: "How tall is X", "what height
does X have" and "what is the height of X" are one question. A rule may only join wordings whose answers are the same
whatever X is; a word that no rule knows stays and has to be equal. Rules are applied in their order to text in lower
case. Then both must have the same words, numbers, names, negations and operators. Only articles, forms of "to be" and
the like may differ. The order may differ only for what a preposition or a genitive attaches ("a list in Python", "a
Python list"; several of them keep theirs), for superlatives, and of the things whose distance or difference is asked
for, each with its own words: "does A imply B" is not "does B imply A". A genitive names an owner and a compound a
kind: "a dog's breed" may be "the breed of a dog", no "dog breed".

Where words themselves are the matter ("how many letters are in ...", "translate ..."), each of them counts as it is
written: an article, a plural, one of two synonyms. So do the synonyms that a question tells apart, and one that is all
that is asked about. A text that a question brings with it (in quotes, behind a colon, in lines of its own) is compared
letter by letter.

Capitals tell names from common words ("US" and "us", "Polish" and "polish", the language C and a speed c), so both
questions must write a word with the same capitals. The capital that begins a sentence says nothing, except of a word
that is known to mean something else with one; and a word that is written both ways is one of those that differ, so a
question in careless lower case is not joined with one that writes its names as names.
"""  # decider

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_REWORDED = 500  # characters; a longer question is compared in its own words: rules take time
_I = r"(?:i|we|one|you|someone|people)"
_IS = "(?:is|are)"  # what was the age of X is another question
_IS_OR_WAS = "(?:is|are|was|were)"
_LANGUAGE = "(french|german|spanish|italian|english|japanese|chinese|russian|portuguese|korean|arabic|greek|hindi)"
RULE_TABLE = (
    (r"\b(\w+)'(?:re|m)\b", r"\1 are"),
    (r"\b(what|who|how|where|when|why|that|it)'s\b", r"\1 is"),
    (r"\bcan(?:'t|not)\b", "can not"),
    (r"\bwon't\b", "will not"),
    (r"n't\b", " not"),
    (r"[,.!?]\s*(?:please|thanks|thank you)\W*$|(?<!say)(?<!spell)(?<!with) please\W*$|\b(?:to|for) me\W*$", " "),
    (rf"^(what|who|when|where) ({_IS_OR_WAS}) my\b", r"\1 \2 mine"),
    (
        r"^(?:\s*(?:hi|hello|hey|so|please|kindly|(?:can|could|would|will) you|do you know|"
        r"i(?:'d| would) (?:like|love) to know|"
        r"i(?: want| need)? to know|i(?: am| are)? wondering|(?:tell|give|show|teach|remind) me|explain(?: to me)?|"
        r"describe(?: to me)?|help me(?: to)?(?= (?:write|make|find|understand))|understand)\b[\s,!.:]*)+",
        "",
    ),
    (r"^((?:write|list|make|compose|create) )me\b", r"\1"),
    (r"\b(?:each|every|per|in a|a) (day|week|month|year)\b", r"per \1"),
    (r"\bdaily\b", "per day"),
    (r"\bget (.*\b(?:stains?|marks?|smells?|gum|wax)) (?:out of|off of|off|from)\b", r"remove \1 from"),
    (r"\b(?:out of|off of)\b", "from"),
    (r"\b(?:into|onto)\b", "to"),
    (r"\bget rid of\b", "remove"),
    (r"\b(?:set up|setting up)\b", "configure"),
    (r"\b(?:the |a )?(?:concept|notion|idea|phenomenon) of\b", ""),
    (r"\b(plural|singular) form\b", r"\1"),
    # what a thing is
    (r"^(?:what )?(?:does|do) (.+) (?:mean|stand for)\W*$", r"\1"),
    (r"^what is meant by (?:the )?", ""),
    (r"^(?:give |provide )?(?:the |a |an )?(?:short |brief )?(?:definition|meaning|explanation|description) of", ""),
    (r"^(?:what is )?the (?:definition|meaning) of", ""),
    (r"^what (.*\S) (?:is|are)\W*$", r"\1"),
    (r"^(?:write |give |provide )?(?:a |the )?(?:short |brief )?(summary|list|overview) of", r"\1"),
    (r"^(?:summari[sz]e|recap)\b", "summary"),
    (r"^(?:what is )?(?:the )?(.+)'s (?:definition|meaning)\W*$", r"\1"),
    (r"^(?:give|provide) (?:the |an? )?", ""),
    (r"^(?:define|find|calculate|compute|determine|work out|name)\b", ""),
    # how it is done
    (r"^what (?:is|are) the (best|easiest|fastest|cheapest|quickest|safest) ways? (?:to|of)\b", r"how \1"),
    (
        r"^(?:what (?:is|are) |which (?:is|are) )?(?:the |a )?"
        r"(?:steps?|way|ways|procedure|process|instructions|method)(?: needed| required)? (?:to|for|of)\b",
        "how",
    ),
    (r"^what (?:must|should|do|can) (?:i|we|one) do to\b", "how"),
    (r"^in (?:what|which) way\b", "how"),
    (
        rf"^(?:translate|how (?:do|would|can) {_I} (?:say|translate)|what is) (.+) (?:to|in) {_LANGUAGE}\W*$",
        r"translate \1 to \2",
    ),
    (rf"^how (?:do|does|can|could) {_I} (make|find|prepare|compute|calculate|spell|pronounce) (.+)", r"how \1 \2"),
    (r"^how (?:is|are) (.+) (?:made|prepared)\W*$", r"how make \1"),
    (r"^how (?:is|are) (.+) (?:found|computed|calculated)\W*$", r"how find \1"),
    (r"^how (?:compute|calculate)\b", "how find"),
    # how much of it
    (r"^(?:what is )?the number of\b", "how many"),
    (r"^how many (.+) (?:do|does) (.+) have\W*$", r"how many \1 in \2"),
    (r"^how many (.+) (?:are there|are|does)\b", r"how many \1"),
    (r"^at (?:what|which) temperature (?:do|does) (.+) (boil|freeze|melt)\W*$", r"\2 point \1"),
    (r"\b(boil|freez|melt)ing point\b", r"\1 point"),
    (r"\bfreeze point\b", "freez point"),
    (rf"^(?:for )?how long (?:should|do|does|must|will|would) (?:{_I} )?", "duration "),
    (rf"\bhow many (?:people|inhabitants) (?:live in|{_IS} there in|does|{_IS} in)\b", "population"),
    (r"^(?:how much does|what does) (.+) (?:cost)\b", r"price \1"),
    (r"^how much does (.+) weigh\b", r"weight \1"),
    (rf"\bhow (?:tall|high)(?: {_IS})?\b", "height"),
    (rf"\bhow fast(?: {_IS}| does| do)?\b", "speed"),
    (rf"\bhow far (?:away )?(?:{_IS} )?(?:it )?\b", "distance "),
    (rf"\bhow long {_IS}\b", "length"),
    (rf"\bhow old {_IS}\b", "age"),
    (rf"\bhow heavy {_IS}\b", "weight"),
    (rf"\bhow (?:big|large) {_IS}\b", "size"),
    (rf"\bhow deep {_IS}\b", "depth"),
    (rf"\bhow wide {_IS}\b", "width"),
    (rf"\bhow hot {_IS}\b", "temperature"),
    (r"\bhow often\b", "frequency"),
    (r"^(?:what is )?the (?:cost|price) of\b", "price"),
    # when, where, who, why
    (r"^(?:at |in |on )?(?:what|which) (?:time|year|date|day)\b", "when"),
    (r"^(?:at |in )?(?:what|which) place\b", "where"),
    (r"^what is the location of", "where"),
    (rf"^who {_IS_OR_WAS} the (?:author|writer) of", "who wrote"),
    (rf"^who {_IS_OR_WAS} the (invent|creat|direct)or of", r"who \1ed"),
    (rf"^who {_IS_OR_WAS} the (discover|found|paint|compos)er of", r"who \1ed"),
    (r"^(?:which|what) (?:painter|artist) (?:made|painted|created)", "who painted"),
    (r"^(?:which|what) (?:author|writer|playwright|poet|novelist) wrote", "who wrote"),
    (r"^(?:which|what) (?:person|man|woman|scientist|inventor|explorer|company)\b(?= \w+ed\b)", "who"),
    (rf"^(?:what {_IS_OR_WAS} )?the (?:reasons?|causes?) (?:for|of|that|why|behind)\b", "why"),
    (r"^(?:what (?:makes|causes|caused|leads to)|for what reasons?|how come)\b", "why"),
    (r"^why ((?!do|is|are|did)\w.*?) to\b", r"why \1"),
    (r"^why (?:does |do )?(.+) (?:happen|occur|exist)s?\W*$", r"why \1"),
    # relations
    (r"^(?:which|what) (.+) (?:do|does) (.+) have\W*$", r"\1 of \2"),
    (r"^why (?:is|are) (.+) (?:good|beneficial|healthy)(?: for (?:you|me|us|people|your health))?\W*$", r"benefit \1"),
    (r"\b(?:benefits?|advantages?|upsides?) (?:of|to)\b", "benefit"),
    (r"^(?:how (?:do|does|are|is)|in what way do) (.+) differ(?:ent)?(?: from (.+?))?\W*$", r"difference \1 and \2"),
    (r"^(?:what (?:does|do)) (.+) do\W*$", r"function \1"),
    (r"^(?:what is )?the (?:role|job|purpose|function|task) of", "function"),
    (r"^is it (?:okay|ok|alright|possible) to\b", "can"),
    (r"^is it (safe|legal|bad|good|necessary|dangerous) to\b", r"can \1"),
    (r"^(can|may|could) (?:i|we|one|you)\b(.*)\bsafely\b", r"can safe \2"),
    (r"^(?:can|could|may) (?:i|we|one|you)\b", "can"),
    (r"\bhow (?:to|(?:do|does|can|could) (?:i|we|one)|(?:can|could) you)\b", "how"),
    (r"\b(should|must|can|could) (?:i|we|one)\b", r"\1"),
    (r"^(?:which|what) city is (?=.*\bcapital\b)", ""),
    (r"^(?:is|are|does|do|am)\b", "whether"),
    (r"^(?:which|what) (currency|language|religion) (?:does|do) (?:people )?(.+?) (?:use|speak|have)\b", r"\1 \2"),
    (r"\b(language|currency) (?:is|are) (?:used|spoken)\b", r"\1"),
    (r"\bhuman body\b", "human"),
)  # fmt: skip
_RULES = tuple((re.compile(pattern), replacement) for pattern, replacement in RULE_TABLE)
_GROUPS = """
large big huge|small little|largest biggest|start begin|end finish|buy purchase|fix repair|car automobile
movie film|photo picture|child kid|doctor physician|lawyer attorney|phone telephone|tv TV television|bike bicycle
help assist|reduce decrease|increase raise|symptom sign|sick ill|hard difficult|easy simple|rich wealthy
disease illness|choose select pick|need require|convert transform|merge combine|folder directory|apartment flat
vacation holiday|smart intelligent|fast quick|shop store|trip journey|answer reply|delete remove erase|make create
uninstall deinstall|use utilize|have has|main primary principal|important significant|recommend suggest|explain describe
"""
SYNONYMS = {
    word: group.split()[0]
    for group in _GROUPS.replace("\n", "|").split("|")
    for word in group.split()
}

# Capitonyms: words that mean something else with a capital, also at the beginning of a sentence.
_CAPITONYMS = """
Amazon Apple August Brown Bush Cancer China Excel Frank French Gap Gemini Guinea Java Jersey Job Lent Lima March Mars
Mercury Nice Oracle Pole Polish Python Ruby Rust Scotch Shell Slack Swede Swift Target Turkey Welsh Windows Word Zoom
"""
CAPITONYMS = frozenset(_CAPITONYMS.split())


def join_wordings(text: str) -> str:
    """Return a question in lower case, in the one wording of those that ask for the same."""
    text = " ".join(text.replace("’", "'").lower().split())
    if len(text) > MAX_REWORDED:
        return text
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text).strip()
    return text


_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:'[^\W\d_]+|(?<=s)')?|[^\w\s?!.,;:\"'`]|_")
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_SIGNS = re.compile(r"[?!.,;:\"'`]+")
# Signs behind a word that end or part sentences, with the quotes around it; behind a number `!` is a factorial.
# Possessive: quotes without end are not parted in all ways.
_ENDS_WORDS = re.compile(r"[\"'`]*+(?:[?!.]*+|[,;:])[\"'`]*+")
_QUOTES = re.compile("[\"'`]+")
_ABOUT_SIGNS = re.compile(
    r"punctuat|\bcommas?\b|colons?\b|apostrophe|gramma|\bsentence|proofread", re.I
)
_ABOUT_WORDS = re.compile(
    r"\b(?:translat|spell|pronounc|pronunciation|rhym|synonym|antonym|homo(?:phone|nym)|syllable|vowel|consonant|acrostic|"
    r"conjugat|re(?:write|word|phrase)\b|paraphras|proofread|gramma|capitali[sz]|anagram|palindrom|etymolog|abbreviat|"
    r"(?:upper|lower) ?case|(?:letter|character|word)s?\b|tense of|plural|singular|part of speech|opposite of|"
    r"in a sentence|in (?:english|correct)\b|correct (?:this|my|the|english)|(?:should|(?:do|would) \w+) (?:i )?say)",
    re.IGNORECASE,
)
_MATERIAL = re.compile(  # what a question brings with it
    r"\"([^\"]+)\"|“([^”]+)”|`([^`]+)`|(?<!\w)'([^']+)'(?!\w)|\n\s*(\S.*)|"
    r"(?<!define)(?<!explain)(?<!tell me)(?<!\Aquestion):\s+(\S.*)",
    re.DOTALL | re.IGNORECASE,
)
# One text, where "poems about cats" asks for several.
_ASKS_FOR_ONE = re.compile(r"(?:write|compose|create|generate|invent|suggest|draw)\s+an?\s")
_LETTER = re.compile(r"(?<=\S )A\b")  # of an answer or a vitamin; no article
_ENDINGS = re.compile(r"(?<=[^\W\d_]{3})(?:'s|(?<!s)s'?|')$")
_WORDS_BY_USE = {
    "free": "a an the is are am be do does what which and it its my",
    "attaches": "of in on at for with between per",
    "directs": "about to from than by before after over under against versus vs without through until since as like",
    "asks": "how why when where who whose whether can could should will",
}
_FREE, _ATTACHES, _DIRECTS, _ASKS = (frozenset(row.split()) for row in _WORDS_BY_USE.values())
_LIGHT = _FREE | _ATTACHES
_FUNCTION_WORDS = _LIGHT | _DIRECTS | _ASKS
_IS_SYMMETRIC = frozenset({"distance", "difference"})
_PARTS = frozenset({"and", "or", "between", "vs", "versus", "from", "to"})  # what is compared
_JOINS = frozenset({"and", "or", "between", "vs", "versus", ""})  # and nothing: the end
_BOUNDS = _JOINS | _ATTACHES | {"to"}


@dataclass(frozen=True, slots=True)
class QuestionMeaning:
    """The words of a question that its answer depends on."""

    # in their order, without those that only say what kind of question it is
    words: tuple[str, ...]
    asks: frozenset[str]
    attached: frozenset[str]  # words behind a preposition or before a genitive's s
    owners: frozenset[str]  # those of them before a genitive's s
    capitals: frozenset[str]  # words as they are written, if with capitals that say something
    openings: frozenset[str]  # words, in lower case, with a capital that begins a sentence
    weights: Mapping[str, float]  # of all words; those that may differ weigh little

    @property
    def key(self) -> list[str]:
        """Return what two questions of one meaning have in common, whatever the order of their words."""
        return sorted([*self.words, *self.asks])

    def agrees_with(self, other: "QuestionMeaning") -> bool:
        """Return whether a question of the same key has the same meaning."""
        if not (self.attached <= other.attached or other.attached <= self.attached):
            return False
        if not (self.owners <= other.attached and other.owners <= self.attached):
            return False
        differing = {word.lower() for word in self.capitals ^ other.capitals}
        if not differing <= self.openings | other.openings:
            return False
        free = self.attached | other.attached
        # two that change their places change what they belong to: the king of Spain, the queen of France
        if [w for w in self.words if w in free] != [w for w in other.words if w in free]:
            return False
        return self._fixed(free) == other._fixed(free)

    def _fixed(self, free: frozenset[str]) -> list[str]:
        return [w for w in self.words if w not in free and not w.endswith("est")]


def read_meaning(text: str) -> QuestionMeaning:
    """Return the meaning of a question: what every two questions that ask for the same have in common."""
    wording = join_wordings(_LETTER.sub("_a", text))
    tokens = _TOKEN.findall(wording)
    synonyms = _select_synonyms(tokens)
    reading = _Reading(tokens, synonyms, is_exact=_ABOUT_WORDS.search(text) is not None)
    if _ASKS_FOR_ONE.match(wording):
        reading.asks.add("one")
    for previous, token, following in zip(["-", *tokens], tokens, [*tokens[1:], ""], strict=False):
        reading.add(previous, token, following)
    capitals, openings = _read_capitals(text.replace("’", "'"))
    words, attached, owners = reading.words, reading.attached, reading.owners
    if reading.is_symmetric and not reading.is_exact:
        words, attached, owners = _sort_parts(words), set(), set()
    return QuestionMeaning(
        tuple(words),
        frozenset(reading.asks),
        frozenset(attached),
        frozenset(owners),
        frozenset(
            word
            for word in capitals
            if reading.is_exact or _stem(word.lower(), synonyms) in reading.weights
        ),
        frozenset(openings),
        reading.weights,
    )


class _Reading:
    """The words of one question, read from the left; each goes to the fields of its `QuestionMeaning`."""

    def __init__(
        self, tokens: Sequence[str], synonyms: Mapping[str, str], *, is_exact: bool
    ) -> None:
        """`is_exact`: the question is about words, which then stay as they are."""
        self.is_symmetric = any(_stem(token, {}) in _IS_SYMMETRIC for token in tokens)
        self.is_exact = is_exact
        self.words: list[str] = []
        self.asks: set[str] = set()
        self.attached: set[str] = set()
        self.owners: set[str] = set()
        self.weights: dict[str, float] = {}
        self._synonyms = synonyms
        # numbers and the letters of formulas, which keep their order; one alone is a name (a list in C)
        self._num_symbols = sum(
            t[0].isdigit() or (len(t) == 1 and t.isalpha() and t != "a") for t in tokens
        )
        self._before = ""  # the last word that was no article
        self._relation = ""

    def add(self, previous: str, token: str, following: str) -> None:
        """Read the next word, between its neighbours; the last one has none that follows."""
        stem = token if self.is_exact else _stem(token, self._synonyms)
        # such a word is asked about: the difference between "in" and "on"
        is_named = previous in _JOINS and following in _BOUNDS and token in _FUNCTION_WORDS
        self.weights[stem] = self.weights.get(stem, 0.0) + (0.25 if token in _LIGHT else 1.0)
        if is_named or self.is_exact:
            self.words.append(stem)
        elif token in _ASKS:
            self.asks.add(token)
        elif self.is_symmetric and token in _PARTS:
            self.words.append("and")
        elif token in _DIRECTS and following:
            self._relation = f"{token} "
        elif token not in _LIGHT or (token in _ATTACHES and not following):
            self._add_word(token, stem)
        if token not in ("the", "a", "an", "my"):
            self._before = token

    def _add_word(self, token: str, stem: str) -> None:
        """Add a word with the relation before it, and note what it belongs to, or what belongs to it."""
        word = self._relation + stem
        self._relation = ""
        self.words.append(word)
        is_name = not stem[0].isdigit() and (len(stem) > 1 or self._num_symbols < 2)
        is_owner = token.endswith(("'s", "s'"))
        if is_name and is_owner:
            self.owners.add(word)
        if is_name and (is_owner or self._before in _ATTACHES):
            self.attached.add(word)


def _sort_parts(words: Sequence[str]) -> list[str]:
    """Return the words of a question for a difference or distance, with what is compared in the order of the alphabet.

    Numbers and letters keep theirs: they may be subtracted.
    """
    ends = [n for n, word in enumerate(words) if word.rpartition(" ")[2] in _IS_SYMMETRIC]
    position = ends[0] if ends else len(words) - 1
    head, compared = [*words[: position + 1]], words[position + 1 :]
    if not compared:
        head, compared = [words[position]], words[:position]
    parts: list[list[str]] = [[]]
    for word in compared:
        if word == "and":
            parts.append([])
        else:
            parts[-1].append(word)
    parts = [part for part in parts if part]
    if not any(part[0][0].isdigit() or len(part[0]) == 1 for part in parts):
        parts.sort()
    return [*head, *(word for part in parts for word in ("and", *part))]


def read_signs(text: str) -> list[str]:
    """Return the punctuation in its order that a question may be about: all that does not end words or quote them.

    "What does ! mean in Bash" is not "What does : mean in Bash", and "5!" is not "5". Where grammar or punctuation is
    asked about, all of it is returned.
    """
    text = text.replace("\u2019", "'").strip()
    is_about = _ABOUT_SIGNS.search(text) is not None
    return [m[0] for m in _SIGNS.finditer(text) if is_about or not _is_usual(m)]


def _is_usual(signs: re.Match[str]) -> bool:
    text, start, end = signs.string, signs.start(), signs.end()
    before, after = text[max(0, start - 1) : start] or " ", text[end : end + 1] or " "
    if after.isspace() or after in ")]}*_":
        if before.isspace():  # some set a space before the last question mark
            return signs[0] == "?" and end == len(text)
        is_factorial = before.isdigit() and "!" in signs[0]
        return not is_factorial and _ENDS_WORDS.fullmatch(signs[0]) is not None
    if before.isspace() or before in "([{*_":
        return _QUOTES.fullmatch(signs[0]) is not None
    return signs[0] == "'"  # inside a word


def _read_capitals(text: str) -> tuple[set[str], set[str]]:
    """Return the words whose capitals say something, and in lower case those that only begin a sentence."""
    capitals, openings = set(), set()
    end = 0
    for match in _WORD.finditer(text):
        gap, end = text[end : match.start()], match.end()
        before = gap.rstrip(" \t\"'([*_-")
        is_first = match.start() == len(gap) or "\n" in gap
        is_first = is_first or (before != gap and before.endswith((".", "?", "!", ":")))
        word = _ENDINGS.sub("", match[0])
        is_title = len(word) > 1 and word[1:] == word[1:].lower()
        if word == word.lower() or word.partition("'")[0] == "I" or word in SYNONYMS:
            continue
        if is_title and word.lower() in _FUNCTION_WORDS:
            continue
        if is_first and (is_title or word == "A") and CAPITONYMS.isdisjoint((word, match[0])):
            openings.add(word.lower())
        else:
            capitals.add(word)
    return capitals, openings


def _select_synonyms(tokens: Sequence[str]) -> Mapping[str, str]:
    """Return the synonyms that stand for each other in a question: none if it tells two apart, or asks about one."""
    stems = {_stem(token, {}) for token in tokens if token not in _FUNCTION_WORDS}
    groups = [SYNONYMS[stem] for stem in stems if stem in SYNONYMS]
    return {} if len(stems) == 1 or len(groups) > len(set(groups)) else SYNONYMS


def _stem(word: str, synonyms: Mapping[str, str]) -> str:
    """Return a word without the ending of a plural or a genitive, as the first of its synonyms."""
    stem = _ENDINGS.sub("", word)
    return synonyms.get(stem) or synonyms.get(word) or stem


def read_material(text: str) -> list[str]:
    """Return the texts that a question brings with it, as they are written; a word in quotes may go without them."""
    if len(text) > MAX_REWORDED:
        return [text.strip()]
    texts = (next(filter(None, match.groups())).strip() for match in _MATERIAL.finditer(text))
    return [material for material in texts if not _is_strict(material)]


def _is_strict(material: str) -> bool:
    """Return whether no other text has the words of this one, as `read_meaning` reads them."""
    lowered = material.lower()
    tokens = _TOKEN.findall(lowered)
    are_same = all(token not in _LIGHT and _stem(token, SYNONYMS) == token for token in tokens)
    return are_same and join_wordings(lowered) == lowered and "\n" not in material
