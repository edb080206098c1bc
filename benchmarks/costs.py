"""What the ways of a run would give over autoregression at the costs of large pairs:
``python -m benchmarks.costs REPORT.json``, of ``fly report RUN --json REPORT.json``.

Speed is tokens a round / (tokens drafted a round · c + v): each way's τ and drafts are the small pair's own, as
measured; c (a drafted token) and v (a verification) are the large pair's, over one token of the target. A head's c
counts its layer and output matrix by the parameters they would have beside such a target; its fusion of hidden states,
once a round, counts as a token more.
"""

import json
import sys
from pathlib import Path

# (hidden width, feed-forward, key/value width, parameters) of the targets; 8.03e9 those of the draft model.
TARGETS = {"70B": (8192, 28672, 1024, 70.6e9), "405B": (16384, 53248, 1024, 405.9e9)}
VERIFY = {"70B": 1.1, "405B": 1.05}
WORDS = 32000  # a head's usual draft vocabulary


def costs(name: str) -> dict[str, float]:
    """c of a head, of a draft model of 8B, and of prompt lookup."""
    width, feed, key, parameters = TARGETS[name]
    layer = 2 * width * (width + 2 * key) + width * width + 3 * width * feed
    return {"head": (layer + WORDS * width) / parameters, "model": 8.03e9 / parameters, "ngram": 0.0}


def kind(way: str) -> str:
    return "head" if "eagle3" in way else "ngram" if way.endswith("ngram") else "model"


report = json.loads(Path(sys.argv[1]).read_text())
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
