"""python tests/durations.py FILE…: make tests/durations.csv anew from what tests have cost.

DDP_COURSE_DURATIONS=FILE make test-all writes such a file. A row for a whole file, and the reason
of each row, stay as they are in the table; of single tests the table holds those above `LEAST`
seconds.
"""

import csv
import sys
from collections import Counter
from pathlib import Path

TABLE = Path(__file__).with_name("durations.csv")
LEAST = 4.0


def names(test):
    """Return the names of a test in the table: with parameters, without them, as its file."""
    return test, test.split("[")[0], test.partition("::")[0]


costs: Counter = Counter()
for path in sys.argv[1:]:
    for seconds, test, _ in csv.reader(Path(path).read_text(encoding="utf-8").splitlines()):
        costs[test] += float(seconds)

with TABLE.open(encoding="utf-8") as file:
    rows = {row["test"]: row for row in csv.DictReader(file)}
for name, row in rows.items():
    measured = [seconds for test, seconds in costs.items() if name in names(test)]
    row["seconds"] = f"{sum(measured):.0f}" if measured else row["seconds"]
for test, seconds in costs.items():
    if seconds >= LEAST and not any(name in rows for name in names(test)):
        rows[test] = {"seconds": f"{seconds:.0f}", "test": test, "why": "measured"}

with TABLE.open("w", encoding="utf-8", newline="") as file:
    table = csv.DictWriter(file, ["seconds", "test", "why"], lineterminator="\n")
    table.writeheader()
    table.writerows(sorted(rows.values(), key=lambda row: row["test"]))
