r"""Read an answer as a person reads it: the number, the letter of a choice, or the program.

Answers are texts of any length that a model wrote, so every reader takes time linear in the length: where a pattern
repeats, the repetition is bounded or cannot be divided in two ways. This is why there is no parser of mathematics and
none of Markdown here. math-verify 0.9 needs seconds for 20,000 characters of numbers, reads ``12{,}000`` as 12 and
``2,3`` as 2.3, and knows no narrow space; a parser of CommonMark ends a block at a fence within a docstring, or at a
line that stands left of its list.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from functools import cache

from fly.models.thinking import TAGS

__all__ = ["extract_answer", "extract_code", "read_choice", "read_number"]


# --- markup ----------------------------------------------------------------------------------------------

_THIN = "\u2009"  # stands for every space that may separate thousands
_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_CHARACTERS: dict[int, int | str | None] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full-width forms of ASCII
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2008\u200a\u202f"), _THIN),
    **dict.fromkeys(map(ord, "\u200b\u2060\ufeff"), None),  # characters without width
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u2044\u2215"), "/"),
    **dict.fromkeys(map(ord, "‘’"), "'"),
    **dict.fromkeys(map(ord, "“”"), '"'),
    **{ord(each): unicodedata.normalize("NFKC", each).replace("\u2044", "/") for each in _VULGAR},
}
_WRAPPERS = (
    "text textbf textit textrm textsf texttt textnormal emph underline mathbf mathrm mathit mathsf mathtt boldsymbol "
    "bm mbox hbox operatorname bf rm it displaystyle textstyle left right big Big bigl bigr Bigl Bigr !"
)
_COMMANDS = {
    **dict.fromkeys(_WRAPPERS.split(), ""),
    **dict.fromkeys([",", ";", ":", " ", "space", "thinspace", "medspace", "thickspace", "nobreakspace"], _THIN),
    **dict.fromkeys(["(", ")", "[", "]", "{", "}", "\\", "quad", "qquad", "boxed", "fbox", "framebox"], " "),
    **dict.fromkeys(["frac", "dfrac", "tfrac", "cfrac"], r"\frac"),
    **dict.fromkeys(["textdollar", "dollar"], "$"),
    "cdot": "·",
    "div": "÷",
    "times": "×",
}
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_TAGS_INLINE = re.compile(r"(?i)</?(?:b|i|u|em|strong|mark|span)(?:\s[\w-]{1,20}=[^<>\n]{0,80})?>")
_GROUP = r"\s*+(?:\{((?:[^{}]|\{[^{}]*\})*+)\}|(\d))"
_FRAC = re.compile(rf"(?P<after>\d?)\\frac{_GROUP}{_GROUP}")
_BOX = re.compile(r"\\?(?:boxed|fbox|framebox)\s*\{")
# A word for the sign of a number; between two numbers "minus" stands for a difference.
_NEGATIVE = re.compile(r"(?i)(?:\bnegative|(?:\A|(?<=[=:(])|(?<=\bis)|(?<=\bbe)|(?<=equals))\s*+\bminus)\s++(?=\.?\d)")
_BRACES = re.compile(r"\\.|\{+|\}+|\n\s*\n", re.DOTALL)


def _answer(text: str) -> str:
    """Return a text without the thinking that it begins with, where nothing has told the two apart. If the prompt has
    opened the thinking, its closing tag begins a line; a program may have such a tag within a line."""
    for tags in TAGS:
        close = tags.close if text.lstrip().startswith(tags.open) else f"\n{tags.close}"
        thinking, _, answer = text.partition(close)
        text = answer or thinking
    return text


def _plain(text: str) -> str:
    r"""Return the text without the markup of LaTeX and Markdown. Spaces that may separate thousands become U+2009, all
    signs of a minus ``-``, and ``\frac{3}{4}`` becomes ``3/4``."""
    text = _TAGS_INLINE.sub("", text)
    text = re.sub(rf"(?<=\d)(?=[{_VULGAR}])", " ", text)
    text = re.sub(r"(?<=\d)~(?=0\d\d|\\)", _THIN, text)  # LaTeX's space; elsewhere "5~10" is a range
    text = re.sub(r"[⁺⁻]?[⁰¹²³⁴-⁹]+", _raised, text).translate(_CHARACTERS)
    text = _COMMAND.sub(_written_out, text)
    text = re.sub(r"_\{[^{}]*\}", "", text)  # an index is no number of its own
    text = re.sub(r"(?<=\d)\{,\}(?=\d{1,2}(?![\d{])|\d{4})", ".", text)  # a comma before decimals
    text = re.sub(r"\{([^\w{}]*)\}", r"\1", text)
    text = _FRAC.sub(_slashed, text)
    text = re.sub(r"(?<=\d)\*\*(?=-?\d)", "^", text.replace("}{", " "))
    text = re.sub(r"(?<=[A-Za-z])\}(?=\w)", " ", text)  # the color of what follows
    text = re.sub(r"[{}]|`+|(?<!\d)\*\*|\*\*(?!\d)|__+", "", text)
    text = re.sub(r"-[$€£¥₹]+ *", "-", text)
    text = re.sub(r"[$€£¥₹]", " ", text)
    text = _NEGATIVE.sub(" -", text)
    return re.sub(r"=\s*-\s+(?=\d)", "= -", text)


def _written_out(command: re.Match[str]) -> str:
    name = command[1]
    return _COMMANDS.get(name, f" {name} " if name.isalpha() else name)


def _raised(digits: re.Match[str]) -> str:
    return "^" + unicodedata.normalize("NFKC", digits[0].lstrip("⁺")).replace("\u2212", "-")


def _slashed(frac: re.Match[str]) -> str:
    over, below = (frac[2] or frac[3] or "").strip(), (frac[4] or frac[5] or "").strip()
    return f"{frac['after']} {over}/{below}" if frac["after"] else f"{over}/{below}"


def _boxes(text: str) -> list[str]:
    r"""Return what each outermost ``\boxed{}`` of a raw text holds, without markup. A box that is not closed ends with
    its line."""
    contents = []
    position = 0
    while box := _BOX.search(text, position):
        begin = position = box.end()
        end, depth = -1, 1
        for braces in _BRACES.finditer(text, begin):
            position = braces.end()
            if braces[0].isspace():  # no box goes past an empty line
                break
            if braces[0][0] == "{":
                depth += len(braces[0])
            elif braces[0][0] == "}":
                depth -= len(braces[0])
                if depth <= 0:
                    end = braces.end() + depth - 1
                    break
        if end < 0:
            line_end = text.find("\n", begin)
            end = len(text) if line_end < 0 else line_end
        contents.append(_plain(text[begin:end].replace("~", _THIN)))
    return contents


def _after(mark: re.Pattern[str], plain: str) -> list[str]:
    """Return for each mark the text that follows it: the rest of its line or, if that is empty, the next line that is
    not, without a bullet. If this text ends with a colon, it includes one more line."""
    marks = list(mark.finditer(plain))
    ends = [*(following.start() for following in marks[1:]), len(plain)]
    pieces = []
    for marked, end in zip(marks, ends):
        rest = plain[marked.end() : end]
        piece = rest.lstrip(" \t\r\n*:=")
        before = marked[0][-1:] + rest[: len(rest) - len(piece)]
        pieces.append(re.sub(r"^-[ \t]+", "", piece) if "\n" in before else piece)
    return [match[0] for piece in pieces if (match := re.match(r"[^\n]*(?:(?<=:)\s+[^\n]+)?", piece))]


# What stands between the word "answer" and the answer.
_IS = (
    r"(?:(?:\s+(?:to|for|of|in|among|from)\b[^\n.:;=?!\d]{0,80}?(?<!\s)|\s?\([^()\n]{2,80}\))?(?:,[^\n.:;=?!,\d]{1,20},)?"
    r"\s+(?:is|are|was|(?:would|should|will|must|has to|can only) be|to be|equals|comes to)(?![A-Za-z])"
    r"|(?:\s?\([^()\n]{2,80}\)|\s+in\s+\w+)?[^\w\n]{0,9}[:=]|'s(?=\s)|[^\w\n]{0,9}[>→⇒—\n]|\s+-(?=\s))"
)


# --- numbers ---------------------------------------------------------------------------------------------

_WHOLE = (
    rf"(?:\d{{1,3}}(?:(?:,\d{{3}})+|(?:{_THIN}\d{{3}})+|(?:'\d{{3}})+|(?:_\d{{3}})+)(?!\d)"
    r"|\d{1,2}(?:,\d\d){1,6},\d{3}(?!\d)|\d+)"
)
# Points that separate thousands: several of them, or one before a comma and decimals.
_CONTINENTAL = r"\d{1,3}(?:(?:\.\d{3})+,\d{1,2}(?![\d,])|(?:\.\d{3}){2,}(?![.,]?\d))"
_NUMBER = re.compile(
    r"(?=[-.\d])(?<![A-Za-z\d^])(?<![A-Za-z\d]_)(?<!\d\.)(?<!\^-)(?P<dated>(?<=/)|(?<=/ ))?"
    r"(?P<sign>(?<![^\W_])(?<![.)\]%])-)?"
    rf"(?P<digits>{_CONTINENTAL}|{_WHOLE}(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE](?P<exponent>[-+]?\d{{1,4}})(?![A-Za-z\d]))?"
    r"(?:\s?\^\s?\(?(?P<power>-?\d{1,4})(?!\d))?"
    r"(?:\s?[×x*·]\s?10\s?\^\s?\(?(?P<tens>-?\d{1,4})(?!\d))?"
    rf"(?(dated)|(?:\s?/\s?(?P<below>-?{_WHOLE}(?:\.\d+)?)(?!\d|\.\d|\s?/\s?\d))?)"
)
# From one number of an equation to the next: "3 bags * 400 nuts = 1200".
_STEP = re.compile(
    r"[\s)\]%]*+(?:(?!x[\s\d]|of\b)[A-Za-z]++\s*+)?(?P<sign>[-+*/×÷·^]|x(?=[\s\d])|=|(?<=%\s)of\b)[\s(]*+"
)
_HASHES = re.compile(r"#{4,}[^\S\n]*\n?")
# "#### 42" or "#### Total: 42", and neither "#### 1. Add" nor "#### Step 1", which are headings.
_STATED = re.compile(rf"(?:[^\d\n:=-]{{0,40}}[:=])?[\s*(\[~≈]*(?>{_NUMBER.pattern})(?![.)]\s+[A-Za-z])")
_ANSWER = re.compile(rf"(?i)(?<!to )(?<!/)\b(?:(?:answers?|ans\.?){_IS}|(?:final answer|ans\.)(?=\s+\W{{0,3}}\d))")
_NOT_NUMBER = re.compile(rf"(?i)\bnot\s+(?>{_NUMBER.pattern})")
_CONTEXT = Context(prec=28, Emin=MIN_EMIN, Emax=MAX_EMAX, traps=[])


def read_number(text: str) -> Decimal | None:
    r"""Return the number that an answer gives, or None if it has none.

    It is the number after the last ``####``, else the one in the last ``\boxed{}``, else the one after the last "answer
    is", "answer:" or ``<answer>``, else the last number. Of several numbers after a mark the first one counts, but
    "3 * 4 = 12" is 12. Numbers are written in English notation: a point before decimals, and thousands separated by
    commas (also 12,34,567), apostrophes, underscores or narrow spaces, right after a mark also by plain spaces.
    ``1.234,56`` and ``1.234.567``, which are no English numbers, are read as they are meant. A fraction is its value;
    "50%" is 50, and units do not matter.
    """
    text = _answer(text)
    plain = _plain(text)
    hash_lines = [piece.partition("\n")[0] for piece in _HASHES.split(plain)[1:]]
    statements = [piece for piece in hash_lines if _STATED.match(piece)]
    for pieces in (statements, _boxes(text), _after(_ANSWER, plain)):
        for piece in reversed(pieces):
            if (number := _first_number(_joined(piece))) is not None:
                return number
    last = deque(_NUMBER.finditer(plain), maxlen=2)
    if not last:
        return None
    mixed = _mixed(last[0], last[-1])
    return _value(last[-1]) if mixed is None else mixed


def _joined(piece: str) -> str:
    """Write the first number of a piece together. A minus that begins the piece is a sign, not a dash, and loses the
    blanks after it; plain spaces between thousands become U+2009."""
    piece = re.sub(r"^\s*-\s+", "-", piece)
    spaced = r"^\s*-?\d{1,3}(?: \d{3})++(?:\.\d++)?(?!\d|[.,]\d|\s?/\s?\d)"
    return re.sub(spaced, lambda number: number[0].strip().replace(" ", _THIN), piece)


def _first_number(piece: str) -> Decimal | None:
    """Return the first number of a text, or the result of the equation that begins with it."""
    piece = _NOT_NUMBER.sub(" ", piece)
    number = _NUMBER.search(piece)
    if number is None:
        return None
    following = _NUMBER.search(piece, number.end())
    if following and (mixed := _mixed(number, following)) is not None:
        return mixed
    sides = [number]  # sides of the equation that are a single number
    end = number.end()
    while (step := _STEP.match(piece, end)) and (operand := _NUMBER.match(piece, step.end())):
        if step["sign"] == "=":
            sides.append(operand)
        elif sides and sides[-1].end() == end:
            sides.pop()
        end = operand.end()
    return _value(sides[-1] if sides else number)


def _mixed(whole: re.Match[str], part: re.Match[str]) -> Decimal | None:
    """Return the value of ``2 1/2``, or None if these are two numbers."""
    between = part.string[whole.end() : part.start()]
    if not whole["digits"].isdecimal() or len(whole[0].lstrip("-")) > len(whole["digits"]):
        return None
    if part["sign"] or part["below"] is None or not between.isspace() or "\n" in between:
        return None
    share = _value(part)
    if share is None or not 0 < share < 1:
        return None
    value = _CONTEXT.add(Decimal(whole["digits"]), share)
    return -value if whole["sign"] else value


def _value(number: re.Match[str]) -> Decimal | None:
    value = _decimal(number["digits"])
    if number["exponent"]:
        value = value.scaleb(int(number["exponent"]), _CONTEXT)
    if number["power"]:
        value = _CONTEXT.power(value, int(number["power"]))
    if number["tens"]:
        value = value.scaleb(int(number["tens"]), _CONTEXT)
    if number["below"] and (below := _decimal(number["below"])):
        value = _CONTEXT.divide(value, below)
    if not value.is_finite():
        return None
    return -value if number["sign"] else value


def _decimal(digits: str) -> Decimal:
    if re.fullmatch(_CONTINENTAL, digits):
        digits = digits.replace(".", "").replace(",", ".")
    return Decimal(re.sub(rf"[,'_{_THIN}]", "", digits))


# --- choices ---------------------------------------------------------------------------------------------

_WORDS = r"(?:(?:options?|choices?|letters?|answers?|the|be|it|is)\s+){0,3}"
_OPEN, _CLOSE = r"[(\[\"'*]{0,3}", r"[)\]\"'*]{0,3}"
_ONE = rf"{_OPEN}\b\w\b{_CLOSE}"
_CAPITAL = rf"{_OPEN}\b(?-i:[A-HJ-Z])\b{_CLOSE}"  # a letter that is surely one of the choices
_WRONG = (
    r"(?:be\s++)?(?:(?:\w{1,20}ly|also|all|both|each)\s++){0,2}"
    r"(?:not(?!\s+(?:wrong|incorrect|false))|wrong|incorrect|false|ruled\s+out|eliminated|excluded|rejected)\b"
)
_MORE = rf"(?:\s*,\s*{_ONE}){{0,9}}\s*+,?\s*+"  # further letters of a list, before its last one
# "not A", "neither A nor B", "rule out A, B and D", "A is wrong", "A and B are wrong", "A or B", "between A and B"
_EXCLUDED = re.compile(
    rf"(?i)(?:\b(?:not|cannot|neither|nor|than|instead of)|n't)\s+{_WORDS}{_ONE}"
    rf"(?:{_MORE}(?:or|nor)\s+{_ONE})?(?!\w|['-]\w)"
    rf"|\b(?:eliminat|exclud|reject|discard|rul(?=e out|ed out|ing out))(?:e|ed|ing)?(?:\s+out)?\s+{_WORDS}{_ONE}"
    rf"(?:{_MORE}(?:and|or)\s+{_ONE})?(?!\w|['-]\w)"
    rf"|(?:{_ONE}\s*,\s*){{0,9}}{_ONE}\s*+,?\s*+(?:and|or)\s+{_ONE}(?:\s+(?:are|were|can|must)\s+{_WRONG}|\s*\?)"
    rf"|(?:{_CAPITAL}\s*,\s*){{0,9}}{_CAPITAL}\s*+,?\s*+or\s+{_CAPITAL}(?!\w|['-]\w)"
    rf"|\bbetween\s+{_CAPITAL}\s+and\s+{_CAPITAL}"
    rf"|{_ONE}(?:\s+\([^()\n]{{0,80}}\))?\s+(?:(?:is|was|can|must)\s+{_WRONG}|isn't|cannot)"
)
_CHOOSES = re.compile(
    r"(?i)(?<!to )(?<!/)\b"
    r"(?:(?:answers?|ans|(?:correct|right|best|final|my) (?:choice|option|letter|one|pick|selection))"
    rf"(?:\s+(?:choice|option|letter))?(?:{_IS}|\.?(?=\s+[(\[]?\w\b(?!\s+\w)))|(?:correct|choice|option|selection)\s*:)"
    rf"|(?<!\#)\#{{4,}}+(?=\s*+{_ONE}\.?[ \t]*+(?:\n|\Z))"
)
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)")


@cache
def _letter_patterns(choices: str) -> tuple[re.Pattern[str], ...]:
    """Return patterns of a letter in a place that is meant for one, of a letter anywhere else, of a conclusion that
    names a letter, of a verdict on one ("C: yes"), and of a list that repeats the choices. The first four have the
    letter as a group."""
    exact = rf"[{re.escape(choices)}]"
    either = rf"[{re.escape(choices + choices.swapcase())}]"
    # Neither the article "a" nor the pronoun "I" (no noun follows an article after these words), nor a part of a word.
    before = r"(?<![A-Za-z\dÀ-ɏ&])(?<![A-Za-z\d]_)(?<!\w[.'-])"
    after = (
        r"(?![A-Za-z\dÀ-ɏ+#]|[_'-]\w|\.(?:[A-Za-z](?![A-Za-z])|\d))(?!(?<=[AaIi])\s+(?!(?:is|was|and|or|but|because|since|as|for|by|due|which|would|must|"
        r"should|has)\b)[a-z])(?!(?<=a)\s+[\dA-Z])"
    )
    letter_text = rf"{before}(?P<letter>{either}){after}"
    standing = (
        rf"{before}(?:(?<=[(\[])(?={either}[)\]])|(?<=\b[Oo]ption )|(?<=\b[Cc]hoice )"
        rf"|\A(?={either}(?:[).:]|\s*\Z))|(?={exact}))(?P<letter>{either}){after}"
    )
    verbs = r"choose|chose|pick|select|go with|going with|opt for|say|guess|it's|it is|must be|should be"
    right = r"(?:the\s+)?(?:\w+ly\s+)?(?:only\s+)?(?:correct|right|better|best|true|answer|choice|option)\b"
    conclusion = (
        rf"\b(?i:{verbs})\s+(?i:{_WORDS}){_OPEN}(?={letter_text})"
        rf"|(?={letter_text}{_CLOSE}(?:\s+\([^()\n]{{0,80}}\))?\s+(?i:is|must be|would be|seems)\s+(?i:{right}))"
        rf"|\b(?i:so|thus|hence|therefore)\b,?\s+(?i:{_WORDS}){_OPEN}(?={letter_text}{_CLOSE}[ \t]*(?:[.!\n]|\Z))"
    ).replace("(?P<letter>", "(")
    verdict = (
        rf"{letter_text}{_CLOSE}(?:\s++|\s*+[-:.]\s++)(?i:remains|correct|right|true|yes|✓|✔|✅)\s*(?:[.,;!\n]|\Z)"
    )
    choice_list = rf"(?:^[ \t]*[(\[]?{exact}[)\].:][^\n]*(?:\n\s*|\Z)){{2,}}"
    patterns = letter_text, standing, conclusion, verdict
    return *map(re.compile, patterns), re.compile(choice_list, re.MULTILINE)


def read_choice(text: str, choices: str) -> str:
    r"""Return the letter of ``choices`` that an answer chooses, or an empty text if it chooses none.

    It is the letter in the last ``\boxed{}``, else the one after the last "answer is", "answer:" or the like, else the
    one that is chosen last ("I choose C", "C is correct"), else the one with the last verdict ("C: yes"), else the
    first letter that stands alone and is neither an article nor a pronoun. In a list of choices no letter counts if one
    does elsewhere. Letters that are excluded ("not A", "B is wrong") or left open ("A or B") do not count. In lower
    case a letter counts in the first two places, in brackets, after "option" or "choice", and as the whole answer.
    """
    in_place, standing, conclusion, verdict, choice_list = _letter_patterns(choices)
    letter_of = {**{letter.swapcase(): letter for letter in choices}, **{letter: letter for letter in choices}}
    text = _answer(text)
    plain = _EXCLUDED.sub(" ", _plain(text)).strip()
    boxes = [_EXCLUDED.sub(" ", box) for box in _boxes(text)]
    for pieces in (boxes, _after(_CHOOSES, plain)):
        for piece in reversed(pieces):
            letter = in_place.search(piece)
            end = _SENTENCE_END.search(piece)
            if letter and (end is None or letter.start() < end.start()):
                return letter_of[letter["letter"]]
    if conclusions := deque(conclusion.finditer(plain), maxlen=1):
        return letter_of[next(filter(None, conclusions[0].groups()))]
    unlisted = choice_list.sub(lambda lines: _drop_list(lines[0], choices), plain)
    for piece in (unlisted, plain):
        verdicts = deque(verdict.finditer(piece), maxlen=1)
        if letter := verdicts[0] if verdicts else standing.search(piece):
            return letter_of[letter["letter"]]
    return ""


def _drop_list(lines: str, choices: str) -> str:
    """Return what follows a list of choices: the lines from the first whose letter is not after the one before."""
    last = -1
    for start in re.finditer(r"^[ \t]*[(\[]?(?P<letter>\S)[^\n]*", lines, re.MULTILINE):
        place = choices.find(start["letter"])
        if place <= last:
            return lines[start.start() :]
        last = place
    return ""


# --- programs --------------------------------------------------------------------------------------------

# The opening line of a block, wherever a list or a quotation has moved it.
_OPENING = re.compile(
    r"^(?P<lead>(?:[ \t]|>|(?:[-*+]|\d{1,9}[.)])(?=[ \t]))*)(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})(?P<info>[^\n]*)$",
    re.MULTILINE,
)
# A block in Python may also begin at the end of a line of prose.
_BEGIN = re.compile(
    rf"{_OPENING.pattern}|^[^`\n]*(?P<python>```)(?=(?i:[ \t]*py(?:thon)?[\d.]*[ \t]*$))[^\n]*$", re.MULTILINE
)
_PYTHON = re.compile(r"(?i)[\s{]*(?:[^\s{}]*[.=:])?i?py(?:thon)?[\d.]*(?![\w-])")
_MARKDOWN = re.compile(r"(?i)\s*(?:markdown|md)\b")
# What may hold back-ticks within a program, and what ends its block.
_LEXEME = re.compile(
    r"(?P<triple>\"{3}|'{3})"
    r"|\"(?:\\.|[^\"\\\n])*+\"|'(?:\\.|[^'\\\n])*+'"
    r"|\#[^\n]*"
    r"|\\."
    r"|(?P<ticks>`{3,})"
    r"|^[ \t>]*(?P<tildes>~{3,})[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
_TRIPLE_END = {quote: re.compile(rf"(?:\\.|[^\\])*?{quote}", re.DOTALL) for quote in ('"""', "'''")}
_STATEMENT = (
    r"(?:(?:(?:async +)?def|class) +\w+ *[(:\[]|import +\w|from +[\w.]+ +import\b|@\w|return\b"
    r"|(?:else|try|finally) *:|(?:if|elif|for|while|with)\b[^\n]*:[ \t]*$)"
)
_STATEMENTS = re.compile(rf"^[ \t]*{_STATEMENT}", re.MULTILINE)
_LINE_OF_CODE = re.compile(r"^[ \t]*[^\s#]", re.MULTILINE)
# An answer without fences: a program between tags, or after a line of prose.
_TAG = re.compile(r"(?im)^(?:[<\[](?:begin|pre|code|python|solution|answer)\b[^<>\[\]\n]{0,80}[>\]])+[ \t]*\n")
_END_TAG = re.compile(r"(?im)^[<\[](?:done\b|/(?:pre|code|python|solution|answer)\b)")
_PROSE = re.compile(r"\s*[A-Z](?:(?=\S+ )[^\n=(]*(?<=[.:!])[ \t]*|[\w']*(?: [a-z][\w'-]*+){2}[^\n=(]*)\n")
_FIRST_STATEMENT = re.compile(rf"^{_STATEMENT}", re.MULTILINE)
# The begin of a text that continues a program: its language, or a line of code after any comments.
_CONTINUES = re.compile(
    r"(?P<language>(?i:i?py(?:thon)?[\d.]*)[ \t]*\n)"
    r"|(?:[ \t]*(?:\#[^\n]*)?\n)*+(?:"
    r"(?:  |\t)[ \t]*(?![-*+>`~\s]|\d+[.)]\s)"
    rf"|{_STATEMENT}"
    r"|[rRbBuUfF]?(?:\"{3}|'{3})"
    r"|[A-Za-z_][\w.]*\([^\n]*\)[ \t]*$"
    r"|[A-Za-z_][\w.]*(?:\[[^\]\n]*\])?(?: *+, *+\w++)*+(?: *+: *+[\w.\[\], ]++)?+ *+[-+*/%|&^]?=[^=\n])",
    re.MULTILINE,
)


