"""A checkpoint comes back whole, whoever is killed, and whatever the disk does."""

import os
import pickle
import random
import resource
import shutil
import signal
import time
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp_course import checkpoint, launch
from ddp_course.base.errors import CheckpointError


def state_of(number, size=1000):
    """Return a state that is the same whenever it is asked for, and different for each number."""
    generator = torch.Generator().manual_seed(number)
    return {
        "model": {"weight": torch.randn(size, generator=generator), "count": torch.tensor(number)},
        "optimizer": {
            "state": {0: {"step": 3.5}},
            "param_groups": [{"params": [0, 1], "betas": (0.9, 0.999)}],
        },
        "step": number,
        "note": "ü",
        "nothing": None,
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def test_what_is_saved_is_loaded_and_the_newest_are_kept(tmp_path):
    folder = tmp_path / "new" / "run"
    for number in range(1, 5):
        file = checkpoint.save(folder, state_of(number))
        assert file.exists()
        assert same(checkpoint.load(folder), state_of(number))
    assert sorted(os.listdir(folder)) == [
        ".writer",
        ".writer.lock",
        "checkpoint-00000003.pt",
        "checkpoint-00000004.pt",
    ]
    (folder / ".abc.tmp").write_bytes(b"half a checkpoint, of a writer that was killed")
    checkpoint.save(folder, state_of(5), keep=3)
    assert [file.stem[-1] for file in checkpoint.checkpoints(folder)] == ["5", "4", "3"]
    assert len(os.listdir(folder)) == 5
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoint.save(folder, state_of(6), keep=0)
    for empty in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            checkpoint.load(empty)


def damaged(content, chance):
    """Return a whole checkpoint with one bit flipped."""
    position = chance.randrange(len(content))
    return (
        content[:position]
        + bytes([content[position] ^ 1 << chance.randrange(8)])
        + content[position + 1 :]
    )


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path):
    chance = random.Random(0)
    checkpoint.save(tmp_path, state_of(1))
    newest = checkpoint.save(tmp_path, state_of(2))
    whole = newest.read_bytes()
    for length in (0, 10, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(30))):
        newest.write_bytes(whole[:length])
        with pytest.warns(
            UserWarning, match="skipped the checkpoint checkpoint-00000002.pt: it is damaged"
        ):
            assert same(checkpoint.load(tmp_path), state_of(1))
    skipped = 0
    for _ in range(60):
        newest.write_bytes(damaged(whole, chance))
        # A bit between two parts of the file changes nothing.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert same(checkpoint.load(tmp_path), state_of(2 - len(caught)))
        skipped += len(caught)
    assert skipped > 30
    newest.write_bytes(whole)
    assert same(checkpoint.load(tmp_path), state_of(2))
    assert same(torch.load(newest), state_of(2))
    for file in checkpoint.checkpoints(tmp_path):
        file.write_bytes(b"nothing")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="all 2 checkpoints"):
        checkpoint.load(tmp_path)


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("was-here",)


def test_a_checkpoint_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Malicious()))
    assert os.path.isdir("was-here"), "the attack works where nobody guards against it"
    os.rmdir("was-here")
    checkpoint.save(tmp_path, state_of(1))
    monkeypatch.setattr(torch.serialization, "get_unsafe_globals_in_checkpoint", lambda file: [])
    checkpoint.save(tmp_path, {"model": Malicious()})
    with pytest.warns(
        UserWarning, match="checkpoint-00000002.pt: it is damaged, .* UnpicklingError: Weights"
    ):
        assert same(checkpoint.load(tmp_path), state_of(1)), "the one before it is as good as ever"
    assert not os.path.isdir("was-here")


def hung_on():
    tensor = torch.ones(2)
    tensor.owner = Malicious()
    return tensor


PLAIN = [
    OrderedDict(a=1),
    torch.Size([2]),
    torch.nn.Parameter(torch.ones(2)),
    2j,
    b"x",
    (1, [2.5]),
    {(1, "a"): None},
]


@pytest.mark.parametrize(
    "value, words",
    [(np.float64(1.0), "numpy"), (torch.nn.Linear(2, 2), "Linear"), (hung_on(), "mkdir")],
)
def test_only_what_can_be_loaded_is_saved(tmp_path, value, words):
    with pytest.raises(
        CheckpointError,
        match=rf"cannot be saved \(.*{words}.*\): a checkpoint holds tensors, numbers",
    ):
        checkpoint.save(tmp_path, {"a": [0, value]})
    assert os.listdir(tmp_path) == []
    checkpoint.save(tmp_path, {"a": PLAIN})
    loaded = checkpoint.load(tmp_path)["a"]
    assert list(map(type, loaded)) == list(map(type, PLAIN))
    assert all(map(same, loaded, PLAIN))


