"""Puts lessons, exercises and documents into the wheel; pyproject.toml says everything else."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class WithCourse(build_py):
    """Modules as always, and the course beside them, as ddp_course/course."""

    def run(self):
        super().run()
        if not self.editable_mode:
            course = Path(self.build_lib) / "ddp_course" / "course"
            shutil.rmtree(course, ignore_errors=True)
            for name in ("notebooks", "exercises", "solutions", "docs"):
                shutil.copytree(HERE / name, course / name, ignore=shutil.ignore_patterns(".*"))


setup(cmdclass={"build_py": WithCourse})
