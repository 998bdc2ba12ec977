"""Fixtures of the parity tests."""

import os
from pathlib import Path

import pytest

from jppo.assets import cache_folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model's directory; tests that need it are skipped without."""
    default = cache_folder() / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("JPPO_SMOLLM2", default))
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs SmolLM2 in {folder} (or JPPO_SMOLLM2)")
    return folder
