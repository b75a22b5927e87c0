import os
import pickle
import random
import resource
import signal
import time
import warnings
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
import torch.distributed as dist
from soak.checkpoints import soak

from ddp_course import launch
from ddp_course.errors import CheckpointError
from ddp_course.running import checkpoint


def state_of(number, size=1000):
    """A state that is the same whenever it is asked for, and different for each number."""
    generator = torch.Generator().manual_seed(number)
    return {
        "model": {"weight": torch.randn(size, generator=generator), "count": torch.tensor(number)},
        "optimizer": {"state": {0: {"step": 3.5}}, "param_groups": [{"params": [0, 1], "betas": (0.9, 0.999)}]},
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
        assert file.exists() and same(checkpoint.load(folder), state_of(number))
    assert sorted(os.listdir(folder)) == [".writer", ".writer.lock", "checkpoint-00000003.pt", "checkpoint-00000004.pt"]
    (folder / ".abc.tmp").write_bytes(b"half a checkpoint, of a writer that was killed")
    checkpoint.save(folder, state_of(5), keep=3)
    assert [number for number, _ in checkpoint.checkpoints(folder)] == [5, 4, 3] and len(os.listdir(folder)) == 5
    with pytest.raises(ValueError, match="keep is 0"):
        checkpoint.save(folder, state_of(6), keep=0)


def test_nothing_to_load_is_said(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            checkpoint.load(folder)


def damaged(content, chance):
    """A whole checkpoint, cut short somewhere, or with one bit flipped."""
    position = chance.randrange(len(content))
    if chance.random() < 0.5:
        return content[:position]
    return content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1 :]


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path):
    chance = random.Random(0)
    checkpoint.save(tmp_path, state_of(1))
    newest = checkpoint.save(tmp_path, state_of(2))
    whole = newest.read_bytes()
    for broken in [b"", whole[:10], whole[:-1], *(damaged(whole, chance) for _ in range(60))]:
        newest.write_bytes(broken)
        with pytest.warns(UserWarning, match="skipped the checkpoint checkpoint-00000002.pt"):
            assert same(checkpoint.load(tmp_path), state_of(1))
    newest.write_bytes(whole)
    assert same(checkpoint.load(tmp_path), state_of(2))
    for _, file in checkpoint.checkpoints(tmp_path):
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
    monkeypatch.setattr(checkpoint, "check_plain", lambda state: None)
    checkpoint.save(tmp_path, {"model": Malicious()})
    with pytest.warns(UserWarning, match="checkpoint-00000002.pt: it holds what no checkpoint may hold: Weights only"):
        assert same(checkpoint.load(tmp_path), state_of(1)), "the one before it is as good as ever"
    assert not os.path.isdir("was-here")


def hung_on():
    tensor = torch.ones(2)
    tensor.owner = Malicious()
    return tensor


ODD = [np.float64(1.0), torch.nn.Linear(2, 2), {1, 2}, torch.float32, defaultdict(int), Counter()]
EVEN = [OrderedDict(a=1), torch.Size([2]), torch.nn.Parameter(torch.ones(2)), 2j, b"x", (1, [2.5]), {(1, "a"): None}]


@pytest.mark.parametrize("value", ODD)
def test_only_plain_data_is_saved_and_the_place_is_named(tmp_path, value):
    with pytest.raises(CheckpointError, match=rf"state\['a'\]\[1\] is a {type(value).__name__}"):
        checkpoint.save(tmp_path, {"a": [0, value]})
    with pytest.raises(CheckpointError, match=r"the key .* is a "):
        checkpoint.save(tmp_path, {"a": {np.float64(1.0): 1}})
    with pytest.raises(CheckpointError, match=r"what was hung on the tensor state\['a'\]\['owner'\] is a Malicious"):
        checkpoint.save(tmp_path, {"a": hung_on()})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", EVEN)
def test_whatever_is_saved_can_be_loaded(tmp_path, value):
    checkpoint.save(tmp_path, {"a": [value]})
    [loaded] = checkpoint.load(tmp_path)["a"]
    assert type(loaded) is type(value) and same(loaded, value)


