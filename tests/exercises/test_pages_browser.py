"""The teacher's page and a learner's in a real browser: nothing is cut off, pale, or lost."""

import pytest
from chromium import PALE, running_browser

from ddp_exercises.grading import report
from ddp_exercises.grading.results import Result, TaskResult

pytestmark = [pytest.mark.lessons, pytest.mark.browser]
LONG = "Maximilian Alexander von Habsburg-Lothringen"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT = "element => element.scrollWidth > element.clientWidth"
FIRST = "document.querySelector('.class tbody tr').cells[0].textContent.trim()"


def a_class():
    """Results of a class with all that a page may show."""
    text = f'def largest_rate():\n    return 0.3, "{"it stays high and " * 20}"'
    results = []
    for number, learner in enumerate((LONG, "ada", "ben")):
        tasks = [TaskResult("10.5", number, 2, answer=text, published="verbatim")]
        tasks.append(TaskResult("10.1", 0, 2, "wrong " * 60, notes=["found elsewhere"]))
        tasks[1].misconception = f"fault {number % 2}"
        tasks[1].suspicious = ["line 3 has os: " + "x" * 80]
        results.append(Result(learner, 10, tasks, note="handed in late"))
        results[-1].question = {"text": "10.5: which?\n  a) " + "this " * 60, "right": "a"}
    return results


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_whole_on_a_small_laptop(scheme, tmp_path):
    pages = report.pages(a_class(), ["zoe"])
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with running_browser() as browser:
        context = browser.new_context(viewport={"width": 1366, "height": 768}, color_scheme=scheme)
        page = context.new_page()
        for name in pages:
            page.goto(f"file://{tmp_path / name}")
            assert page.evaluate(OVERFLOW) == 0, name
            assert page.evaluate(f"({PALE})(document.body)") == [], name
            assert not any(page.eval_on_selector_all("pre", f"all => all.map({CUT})")), name
        page.goto(f"file://{tmp_path / 'index.html'}")
        assert page.locator(".heat .has:visible").count() == 3
        assert page.locator(".heat thead th").count() == 3 + 3
        firsts = []
        for _ in range(2):
            page.locator(".class th", has_text="Points").click()
            firsts.append(page.evaluate(FIRST))
        assert sorted(firsts) == [LONG, "ben"]
        context.close()
