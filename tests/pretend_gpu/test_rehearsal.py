"""Lessons and solutions run to their end on pretended GPUs, and nothing is found that a real one
would punish.
"""

import pytest

from pretend_gpu import build, rehearsal

pytestmark = [
    pytest.mark.skipif(bool(build.why_not()), reason=str(build.why_not())),
    pytest.mark.slow,
    pytest.mark.weekly,
]
NOTEBOOKS = sorted(
    [*rehearsal.ROOT.glob("notebooks/[0-9]*.ipynb"), *rehearsal.ROOT.glob("solutions/[0-9]*.ipynb")]
)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_notebook_runs_on_pretended_gpus(path, gpus):
    _, wrong = rehearsal.rehearse(path, gpus)
    assert not wrong, "\n".join(wrong)
