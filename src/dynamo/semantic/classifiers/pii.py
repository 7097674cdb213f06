"""Personal data in a text: patterns, decided by checksums and parsers where a kind has one.

The names of the types are Presidio's. English is what the patterns for addresses and names are made for.
"""  # decider

import dataclasses
import ipaddress
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dynamo.semantic.classifiers import disguises

MAX_CHARACTERS = 4_000_000  # of one text; what is behind them is reported as unread


@dataclass(frozen=True, slots=True)
class PiiSpan:
    """A piece of personal data."""

    type: str
    start: int  # characters
    end: int
    confidence: float


Check = Callable[[re.Match[str]], float]  # the confidence that a match is what it looks like


def find_spans(text: str, names: Iterable[PiiSpan] = ()) -> tuple[list[PiiSpan], bool]:
    """Return the spans in order, none over another, and whether all of the text was read.

    `names` are spans found elsewhere, which count where nothing else is.
    """
    is_complete = len(text) <= MAX_CHARACTERS
    text = text[:MAX_CHARACTERS]
    spans: list[PiiSpan] = []
    covered = bytearray()  # a byte for each character; so many spans cost no more than a few
    plain, positions = _in_plain_characters(text)
    by_pattern: Iterator[PiiSpan] = itertools.chain.from_iterable(_finders(plain))
    if positions:
        by_pattern = (
            dataclasses.replace(s, start=positions[s.start], end=positions[s.end - 1] + 1)
            for s in by_pattern
        )
    for span in itertools.chain(by_pattern, names):
        covered = covered or bytearray(len(text))
        if covered.find(1, span.start, span.end) < 0:
            covered[span.start : span.end] = b"\x01" * (span.end - span.start)
            spans.append(span)
    return sorted(spans, key=lambda span: span.start), is_complete


def _in_plain_characters(text: str) -> tuple[str, list[int]]:
    """Return what the patterns read of a text, and the position of each of its characters if some are left out.

    Digits, signs, spaces and hyphens of all scripts are those of ASCII, and invisible characters are left out. Letters
    of scripts that set no spaces between words are signs, so that they end a number or an address.
    """
    if text.isascii():
        return text, []
    plain = _UNSPACED.sub("\u3002", text.translate(_ASCII_OF))
    if _INVISIBLE.search(plain) is None:
        return plain, []
    positions = [number for number, sign in enumerate(plain) if not _INVISIBLE.match(sign)]
    return "".join(plain[number] for number in positions), positions


_INVISIBLE = re.compile(f"[{disguises.INVISIBLE}]")
_UNSPACED = re.compile(f"[{disguises.UNSPACED_LETTERS}]")
_ASCII_OF: dict[int, int | str] = {
    code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)
}  # of full width
_ASCII_OF[0x2019] = "'"  # the apostrophe of telephones and word processors
_ASCII_OF |= {
    code: {"Nd": str(unicodedata.decimal(chr(code), 0)), "Zs": " ", "Pd": "-"}[kind]
    for code in range(0x80, 0x1FC00)  # the digits of all scripts are below
    if (kind := unicodedata.category(chr(code))) in ("Nd", "Zs", "Pd") and code not in _ASCII_OF
}


def _finders(text: str) -> Iterator[Iterator[PiiSpan]]:
    """Yield the searches that the characters of the text make worth while, the surest first."""
    has_number = _LONG_NUMBER.search(text) is not None
    lowered = text.lower()
    if "@" in text:
        yield _search("EMAIL_ADDRESS", _EMAIL, text, _check_mail)
        yield _search("EMAIL_ADDRESS", _PAYMENT_ADDRESS, text, lambda _: 0.9)
    if _SPELLED_AT.search(lowered):
        yield _search("EMAIL_ADDRESS", _SPELLED_EMAIL, text, lambda _: 0.9)
    yield _search_ibans(text)
    if has_number:
        yield _search("CREDIT_CARD", _CARD, text, _check_card)
        yield _search("CREDIT_CARD", _CARD_BEFORE_DIGITS, text, _check_card)
        yield _search("US_SSN", _SSN, text, _check_ssn)
        yield _search("US_SSN", _NEAR_SSN, text, lambda _: 0.8, group=1)
    if "licen" in lowered:
        yield _search("US_DRIVER_LICENSE", _LICENCE, text, lambda _: 0.8, group=1)
    if has_number:
        yield _search("IP_ADDRESS", _IPV4, text, _check_ip)
        yield _search("PHONE_NUMBER", _PHONE, text, _check_phone)
        yield _search("PHONE_NUMBER", _AREA_AND_NUMBER, text, _check_area)
    if any(word in lowered for word in ("birth", "born", "dob", "d.o.b")):
        yield _search("DATE_TIME", _BIRTH, text, lambda _: 0.8, group=1)
    if _HOUSE_NUMBER.search(text):
        yield _search("STREET_ADDRESS", _STREET, text, lambda _: 0.75)
    if _COLONS.search(text):
        yield _search("IP_ADDRESS", _IPV6, text, _check_ip)
    yield _search("PERSON", _NAME, text, _check_name, group=1)