def extract_answer(completion: str) -> str | None:
    """Return the text of the last line that begins with ``####``, or None if there is none."""
    answers = re.findall(r"^####(.*)$", completion, flags=re.MULTILINE)
    return answers[-1].strip() if answers else None


def extract_code(completion: str) -> str:
    r"""Return the program of an answer: its first block in Python, as evaluators of HumanEval do (OpenCompass and
    simple-evals take the first block).

    A block without a language is in Python if it has statements of Python, or if no block is named as Python. Sessions
    (``>>>``) are no programs. The answer may begin within a block that its prompt has opened, and may end within one.
    Without any block, the program is what stands between tags (``<code>``), or after a line of prose, or else the whole
    text. Line ends become ``\n``.
    """
    text = _answer(completion).removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    unnamed_blocks = []
    other_blocks = []
    for info, code in _blocks(text):
        if not _LINE_OF_CODE.search(code) or code.lstrip().startswith(">>>"):
            continue
        has_statements = _STATEMENTS.search(code) is not None
        if _PYTHON.match(info) or (has_statements and not info.strip()):
            return code
        if not info.strip():
            unnamed_blocks.append(code)
        elif has_statements:
            other_blocks.append(code)
    blocks = unnamed_blocks + other_blocks
    return blocks[0] if blocks else _without_prose(text)


