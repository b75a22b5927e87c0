"""One iteration on three devices, drawn for each stage in the same form.

`iterations()` gives the pictures of lessons 02 to 09 as SVG. `python authoring/build.py` writes
them to docs/figures. A row is a device, and time runs to the right. A purple box is something that
the devices do together. What a lesson adds has a thick outline, and stands in words below the rows.
"""

from collections.abc import Callable
from html import escape
from math import cos, pi, sin
from typing import NamedTuple

WIDTH = 990
HEIGHT = 372
LEFT = 84  # The rows begin here.
TOP = 64  # The first row begins here.
STEP = 90  # The next row begins so much further down.
TALL = 60  # A row has this height.
BELOW = TOP + 2 * STEP + TALL  # The last row ends here.
# Colours of boxes, by what they stand for; NEW is that of the outline of what a lesson adds.
DATA = "#eeeeee"
FORWARD = "#d7e8f7"
BACKWARD = "#fbe0cf"
UPDATE = "#d5efe4"
TOGETHER = "#e6e0f2"
INK = "#111111"
LINE = "#333333"
NEW = "#b03a00"
RANKS = range(3)


class Piece(NamedTuple):
    """A box in the course of a row; lane 0 is above, lane 1 below.

    `begin` and `end` are counted from the column's beginning.
    """

    begin: float
    end: float
    lane: int
    text: str
    fill: str
    new: bool = False


