"""For the tests that train lesson 8: a made-up corpus, and a model so small that a run is a second.

Runs happen in this process, through `main`; another process (two seconds for torch alone) is
started only where the process itself matters.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

TINY = (
    *("--d-model", "16", "--n-heads", "2", "--d-ff", "32", "--n-layers", "1"),
    *("--device", "cpu", "--precision", "fp32"),
    *("--vocab-size", "400", "--batch-tokens", "256", "--epochs", "2"),
)

SUBJECTS = {
    "I": "tôi",
    "my brother": "anh trai tôi",
    "the old teacher": "thầy giáo già",
    "a black cat": "con mèo đen",
    "our neighbours": "hàng xóm của chúng tôi",
    "she": "cô ấy",
}
VERBS = {"saw": "đã thấy", "liked": "đã thích", "didn &apos;t find": "không tìm được"}
OBJECTS = {
    "the river": "dòng sông",
    "a small house": "một ngôi nhà nhỏ",
    "her book": "quyển sách của cô ấy",
    "the &quot; green &quot; door": "cánh cửa &quot; xanh &quot;",
    "nothing": "cái gì cả",
}
ENDINGS = {".": ".", "yesterday .": "hôm qua .", "in Hanoi .": "ở Hà Nội .", "?": "?"}


def made_up_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return sentence pairs in Moses form: tokenised, quotes and apostrophes escaped."""
    rng = random.Random(seed)
    tables = [list(table.items()) for table in (SUBJECTS, VERBS, OBJECTS, ENDINGS)]
    chosen = ([rng.choice(table) for table in tables] for _ in range(count))
    return [tuple(" ".join(words) for words in zip(*cells, strict=True)) for cells in chosen]


def write_part(folder: Path, stem: str, pairs: list[tuple[str, str]]) -> None:
    """Write one part of a corpus as plain files, stem.en and stem.vi."""
    folder.mkdir(parents=True, exist_ok=True)
    for language, side in zip(("en", "vi"), zip(*pairs, strict=True), strict=True):
        text = "".join(line + "\n" for line in side)
        (folder / f"{stem}.{language}").write_text(text, encoding="utf-8", newline="\n")


def write_corpus(folder: Path) -> Path:
    """Write 300 training pairs, 30 of dev and 20 of test."""
    for seed, (stem, count) in enumerate({"train": 300, "tst2012": 30, "tst2013": 20}.items()):
        write_part(folder, stem, made_up_pairs(count, seed))
    return folder


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order in every process; such a model gains nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Result(NamedTuple):
    """What a command ended with."""

    status: int
    out: str
    err: str

    def refused(self) -> str:
        """Return the one sentence of a refusal, after checking that it is nothing else."""
        assert self.status == 2, self
        assert "Traceback" not in self.err
        told = [line for line in self.err.splitlines() if not line.startswith("Model: ")]
        assert len(told) == 1 and told[0].startswith("error: "), self.err
        return told[0]


def run_main(lesson8: Any, capsys: Any, *arguments: object) -> Result:
    """Run the command line in this process."""
    capsys.readouterr()
    try:
        status = lesson8.main([str(argument) for argument in arguments])
    except SystemExit as stop:  # argparse ends the program itself
        status = stop.code
    return Result(status, *capsys.readouterr())


def python(
    *arguments: object, stdin: bytes = b"", env: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        timeout=timeout,
    )


def load(path: Path) -> Any:
    """Read a checkpoint as anybody may: tensors and plain values only."""
    return torch.load(path, map_location="cpu", weights_only=True)


def metrics_of(lesson8: Any, run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / lesson8.METRICS).read_text("utf-8").splitlines()]


def identical(first: Any, second: Any) -> bool:
    """Return whether two nested values are the same to the last bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(identical(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(identical, first, second))
    return first == second


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder, but for the lock."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != "lock")
    return {file.name: file.read_bytes() for file in files}
