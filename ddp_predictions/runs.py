"""Reads a `Run` from what people write: lines of tables, Hugging Face's config.json, presets.

`read_run` takes a dict of texts or numbers with the columns of transformer_throughput.csv, with the
names of a config.json, or with those of gpt_step_ms_a100_3d.csv. A model of models.csv needs no
shape. A missing field has a default, and every default that counts is returned in words.
"""

import re
from functools import cache
from typing import Any

from manyranks import presets

from .frozen import lines_of
from .transformers import WAYS, Run

Row = dict[str, Any]
# Other people's names of columns are translated to ours.
COLUMNS = {
    "num_hidden_layers": "layers",
    "n_layer": "layers",
    "# layers": "layers",
    "n_layers": "layers",
    "hidden_size": "hidden",
    "n_embd": "hidden",
    "hidden size": "hidden",
    "d_model": "hidden",
    "num_attention_heads": "heads",
    "n_head": "heads",
    "attention heads": "heads",
    "n_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ff",
    "n_inner": "ff",
    "vocab_size": "vocab",
    "sequence length": "seq",
    "n_positions": "longest",
    "max_position_embeddings": "longest",
    "micro batch": "micro_batch",
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "tensor parallelism": "tensor",
    "# GPUs": "gpus",
    "pipeline parallelism": "pipeline",
    "data parallelism": "data",
    "sharding": "way",
    "global batch": "batch",
    "network_gbit_per_host": "network",
}
WAY_NAMES = {
    "full": "fsdp",
    "zero3": "fsdp",
    "grad_op": "zero2",
    "hsdp": "hybrid",
    "zero-1": "zero1",
    "zero-2": "zero2",
    "zero-3": "fsdp",
}
RECOMPUTE = {"none": 0.0, "selective": 0.5, "full": 1.0}
SHAPE = {"layers", "hidden", "heads"}
# All runs of gpt_step_ms_a100_3d.csv have these values, and no column says so.
GPT_TABLE = {
    "gpu": "A100",
    "recompute": "full",
    "attention": "unfused",
    "overlap": "no",
    "network": 800,
    "vocab": 51_200,
    "way": "zero1",
}


@cache
def models() -> dict[str, Row]:
    """Return known architectures by name, as in their published configurations."""
    return {line.pop("name"): line for line in lines_of("models.csv")}


class UnknownAccelerator(ValueError):
    """A row's GPU is in no table; other rows may be predicted all the same."""


class Reader:
    """The fields of a row by our names; `assumed` collects what had to be assumed, in words."""

    def __init__(self, row: Row):
        self.fields: Row = {}
        self.titles: dict[str, str] = {}
        self.assumed: list[str] = []
        for title, value in row.items():
            name = COLUMNS.get(title, title)
            self.titles[name] = title
            if value not in (None, ""):
                self.fields[name] = value

    def wrong(self, name: str, expected: str) -> ValueError:
        """Return the error for a field that cannot be."""
        title = self.titles.get(name, name)
        return ValueError(f'"{title}" is {self.fields.get(name, "missing")}; {expected}')

    def assume(self, name: str, value: Any, words: str = "") -> Any:
        """Note in words that a `value` is assumed, and return it."""
        self.assumed.append(words or f"{name.replace('_', ' ')} {value}")
        return value

    def whole(self, name: str, default: int | None = None, words: str = "") -> int:
        """Return a whole number from 1 on; raises ValueError, which names the field, for others."""
        if name not in self.fields and default is not None:
            return self.assume(name, default, words)
        text = str(self.fields.get(name, "missing"))
        if not re.fullmatch(r"[1-9]\d{0,11}(\.0)?", text):
            raise self.wrong(name, "it must be a whole number, 1 or more")
        return int(float(text))

    def text(self, name: str, default: str, words: str = "") -> str:
        """Return a field as text, or else the default."""
        return str(self.fields.get(name) or self.assume(name, default, words))

    def choice(self, name: str, choices: Any, default: str) -> str:
        """Return one of the `choices`; raises ValueError, which names the field, for other text."""
        text = self.text(name, default).strip()
        if text not in choices:
            raise self.wrong(name, f"choose one of {', '.join(choices)}")
        return text

    def rate(self, name: str) -> float:
        """Return the bits per second of a link: a number of Gbit/s, "25Gbit", or a known link.

        Raises ValueError, which names the field, for other text.
        """
        value = self.fields.get(name)
        if value is None:
            return 0.0
        text = str(value).strip()
        try:
            plain = re.fullmatch(r"\d+(\.\d+)?", text)
            bits = 1e9 * float(text) if plain else float(presets.bandwidth(text))
        except Exception:
            bits = 0.0
        # NaN lies in no range, and no link carries a petabit.
        if not 0 < bits < 1e15:
            known = ", ".join(presets.LINKS)
            raise self.wrong(name, f'give Gbit/s as in 400, "25Gbit", or one of {known}')
        return bits


