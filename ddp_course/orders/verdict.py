"""What came of a run: right in every order, or what breaks which order, at which lines."""

from dataclasses import dataclass, field

SHOWN = 6  # so many events of each rank, the last ones, are in the timeline


@dataclass
class Verdict:
    """What `every_order` found.

    `runs` is the number of runs, and `proof` says in a sentence what they prove. Where `ok` is
    False, `kind` is "deadlock", "touched too early", "overwritten too early", "not waited for" or
    "unlike results", `ranks` are those that it is about, and `lines` the program's lines. `events`
    are (rank, virtual seconds, what, line) in the order of virtual time.
    """

    ok: bool
    runs: int
    proof: str
    kind: str = ""
    ranks: list = field(default_factory=list)
    lines: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def __str__(self):
        return self.proof if self.ok else f"{self.kind}: {self.proof}"

    def __repr__(self):
        return f"<{self}>"

    def show(self) -> None:
        """Print the last events of the ranks that it is about, as a small timeline."""
        print(self)
        about = self.ranks or sorted({event[0] for event in self.events})
        rows = []
        for rank in about:
            rows += [event for event in self.events if event[0] == rank][-SHOWN:]
        for rank, moment, what, line in sorted(rows, key=lambda event: event[1]):
            column = "    " * about.index(rank)
            place = line.partition(":")[0]
            print(f"{1000 * moment:10.3f} ms  {column}rank {rank}: {what}  ({place})")
