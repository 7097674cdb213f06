"""Files and directories that a later run finds whole, or not at all, however the run that made them ended."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path beside this one, which takes its name when the block has ended without an error."""
    draft = path.with_name(f"{path.name}.draft")
    if draft.is_dir():  # of a run that was interrupted
        shutil.rmtree(draft)
    yield draft
    draft.rename(path)
