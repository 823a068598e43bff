"""README.md: what it shows is what the scripts print, and its figures are those of the code.

Transcripts stand in blocks marked `console`: a line that begins with "$ " is a command, the lines
after it are its output, in order, and "..." stands for lines left out.
"""

import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import python

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
UTF8 = {"PYTHONIOENCODING": "utf-8"}


def blocks(kind):
    return re.findall(rf"(?ms)^```{kind}\n(.*?)^```$", README)


def transcripts():
    """Every command of the console blocks with the lines that it is said to print."""
    found = {}
    for block in blocks("console"):
        for part in re.split(r"(?m)^\$ ", block)[1:]:
            command, _, output = part.partition("\n")
            found[command] = [line for line in output.splitlines() if line]
    return found


SHOWN = transcripts()
QUICK = [command for command in SHOWN if re.match(r"python 0[1-5]_", command)]
# These train first, or need a model that was trained: they were run as written, by hand.
BY_HAND = re.compile(r"python 0(7_train_translate\.py --infer|8_iwslt_vi_en\.py --)")


def printed(command):
    arguments = shlex.split(command)[1:]
    done = python(ROOT / arguments[0], *arguments[1:], env=UTF8)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8").splitlines()


def test_every_transcript_is_run_here_or_known_to_need_training():
    assert QUICK
    others = [command for command in SHOWN if command not in QUICK]
    assert [command for command in others if not BY_HAND.match(command)] == []


@pytest.mark.parametrize("command", QUICK)
def test_a_transcript_shows_what_the_command_prints(command):
    output, place = printed(command), 0
    gap = SHOWN[command][0] == "..."
    for line in SHOWN[command]:
        if line == "...":
            gap = True
            continue
        while place < len(output) and not output[place]:
            place += 1
        assert line in output[place:], line
        found = output.index(line, place)
        assert gap or found == place, f"lines are left out before {line!r}, without '...'"
        place, gap = found + 1, False


def named(text):
    """The commands that introduce a block of plain text, with the block."""
    pattern = r"Printed by `(python 0[1-5][^`]*)`[^`]*```text\n(.*?)\n```"
    return re.findall(pattern, text, re.DOTALL)


@pytest.mark.parametrize(("command", "picture"), named(README))
def test_a_diagram_is_the_one_that_a_lesson_prints(command, picture):
    output = [line.strip() for line in printed(command) if line.strip()]
    lines = [line.strip() for line in picture.splitlines() if line.strip()]
    start = output.index(lines[0])
    assert output[start : start + len(lines)] == lines


def test_two_diagrams_are_shown():
    assert len(named(README)) == len(blocks("text")) == 2


def test_the_pictures_shown_are_those_kept():
    pictures = re.findall(r"!\[[^\]]+\]\(tests/figures/([^)]+)\)", README)
    assert len(pictures) == README.count("![") == 2
    assert {path.name for path in (ROOT / "tests" / "figures").iterdir()} == set(pictures)


def test_a_picture_looks_like_the_one_that_the_lesson_draws(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    lesson, name = importlib.import_module("02_embeddings"), "positional_encoding.png"
    lesson.save_figures(tmp_path, lesson.named("draw_"))
    drawn, kept = (image.imread(folder / name) for folder in (tmp_path, ROOT / "tests/figures"))
    assert drawn.shape == kept.shape
    assert np.abs(drawn - kept).mean() < 0.02  # fonts differ a little between machines


def test_the_counts_in_the_text_are_those_of_the_code(lesson8):
    lesson7 = importlib.import_module("07_train_translate")
    _, held_out = lesson8.demo_pairs()
    assert f"of {len(held_out)} held-out pairs" in README
    assert f"{len(lesson7.TOY)} English-French sentences" in README
    assert f"all {len(lesson7.TOY)} exactly" in README
    assert f"of {len(lesson7.NEW)} unseen ones" in README
    laptop = lesson8.Config()
    with torch.device("meta"):
        model = lesson8.build_model(laptop, [laptop.vocab_size] * 2)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count / 1e6:.1f}M parameters" in README
    assert f"{count:,}" in README