class Drawing:
    """An SVG that grows from left to right: each method draws a column and moves `x` behind it."""

    def __init__(self, names=("rank 0", "rank 1", "rank 2"), layers=(), gap=20):
        """`layers` says below a row's name what its rank has, if not all of the model."""
        self.parts = []
        self.gap = gap
        self.x = LEFT
        self.ends = {}  # {row: where its last box ends} of the rows that the last column has.
        for row, name in enumerate(names):
            lines = [name, layers[row]] if layers else [name]
            self.text(LEFT / 2, TOP + STEP * row + TALL / 2, lines, size=13, bold=True)

    def text(self, x, y, lines, size=12.0, bold=False):
        """Write lines of text around (x, y); the first one is bold if `bold`."""
        height = 1.25 * size
        baseline = y + 0.35 * size - height * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            weight = ' font-weight="bold"' if bold and number == 0 else ""
            self.parts.append(
                f'<text x="{x:g}" y="{baseline + height * number:g}" font-size="{size:g}"'
                f' text-anchor="middle"{weight} fill="{INK}">{escape(line)}</text>'
            )

    def box(self, x, y, width, height, fill, new=False):
        """Draw a box; with a thick outline if it is new."""
        colour = NEW if new else LINE
        thickness = 3 if new else 1
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
            f' fill="{fill}" stroke="{colour}" stroke-width="{thickness}"/>'
        )

    def arrow(self, x1, y1, x2, y2):
        """Draw a straight arrow."""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{LINE}"'
            ' stroke-width="1.6" marker-end="url(#head)"/>'
        )

    def begin_column(self, rows):
        """Draw arrows from the column before to this one, in the rows that both have."""
        for row in rows:
            if row in self.ends:
                y = TOP + STEP * row + TALL / 2
                self.arrow(self.ends[row], y, self.x - 2, y)

    def end_column(self, width, rows):
        """Have the next column begin behind this one."""
        self.ends = dict.fromkeys(rows, self.x + width)
        self.x += width + self.gap

    def rows(self, width, lines, fill, new=False, only=RANKS):
        """Draw the same box in each row, or in those of `only`; `{n}` in its lines is the row."""
        self.begin_column(only)
        for row in only:
            y = TOP + STEP * row
            self.box(self.x, y, width, TALL, fill, new)
            row_lines = [line.format(n=row) for line in lines]
            self.text(self.x + width / 2, y + TALL / 2, row_lines, bold=True)
        self.end_column(width, only)

    def all_ranks(self, width, lines, arrows, size=12.0):
        """Draw a new box over all rows, and in it the `arrows`, which are pairs of devices."""
        self.begin_column(RANKS)
        self.box(self.x, TOP, width, BELOW - TOP, TOGETHER, new=True)
        middle = self.x + width / 2
        self.text(middle, TOP + 18 + 7.5 * len(lines), lines, size, bold=True)
        self.connect(middle, BELOW - 76, min(40, 0.31 * width), arrows)
        self.end_column(width, RANKS)

    def connect(self, x, y, radius, arrows):
        """Draw three devices on a circle around (x, y), and arrows between them."""
        places = [
            (x + radius * cos(angle), y + radius * sin(angle))
            for angle in (-pi / 2, pi / 6, 5 * pi / 6)
        ]
        distance = radius * 3**0.5
        for sender, receiver in arrows:
            x1, y1 = places[sender]
            x2, y2 = places[receiver]
            # (right, down) is the arrow's direction, of length 1, and (-down, right) lies across.
            right = (x2 - x1) / distance
            down = (y2 - y1) / distance
            # Two arrows between the same devices lie side by side.
            aside = 0.12 * radius if (receiver, sender) in arrows else 0.0
            start = 0.38 * radius
            stop = 0.45 * radius
            self.arrow(
                x1 + start * right - aside * down,
                y1 + start * down + aside * right,
                x2 - stop * right - aside * down,
                y2 - stop * down + aside * right,
            )
        for number, (x, y) in enumerate(places):
            self.parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{0.36 * radius:.1f}" fill="#ffffff"'
                f' stroke="{LINE}"/>'
            )
            self.text(x, y, [str(number)], size=max(9, 0.32 * radius), bold=True)

    def pieces(self, width, rows, tall=TALL / 2):
        """Draw boxes along the time of each row.

        `rows` are lists of Pieces, of which the last one ends last.
        """
        self.begin_column(RANKS)
        begin = self.x
        self.end_column(width, RANKS)
        for row, pieces in enumerate(rows):
            for piece in pieces:
                x = begin + piece.begin
                y = TOP + STEP * row + tall * piece.lane
                wide = piece.end - piece.begin
                self.box(x, y, wide, tall, piece.fill, piece.new)
                self.text(x + wide / 2, y + tall / 2, [piece.text], size=11)
            self.ends[row] = begin + pieces[-1].end

    def link_rows(self, x):
        """Draw a dashed line through all rows: what lies there is one message exchange."""
        self.parts.append(
            f'<path d="M{x:g} {TOP + TALL}V{BELOW}" stroke="#6a51a3" stroke-width="1.6"'
            ' stroke-dasharray="3 3"/>'
        )

    def svg(self, title, description, number, changed):
        """Return the whole picture, with what is new below it."""
        y = BELOW + 46
        self.box(LEFT, y - 13, 26, 18, "#ffffff", new=True)
        body = "\n".join(self.parts)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="t d" \
