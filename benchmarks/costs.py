"""The speed that the settings of a run would have over autoregressive decoding at the costs of large pairs:
``python -m benchmarks.costs REPORT.json``, where ``fly report RUN --json REPORT.json`` wrote the file.

Speed is tokens per round / (drafted tokens per round · c + v). τ and the drafted tokens are the small pair's, as
measured. c (a drafted token) and v (a verification) are the large pair's, in forwards of the target over one token. A
head's c counts the parameters that its layer and output matrix would have with such a target; combining the hidden
states, once per round, counts as one more token.
"""

import json
import sys
from pathlib import Path

# (hidden width, feed-forward, key/value width, parameters) of the targets; the draft model has 8.03e9 parameters.
TARGETS = {"70B": (8192, 28672, 1024, 70.6e9), "405B": (16384, 53248, 1024, 405.9e9)}
VERIFY = {"70B": 1.1, "405B": 1.05}
WORDS = 32000  # a head's usual draft vocabulary


def costs(name: str) -> dict[str, float]:
    """c of a draft head, of an 8B draft model, and of prompt lookup."""
    width, feed, key, parameters = TARGETS[name]
    layer = 2 * width * (width + 2 * key) + width * width + 3 * width * feed
    return {"head": (layer + WORDS * width) / parameters, "model": 8.03e9 / parameters, "ngram": 0.0}


def kind(way: str) -> str:
    return "head" if "eagle3" in way else "ngram" if way.endswith("ngram") else "model"


report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
for name in TARGETS:
    print(f"{name}: v {VERIFY[name]}; c " + ", ".join(f"{value:.3f} ({draft})" for draft, value in costs(name).items()))
print(f"\n{'':36}  tau  drafted" + "".join(f"{f'as {name}':>10}" for name in TARGETS))
for table in report["tables"]:
    print(f"{table['task']}, temperature {table['temperature']:g}")
    for row in table["rows"]:
        if row["way"] == "autoregressive":
            continue
        drafted = (row["tau"] - 1) / row["kept"] if row["kept"] else row["k"]
        speeds = ""
        for name in TARGETS:
            c, extra = costs(name)[kind(row["way"])], kind(row["way"]) == "head"
            speeds += f"{row['tau'] / ((drafted + extra) * c + VERIFY[name]):>9.2f}×"
        print(f"  {row['way']:<34} {row['tau']:>5.2f} {drafted:>8.1f}{speeds}")