def no_space(folder):
    """Save with a limit on the size of files, as on a full disk; returns the message and what is in the folder."""
    checkpoint.save(folder, state_of(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        checkpoint.save(folder, state_of(2, size=1_000_000))
    except CheckpointError as error:
        return str(error), sorted(os.listdir(folder)), same(checkpoint.load(folder), state_of(1))


def test_a_full_disk_loses_nothing(tmp_path):
    [(message, files, kept)] = launch(no_space, str(tmp_path), world_size=1)
    assert message.startswith(f'no checkpoint could be written to "{tmp_path}": File too large')
    assert files == [".writer", ".writer.lock", "checkpoint-00000001.pt"] and kept


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint could be written"):
        checkpoint.save(tmp_path / "file" / "run", state_of(1))


def test_an_old_checkpoint_that_cannot_be_deleted_is_only_told(tmp_path):
    (tmp_path / "checkpoint-00000001.pt").mkdir()
    checkpoint.save(tmp_path, state_of(2))
    with pytest.warns(UserWarning, match="the old checkpoint .*checkpoint-00000001.pt could not be deleted"):
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
    assert complaint.startswith(f'another run writes its checkpoints to "{tmp_path}" (process {os.getpid()} on ')
    assert same(checkpoint.load(tmp_path), state_of(1))
    assert launch(save_or_complain, str(tmp_path), world_size=1) == [None], "the first run is over"


def killed_writers(folder, kills):
    """Fork writers that save one checkpoint after the other and kill each at a random moment.

    Returns for each: the step last known to be saved, the step that is loaded (None if none can be), whether
    everything loaded was right, and whether the writer was caught with a temporary file.
    """
    chance, outcomes = random.Random(1), []
    for attempt in range(kills):
        place, known = os.path.join(folder, str(attempt)), os.path.join(folder, f"{attempt}.known")
        writer = os.fork()
        if writer == 0:
            for step in range(1, 1000):
                checkpoint.save(place, state_of(step, size=500_000))
                with open(known, "w") as file:
                    file.write(str(step))
            os._exit(0)
        while not os.path.exists(known):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        caught = any(name.endswith(".tmp") for name in os.listdir(place))
        with open(known) as file:
            saved = int(file.read() or 0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                state = checkpoint.load(place)
            outcomes.append((saved, state["step"], same(state, state_of(state["step"], size=500_000)), caught))
        except (CheckpointError, UserWarning):
            outcomes.append((saved, None, False, caught))
        for name in os.listdir(place):
            os.unlink(os.path.join(place, name))
    return outcomes


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    [outcomes] = launch(killed_writers, str(tmp_path), 25, world_size=1)
    assert all(whole and loaded >= saved for saved, loaded, whole, _ in outcomes)
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
    checkpoint.set_random_state(loaded[:1])  # of a run with one rank
    return after, again, draws()


def test_the_random_state_of_every_rank_comes_back(tmp_path):
    ranks = launch(random_states, str(tmp_path), world_size=3)
    assert all(after == again for after, again, _ in ranks)
    assert len({after for after, *_ in ranks}) == 3
    assert ranks[0][2] == ranks[0][0] and ranks[1][2] != ranks[1][0]


def test_of_all_gpus_only_the_state_of_this_ranks_is_kept(monkeypatch):
    put = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "of this rank's GPU")
    monkeypatch.setattr(torch.cuda, "set_rng_state", put.append)
    for other in ("get_rng_state_all", "set_rng_state_all"):  # they would make a context on every GPU
        monkeypatch.setattr(torch.cuda, other, lambda *_: pytest.fail("touches all GPUs"))
    states = checkpoint.random_states()
    checkpoint.set_random_state(states)
    assert put == [states[0]["cuda"]] == ["of this rank's GPU"]


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = {**before, "0.weight": torch.zeros(2, 4), "1.bias": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r'"0.weight" is \(2, 4\) in the checkpoint and \(2, 3\) in the model'):
        checkpoint.load_model(model, other)
    with pytest.raises(CheckpointError, match=r'"1.bias" is missing in the checkpoint .* 1 more differ'):
        checkpoint.load_model(
            model, {name: before[name] for name in ("0.weight", "0.bias")} | {"1.weight": before["0.bias"]}
        )
    assert same(dict(model.state_dict()), before)
    checkpoint.load_model(model, {name: torch.ones_like(tensor) for name, tensor in before.items()})
    assert model[1].bias.item() == 1


def test_runs_killed_at_random_moments_resume_to_the_last_bit():
    kills, _ = soak(3, seed=1, cases=[("6", 4, "bytes"), ("5", 2, "digits")], kills=2)
    assert kills >= 3
