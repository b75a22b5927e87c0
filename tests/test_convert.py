"""docs/CONVERT.md, followed to the letter: its script gives one result on one rank and on two."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def changed(script, diff):
    """Return `script` after one diff of the page; each piece that it names stands there once."""
    pieces = []
    for line in diff:
        if line[0] != "+" and (not pieces or pieces[-1][1]):
            pieces.append(([], []))
        old, new = pieces[-1]
        if line[0] != "+":
            old.append(line[1:] + "\n")
        if line[0] != "-":
            new.append(line[1:] + "\n")
    for old, new in pieces:
        assert script.count("".join(old)) == 1, old
        script = script.replace("".join(old), "".join(new))
    return script


def losses(script, folder, ranks):
    """Return the losses that a script prints on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(script)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_five_changes_make_a_script_distributed(tmp_path):
    text = (ROOT / "docs" / "CONVERT.md").read_text()
    script, in_a_cell = re.findall(r"```python\n(.*?)```", text, re.S)
    diffs = re.findall(r"```diff\n(.*?)```", text, re.S)
    assert len(diffs) == 5
    said = subprocess.run([sys.executable, "-c", in_a_cell], capture_output=True, text=True)
    assert "'rank 3 of 4'" in said.stdout, said.stderr
    for diff in diffs:
        script = changed(script, diff.splitlines())
    path = tmp_path / "train.py"
    path.write_text(script)
    alone = losses(path, tmp_path, 1)
    assert len(alone) == 3
    assert alone[-1] < alone[0]
    assert losses(path, tmp_path, 2) == pytest.approx(alone, rel=1e-4)
    assert (tmp_path / "model.pt").exists()
    without_sampler = script.replace("sampler=sampler", "shuffle=True")
    path.write_text(without_sampler)
    assert losses(path, tmp_path, 2) != pytest.approx(alone, rel=1e-4)