font-family="DejaVu Sans, Helvetica, Arial, sans-serif">
<title id="t">{escape(title)}</title>
<desc id="d">{escape(description)}</desc>
<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" \
orient="auto"><path d="M0 0L10 5L0 10z" fill="{LINE}"/></marker></defs>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
<text x="{WIDTH / 2:g}" y="28" font-size="16" text-anchor="middle" font-weight="bold" \
fill="{INK}">{escape(title)}</text>
{body}
<text x="{LEFT + 36}" y="{y}" font-size="13" fill="{INK}">\
{escape(f"New in lesson {number:02}: {changed}")}</text>
</svg>
"""


TO_ALL = [(0, 1), (0, 2)]
TO_ONE = [(1, 0), (2, 0)]
BOTH_WAYS = TO_ALL + TO_ONE
RING = [(0, 1), (1, 2), (2, 0)]


def data_parallel():
    """Draw stage 2: the master does all but forward and backward."""
    drawing = Drawing(names=("master", "device 1", "device 2"))
    drawing.rows(64, ["batch", "all of it"], DATA, only=[0])
    hand_out = ["scatter, replicate", "to each a shard and", "a copy of the model"]
    drawing.all_ranks(136, hand_out, TO_ALL)
    drawing.rows(80, ["forward", "shard {n}"], FORWARD)
    compare = ["gather, loss", "outputs come in, the", "loss's gradient goes out"]
    drawing.all_ranks(158, compare, BOTH_WAYS)
    drawing.rows(80, ["backward", "shard {n}"], BACKWARD)
    drawing.all_ranks(126, ["reduce", "the master adds up", "three gradients"], TO_ONE)
    for row in (1, 2):
        drawing.text(drawing.x + 50, TOP + STEP * row + TALL / 2, ["its copy is", "thrown away"])
    drawing.rows(96, ["update", "one model"], UPDATE, only=[0])
    return drawing


def begin_of_a_rank(drawing, new=False):
    """Draw what the rows of stages 3 to 5 begin with."""
    drawing.rows(116, ["shard {n}", "1/3 of the batch"], DATA, new)
    drawing.rows(98, ["forward", "same weights"], FORWARD)


def update_of_a_rank(drawing, new=False):
    """Draw what the rows of stages 3 to 6 end with."""
    drawing.rows(128, ["update", "weights stay equal"], UPDATE, new)


def one_after_the_other(drawing):
    """Draw the backward pass of stages 3 and 4, which is over before anything is sent."""
    drawing.rows(196, ["backward", "layer 3 → layer 2 → layer 1"], BACKWARD)


def parameter_server():
    """Draw stage 3: each rank has its own data and weights, and rank 0 averages."""
    drawing = Drawing(gap=28)
    begin_of_a_rank(drawing, new=True)
    one_after_the_other(drawing)
    server = ["parameter server", "gradients to rank 0,", "their average back"]
    drawing.all_ranks(170, server, BOTH_WAYS)
    update_of_a_rank(drawing, new=True)
    return drawing


def ring_all_reduce():
    """Draw stage 4: a ring in the place of the server."""
    drawing = Drawing(gap=28)
    begin_of_a_rank(drawing)
    one_after_the_other(drawing)
    drawing.all_ranks(170, ["ring all-reduce", "chunks of gradients,", "each to the right"], RING)
    update_of_a_rank(drawing)
    return drawing


def under_backward(drawing, unit, new):
    """Draw backward, layer by layer, and below it the buckets, each on all ranks together."""
    boxes = []
    for number in range(3):
        begin = unit * number
        ready = begin + unit
        boxes.append(Piece(begin, ready, 0, f"layer {3 - number}", BACKWARD))
        boxes.append(Piece(ready, ready + unit, 1, f"bucket {number}", TOGETHER, new))
        drawing.link_rows(drawing.x + ready + unit / 2)
    drawing.text(drawing.x + 1.5 * unit, TOP - 12, ["backward, and below it the network"])
    drawing.text(drawing.x + 2.5 * unit, BELOW + 14, ["each bucket: an all-reduce on the ring"])
    drawing.pieces(4 * unit, [boxes] * 3)


def bucketed():
    """Draw stage 5: buckets under the backward pass."""
    drawing = Drawing(gap=30)
    begin_of_a_rank(drawing)
    under_backward(drawing, 108, new=True)
    update_of_a_rank(drawing)
    return drawing


def complete():
    """Draw stage 6: what a complete DDP does before and after that."""
    drawing = Drawing(gap=14)
    drawing.rows(84, ["shard {n}", "or none left"], DATA, new=True)
    drawing.all_ranks(98, ["buffers", "rank 0's to all"], TO_ALL)
    drawing.rows(112, ["forward", "who is unused?"], FORWARD, new=True)
    under_backward(drawing, 70, new=False)
    drawing.all_ranks(100, ["bitmap", "who was used", "on any rank?"], RING)
    update_of_a_rank(drawing)
    return drawing


def sharded():
    """Draw stage 7, fully sharded: weights come for a moment, gradients go to their owner."""
    drawing = Drawing()
    drawing.rows(88, ["shard {n}", "1/3 of batch"], DATA)
    unit = 56  # A layer's forward pass is so wide, and `wide` its backward pass.
    wide = 106
    boxes = [Piece(0, unit, 1, "gather 1", TOGETHER, True)]
    for layer in (1, 2, 3):
        begin = unit * layer
        boxes.append(Piece(begin, begin + unit, 0, f"layer {layer}", FORWARD))
        if layer < 3:
            boxes.append(Piece(begin, begin + unit, 1, f"gather {layer + 1}", TOGETHER, True))
    turn = 4 * unit
    begin = turn + unit
    boxes.append(Piece(turn, begin, 1, "gather 3", TOGETHER, True))
    half = wide / 2
    boxes.append(Piece(begin, begin + wide, 0, "layer 3", BACKWARD))
    boxes.append(Piece(begin, begin + half, 1, "gather 2", TOGETHER, True))
    begin += wide
    boxes.append(Piece(begin, begin + wide, 0, "layer 2", BACKWARD))
    boxes.append(Piece(begin, begin + half, 1, "gather 1", TOGETHER, True))
    boxes.append(Piece(begin + half, begin + wide, 1, "sum 3", TOGETHER, True))
    begin += wide
    boxes.append(Piece(begin, begin + wide, 0, "layer 1", BACKWARD))
    boxes.append(Piece(begin, begin + half, 1, "sum 2", TOGETHER, True))
    begin += wide
    boxes.append(Piece(begin, begin + half, 1, "sum 1", TOGETHER, True))
    drawing.text(drawing.x + 2.5 * unit, TOP - 12, ["forward"])
    drawing.text(drawing.x + turn + unit + 1.5 * wide, TOP - 12, ["backward"])
    words = "gather: a layer's weights from all, freed after use; sum: reduce-scatter of gradients"
    drawing.text(drawing.x + begin / 2, BELOW + 14, [words])
    drawing.pieces(begin + half, [boxes] * 3)
    drawing.rows(98, ["update", "own third"], UPDATE, new=True)
    return drawing


def pipeline():
    """Draw stage 8: each rank has its layers, and micro-batches go through them."""
    drawing = Drawing(layers=("layer 1", "layer 2", "layer 3"))
    drawing.rows(104, ["whole batch", "in three parts"], DATA, new=True, only=[0])
    unit = 48  # A forward pass is so wide, and `wide` a backward pass.
    wide = 74
    turn = 5 * unit  # The last forward pass ends here.
    rows = []
    for rank in RANKS:
        boxes = []
        for part in range(3):
            ready = unit * (rank + part + 1)
            boxes.append(Piece(ready - unit, ready, 0, f"F{part}", FORWARD, True))
            back = turn + wide * (3 - rank + part)
            boxes.append(Piece(back - wide, back, 0, f"B{part}", BACKWARD, True))
            y = TOP + STEP * rank
            if rank < 2:
                x = drawing.x + ready
                drawing.arrow(x, y + TALL + 3, x, y + STEP - 4)
            if rank > 0:
                x = drawing.x + back
                drawing.arrow(x, y - 3, x, y - STEP + TALL + 4)
        rows.append(boxes)
    drawing.text(drawing.x + turn / 2, TOP - 12, ["forward: activations go down"])
    drawing.text(drawing.x + turn + 2.5 * wide, TOP - 12, ["backward: their gradients go up"])
    words = "F1, B1: forward and backward of the second micro-batch; in the gaps a rank idles"
    drawing.text(drawing.x + (turn + 5 * wide) / 2, BELOW + 14, [words])
    drawing.pieces(turn + 5 * wide, rows, tall=TALL)
    drawing.rows(98, ["update", "own layer"], UPDATE, new=True)
    return drawing


def tensor_parallel():
    """Draw stage 9: each rank has a slice of every layer, and activations are added up."""
    drawing = Drawing(gap=12)
    attention = ["attention", "1/3 of heads"]
    mlp = ["MLP", "1/3 of units"]
    drawing.rows(64, ["batch", "all of it"], DATA, new=True)
    passes = (
        ("forward", FORWARD, (attention, mlp), ["sum", "of outputs"]),
        ("backward", BACKWARD, (mlp, attention), ["sum", "of inputs'", "gradients"]),
    )
    for name, colour, parts, what_is_summed in passes:
        drawing.text(drawing.x + 170, TOP - 12, [name])
        for part in parts:
            drawing.rows(82, part, colour, new=True)
            drawing.all_ranks(74, what_is_summed, RING, size=11)
    drawing.rows(76, ["update", "own slices"], UPDATE, new=True)
    return drawing


class Iteration(NamedTuple):
    """A stage's picture: its title, what it shows in words, and what is new in it."""

    title: str
    description: str
    changed: str
    draw: Callable[[], Drawing]


