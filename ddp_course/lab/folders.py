"""Where the folders of the course are."""

from pathlib import Path


def course_folder(name: str) -> Path:
    """Return the course's folder `notebooks`, `exercises` or `docs`, in its repository or in the
    installed package.
    """
    package = Path(__file__).resolve().parents[1]
    packed = package / "course" / name  # setup.py copies the course's folders there
    return packed if packed.is_dir() else package.parent / name
