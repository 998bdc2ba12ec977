"""Fixtures of the model tests."""

import os
from pathlib import Path

import pytest
from hf_dirs import CFG, random_params

from jppo.assets import cache_folder
from jppo.models.hf import save_hf


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real model's directory; tests that need it are skipped without."""
    default = cache_folder() / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("JPPO_SMOLLM2", default))
    if not (folder / "config.json").is_file():
        pytest.skip(f"needs SmolLM2 in {folder}; make quickstart puts it there")
    return folder


@pytest.fixture
def saved(tmp_path) -> Path:
    save_hf(tmp_path / "m", CFG, random_params(CFG))
    return tmp_path / "m"
