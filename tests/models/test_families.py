"""Every family against logits that torch gave, cached decoding, and the way back."""

from pathlib import Path

import numpy as np
import pytest
from family_checks import LIMIT, decode_gap, jppo_logits, largest, round_trip
from safetensors.numpy import save_file

from jppo.models.families import FAMILIES
from jppo.models.hf import load_hf

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
FILES = sorted(GOLDENS.glob("family_*.npz"))


def directory_of(golden, folder: Path) -> Path:
    """The golden as the directory that transformers wrote."""
    weights = {
        key.removeprefix("weights/"): golden[key] * golden["step"]
        for key in golden.files
        if key.startswith("weights/")
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(str(golden["config"]))
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem.removeprefix("family_"))
def test_family(file, tmp_path):
    golden = np.load(file)
    cfg, params = load_hf(directory_of(golden, tmp_path / "m"))
    tokens, mask, want = (golden[k] for k in ("tokens", "mask", "logits"))
    got = jppo_logits(cfg, params, tokens, mask)
    assert want[mask].std() > 0.3  # far from flat: models differ by more than rounding
    assert largest(got[mask], want[mask]) <= LIMIT
    assert decode_gap(cfg, params, tokens, mask, got) <= LIMIT
    assert round_trip(tmp_path, cfg, params)


def test_no_family_is_left_out(tmp_path):
    seen = set()
    for file in FILES:
        cfg, _ = load_hf(directory_of(np.load(file), tmp_path / file.stem))
        seen.add(cfg.family)
    assert seen == set(FAMILIES)
