"""A script that is right has none of the usual mistakes; each of them, planted, is found."""

import pytest

from manyranks import audit

SOURCE = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = torch.nn.Linear(4, 2)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
if dist.get_rank() == 0:
    torch.save({"model": model.state_dict()}, os.path.join(sys.argv[1], "never-written.pt"))
"""
MISTAKES = {
    "no DistributedSampler": ("sampler=sampler)", "shuffle=True)"),
    "set_epoch is not called": ("    sampler.set_epoch(epoch)\n", ""),
    "weights differ": ("cross_entropy(parallel(", "cross_entropy(model("),
    "all write": ("if dist.get_rank() == 0:", "if True:"),
    'begin with "module."': ("model.state_dict()", "parallel.state_dict()"),
    "zero_grad() is not called": ("        optimizer.zero_grad()\n", ""),
    "rank=0, world_size=1": (
        'dist.init_process_group("gloo")',
        'dist.init_process_group("gloo", rank=0, world_size=1)',
    ),
    "told num_replicas=1": (
        "DistributedSampler(data)",
        "DistributedSampler(data, num_replicas=1, rank=0)",
    ),
    "before step() was in no_sync()": (
        "        loss = cross_entropy(parallel(inputs), targets)\n        loss.backward()\n",
        "        with parallel.no_sync():\n"
        "            loss = cross_entropy(parallel(inputs), targets)\n"
        "        loss.backward()\n",
    ),
    "two forward passes": (
        "        loss.backward()\n",
        "        again = cross_entropy(parallel(inputs), targets)\n"
        "        loss.backward()\n        again.backward()\n",
    ),
    "another number of targets": ("(inputs), targets)", "(inputs), targets, ignore_index=1)"),
    "each worker yields all": (
        "DataLoader(data, batch_size=8, sampler=sampler)",
        'DataLoader(type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self:'
        " (data[n] for n in sampler)})(), batch_size=8, num_workers=2)",
    ),
}


def test_the_script_has_none_of_them():
    assert audit(SOURCE) == []


@pytest.mark.parametrize("words", MISTAKES)
def test_a_planted_mistake_is_found_and_no_other(words):
    right, wrong = MISTAKES[words]
    assert SOURCE.count(right) == 1
    messages = audit(SOURCE.replace(right, wrong))
    assert len(messages) == 1, messages
    assert words in messages[0], messages


OWN_DATA = """
class Own(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(index % 2)}
"""
OWN_SCRIPT = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
dist.init_process_group("gloo")
%s
data = Own()
%s
model = torch.nn.Linear(4, 2)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(batch["x"]), batch["y"]).backward()
        optimizer.step()
    for batch in DataLoader(data, batch_size=32):  # validation, on all ranks
        model(batch["x"])
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "never-written.pt")
"""
BY_HAND = "loader = DataLoader(Subset(data, range(dist.get_rank(), 64, 2)), batch_size=8)"
IN_ORDER = (
    "loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))"
)
SHUFFLED = (
    "loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=1)"
)
ALL = "loader = DataLoader(data, batch_size=8)"


@pytest.mark.parametrize(
    "loader, words",
    [
        (BY_HAND, None),
        (IN_ORDER, None),
        (SHUFFLED, "set_epoch is not called"),
        (ALL, "no DistributedSampler"),
    ],
)
def test_a_script_may_share_its_own_data_in_its_own_way(loader, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    messages = audit(OWN_SCRIPT % (OWN_DATA, loader))
    assert len(messages) == int(words is not None)
    assert all(words in message for message in messages)
    assert not (tmp_path / "never-written.pt").exists()


def test_what_was_not_seen_is_said():
    messages = audit("model = None")
    assert len(messages) == 2
    assert all(message.startswith("not seen") for message in messages)


def test_a_path_in_the_temporary_folder_is_in_the_temporary_folder():
    script = "import os, sys; assert os.path.isdir(os.path.dirname(sys.argv[1])), sys.argv"
    assert len(audit(script, ["FOLDER/run.json"])) == 2