def _without_prose(text: str) -> str:
    """Return the program of an answer without blocks: what stands between tags, or what follows a line of prose."""
    if tag := _TAG.search(text):
        end = _END_TAG.search(text, tag.end())
        return text[tag.end() : end.start() if end else len(text)]
    if _PROSE.match(text) and (statement := _FIRST_STATEMENT.search(text)):
        return text[statement.start() :]
    return text


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the content of each block."""
    endless: set[str] = set()
    position = 0
    if continues := _CONTINUES.match(text):
        begin = continues.end("language") if continues["language"] else 0
        end, following = _end_of_block(text, begin, "```", endless)
        if following > end or end == len(text):  # not the opening line of another block
            yield "python", text[begin:end]
            position = following
    while opening := _BEGIN.search(text, position):
        begin = position = min(opening.end() + 1, len(text))
        info = "python" if opening["python"] else opening["info"]
        if not _MARKDOWN.match(info):  # the blocks within Markdown are blocks of the answer
            end, position = _end_of_block(text, begin, opening["fence"] or opening["python"], endless)
            yield info, _moved_back(text[begin:end], opening["lead"] or "")


def _end_of_block(text: str, begin: int, fence: str, endless: set[str]) -> tuple[int, int]:
    """Return where the content of a block ends, and where the text after the block begins.

    Outside of strings and comments no program has three back-ticks, so they end a block wherever they stand: at the end
    of a line of code, and as the opening line of the next block. ``endless`` collects the triple quotes that never
    close, which begin no string.
    """
    position = begin
    while lexeme := _LEXEME.search(text, position):
        position = lexeme.end()
        if quote := lexeme["triple"]:
            string = None if quote in endless else _TRIPLE_END[quote].match(text, position)
            if string is None:
                endless.add(quote)
            else:
                position = string.end()
            continue
        closing = lexeme[{"`": "ticks", "~": "tildes"}[fence[0]]]
        if closing is None or len(closing) < len(fence):
            continue
        line = max(begin, text.rfind("\n", 0, lexeme.end()) + 1)
        opening = _OPENING.match(text, line)
        if opening is None:
            return lexeme.start(), lexeme.end()
        return line, line if opening["info"].strip() else min(opening.end() + 1, len(text))
    return len(text), len(text)


def _moved_back(code: str, lead: str) -> str:
    """Remove from each line what a list or a quotation has put before a block."""
    before, quoted, indent = lead.rpartition(">")
    if quoted:
        code = re.sub(rf"^(?: {{0,3}}> ?){{1,{before.count('>') + 1}}}", "", code, flags=re.MULTILINE)
        indent = indent.removeprefix(" ")
    first = re.match(r"\s*\n", code)
    if not re.match(rf"[ \t]{{{len(indent)}}}", code[first.end() :] if first else code):
        return code  # the program stands left of its fence
    return re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE) if indent else code