def read_gpu(reader: Reader) -> str:
    """Return the name of the row's GPU; raise UnknownAccelerator where nothing is known of it."""
    gpu = str(reader.fields.get("gpu"))
    gpu = presets.ALIASES.get(gpu, gpu)
    # Without a GPU's cycles attention cannot be predicted.
    names = [name for name, entry in presets.ACCELERATORS.items() if entry.cycles]
    if gpu not in names:
        raise UnknownAccelerator(
            f"{reader.wrong('gpu', 'choose one of')} {', '.join([*names, *presets.ALIASES])}; or"
            f' teach it: --accelerator "{gpu}=FLOP/s,bytes/s", as in "{gpu}=989TFLOP/s,2.4TB/s"'
        )
    return gpu


def read_run(row: Row) -> tuple[Run, list[str]]:
    """Return the run of a row, and in words what is assumed.

    Raises ValueError, which names the field, for one that cannot be.
    """
    reader = Reader(row)
    fields = reader.fields
    # Only gpt_step_ms_a100_3d.csv has this title.
    if "# GPUs" in row:
        for column, value in GPT_TABLE.items():
            if column not in fields:
                fields[column] = reader.assume(column, value)
    shape = read_shape(reader)
    gpu = read_gpu(reader)
    known = presets.ACCELERATORS[gpu]
    way = reader.text("way", "fsdp")
    fields["way"] = WAY_NAMES.get(way.lower(), way)
    pure = reader.choice("precision", ("bf16 mixed", "bf16 pure"), "bf16 mixed") == "bf16 pure"
    run = Run(
        **shape,
        gpu=gpu,
        gpus=reader.whole("gpus"),
        gpus_per_host=reader.whole("gpus_per_host", 8, "8 GPUs per host"),
        network=reader.rate("network"),
        inside=reader.rate("inside"),
        micro_batch=reader.whole("micro_batch", 1, "micro-batches of 1 sequence"),
        accumulate=1,  # Until the run says how many copies share the batch.
        tensor=reader.whole("tensor", 1),
        pipeline=reader.whole("pipeline", 1),
        way=reader.choice("way", WAYS, "fsdp"),
        recompute=read_recompute(reader),
        pure=pure,
        reduce_bytes=reader.whole("reduce_bytes", 2 if pure else 4),
        attention=reader.choice("attention", ("fused", "unfused"), "fused"),
        kernels=reader.choice("kernels", ("compiled", "eager"), "compiled"),
        overlap=reader.choice("overlap", ("yes", "no"), "yes") == "yes",
        model=str(fields.get("model", "a transformer")),
    )
    check_ways(reader, run)
    run.accumulate = read_accumulate(reader, run)
    if not run.network and run.gpus > run.inside_host:
        reader.assume("network", known.network, f"{known.network / 1e9:,.0f} Gbit/s per host")
    if not run.inside and run.inside_host > 1:
        reader.assume("inside", known.link, f"{known.link} inside a host")
    return run, reader.assumed