def no_space(folder):
    """Save with a limit on the size of files, as on a full disk.

    Return the message and what is in the folder.
    """
    checkpoint.save(folder, state_of(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        checkpoint.save(folder, state_of(2, size=1_000_000))
    except CheckpointError as error:
        return str(error), sorted(os.listdir(folder)), same(checkpoint.load(folder), state_of(1))


def test_a_full_disk_loses_nothing(tmp_path):
    [(message, files, kept)] = launch(no_space, str(tmp_path), world_size=1)
    assert message.startswith(f'no checkpoint could be written to "{tmp_path}": File too large')
    assert files == [".writer", ".writer.lock", "checkpoint-00000001.pt"]
    assert kept
    with pytest.raises(CheckpointError, match="no checkpoint could be written"):
        # No folder can be made below a file.
        checkpoint.save(tmp_path / "checkpoint-00000001.pt" / "run", state_of(1))


def test_an_old_checkpoint_that_cannot_be_deleted_is_only_told(tmp_path):
    (tmp_path / "checkpoint-00000001.pt").mkdir()
    checkpoint.save(tmp_path, state_of(2))
    with pytest.warns(
        UserWarning, match="the old checkpoint .*checkpoint-00000001.pt could not be deleted"
    ):
        checkpoint.save(tmp_path, state_of(3))
    assert same(checkpoint.load(tmp_path), state_of(3))


def save_or_complain(folder):
    try:
        checkpoint.save(folder, state_of(2))
    except CheckpointError as error:
        return str(error)


def test_a_second_run_in_the_folder_is_refused_and_names_the_first(tmp_path):
    with checkpoint.writing_to(tmp_path):
        checkpoint.save(tmp_path, state_of(1))
        [complaint] = launch(save_or_complain, str(tmp_path), world_size=1)
    assert complaint.startswith(
        f'another run writes its checkpoints to "{tmp_path}" (process {os.getpid()} on '
    )
    assert same(checkpoint.load(tmp_path), state_of(1))
    assert launch(save_or_complain, str(tmp_path), world_size=1) == [None], "the first run is over"


def killed_writers(folder):
    """Fork writers that save one checkpoint after the other, and kill each at a random moment.

    It goes on until 3 were writing. Returns for each: the step last known to be saved, the step
    that is loaded, whether all that was loaded is right, and whether the writer was caught with a
    temporary file.
    """
    chance = random.Random(1)
    outcomes = []
    warnings.simplefilter("error")  # a damaged checkpoint would be skipped with a warning
    for attempt in range(250):
        if attempt >= 25 and sum(caught for *_, caught in outcomes) >= 3:
            break
        place = Path(folder, str(attempt))
        known = Path(folder, f"{attempt}.known")
        writer = os.fork()
        if writer == 0:
            for step in range(1, 1000):
                checkpoint.save(place, state_of(step, size=500_000))
                known.write_text(str(step))
            os._exit(0)
        while not known.exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        state = checkpoint.load(place)
        caught = bool(list(place.glob(".*.tmp")))
        right = same(state, state_of(state["step"], size=500_000))
        outcomes.append((int(known.read_text() or 0), state["step"], right, caught))
        shutil.rmtree(place)
    return outcomes


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    [outcomes] = launch(killed_writers, str(tmp_path), world_size=1)
    assert all(right and loaded >= saved for saved, loaded, right, _ in outcomes)
    assert sum(caught for *_, caught in outcomes) >= 3, "hardly a kill hit the middle of writing"


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def random_states(folder):
    """Draw, save, draw, go back, draw again; and what another world size makes of it."""
    rank = dist.get_rank()
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    draws()
    checkpoint.save(folder, {"random": checkpoint.random_states()})
    after = draws()
    dist.barrier()
    loaded = checkpoint.load(folder)["random"]
    checkpoint.set_random_state(loaded)
    again = draws()
    checkpoint.set_random_state(loaded[:1])  # That is the state of a run with one rank.
    return after, again, draws()


def test_the_random_state_of_every_rank_comes_back(tmp_path):
    ranks = launch(random_states, str(tmp_path), world_size=3)
    assert all(after == again for after, again, _ in ranks)
    assert len({after for after, *_ in ranks}) == 3
    assert ranks[0][2] == ranks[0][0]
    assert ranks[1][2] != ranks[1][0]


def test_a_number_of_nine_digits_is_newer_than_one_of_eight(tmp_path):
    checkpoint.save(tmp_path, {"step": 1})
    (tmp_path / "checkpoint-00000001.pt").rename(tmp_path / "checkpoint-99999999.pt")
    for step in (2, 3):
        assert checkpoint.save(tmp_path, {"step": step}).stem == f"checkpoint-{99999998 + step}"
        assert checkpoint.load(tmp_path) == {"step": step}
    assert len(checkpoint.checkpoints(tmp_path)) == 2


def test_what_cannot_be_read_back_is_refused_before_it_is_written(tmp_path):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for state in (deep, {"number": 10**5000}):
        with pytest.raises(CheckpointError, match="cannot be saved"):
            checkpoint.save(tmp_path, state)
    assert not checkpoint.checkpoints(tmp_path)
    while deep:  # Python would take it apart recursively.
        deep = deep.pop()