def _search(
    kind: str, pattern: re.Pattern[str], text: str, check: Check, *, group: int = 0
) -> Iterator[PiiSpan]:
    for match in pattern.finditer(text):
        confidence = check(match)
        if confidence > 0:
            yield PiiSpan(kind, match.start(group), match.end(group), confidence)


# What a text must have, or the patterns below cannot match: each is a fifth of the cost of one of them.
_LONG_NUMBER = re.compile(r"[\d(+][\d ._/()+-]{6}")
_HOUSE_NUMBER = re.compile(r"\d[A-Za-z]? [A-Z]")
_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:")
_EMAIL = re.compile(
    r"(?<![\w.+-])[\w.+%'-]{1,64}@(?:[^\W_](?:[^\W_]|-){0,62}\.){1,8}"
    r"(?:xn--[A-Za-z0-9-]{2,59}|[^\W\d_]{2,24})(?![\w-])"
)
_SPELLED_AT = re.compile(r"[(\[{<] ?at ?[)\]}>]")
_SPELLED_EMAIL = (
    re.compile(  # as on pages that are not to be searched for addresses: bob [at] example [dot] com
        r"(?<![\w.+-])[\w.+-]{1,64} ?[(\[{<] ?at ?[)\]}>] ?"
        r"(?:[^\W_](?:[^\W_]|-){0,62}(?:\.| ?[(\[{<] ?dot ?[)\]}>] ?)){1,8}[A-Za-z]{2,24}(?![\w-])",
        re.IGNORECASE,
    )
)
_PAYMENT_ADDRESS = re.compile(  # of a person at a bank of India (UPI): the address has no top-level domain
    r"(?<![\w.+-])[\w.-]{2,64}@(?:ok(?:sbi|axis|icici|hdfcbank)|ybl|ibl|axl|apl|upi|paytm|sbi|icici|hdfcbank|"
    r"axisbank)(?![\w.-]*\w)"
)
# Patterns that begin with a class of characters are searched for three times as fast, so what is before comes behind.
_IBAN_START = re.compile(r"\d\d(?<=[A-Za-z]{2}..)(?<![A-Za-z0-9][A-Za-z]{2}..)(?=[ -]?[A-Za-z0-9])")
_CARD = re.compile(r"(?<![\w.-])(?:[2-6]\d{3}|1800)(?:[ -]?\d){8,15}(?![\w-])")
_CARD_BEFORE_DIGITS = re.compile(  # its date or code may stand behind it, which the pattern above takes for its digits
    r"(?<![\w.-])(?:[2-6]\d{3}(?:( ?[._/-] ?|  ?)\d{4}(?:\1\d{4}){2}|[ .-]\d{6}[ .-]\d{4,5})|"
    r"[2-6]\d{12,18})(?![\w-]|\.\d)"
)
# First digits with the lengths that their issuers give out.
_CARD_NUMBER = re.compile(
    r"4(?:\d{12}|\d{15}|\d{17,18})|3[47]\d{13}|(?:2131|1800)\d{11}|3(?:0[0-59]|[689]\d)(?:\d{11}|\d{13,16})|"
    r"35\d{14,17}|(?:5[1-5]|2[2-7])\d{14,17}|(?:50|5[6-9]|6\d)\d{10,17}"
)
_SSN = re.compile(
    r"(?<![\w-])(?<!Suite )(?<!Apt )(?<!Apt\. )(?<!Unit )(\d{3})([- ])(\d{2})\2(\d{4})(?![\w-])"
)
_NEAR_SSN = re.compile(
    r"\b(?:ssn|social[ -]security(?: (?:number|no\.?|#))?)\b[^\w\n]{0,4}(?:is|:|=|#)?[^\w\n]{0,4}"
    r"(\d{3}[- ]?\d{2}[- ]?\d{4})(?!\d)",
    re.IGNORECASE,
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_VERSION_WORD = re.compile(  # just before one, or before another one
    r"\b(?:v|versions?|release|build|firmware|kernel|upgrad\w+(?: from| to)?|(?:sub)?section|clause|chapter|paragraph)"
    r"(?: (?:number|no|is|was|to|from))?[^\w\n]{0,3}(?:v?\d+(?:\.\d+){1,3} (?:and|or|to) )?$",
    re.IGNORECASE,
)
_IPV6 = re.compile(r"(?<![\w:.])(?=[\w.]*:[\w.]*:)[0-9A-Fa-f:]{2,39}(?![\w:])")
# Possessive, because digits without separators are parted in thousands of ways where none of them matches.
_PHONE = re.compile(
    r"(?<![\w.$€£#/-])(?<![^A-Za-z][:=])(?:\+|00)?\(?\d{1,4}+\)?(?:[ .-]?\(?\d{1,5}+\)?){1,5}(?:,? ?(?:x|"
    r"ext\.?) ?\d{1,6})?(?![\w%]|[.,/:-]\d)",
    re.IGNORECASE,
)
# Without another country's code: 07700 900123, 030/901820.
_AREA_AND_NUMBER = re.compile(r"(?<![\w.$€£#/:=+-])0[1-9]\d{1,4}[ /-]\d{5,8}(?![\w%]|[.,/:-]\d)")
_PHONE_WORD = re.compile(
    r"\b(?:(?:phone|call|tel|telephone|mobile|cell|fax|whatsapp|dial|sms)(?:_?(?:number|no))?|"
    r"(?:my|your|his|her|our|their|'s|registered|contact)\b[^\n]{0,20}\bnumber|number(?: is|:|=)|"
    r"(?:text|contact|answering|reach|messages?|registered)\b[^\n]{0,20}\b(?:me|him|her|us|them|at|on|to|my|our|your)|"
    r"registered)\b[^\n]{0,40}$",
    re.IGNORECASE,
)
_OTHER_NUMBER = re.compile(  # names of numbers that are no telephone's, just before one
    r"\b(?:aadh?ar|aadhaar|routing|tax|account|id|identification|order|invoice|policy|case|ticket|reference|serial|"
    r"passport|licen[cs]e|part|tracking|customer|member(?:ship)?|flight|model|room)\b"
    r"((?: (?:id|number|no\.?|#))*)[^\w\n]{0,4}(?:is )?[^\w\n]{0,2}$",
    re.IGNORECASE,
)
_LICENCE = re.compile(
    r"\bdriver(?:'s|s)? licen[cs]e\b(?: (?:number|no\.?|#))?[^\w\n]{0,3}(?:is|:|=)?[^\w\n]{0,3}"
    r"([A-Za-z]{0,3}\d[\w-]{4,15})",
    re.IGNORECASE,
)
_BIRTH = re.compile(
    r"\b(?:born(?: on)?|date of birth|dob|d\.o\.b\.?|birthday|birth date)(?!\w)[^\w\n]{0,3}(?:is|:|=|on)?[^\w\n]{0,3}"
    r"(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}(?:st|nd|rd|th)? [A-Z][a-z]{2,8},? \d{4}|"
    r"[A-Z][a-z]{2,8} \d{1,2}(?:st|nd|rd|th)?,? \d{4})",
    re.IGNORECASE,
)
_STREET = re.compile(
    r"(?<![\w.])\d{1,6}[A-Za-z]? (?:[A-Z][\w'.-]{1,20} ){1,4}(?:Street|St|Avenue|Ave|Road|Rd|Boulevard|Blvd|"
    r"Lane|Ln|Drive|"
    r"Dr|Court|Ct|Place|Pl|Terrace|Way|Parkway|Pkwy|Circle|Square|Highway|Hwy)\b\.?(?:,? (?:Apt|Suite|Unit|"
    r"#)\.? ?\w{1,6})?"
)
_NAME_WORD = r"[^\W\d_a-z][^\W\d_A-Z]{1,20}(?:[-'][^\W\d_a-z][^\W\d_A-Z]{1,20})?"
_NAME = re.compile(
    rf"[MmNnIiCcDdRrSs](?<!\w.)(?:(?<=[Mm])(?:y (?:full )?name is|y name's|r\.?|rs\.?|s\.?|aiden name is)|"
    rf"(?<=[Nn])ame(?:d| on the \w{{1,12}})?:|(?<=[Ii]) am called|(?<=[Cc])all me|(?<=[Dd])(?:r\.|ear)|"
    rf"(?<=[Rr])egards,?\s|(?<=[Ss])incerely,?\s)\s{{1,3}}({_NAME_WORD}(?: (?:[A-Z]\. )?{_NAME_WORD}){{0,2}})"
)
_GREETED = """
Sir Sirs Madam All Team Customer Customers Friend Friends Hiring Editor Santa Diary God Lord President Reader Readers
Colleague Colleagues Member Members User Users Parents Students Guest Guests Applicant Support The Who
"""
_NOT_NAMES = frozenset(_GREETED.split())
_IBAN_LENGTH_TABLE = """
AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18
DO28 EE20 EG29 ES24 FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23
IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27
MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24 RS22 RU33 SA24 SC31 SD18 SE24 SI19
SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30
"""
_IBAN_LENGTHS = {code[:2]: int(code[2:]) for code in _IBAN_LENGTH_TABLE.split()}


def _search_ibans(text: str) -> Iterator[PiiSpan]:
    """Yield the account numbers that have their country's length and leave a remainder of 1 by 97."""
    for match in _IBAN_START.finditer(text):
        start = match.start() - 2
        length = _IBAN_LENGTHS.get(text[start : start + 2].upper())
        if length is None:
            continue
        digits = rf"(?:[ -]?[A-Za-z0-9]){{{length - 4}}}(?![A-Za-z0-9])"
        tail = re.compile(digits).match(text, match.end())
        if tail is None:
            continue
        code = re.sub(r"[ -]", "", text[start : tail.end()]).upper()
        number = "".join(str(int(sign, 36)) for sign in code[4:] + code[:4])
        if int(number) % 97 == 1:
            yield PiiSpan("IBAN_CODE", start, tail.end(), 1.0)


def _check_mail(match: re.Match[str]) -> float:
    """Return the confidence of an address; `git@` is the account of all at a server of code."""
    return 0.0 if match[0].startswith("git@") else 1.0


def _check_card(match: re.Match[str]) -> float:
    """Return 1 for digits that a card may have if their sum by Luhn's rule ends in 0, as that of an IMEI does, too."""
    number = re.sub(r"\D", "", match[0])
    if not _CARD_NUMBER.fullmatch(number) or len(set(number)) == 1:
        return 0.0
    if len(number) < 13 and re.search(r"\d{4}[ -]\Z", match.string[: match.start()][-5:]):
        return 0.0  # the end of a longer number
    digits = [*map(int, number)]
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return 1.0 if (doubled + sum(digits[-1::-2])) % 10 == 0 else 0.0


def _check_ssn(match: re.Match[str]) -> float:
    """Return the confidence for three groups of digits: parts that are never given out exclude it."""
    area, _, group, serial = match.groups()
    if area in ("000", "666") or area[0] == "9" or group == "00" or serial == "0000":
        return 0.0
    return 0.85


def _check_ip(match: re.Match[str]) -> float:
    """Return the confidence of an address that parses; unspecified and loopback ones tell nothing of a person.

    One without a digit is a name of a program's: `A::B`, `::add`. Versions and sections have four numbers, too.
    """
    if match[0].startswith("255.") or _VERSION_WORD.search(
        match.string[max(0, match.start() - 60) : match.start()]
    ):
        return 0.0
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return 0.0
    if address.is_unspecified or address.is_loopback or not re.search(r"\d", match[0]):
        return 0.0
    return 0.95


def _check_phone(match: re.Match[str]) -> float:
    """Return the confidence of a run of digits by its groups: others lack a prefix, separators, or a word before."""
    written = match[0]
    number = re.split(r",? ?(?:x|ext)", written, flags=re.IGNORECASE)[0]
    groups = re.findall(r"\d+", number)
    before = match.string[max(0, match.start() - 60) : match.start()]
    num_digits = sum(map(len, groups))
    if not 7 <= num_digits <= 15:
        return 0.0
    if re.match(r"\(?\+", number) and num_digits >= 8:
        return 0.95
    if re.match(r"\(?00[1-9]", number) and num_digits >= 10:
        return 0.95
    sizes = [len(group) for group in groups]
    named_kind = _OTHER_NUMBER.search(before)
    if re.search(r"\w\($|\d $", before) or (named_kind and named_kind[1]):
        return 0.0  # an argument of a function, the end of a list, a number with a name
    has_area = re.match(r"(?:\d{1,3} ?)?\((?:0|\d\d)", number) is not None
    if has_area and (num_digits >= 10 or (num_digits == 9 and groups[0][0] == "0")):
        return 0.9
    if sizes[-3:] == [3, 3, 4] or sizes == [3, 4, 4]:
        return 0.9
    if _PHONE_WORD.search(before) and not named_kind:
        return 0.85
    is_grouped = 3 <= len(groups) <= 5 and all(2 <= size <= 4 for size in sizes)
    return 0.75 if is_grouped and re.match(r"0[1-9]", groups[0]) and num_digits >= 9 else 0.0


def _check_area(match: re.Match[str]) -> float:
    before = match.string[max(0, match.start() - 60) : match.start()]
    num_digits = len(match[0]) - 1
    return 0.75 if 9 <= num_digits <= 12 and not _OTHER_NUMBER.search(before) else 0.0


def _check_name(match: re.Match[str]) -> float:
    return 0.0 if match[1].split()[0] in _NOT_NAMES else 0.8
