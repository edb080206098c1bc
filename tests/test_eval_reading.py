r"""What a person reads in an answer: its number, the letter of a choice, its program.

The tables have texts as models write them, and what a person reads. Where people may differ, numbers follow
lm-evaluation-harness (gsm8k) and Qwen2.5-Math, which take ``50%`` as 50, and English notation; programs follow the
evaluators of HumanEval, which take the first block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fly.extras.eval.reading import extract_answer, extract_code, read_choice, read_number
from fly.models.bundled.tasks import problems

NUMBERS: list[tuple[str, float | None]] = [
    ("", None),
    ("I do not know.", None),
    (r"\boxed{$9{,}500}", 9500),
    (r"The answer is $9{,}500.", 9500),
    (r"The answer is $9{,}500$.", 9500),
    (r"\boxed{\$1{,}200}", 1200),
    (r"\boxed{\$ 1,200}", 1200),
    (r"12{,}000", 12000),
    (r"10\,000", 10000),
    (r"10\;000", 10000),
    (r"10\ 000", 10000),
    (r"10\:000", 10000),
    (r"10,\!000", 10000),
    (r"9\text{,}500", 9500),
    ("10\u2009000", 10000),
    ("10\u202f000", 10000),
    ("10\u00a0000", 10000),
    ("1\u2009234\u2009567.5 in all", 1234567.5),
    (r"\text{42}", 42),
    (r"\boxed{\text{42}}", 42),
    (r"\boxed{\mathbf{-42}}", -42),
    ("The answer is \u22125.", -5),
    ("\u22125", -5),
    ("\u20135 degrees", -5),
    ("3/4", 0.75),
    ("The answer is 3/4.", 0.75),
    ("-3/4 of it", -0.75),
    (r"\frac{3}{4}", 0.75),
    (r"\dfrac34", 0.75),
    (r"\tfrac{3}4", 0.75),
    (r"\frac{3}{-4}", -0.75),
    (r"\frac{\text{3}}{4}", 0.75),
    (r"\textcolor{red}{42}", 42),
    (r"-\frac{3}{4}", -0.75),
    (r"\boxed{\frac{1}{2}}", 0.5),
    (r"\boxed{-\dfrac{1{,}000}{8}}", -125),
    (r"2\frac{1}{2}", 2.5),
    ("so 2 1/2 cups", 2.5),
    ("The answer is 2 1/2 cups.", 2.5),
    ("2½ cups", 2.5),
    ("¾", 0.75),
    ("The answer is 10/4 = 2.5", 2.5),
    (r"\boxed{\boxed{7}}", 7),
    (r"\boxed{42 = \boxed{42}} of 7", 42),
    (r"\boxed{x = 5}", 5),
    (r"\boxed{x_1 = 5}", 5),
    (r"\boxed{x_{1} = -5}", -5),
    (r"\boxed{f(2) = 7}", 7),
    (r"\boxed{42\text{ apples}}", 42),
    (r"\boxed{42 \text{ (3 + 39)}}", 42),
    (r"\boxed{- 5}", -5),
    (r"so \(\boxed{18}\), from 3 and 6", 18),
    (r"\boxed{18", 18),
    ("It is \\boxed{18\n\nfrom 3 and 6, so \\boxed{19}.", 19),
    (r"\boxed{3} and then \boxed{4}, of 9", 4),
    (r"\boxed{\text{none}} of 12", 12),
    (r"\fbox{12} of 7", 12),
    (r"50\%", 50),
    ("50%", 50),
    ("The answer is 12.5 % of 80.", 12.5),
    (r"90^\circ", 90),
    ("1.5e3", 1500),
    ("1.5E+3 metres", 1500),
    ("2e-3", 0.002),
    (r"1.5 \times 10^{3}", 1500),
    ("6.5 × 10⁻³ m²", 0.0065),
    ("2**10", 1024),
    ("1.5 × 10^-3", 0.0015),
    ("10^6", 1000000),
    ("5 m^2", 5),
    ("5 m²", 5),
    ("1,234,567.89", 1234567.89),
    ("1,234.", 1234),
    ("12,34,567", 1234567),
    ("₹1,00,000", 100000),
    ("1.234,56", 1234.56),
    ("It costs 1.234.567 euros of 2", 2),
    ("The answer is 1.234.567 euros", 1234567),
    ("192.168", 192.168),
    ("The answer is 1'234’567.", 1234567),
    ("1_000_000", 1000000),
    (r"\boxed{2{,}5}", 2.5),
    (r"1{,}23{,}456", 123456),
    ("The answer is negative 12.", -12),
    ("The answer is minus 12, not 7.", -12),
    ("12 minus 5", 5),
    (r"\boxed{\color{red}3} of 7", 3),
    (r"\framebox{3} of 7", 3),
    ("<answer>42</answer> of 7", 42),
    ("Answer (in dollars): 42 of 7", 42),
    ("Answer in dollars: 42 of 7", 42),
    ("Final answer → 42 of 7", 42),
    ("Answer => -42 of 7", -42),
    ("Answer - 42 of 7", 42),
    ("Final answer — 42 of 7", 42),
    ("Final answer 42 of 7", 42),
    ("Ans. 42 of 7", 42),
    ("The answer among these is 42 of 7", 42),
    ("The answer comes to 42, of 7.", 42),
    ("The answer equals 42, of 7.", 42),
    ("The answer is therefore:\n\n$$42$$ of 7", 42),
    ("The answer is as follows:\n\n**42**, of 7", 42),
    ("The answer is 50% of 84 = 42 (of 99)", 42),
    ("<think>The answer is 7.</think>It is 42.", 42),
    ("The answer is 1, 2, 3.", 1),
    ("1, 2, 3", 3),
    ("1,2,3", 3),
    (r"\boxed{1, 2, 3}", 1),
    ("The answer is 2,3.", 2),
    ("On 3/4/2020 he had 7", 7),
    ("It was on 10/12/2020", 2020),
    ("The answer is $5 and $7.", 5),
    ("$5 and $7", 7),
    ("４２", 42),
    ("１，２００", 1200),
    ("答案是42。", 42),
    ("**42**", 42),
    ("__42__", 42),
    ("_42_", 42),
    ("`42`", 42),
    ("<b>42</b>", 42),
    ("**Answer: 42**, not 7", 42),
    ("answer is: 42 apples.", 42),
    ("The answer is therefore 42, of 50.", 42),
    ("The answer to the question is 42, of 50.", 42),
    ("The answer would be 42, of 50.", 42),
    ("Answer = 42 of 50", 42),
    ("answer is42", 42),
    ("The answer's 42, of 50", 42),
    ("## Answer\n\n42 of 50", 42),
    ("**Final Answer:**\n\n$$\n42\n$$\nof 50", 42),
    ("The answer is:\n\\[\n42\n\\] of 50", 42),
    ("The answer is 3. Wait, the answer is 4 of 5.", 4),
    ("Turn the answer to weeks: 28 days / 7 days/week = 4 weeks", 4),
    ("To answer, add 12 and 3.\nIt makes 15 eggs.", 15),
    ("The answer is not 5 but 6 of 7.", 6),
    ("The answer is 3 * 400 = 1200 of 5,000.", 1200),
    ("The answer is 3 bags * 400 nuts = 1,200 nuts, not 7", 1200),
    ("The answer is 18 because 3 + 4 = 7 and 7 + 11 = 18, of 20", 18),
    ("The answer is 5 = 2 + 3", 5),
    ("The answer is 5, since x = 3", 5),
    ("The answer is (5 + 3) * 2 = 16 (of 20)", 16),
    ("The answer is 3-4.", 3),
    ("3-4", 4),
    ("3\u20134", 4),
    ("5%-10%", 10),
    ("$5-$10", 10),
    ("5 - 3", 3),
    ("-$5", -5),
    ("$-5", -5),
    (r"-\$5", -5),
    ("\u2212£5", -5),
    ("They have:\n- 5 apples", 5),
    ("They have:\n- $5", 5),
    ("USD -5", -5),
    ("1st", 1),
    ("the 22nd", 22),
    ("5kg", 5),
    ("Rs.500", 500),
    ("No.5", 5),
    ("x2 is 7, y3", 7),
    ("0.5", 0.5),
    (".5", 0.5),
    ("-.5", -0.5),
    ("It is...5", 5),
    ("#### 1,000", 1000),
    ("#### 42.", 42),
    ("#### $42", 42),
    ("#### **42** of 7", 42),
    ("#### 1,200\nor 7", 1200),
    ("####\n42\nor 7", 42),
    ("#### -5 of 7", -5),
    ("#### 3 * 4 = 12 of 20", 12),
    ("#### Total: 42 of 50", 42),
    ("#### $\\boxed{42}$ of 50", 42),
    ("#### Step 1: add 3 and 4\nIt makes 7.", 7),
    ("#### 1. Add\n3 + 4 = 7\n#### 2. Double\n7 * 2 = 14", 14),
    ("#### 1. Add\nWe get \\boxed{7}.\n#### 2. Check\n4 + 3", 7),
    ("Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\r\n#### 18\r\n", 18),
    # LaTeX's space ~, a minus that stands alone, and plain spaces between thousands
    ("The total is $10~000$.", 10000),
    (r"\boxed{12~500}", 12500),
    (r"\boxed{1~\frac{3}{4}}", 1.75),
    ("The answer is 5~10.", 5),
    ("The answer is - 5.", -5),
    (r"The answer is \( - 5 \)", -5),
    ("The answer - 5", 5),
    ("The answer is 12 000", 12000),
    ("#### 12 500 dollars", 12500),
    (r"\boxed{9 500}", 9500),
    ("The answer is 12 34", 12),
    ("The answer is 1 234 567.89", 1234567.89),
    ("The answer is 1 000 0000", 1),
    (r"\boxed{5\frac{125}{128}}", 5 + 125 / 128),
    ("The answer is 5 125/128", 5 + 125 / 128),
    *[
        (f"{mark}{between}- 5 apples", 5)
        for mark in ("The answer is:", "**Answer:**", "Answer")
        for between in ("\n", "\n\n")
    ],
    ("Since a<b and b>12", 12),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_a_number_is_what_a_person_reads(text: str, number: float | None) -> None:
    found = read_number(text)
    assert found == (None if number is None else Decimal(str(number)))


CHOICES: list[tuple[str, str]] = [
    ("", ""),
    ("C", "C"),
    ("C.", "C"),
    ("(C)", "C"),
    ("c", "C"),
    ("(c)", "C"),
    ("c)", "C"),
    ("c. Paris", "C"),
    ("`c`", "C"),
    ("**C**", "C"),
    ('"C"', "C"),
    ("Ｃ", "C"),
    (r"\boxed{C}", "C"),
    (r"\boxed{\text{(C)}} and not A", "C"),
    (r"\boxed{\text{C. Paris}}", "C"),
    (r"Of A and B, $\boxed{\mathbf{c}}$", "C"),
    ("The answer is C", "C"),
    ("The answer is $C$, and B is not.", "C"),
    (r"The answer is \boxed{C}, since A and B fail.", "C"),
    (r"The answer is \(\text{C}\).", "C"),
    ("The answer is option C, A fits less.", "C"),
    ("The answer is choice C.", "C"),
    ("The answer is: option (C).", "C"),
    ("**Answer**: **C**", "C"),
    ("**Answer:** C\n\nA is a city.", "C"),
    ("Answer - C", "C"),
    ("Answer: C", "C"),
    ("Answer: `C`", "C"),
    ("Answer: [C]", "C"),
    ("Answer: {C}", "C"),
    ("Answer: <C>", "C"),
    ("Answer: (c)", "C"),
    ("answer: c", "C"),
    ("the answer is c.", "C"),
    ("the answer is c) Paris", "C"),
    ("the answer is a", "A"),
    ("the answer is a) Rome", "A"),
    ("The answer is A because B is in Spain.", "A"),
    ("The answer is a city: C", "C"),
    ("The answer is A", "A"),
    ('The answer is "C".', "C"),
    ("The answer is “C”.", "C"),
    ("The answer is 'C'.", "C"),
    ("The correct answer is **C**", "C"),
    ("The correct answer is **C. Paris**, not A.", "C"),
    ("The correct answer is Paris, which is option C.", "C"),
    ("The correct option is C, and A is close.", "C"),
    ("Correct option: C", "C"),
    ("The right choice would be C, rather than A", "C"),
    ("the answer is therefore C", "C"),
    ("The answer to this question is, of A and B, C", "A"),
    ("The answer to this question is C, of A and B", "C"),
    ("The best answer, then, is C (A is close)", "C"),
    ("The answer must be C; A is too small.", "C"),
    ("Answer\n\nC", "C"),
    ("Of A and B:\n\n## Answer\n\nC", "C"),
    ("Answer C", "C"),
    ("A is close. Final answer (C).", "C"),
    ("<answer>C</answer>, not A", "C"),
    ("A looks fine, but I choose C", "C"),
    ("A looks fine, but I'd go with option C.", "C"),
    ("Of A and B, I pick (b).", "B"),
    ("A says little. C is correct.", "C"),
    ("A says little. (C) Paris is a city. C is the correct answer.", "C"),
    ("A says little. C (Paris) is right.", "C"),
    ("**C. Paris**\n\nA is in Italy.", "C"),
    ("(C) Paris", "C"),
    ("C) Paris, and A) Rome is not", "C"),
    ("C: Paris", "C"),
    ("A) Rome\nB) Oslo\nC) Paris\nD) Bern\n\nI say it has to be C.", "C"),
    ("A. Rome\nB. Oslo\nC. Paris\n\nParis, so C", "C"),
    ("not A but C", "C"),
    ("The answer is not A but C.", "C"),
    ("The answer is not A or B, but C.", "C"),
    ("The answer is neither A nor (B): it is C", "C"),
    ("The answer isn't A. It's C.", "C"),
    ("The answer cannot be A, so B", "B"),
    ("Option A is wrong because it is in Italy; the answer is C", "C"),
    ("A is wrong. B is incorrect. C fits.", "C"),
    ("A is not right, and C fits.", "C"),
    ("A good guess: I think of Paris. C", "C"),
    ("I think that A letter is missing. B", "B"),
    ("It's an A-level question about vitamin-B, C++ and D's: (c)", "C"),
    ("The U.S.A. is no city. C", "C"),
    ("The answer is B. Wait, no. The answer is C.", "C"),
    ("To answer: A is in Italy. C is correct", "C"),
    ("答案是C。", "C"),
    ("The answer is C\r\n\r\nA is in Italy.\r\n", "C"),
    ("选C", "C"),
    ("The answer is _C_, not A", "C"),
    ("The answer's C; A is close.", "C"),
    ("A or B? I believe the answer to be C.", "C"),
    ("A, B and D are wrong, so (C)", "C"),
    ("The answer is C, A is wrong.", "C"),
    ("The answer is C, and A is wrong.", "C"),
    ("C is not wrong.", "C"),
    ("Both A and (B) are incorrect. C", "C"),
    ("Look at A. Therefore (C) is the answer.", "C"),
    ("Of A and B:\n#### C", "C"),
    ("#### Option A\nIt is close.\n\n**Choice: C**", "C"),
    ("Éa, Cé: B", "B"),
    ("<answer>\nC\n</answer>\nA is close", "C"),
    ("The answer among A, B, C and D is C.", "C"),
    ("The correct answer (C) is Paris.", "C"),
    ("A: wrong\nB: wrong\nC: correct\nD: wrong", "C"),
    ("A) ✗\nB) ✗\nC) ✓\nD) ✗", "C"),
    ("(A) No. (B) No. (C) Yes. (D) No.", "C"),
    ("A fails; B fails; D fails. So C.", "C"),
    ("C fits. So A, B and D fail.", "C"),
    ("Eliminate A, B, and D. C remains.", "C"),
    ("We can rule out (A) and (B), so (C)", "C"),
    ("The rule (A) holds.", "A"),
    ("A. Rome\nB. Oslo\nC. Paris\nD. Bern\n\n**C. Paris**", "C"),
    ("A. Rome\nB. Oslo\n\nA. Rome", "A"),
    ("A. Yes\nB. No\n\nB", "B"),
    ("A. True\nB. False\n\nThe statement does not hold: (B)", "B"),
    ("Both A and C look right, but C is better", "C"),
    ("A or C? C.", "C"),
    ("<think>A or B? A.</think>\nC", "C"),
    ("The answer is as follows:\n\nC. Paris\n\nA. Rome is not", "C"),
    ("Bob and Carol", ""),
    ("The answer is Paris.", ""),
    *[(f"Answer: C{point}Paris", "C") for point in (".", "．", ")", ":")],
    ("The C.I.A. says B", "B"),
    ("See A.1. It is B", "B"),
    *[
        (f"{wrong} C.", "C")
        for wrong in (
            "A, B, and D are all wrong.",
            "A and B are both wrong.",
            "A is clearly wrong.",
            "A is also not right.",
            "A is ruled out.",
            "A can be eliminated.",
        )
    ],
    ("The answer is either A or C. I choose C.", "C"),
    ("The answer is A or C. It's C.", "C"),
    ("The answer is between B and C; I pick C", "C"),
    ("I would take option c", "C"),
    ("The correct answer is C, or 4.", "C"),
    ("The answer is (B), or x = 5", "B"),
    ("The answer is C or a similar one.", "C"),
    ("The answer is D, or I think so", "D"),
    ("a<b and B>c", "B"),
    ("I take adoption b. C", "C"),
    ("The <b style='x'>answer</b> is <span class=\"y\">C</span>", "C"),
]


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_a_choice_is_what_a_person_reads(text: str, letter: str) -> None:
    assert read_choice(text, "ABCD") == letter


def test_choices_may_be_of_any_kind() -> None:
    assert read_choice("I think it is E, not I.", "ABCDEFGHI") == "E"
    assert read_choice("I am sure: H", "ABCDEFGHI") == "H"
    assert read_choice("The answer is (I).", "ABCDEFGHI") == "I"
    assert read_choice("The answer is B.", "abcd") == "b"
    assert read_choice("Answer: 3) 1.5 metres", "1234") == "3"
    assert read_choice("The answer is a.", "aA") == "a"


PROGRAM = "import math\n\ndef f(x):\n    return math.floor(x) + 1\n"
BODY = "    y = x\n    return y + 1\n\n\ndef g(x):\n    return x\n"
FENCED = 'def f(x):\n    """Add one.\n\n    ```\n    f(1)\n    ```\n    """\n    return x + 1\n'
AT_THE_EDGE = "'''Usage:\n```python\nf(1)\n```\n'''\ndef f(x):  # not ```\n    return \"```\\\"\" + 'x'\n"


def moved(text: str, by: str) -> str:
    return "".join(f"{by}{line}" for line in text.splitlines(keepends=True))


CODE: list[tuple[str, str]] = [
    (PROGRAM, PROGRAM),
    (BODY, BODY),
    (FENCED, FENCED),
    ("I cannot.", "I cannot."),
    # Fences and their languages.
    *[
        (f"Sure:\n\n{opening}\n{PROGRAM}{closing}\n\nIt adds one.\n", PROGRAM)
        for opening, closing in [
            ("```", "```"),
            ("```python", "```"),
            ("```python", "``` "),
            ("```python ", "`````"),
            ("``` python", "```"),
            ("```Python", "```"),
            ("```PYTHON", "```"),
            ("```py", "```"),
            ("```py3", "```"),
            ("```python3", "```"),
            ("```python3.11", "```"),
            ("```Python 3", "```"),
            ("```ipython", "```"),
            ('```python title="f.py"', "```"),
            ("```python:f.py", "```"),
            ("```f.py", "```"),
            ("```{python}", "```"),
            ("```{.python .numberLines}", "```"),
            ("````", "````"),
            ("````python", "````"),
            ("~~~", "~~~"),
            ("~~~python", "~~~"),
            ("~~~~ python `x`", "~~~~"),
            ("   ```python", "   ```"),
        ]
    ],
    # Blocks without an end, with one at the end of a line, and the prompt's block, which the answer ends.
    (f"```python\n{PROGRAM}", PROGRAM),
    (f"```\n{PROGRAM}", PROGRAM),
    ("```python\nx = 1```", "x = 1"),
    ("```python\nx = 1```\nUse it:\n```python\nprint(x)\n```", "x = 1"),
    ("```python\nx = 1\n```python\ny = 2\n```", "x = 1\n"),
    (f"```python\n```\n```python\n{PROGRAM}```", PROGRAM),
    (f"python\n{PROGRAM}```\nThis adds one.", PROGRAM),
    (f"{PROGRAM}```", PROGRAM),
    (f"{PROGRAM}```\n\nThis adds one.", PROGRAM),
    (f"{BODY}```\n\nThis adds one.", BODY),
    (f"{BODY}```\n\nUse it:\n```python\nprint(f(1))\n```\n", BODY),
    (f"# Add one.\n\n{PROGRAM}```\nUse it:\n```\nprint(f(1))\n```\n", f"# Add one.\n\n{PROGRAM}"),
    (f"{FENCED}```\nThis adds one.", FENCED),
    ("y = [x]\ny.sort()\nreturn y\n```\nIt's sorted.", "y = [x]\ny.sort()\nreturn y\n"),
    ('"""Adds one."""\nreturn x + 1\n```\nDone.', '"""Adds one."""\nreturn x + 1\n'),
    ("# Solution\n\n```\nx = 1\n```", "x = 1\n"),
    # Back-ticks within the program.
    (f"```python\n{FENCED}```\nThis adds one.", FENCED),
    (f"```\n{FENCED}```\nThis adds one.", FENCED),
    (f"```python\n{AT_THE_EDGE}```\nThis isn't all: '''", AT_THE_EDGE),
    (f"````python\n{AT_THE_EDGE}````", AT_THE_EDGE),
    ("```python\n'''\nx\n```\nIt never ends.", "'''\nx\n"),
    # Several blocks.
    (f"```python\n{PROGRAM}```\nor\n```python\nx = 2\n```", PROGRAM),
    (f"```bash\npip install numpy\n```\n```python\n{PROGRAM}```", PROGRAM),
    (f"```output\n[1, 2]\n```\n```python\n{PROGRAM}```", PROGRAM),
    (f"It prints\n```\n[1, 2]\n```\nwith\n```python\n{PROGRAM}```", PROGRAM),
    (f"```\n[1, 2]\n```\n```\n{PROGRAM}```", PROGRAM),
    (f"```\n{PROGRAM}```\nUse it:\n```python\nprint(f(1))\n```", PROGRAM),
    (f"```pycon\n>>> f(1)\n2\n```\n```python\n{PROGRAM}```", PROGRAM),
    (f"```python\n>>> f(1)\n2\n```\n```python\n{PROGRAM}```", PROGRAM),
    (f"```json\n{{}}\n```\n~~~py\n{PROGRAM}~~~", PROGRAM),
    (f"~~~\n[```]\n~~~\n```python\n{PROGRAM}```", PROGRAM),
    (f"````markdown\n# Answer\n\n```python\n{PROGRAM}```\n````", PROGRAM),
    (f"Call ```f``` so:\n```python\n{PROGRAM}```", PROGRAM),
    (f"```python\n# Usage\n```\n```python\n{PROGRAM}```", PROGRAM),
    (f"```text\n[1, 2]\n```\n```code\n{PROGRAM}```", PROGRAM),
    (f"```tool_code\n{PROGRAM}```", PROGRAM),
    ("```js\nfunction f() {\n  return 1\n}\n```\n```\nx = 1\n```", "x = 1\n"),
    (f"**Solution**: ```python\n{PROGRAM}```\nIt adds.", PROGRAM),
    (f"<think>\n```python\nx = 0\n```\n</think>\n```python\n{PROGRAM}```", PROGRAM),
    (f"I use\n```python\nx = 0\n```\n</think>\n```python\n{PROGRAM}```", PROGRAM),
    ("```python\nx = 'a</think>b'.split('</think>')\n```", "x = 'a</think>b'.split('</think>')\n"),
    (f"\ufeff```python\n{PROGRAM}```", PROGRAM),
    (f"```python\n{PROGRAM}```".replace("\n", "\r"), PROGRAM),
    # Programs between tags, and after prose.
    (f"<code>\n{PROGRAM}</code>\nIt adds.", PROGRAM),
    (f'<pre><code class="language-python">\n{PROGRAM}</code></pre>', PROGRAM),
    (f"Sure:\n[PYTHON]\n{PROGRAM}[/PYTHON]", PROGRAM),
    (f"[BEGIN]\n{PROGRAM}[DONE]", PROGRAM),
    (f"<answer>\n{PROGRAM}", PROGRAM),
    ("x = {}\nx[code] = 1\nx[code]\n", "x = {}\nx[code] = 1\nx[code]\n"),
    (f"Sure! Here's the code:\n\n{PROGRAM}", PROGRAM),
    ("Names = []\nNames.append(1)\n", "Names = []\nNames.append(1)\n"),
    # Blocks in lists and quotations.
    (f"1. Write:\n\n   ```python\n{moved(PROGRAM, '   ')}   ```\n2. Run.", PROGRAM),
    (f"- Write:\n    ```python\n{moved(PROGRAM, '    ')}    ```", PROGRAM),
    (f"* ```python\n{moved(PROGRAM, '  ')}  ```", PROGRAM),
    (f"1. Write:\n   ```python\n{PROGRAM}   ```", PROGRAM),
    (f"1. Write:\n   ```python\n{PROGRAM}```", PROGRAM),
    (f"\t```python\n{moved(PROGRAM, chr(9))}\t```", PROGRAM),
    (f"> ```python\n{moved(PROGRAM, '> ')}> ```\nDone", PROGRAM),
    (f"Here is the solution\n\n{PROGRAM}", PROGRAM),
    (f">> ```python\n{moved(PROGRAM, '>> ')}>> ```\nDone", PROGRAM),
]
CODE += [(text.replace("\n", "\r\n"), program) for text, program in CODE[::3]]


@pytest.mark.parametrize(("text", "program"), CODE)
def test_a_program_is_what_a_person_reads(text: str, program: str) -> None:
    assert extract_code(text) == program


# --- whatever the number, the letter or the program, in any wrapping -------------------------------------

SEPARATORS = [",", "{,}", r"\,", r"\;", r"\ ", r"\text{,}", r",\!", "\u2009", "\u202f", "\u00a0"]
WRAPPERS = [
    "{}",
    "${}$",
    "**{}**",
    "`{}`",
    r"\({}\)",
    r"\boxed{{{}}}",
    r"$\boxed{{\text{{{}}}}}$",
    r"\boxed{{\boxed{{{}}}}}",
]
CURRENCIES = ["", "", "$", r"\$", "£", "$ "]
NUMBER_SENTENCES = [
    "{}",
    "They add 3 and 4.\nThe answer is {}.",
    "Answer: {} apples, of 99.",
    "**Final answer**: {}, not 7",
    "First 1, then 2: it makes {}.",
    "x = 7\n#### {}",
    "The answer to the question is therefore {}, i.e. 1 more than 2.",
    "## Answer\n\n{}",
    "So 1 + 1 = {}",
]


def grouped(digits: str, separator: str, indian: bool) -> str:
    head, groups = digits[:-3], [digits[-3:]]
    while head:
        size = 2 if indian else 3
        head, groups = head[:-size], [head[-size:], *groups]
    return separator.join(groups)


@st.composite
def written_numbers(draw: st.DrawFn) -> tuple[str, Fraction]:
    whole = draw(st.integers(0, 10**9) | st.integers(0, 99))
    minus = draw(st.sampled_from(["", "", "-", "\u2212"]))
    form = draw(st.sampled_from(["plain", "grouped", "indian", "slash", "frac", "mixed", "exponent", "wide"]))
    value = Fraction(whole)
    text = str(whole)
    if form in ("plain", "grouped", "indian"):
        if form != "plain":
            text = grouped(text, "," if form == "indian" else draw(st.sampled_from(SEPARATORS)), form == "indian")
        if decimals := draw(st.sampled_from(["", "", "5", "25", "00"])):
            text, value = f"{text}.{decimals}", value + Fraction(int(decimals), 10 ** len(decimals))
        text = draw(st.sampled_from(CURRENCIES)) + text + draw(st.sampled_from(["", "", "%", r"\%", r"\text{ kg}"]))
    elif form == "exponent":
        power = draw(st.integers(-5, 5))
        text = draw(st.sampled_from([f"{whole}e{power}", rf"{whole} \times 10^{{{power}}}"]))
        value *= Fraction(10) ** power
    elif form == "wide":
        text = text.translate({ord("0") + n: ord("０") + n for n in range(10)})
    else:
        below = draw(st.integers(2, 12))
        over = draw(st.integers(1, below - 1))
        text = (
            f"{over}/{below}"
            if form == "slash"
            else rf"\{draw(st.sampled_from('dt '))}frac".replace(" ", "") + f"{{{over}}}{{{below}}}"
        )
        value = Fraction(over, below)
        if form == "mixed":
            text, value = f"{whole}{text}", whole + value
    return minus + text, -value if minus else value


@given(written_numbers(), st.sampled_from(WRAPPERS), st.sampled_from(NUMBER_SENTENCES), st.booleans())
def test_any_number_is_read_back(number: tuple[str, Fraction], wrapper: str, sentence: str, windows: bool) -> None:
    text = sentence.format(wrapper.format(number[0]))
    found = read_number(text.replace("\n", "\r\n") if windows else text)
    assert found is not None and float(found) == pytest.approx(float(number[1]), rel=1e-15), text


LETTER_WRAPPERS = [
    *WRAPPERS,
    "<b>{}</b>",
    "<I>({})</I>",
    "({})",
    "[{}]",
    '"{}"',
    "“{}”",
    "{}.",
    "{})",
    "option {}",
    "choice ({})",
    "**{}. Paris**",
    "({}) Paris",
    r"$\text{{{}}}$",
    r"\boxed{{\text{{({})}}}}",
    r"\boxed{{\textbf{{{}) }}5}}",
]
LETTER_SENTENCES = [
    "The answer is {}",
    "A is in Italy and B is wrong. The correct answer is {}, not A.",
    "Answer: {}\n\nA is in Italy.",
    "**Answer**: {}\n\nI think so.",
    "A good question. I choose {}",
    "Answer\n\n{}",
    "the answer is therefore {}",
    "The answer is not A but {}",
    "A) Rome\nB) Oslo\n\nThe best option is {}",
]


@given(st.sampled_from("BCDbcd"), st.sampled_from(LETTER_WRAPPERS), st.sampled_from(LETTER_SENTENCES))
def test_any_letter_is_read_back(letter: str, wrapper: str, sentence: str) -> None:
    text = sentence.format(wrapper.format(letter))
    assert read_choice(text, "ABCD") == letter.upper(), text


@given(st.sampled_from("ABCD"), st.sampled_from(LETTER_WRAPPERS))
def test_any_letter_alone_is_read_back(letter: str, wrapper: str) -> None:
    assert read_choice(wrapper.format(letter), "ABCD") == letter
    assert read_choice(f"The answer is: {wrapper.format(letter)}", "ABCD") == letter


LINES = st.sampled_from(
    [
        "x = 1",
        "",
        "def f(x):",
        "    return x",
        "# don't stop: ```",
        "s = 'it\\'s ```'",
        's = f"```{x}\\\\"',
        '"""Add.\n\n```\nf(1)\n```\n"""',
        "    '''\n    ```python\n    f(1)\n    ```\n    it's\n    '''",
        "y = ~x  # ~~~",
        "    1. no list",
        "> 3",
    ]
)
PROGRAMS = st.lists(LINES, min_size=1, max_size=9).map(lambda lines: "import os\n" + "\n".join(lines) + "\n")


@given(
    PROGRAMS,
    st.sampled_from(["```", "````", "~~~", "~~~~~"]),
    st.sampled_from(["", "python", "py", "Python3", "python3.11", "{.python}", 'python title="f.py"']),
    st.sampled_from(["", "Sure, that's it:\n", "```bash\npip install x\n```\n", "1. It's:\n\n"]),
    st.sampled_from(["", "   ", "      ", "\t"]),
    st.sampled_from(["", "\n", "\nDone. It's ''' now.\n", "\n```python\nprint(1)\n```\n"]),
    st.booleans(),
)
def test_any_program_is_given_back(
    program: str, fence: str, language: str, before: str, indent: str, after: str, windows: bool
) -> None:
    text = f"{before}{moved(f'{fence}{language}{chr(10)}{program}{fence}', indent)}{after}"
    assert extract_code(text.replace("\n", "\r\n") if windows else text) == program
    assert extract_code(f"{before}{moved(f'{fence}{language}{chr(10)}{program}', indent)}") == program


@given(PROGRAMS, st.sampled_from(["", "It adds.", "So:\n```python\nprint(1)\n```\n", "It's:\n```\n1\n```"]))
def test_a_program_in_a_block_that_the_prompt_opened_is_given_back(program: str, after: str) -> None:
    assert extract_code(f"{program}```\n{after}") == program


def test_the_answers_of_bundled_problems_are_read() -> None:
    for split in ("heldout", "middle", "ood"):
        for problem in problems(None, split):
            if problem.kind == "code":
                assert extract_code(problem.solution) == problem.solution.split("```python\n")[1].partition("```")[0]
            else:
                assert extract_answer(problem.solution.replace("\n", "\r\n")) == problem.answer
            if problem.kind == "arithmetic":
                assert read_number(problem.solution) == Decimal(problem.answer)


LONG = [
    *[("```python\n", piece) for piece in ["7", "{", "}", "`", "\\"]],
    *[
        ("", piece)
        for piece in ["1 ", "1,", "1=", "A, ", "not A or ", '\\"', r"\boxed{", r"\frac{", "answer is ", "if x:"]
    ],
    *[("```\n", piece) for piece in ["```\n", "'''\n", "```\n\\'''\n", "> ", "1. "]],
    *[(head, " ") for head in ["x", "A", "A,", "not A,", "answer", "answer is", "#### 1", "= -", r"\boxed", r"\frac"]],
    *[(head, "\n") for head in ["answer", "A) x", "####", "# x"]],
    ("", "#"),
    ("option:", " "),
    *[
        ("", piece)
        for piece in ["<code>\n", "<code", "is minus ", "rule out A, ", "answer (", "Aa ", "Aa. ", "answer is:\n"]
    ],
    *[("Aa", " "), ("answer in", " "), ("negative", " "), ("is", " "), ("A) x\n", "A) x\n"), ("A or A", " ")],
    *[("A a ", "b"), ("Aa aa b", "-"), ("Answer\n- ", " "), ("answer is 1", " 000"), ("A, ", "B, ")],
    *[
        ("", piece)
        for piece in ["<b", "answer\n- ", "<b>", "A or B ", "between A and ", "A is also ", "Aa aa aa ", "~0", "1 000 "]
    ],
    *[
        (head, " ")
        for head in ["A is also", "<b", "answer is -", "B", "B:", "B yes", "Here is the", "not B", "choose B"]
    ],
]


@pytest.mark.parametrize("read", [read_number, lambda text: read_choice(text, "ABCD"), extract_code, extract_answer])
def test_reading_takes_time_linear_in_the_text(read: Callable[[str], object]) -> None:
    for head, piece in LONG:
        size, limit_s = (200_000, 0.2) if piece in "7{}`\\" else (50_000, 0.5)
        text = head + piece * (size // len(piece)) + "x"
        started = time.process_time()
        read(text)
        assert time.process_time() - started < limit_s, (head, piece)