def read_shape(reader: Reader) -> Row:
    """Return the architecture's fields: from the row, else from the model of that name.

    Raises ValueError, which names the field, for a shape that cannot be or is not foretold.
    """
    fields = reader.fields
    name = str(fields.get("model", "")).split(" ")[0].lower()
    known = models().get(name, {})
    for column, value in known.items():
        fields.setdefault(column, value)
    if "num_local_experts" in fields:
        raise reader.wrong("num_local_experts", "layers of experts are not foretold")
    if fields.get("model") and not fields.keys() >= SHAPE:
        raise reader.wrong(
            "model", f"give layers, hidden and heads, or one of {', '.join(models())}"
        )
    hidden = reader.whole("hidden")
    heads = reader.whole("heads")
    if hidden % heads:
        raise reader.wrong("heads", f"a width of {hidden} does not divide evenly over them")
    fields.setdefault("longest", 2048)
    # Longer contexts are trained last, and briefly.
    usual = min(reader.whole("longest"), 8192)
    seq = reader.whole("seq", usual, f"sequences of {usual:,} tokens")
    ff = reader.whole("ff", 4 * hidden, "MLPs of 4 times the width")
    # Models with SiLU have gates.
    silu = "silu" in str(fields.get("hidden_act", ""))
    gated = reader.choice("gated", ("yes", "no"), "yes" if silu else "no") == "yes"
    return {
        "layers": reader.whole("layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": reader.whole("kv_heads", heads, "keys and values for each head"),
        "ff": ff,
        "gated": gated,
        "vocab": reader.whole("vocab", 50_257, "a vocabulary of 50,257"),
        "seq": seq,
    }


def read_recompute(reader: Reader) -> float:
    """Return the part of the forward pass that is run again, from "full" or "selective (…)".

    Raises ValueError, which names the field, for other words.
    """
    word = reader.text("recompute", "none", "nothing recomputed").split(" ")[0]
    if word not in RECOMPUTE:
        raise reader.wrong("recompute", f"choose one of {', '.join(RECOMPUTE)}")
    return RECOMPUTE[word]


def read_accumulate(reader: Reader, run: Run) -> int:
    """Return the micro-batches per copy and step, from `accumulate` or from a step's sequences.

    Raises ValueError, which names the field, for a batch that does not come out even.
    """
    if "batch" not in reader.fields:
        return reader.whole("accumulate", 1, "1 micro-batch per step")
    batch = reader.whole("batch")
    if batch % (run.data * run.micro_batch):
        raise reader.wrong(
            "batch",
            f"it does not come out even over {run.data} copies with micro-batches of"
            f" {run.micro_batch}; choose a multiple",
        )
    return batch // (run.data * run.micro_batch)


def check_ways(reader: Reader, run: Run) -> None:
    """Raise ValueError if GPUs, hosts, layers and heads do not fit the ways."""
    ways = run.tensor * run.pipeline
    reader.fields.setdefault("data", max(1, run.data))
    data = reader.whole("data")
    if ways * data != run.gpus:
        raise reader.wrong(
            "gpus",
            f"{run.tensor} x {data} x {run.pipeline} ways are {ways * data} GPUs; choose a multiple"
            f" of {ways}",
        )
    if run.gpus % run.inside_host:
        raise reader.wrong(
            "gpus",
            f"they do not fill hosts of {run.gpus_per_host}; choose a multiple, or give"
            " gpus_per_host",
        )
    if run.pipeline > run.layers:
        raise reader.wrong(
            "pipeline",
            f"{run.pipeline} stages for {run.layers} layers; give each stage at least one",
        )
    if run.heads % run.tensor:
        raise reader.wrong("tensor", f"{run.heads} heads do not divide evenly over them")