ITERATIONS = {
    2: Iteration(
        "One iteration of DataParallel on three devices",
        "The master, device 0, gives each other device a shard of the batch and a copy of the"
        " model. Every device goes forward. The master gathers all outputs, computes the loss and"
        " sends its gradient out. Every device goes backward. The master adds up the three"
        " gradients and makes the update alone; the copies are thrown away.",
        "three devices compute; the master hands out, gathers, adds up, and updates alone",
        data_parallel,
    ),
    3: Iteration(
        "One iteration with a parameter server",
        "Each of three ranks takes a third of the batch and goes forward and backward with equal"
        " weights. Then ranks 1 and 2 send their gradients to rank 0, which sends the average"
        " back. Every rank makes the same update, so the weights stay equal.",
        "each rank reads its own data, keeps its own weights and updates them; rank 0 averages",
        parameter_server,
    ),
    4: Iteration(
        "One iteration with the ring all-reduce",
        "As with the server, but the gradients are averaged on a ring: each of three ranks sends"
        " chunks to its right neighbour, all at the same time, after the backward pass.",
        "the ring in the place of the server; all else stays",
        ring_all_reduce,
    ),
    5: Iteration(
        "One iteration with buckets",
        "Each of three ranks takes a third of the batch and goes forward and backward with equal"
        " weights. Backward begins with layer 3. As soon as its gradient is there, bucket 0"
        " travels around the ring while backward computes layer 2; the last bucket travels when"
        " backward is over. Every rank makes the same update, so the weights stay equal.",
        "buckets leave in order, each as soon as it is full: all but the last under the backward"
        " pass",
        bucketed,
    ),
    6: Iteration(
        "One iteration of a complete DDP",
        "Before forward, rank 0's buffers go to all ranks. After forward each rank looks for"
        " parameters that were not used. Buckets travel under the backward pass, as in lesson 05."
        " Then the ranks add up a bitmap of who was used, and update. A rank without data joins"
        " in with zeros.",
        "buffers, unused parameters, ranks that have run out of data",
        complete,
    ),
    7: Iteration(
        "One iteration, fully sharded",
        "Each rank keeps a third of every layer. Before a layer computes, its weights are"
        " gathered from all ranks, while the layer before it computes, and freed after use; for"
        " the backward pass they are gathered again. Each layer's gradients are summed up at"
        " their owners, which update their own third.",
        "a rank keeps a third of each layer; the rest comes for as long as it is used",
        sharded,
    ),
    8: Iteration(
        "One iteration of a pipeline (GPipe)",
        "Rank 0 has layer 1, rank 1 layer 2, rank 2 layer 3. The whole batch is cut into three"
        " micro-batches. Their activations go down from rank to rank, then the gradients of the"
        " activations go up. At the beginning, in the middle and at the end ranks idle. Each rank"
        " updates its own layer; no gradient of a weight is sent.",
        "a rank has its own layers, for all of the data; only activations and their gradients"
        " travel",
        pipeline,
    ),
    9: Iteration(
        "One iteration of tensor parallelism",
        "All ranks work on the whole batch, each with a third of the attention heads and of the"
        " MLP's units. In the forward pass their outputs are added up after the attention and"
        " after the MLP; in the backward pass the gradients of the inputs, before each of them."
        " Each rank updates its own slices; no gradient of a weight is sent.",
        "a rank has a slice of every layer; activations are added up twice, and their gradients"
        " too",
        tensor_parallel,
    ),
}


def iterations():
    """Return {name of a file: its text} of all pictures."""
    pictures = {}
    for number, iteration in ITERATIONS.items():
        svg = iteration.draw().svg(
            iteration.title, iteration.description, number, iteration.changed
        )
        pictures[f"iteration_{number:02}.svg"] = svg
    return pictures
