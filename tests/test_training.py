"""Lesson 8, training: checkpoints, exact resume, the folder of a run, several processes."""

import contextlib
import itertools
import math
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    TINY,
    contents,
    identical,
    load,
    made_up_pairs,
    metrics_of,
    one_thread,
    python,
    run_main,
    write_corpus,
    write_part,
)

SENTENCES = ["I saw the river.", "My brother didn't find her book yesterday.", "", "Hanoi?"]

# What makes an exact resume hard: dropout, batches summed up, several epochs.
HARD = (*TINY, "--dropout", "0.2", "--accumulate", "2", "--epochs", "4", "--seed", "7")


@pytest.fixture(autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def finished(lesson8, corpus, tmp_path_factory):
    """The folder of a finished run; tests that change something copy it."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    arguments = ["--full", "--data", corpus, "--run", run, *HARD]
    with one_thread():
        assert lesson8.main(list(map(str, arguments))) == 0
    return run


@pytest.fixture
def copy(finished, tmp_path):
    """A finished run that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture
def command(lesson8, capsys):
    """main(), as command(...) -> status, out, err."""
    return lambda *arguments: run_main(lesson8, capsys, *arguments)


@pytest.fixture
def full(command, corpus, tmp_path):
    """--full on the tiny corpus with the settings HARD; what is given goes on top."""

    def full(*more, run=tmp_path / "run", data=corpus):
        return command("--full", "--data", data, "--run", run, *HARD, *more)

    return full


@pytest.fixture
def at_step(monkeypatch):
    """Have something happen in the middle of a training step: at_step(number, action).

    Where the action returns something, that is the step's gradient norm.
    """

    def at_step(number, action):
        original, calls = torch.nn.utils.clip_grad_norm_, itertools.count(1)

        def clip(*arguments, **more):
            norm = original(*arguments, **more)
            changed = action() if next(calls) == number else None
            return norm if changed is None else changed

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)

    yield at_step


def interrupt():
    """Send SIGTERM to this process, if it is ready for it."""
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "SIGTERM would kill the run"
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def unfinished(full, at_step, monkeypatch, tmp_path):
    """The folder of a run that was stopped in its fifth or sixth step."""
    with monkeypatch.context():
        at_step(5, interrupt)
        assert full().status == 143
    monkeypatch.undo()
    return tmp_path / "run"


# ------------------------------------------------------------------------------------------------
# Learning, checkpoints
# ------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss(lesson8, full, tmp_path):
    result = full("--epochs", 6, "--lr", 0.01)
    assert result.status == 0, result.err
    rows = [row for row in metrics_of(lesson8, tmp_path / "run") if "dev_loss" in row]
    assert rows[-1]["dev_loss"] < 0.6 * rows[0]["dev_loss"]
    assert rows[-1]["dev_loss"] < 0.6 * math.log(400)  # far better than guessing
    best = load(tmp_path / "run" / lesson8.BEST)
    assert best["dev_loss"] == min(row["dev_loss"] for row in rows)


def test_two_sample_translations_are_printed_at_each_validation(lesson8, full, tmp_path):
    result = full()
    rows = [row for row in metrics_of(lesson8, tmp_path / "run") if "dev_loss" in row]
    assert len(rows) >= 4
    assert result.out.count("->") == 2 * len(rows)
    assert result.out.count("dev loss") >= len(rows)


def test_checkpoint_translates_the_same_after_reload_and_elsewhere(lesson8, finished, copy):
    cpu = torch.device("cpu")
    translator = lesson8.Translator(finished, cpu, beam=2)
    first = translator.translate(SENTENCES)
    assert first[2] == "" and any(first)
    assert translator.translate(SENTENCES) == first, "dropout is still on"
    assert lesson8.Translator(copy, cpu, beam=2).translate(SENTENCES) == first


def test_checkpoint_holds_plain_weights_of_the_whole_model(lesson8, finished):
    best = load(finished / lesson8.BEST)
    names = set(best["weights"])
    assert not [name for name in names if "_orig_mod" in name or name.startswith("module.")]
    model = lesson8.build_model(lesson8.Config(**best["config"]), [400, 400])
    assert names == set(model.state_dict())
    assert torch.equal(
        best["weights"]["output.weight"], best["weights"]["tgt_embedding.table.weight"]
    )
    state = load(finished / lesson8.STATE)
    assert state["config"] == best["config"]
    if best["step"] == state["progress"][0]:  # the last weights were the best
        assert identical(best["weights"], state["model"])


class Code:
    """Where this is unpickled, a folder appears."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


DAMAGES = {
    "cut short": lambda path, marker: path.write_bytes(path.read_bytes()[:-3000]),
    "empty": lambda path, marker: path.write_bytes(b""),
    "text": lambda path, marker: path.write_text("hello\n", encoding="utf-8"),
    "of another program": lambda path, marker: torch.save({"model": {}, "epoch": 3}, path),
    "a list": lambda path, marker: torch.save([1, 2], path),
    "torch file with code": lambda path, marker: torch.save({"format": Code(marker)}, path),
    "pickle with code": lambda path, marker: path.write_bytes(pickle.dumps(Code(marker))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_or_foreign_checkpoint_is_refused_and_no_code_in_it_runs(
    lesson8, command, copy, tmp_path, damage
):
    DAMAGES[damage](copy / lesson8.BEST, tmp_path / "marker")
    sentence = command("--infer", "--device", "cpu", "--run", copy).refused()
    assert lesson8.BEST in sentence
    assert not (tmp_path / "marker").exists(), "code in a checkpoint was executed"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_or_foreign_state_is_refused_and_the_run_stays(
    lesson8, full, copy, tmp_path, damage
):
    DAMAGES[damage](copy / lesson8.STATE, tmp_path / "marker")
    before = contents(copy)
    assert lesson8.STATE in full("--resume", run=copy).refused()
    assert contents(copy) == before
    assert not (tmp_path / "marker").exists(), "code in a state was executed"


@pytest.mark.parametrize("damage", ["cut short", "a list", "torch file with code"])
def test_damaged_cache_of_prepared_data_is_prepared_again(
    lesson8, full, copy, finished, tmp_path, damage
):
    DAMAGES[damage](copy / "prepared.pth", tmp_path / "marker")
    assert full("--restart", run=copy).status == 0
    assert not (tmp_path / "marker").exists(), "code in the cache was executed"
    weights = [load(run / lesson8.BEST)["weights"] for run in (copy, finished)]
    assert identical(*weights)


def test_swapped_tokenizer_file_is_refused(lesson8, command, copy):
    shutil.copy(copy / "vi_tokenizer.json", copy / "en_tokenizer.json")
    sentence = command("--infer", "--device", "cpu", "--run", copy).refused()
    assert "en_tokenizer.json" in sentence and lesson8.BEST in sentence


@pytest.mark.parametrize("entry", [None, [], ["one"], "absent"], ids=str)
def test_checkpoint_with_an_unfit_list_of_tokenizers_is_refused(lesson8, command, copy, entry):
    checkpoint = load(copy / lesson8.BEST)
    checkpoint["tokenizers"] = entry
    if entry == "absent":
        del checkpoint["tokenizers"]
    torch.save(checkpoint, copy / lesson8.BEST)
    assert "does not fit" in command("--infer", "--run", copy, "--device", "cpu").refused()


@pytest.mark.parametrize(
    "useless", [["--d-model", 3], ["--preset", "gpu"], ["--resume"], ["--restart", "--lr", 7]]
)
@pytest.mark.parametrize("mode", ["--infer", "--evaluate"])
def test_settings_of_training_are_refused_where_they_would_be_ignored(command, copy, mode, useless):
    sentence = command(mode, "--run", copy, "--device", "cpu", *useless).refused()
    assert useless[0] in sentence and "training" in sentence


@pytest.mark.parametrize("text", [None, "", "{}", '{"model":'])
def test_missing_or_damaged_tokenizer_file_is_refused(command, copy, text):
    path = copy / "vi_tokenizer.json"
    path.unlink() if text is None else path.write_text(text, encoding="utf-8")
    sentence = command("--infer", "--device", "cpu", "--run", copy).refused()
    assert "vi_tokenizer.json" in sentence


def test_lost_tokenizer_files_come_back_with_the_next_training(lesson8, full, copy):
    """Else a run of hours ends with a model that nothing can use."""
    for language in ("en", "vi"):
        (copy / f"{language}_tokenizer.json").unlink()
    assert full("--restart", run=copy).status == 0
    assert lesson8.Translator(copy, torch.device("cpu")).translate([""]) == [""]


def test_run_of_the_other_direction_is_refused(command, finished, corpus):
    for mode in ("--infer", "--evaluate"):
        result = command(mode, "--direction", "vi-en", "--run", finished, "--data", corpus)
        assert "en-vi" in result.refused() and "vi-en" in result.err


def test_full_disk_ends_the_run_with_a_sentence_and_keeps_the_last_checkpoint(
    lesson8, full, monkeypatch, tmp_path
):
    original, disk = os.fsync, {"full": False}

    def fsync(descriptor):
        if disk["full"]:
            raise OSError(28, "No space left on device")
        original(descriptor)
        metrics = tmp_path / "run" / lesson8.METRICS
        disk["full"] = metrics.exists() and metrics.stat().st_size > 0

    monkeypatch.setattr(os, "fsync", fsync)
    result = full()
    assert result.status == 2 and "Traceback" not in result.err
    assert "No space left on device" in result.err
    monkeypatch.undo()
    assert load(tmp_path / "run" / lesson8.BEST)["step"] > 0
    assert not [name for name in contents(tmp_path / "run") if name.endswith(".tmp")]
    assert full("--resume").status == 0


def test_diverged_training_ends_with_a_sentence_and_keeps_the_checkpoint(
    lesson8, full, at_step, finished, tmp_path
):
    step = load(finished / lesson8.STATE)["progress"][1] // 4 + 2  # in the second of four epochs
    at_step(step, lambda: torch.tensor(math.nan))
    result = full()
    assert result.status == 2 and "Traceback" not in result.err
    assert "--lr" in result.err and f"step {step}" in result.err
    for tensor in load(tmp_path / "run" / lesson8.BEST)["weights"].values():
        assert tensor.isfinite().all()


def test_without_dev_files_pairs_are_held_out_and_it_says_so(full, corpus, tmp_path):
    for language in ("en", "vi"):
        (tmp_path / "data").mkdir(exist_ok=True)
        shutil.copy(corpus / f"train.{language}", tmp_path / "data")
    result = full("--epochs", 1, data=tmp_path / "data")
    assert result.status == 0, result.err
    assert "3 training pairs are held out" in result.out  # 1% of 300


# ------------------------------------------------------------------------------------------------
# Chance and sums
# ------------------------------------------------------------------------------------------------


def test_same_seed_same_result_other_seed_other_result(lesson8, full, finished, tmp_path):
    assert full(run=tmp_path / "same").status == 0
    assert full("--seed", 8, run=tmp_path / "other").status == 0
    runs = (finished, tmp_path / "same", tmp_path / "other")
    expected, same, other = (load(run / lesson8.BEST)["weights"] for run in runs)
    assert identical(expected, same)
    assert not [
        name
        for name in expected
        if name.endswith("w_q.weight") and torch.equal(expected[name], other[name])
    ]


def test_accumulated_gradient_equals_that_of_the_joint_batch(lesson8, corpus, tmp_path):
    """Each token weighs the same, in whichever batch it is: not each batch."""
    config = lesson8.Config(
        vocab_size=400, d_model=16, n_heads=2, d_ff=32, n_layers=1, dropout=0.0, precision="fp32"
    )
    prepared = lesson8.prepare(config, corpus, tmp_path)
    trainer = lesson8.Trainer(config, prepared, torch.device("cpu"), tmp_path)
    lengths = np.array([len(row) for row in prepared.train[1]])
    order = lengths.argsort()
    short, long = order[:3], order[-9:]  # very different numbers of tokens
    assert lengths[long].sum() > 4 * lengths[short].sum()

    results = []
    for group in ([short, long], [np.concatenate([short, long])]):
        loss, tokens = trainer.backward(group)
        gradients = [parameter.grad.clone() for parameter in trainer.model.parameters()]
        results.append((loss, tokens, gradients))
    (loss, tokens, apart), (expected_loss, expected_tokens, joint) = results
    assert tokens == expected_tokens == lengths[short].sum() + lengths[long].sum()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert max(gradient.abs().max() for gradient in joint) > 1e-3
    for first, second in zip(apart, joint, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------
# Interruptions
# ------------------------------------------------------------------------------------------------

# Sends itself a signal at the n-th moment of a kind, "step": before or after a gradient is clipped;
# "save": a file is half-written, about to reach the disk or to take the place of the old one, or
# just has; "validation": among the batches of the dev set, before or after the samples.
INTERRUPTED = """
import importlib.util, io, os, sys, torch
script, number, wanted, moment, *arguments = sys.argv[1:]
moments = {"step": 0, "save": 0, "validation": 0}

def tick(kind):
    moments[kind] += 1
    if kind == wanted and moments[kind] == int(moment):
        os.kill(os.getpid(), int(number))

def watched(function, kind, when=lambda: True):
    def watching(*arguments, **more):
        if when():
            tick(kind)
        result = function(*arguments, **more)
        if when():
            tick(kind)
        return result
    return watching

class Slow(io.FileIO):
    def write(self, data):
        data = memoryview(data)
        super().write(data[: len(data) // 2])
        tick("save")
        return len(data) // 2 + super().write(data[len(data) // 2 :])

torch.nn.utils.clip_grad_norm_ = watched(torch.nn.utils.clip_grad_norm_, "step")
os.fsync, os.replace = watched(os.fsync, "save"), watched(os.replace, "save")
spec = importlib.util.spec_from_file_location("lesson8", script)
sys.modules["lesson8"] = lesson8 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lesson8)
lesson8.open = Slow
lesson8.translate_ids = watched(lesson8.translate_ids, "validation")
validating = lambda: not torch.is_grad_enabled()
lesson8.Trainer.loss = watched(lesson8.Trainer.loss, "validation", validating)
torch.set_num_threads(1)
status = lesson8.main(arguments)
print(*moments.values(), file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture(scope="session")
def moments(lesson8, corpus, tmp_path_factory):
    """How many moments of each kind an uninterrupted run has."""
    run = tmp_path_factory.mktemp("moments") / "run"
    code = ["-c", INTERRUPTED, lesson8.__file__, 0, "none", 0]
    ended = python(*code, "--full", "--data", corpus, "--run", run, *HARD)
    counts = map(int, ended.stderr.split()[-3:])
    return dict(zip(("step", "save", "validation"), counts, strict=True))


RANDOM = random.Random(1)
KILLS = [(kind, RANDOM.random()) for _ in range(8) for kind in ("step", "save", "validation")]


@pytest.mark.skipif(os.name == "nt", reason="signals are sent to a process only on POSIX")
@pytest.mark.parametrize(
    ("name", "kind", "where"),
    [
        ("SIGTERM", "step", 0.6),
        ("SIGINT", "step", 0.4),
        *(("SIGKILL", *kill) for kill in KILLS[:3]),
        *(pytest.param("SIGKILL", *kill, marks=pytest.mark.slow) for kill in KILLS[3:]),
    ],
)
def test_interrupted_and_resumed_run_ends_bit_identical(
    lesson8, full, corpus, finished, moments, tmp_path, name, kind, where
):
    run, number = tmp_path / "run", getattr(signal, name)
    total = load(finished / lesson8.STATE)["progress"][1]
    moment = 1 + int(where * moments[kind])
    arguments = ["--full", "--data", corpus, "--run", run, *HARD]
    ended = python("-c", INTERRUPTED, lesson8.__file__, int(number), kind, moment, *arguments)
    if name == "SIGKILL":
        assert ended.returncode == -number
    else:
        assert ended.returncode == 128 + number, ended.stderr.decode()
        assert b"--resume" in ended.stdout + ended.stderr
        assert b"Traceback" not in ended.stderr
        assert 0 < load(run / lesson8.STATE)["progress"][0] < total

    result = full("--resume")
    assert result.status == 0, result.err
    assert not list(run.glob(".*")), "something half-written was left"
    assert_ended_alike(lesson8, run, finished)


def assert_ended_alike(lesson8, run, expected_run):
    """Weights, optimizer and what is told about them are the same to the last bit."""
    state, expected = (load(folder / lesson8.STATE) for folder in (run, expected_run))
    assert identical(state["model"], expected["model"])
    assert identical(state["optimizer"], expected["optimizer"])
    assert state["progress"][:3] == expected["progress"][:3]
    best, expected = (load(folder / lesson8.BEST) for folder in (run, expected_run))
    assert identical(best, expected)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_run_killed_again_and_again_by_the_clock_ends_bit_identical(
    lesson8, full, corpus, tmp_path
):
    """Nothing is chosen here but the time: one run, killed twenty times, resumed each time."""
    run, chance, kills = tmp_path / "run", random.Random(3), 0
    start = time.monotonic()
    assert full("--epochs", 12, run=tmp_path / "whole").status == 0
    longest = (time.monotonic() - start) / 8
    command = [sys.executable, lesson8.__file__, "--full", "--resume", "--data", corpus]
    command += ["--run", run, *HARD, "--epochs", 12]
    for _ in range(20):
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        while (line := process.stdout.readline()) and b"After step" not in line:
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=chance.uniform(0, longest))
        kills += process.poll() is None
        process.kill()
        process.wait()
        process.stdout.close()
    assert kills >= 15
    assert full("--resume", "--epochs", 12).status == 0
    assert_ended_alike(lesson8, run, tmp_path / "whole")


def test_run_that_ended_in_its_first_step_is_resumed(lesson8, full, at_step, finished, tmp_path):
    """There is a state from the first moment on, though no checkpoint yet."""
    at_step(1, lambda: torch.tensor(math.nan))
    assert full().status == 2
    assert load(tmp_path / "run" / lesson8.STATE)["progress"][0] == 0
    assert not (tmp_path / "run" / lesson8.BEST).exists()
    assert "--resume goes on with it" in full().refused()
    result = full("--resume")
    assert result.status == 0 and "Nothing to resume" not in result.out
    assert_ended_alike(lesson8, tmp_path / "run", finished)


def test_resume_tells_where_it_goes_on_and_measures_each_step_once(
    lesson8, full, unfinished, finished
):
    stopped = load(unfinished / lesson8.STATE)["progress"][0]
    assert stopped in (5, 6)
    result = full("--resume")
    assert result.status == 0 and f"step {stopped}" in result.out
    losses = {}
    for run in (unfinished, finished):
        rows = metrics_of(lesson8, run)
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps))
        losses[run] = [(row["step"], row["dev_loss"]) for row in rows if "dev_loss" in row]
    assert losses[unfinished] == losses[finished]


def test_resume_after_a_crash_forgets_what_was_measured_after_the_last_save(
    lesson8, full, unfinished
):
    """The steps after it are done again, and so are their rows."""
    with open(unfinished / lesson8.METRICS, "a", encoding="utf-8") as file:
        file.write('{"step": 7, "loss": 99.0, "rate": 0.1}\n')
    assert full("--resume").status == 0
    rows = metrics_of(lesson8, unfinished)
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert 99.0 not in [row["loss"] for row in rows]


def test_second_interrupt_ends_at_once(lesson8, full, at_step):
    def twice():
        interrupt()
        interrupt()

    at_step(3, twice)
    result = full()
    assert result.status == 130 and "Traceback" not in result.err


def test_resume_with_nothing_to_resume_starts_afresh_and_says_so(lesson8, full, tmp_path):
    result = full("--resume", "--epochs", 1)
    assert result.status == 0
    assert "Nothing to resume" in result.out
    assert (tmp_path / "run" / lesson8.BEST).exists()


def test_resume_of_a_finished_run_says_so_and_changes_nothing(full, copy):
    before = contents(copy)
    result = full("--resume", run=copy)
    assert result.status == 0 and "finished" in result.out
    assert contents(copy) == before


@pytest.mark.parametrize(
    ("setting", "value", "before"),
    [("--lr", 0.002, "0.0015"), ("--d-model", 32, "16"), ("--seed", 1, "7"), ("--epochs", 3, "4")],
)
def test_resume_with_another_setting_is_refused(full, unfinished, setting, value, before):
    files = contents(unfinished)
    sentence = full("--resume", setting, value).refused()
    assert f"{setting} {before}" in sentence
    assert contents(unfinished) == files


def test_resume_needs_no_settings_again(lesson8, command, unfinished, corpus, finished):
    where = ("--data", corpus, "--run", unfinished, "--device", "cpu")
    assert command("--full", "--resume", *where).status == 0
    weights = [load(run / lesson8.BEST)["weights"] for run in (unfinished, finished)]
    assert identical(*weights)


def test_checkpoint_without_a_state_gives_one_consistent_answer(lesson8, full, copy):
    """As after a crash between the two, or where somebody has deleted the larger file."""
    for name in (lesson8.STATE, lesson8.METRICS):
        (copy / name).unlink()
    result = full("--resume", run=copy)
    if result.status == 0:
        assert "Nothing to resume" in result.out
    else:
        sentence = result.refused()
        assert "--restart" in sentence
        assert "--resume goes on" not in sentence
        assert "starting afresh" not in result.out


@pytest.mark.parametrize("state", ["unfinished", "finished"])
def test_resume_with_a_changed_corpus_never_mixes_weights_and_tokenizers(
    lesson8, full, corpus, copy, tmp_path, request, state
):
    """Subwords learned from other text give the ids other meanings."""
    run = copy if state == "finished" else request.getfixturevalue("unfinished")
    shutil.copytree(corpus, tmp_path / "data")
    write_part(tmp_path / "data", "train", [(en[::-1], vi) for en, vi in made_up_pairs(300, 9)])
    before = contents(run)
    result = full("--resume", run=run, data=tmp_path / "data")
    for name in ("en_tokenizer.json", "vi_tokenizer.json", lesson8.BEST, lesson8.STATE):
        assert contents(run).get(name) == before.get(name), f"{name} has changed"
    if state == "unfinished":
        result.refused()


# ------------------------------------------------------------------------------------------------
# The folder of a run
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["--full", "--demo"])
def test_full_run_is_not_replaced_without_restart(command, copy, corpus, mode):
    before = contents(copy)
    sentence = command(mode, "--data", corpus, "--run", copy, *TINY).refused()
    assert "--restart" in sentence and str(copy) in sentence
    assert contents(copy) == before


def test_unfinished_run_is_not_replaced_without_restart(full, unfinished):
    before = contents(unfinished)
    assert "--resume" in full().refused()
    assert contents(unfinished) == before


def test_restart_replaces_a_run(lesson8, full, copy):
    assert full("--restart", "--seed", 2, "--epochs", 1, run=copy).status == 0
    for name in (lesson8.BEST, lesson8.STATE):
        assert load(copy / name)["config"]["seed"] == 2
    total = load(copy / lesson8.STATE)["progress"][1]
    assert {row["step"] for row in metrics_of(lesson8, copy)} == {total}, "rows of the old run"


def test_folder_is_locked_while_training_and_free_afterwards(lesson8, full, at_step, tmp_path):
    run, seen = tmp_path / "run", []

    def try_lock():
        with pytest.raises(lesson8.UserError, match="Another process"), lesson8.lock_folder(run):
            pass
        seen.append(True)

    at_step(3, try_lock)
    assert full().status == 0 and seen
    with lesson8.lock_folder(run):
        pass


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_second_process_is_refused_until_the_first_is_gone_even_killed(lesson8, full, copy):
    code = (
        "import importlib, pathlib, sys, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "lesson8 = importlib.import_module('08_iwslt_vi_en')\n"
        "with lesson8.lock_folder(pathlib.Path(sys.argv[2])):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(600)\n"
    )
    where = (str(Path(lesson8.__file__).parent), str(copy))
    holder = subprocess.Popen([sys.executable, "-c", code, *where], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline().strip() == b"locked"
        before = contents(copy)
        for how in ("--resume", "--restart"):
            assert "Another process" in full(how, run=copy).refused()
        assert contents(copy) == before
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert full("--resume", run=copy).status == 0


# ------------------------------------------------------------------------------------------------
# Time, precision, curve
# ------------------------------------------------------------------------------------------------


def test_minutes_fix_the_number_of_steps_once(lesson8, full, at_step, monkeypatch, tmp_path):
    at_step(2, interrupt)
    stopped = full("--minutes", 0.02)
    monkeypatch.undo()
    assert stopped.status in (0, 143)  # 0: a machine so slow that two steps were all
    total = load(tmp_path / "run" / lesson8.STATE)["progress"][1]
    assert total >= 1
    assert full("--minutes", 0.02, "--resume").status == 0
    assert load(tmp_path / "run" / lesson8.STATE)["progress"][:2] == [total, total]
    validations = [row for row in metrics_of(lesson8, tmp_path / "run") if "dev_loss" in row]
    assert validations[-1]["step"] == total
    assert load(tmp_path / "run" / lesson8.BEST)["step"] <= total


def test_auto_precision_is_bf16_where_the_processor_has_it(lesson8, monkeypatch):
    for there, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(lesson8, "cpu_has_bf16", lambda there=there: there)
        assert lesson8.choose_precision("auto", torch.device("cpu")) == expected
        assert lesson8.choose_precision("fp32", torch.device("cpu")) == "fp32"
        assert lesson8.choose_precision("bf16", torch.device("cpu")) == "bf16"


@pytest.mark.parametrize(
    ("wanted", "there", "expected"),
    [("auto", True, "bf16"), ("auto", False, "fp32"), ("bf16", False, "bf16")],
)
def test_precision_is_told_and_trains_with_finite_loss(
    lesson8, full, monkeypatch, tmp_path, wanted, there, expected
):
    monkeypatch.setattr(lesson8, "cpu_has_bf16", lambda: there)
    result = full("--epochs", 1, "--precision", wanted)
    assert result.status == 0, result.err
    line = next(line for line in result.out.splitlines() if "threads" in line)
    line = re.sub(r"\(.*?\)", "", line)  # what the processor has is told in brackets
    assert {"fp32", "bf16"} & set(re.findall(r"\w+", line)) == {expected}
    rows = metrics_of(lesson8, tmp_path / "run")
    assert all(math.isfinite(row["loss"]) for row in rows)
    weights = load(tmp_path / "run" / lesson8.BEST)["weights"].values()
    assert {tensor.dtype for tensor in weights} == {torch.float32}


@pytest.mark.parametrize(
    ("trained", "wanted", "bf16", "packs", "expected"),
    [
        ("auto", "auto", True, True, "bf16"),
        ("auto", "auto", False, True, "fp16"),
        ("auto", "auto", False, False, "fp32"),
        ("fp16", "auto", False, False, "fp32"),  # trained on another machine
        ("fp32", "auto", True, True, "fp32"),
        ("auto", "fp32", True, True, "fp32"),
        ("auto", "fp16", True, True, "fp16"),
        ("fp32", "bf16", False, True, "bf16"),
    ],
)
def test_a_run_is_used_in_the_precision_of_the_machine(
    lesson8, copy, monkeypatch, trained, wanted, bf16, packs, expected
):
    if expected == "fp16" and not lesson8.cpu_packs_fp16():
        pytest.skip("torch has no products with packed fp16 weights here")
    monkeypatch.setattr(lesson8, "cpu_has_bf16", lambda: bf16)
    monkeypatch.setattr(lesson8, "cpu_packs_fp16", lambda: packs)
    checkpoint = load(copy / lesson8.BEST)
    checkpoint["config"]["precision"] = trained
    torch.save(checkpoint, copy / lesson8.BEST)
    translator = lesson8.Translator(copy, torch.device("cpu"), precision=wanted)
    assert translator.precision == expected
    kinds = {type(module) for module in translator.model.modules()}
    assert (torch.nn.Linear in kinds, lesson8.PackedLinear in kinds) == (
        expected != "fp16",
        expected == "fp16",
    )
    dtype = torch.bfloat16 if expected == "bf16" else torch.float32
    assert {parameter.dtype for parameter in translator.model.parameters()} == {dtype}
    lines = ["the river", "My brother saw her book."]
    exact = lesson8.Translator(copy, torch.device("cpu"), precision="fp32").translate(lines)
    assert len(translator.translate(lines)) == len(lines)
    assert expected != "fp32" or translator.translate(lines) == exact


def test_where_torch_cannot_pack_weights_fp16_is_refused_and_auto_is_fp32(lesson8, monkeypatch):
    def refuse(weight, bias):
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16")

    cpu = torch.device("cpu")
    monkeypatch.setattr(lesson8, "cpu_has_bf16", lambda: False)
    for packs in (lesson8.cpu_packs_fp16(), False):
        expected = "fp16" if packs else "fp32"
        assert lesson8.choose_precision("auto", cpu, translating=True) == expected
        assert lesson8.choose_precision("auto", cpu) == "fp32"
        assert lesson8.choose_precision("auto", torch.device("mps"), translating=True) == "fp32"
        monkeypatch.setattr(torch.ops.quantized, "linear_prepack_fp16", refuse)
    with pytest.raises(lesson8.UserError, match="--precision fp16 is not for translating on cpu"):
        lesson8.choose_precision("fp16", cpu, translating=True)
    with pytest.raises(lesson8.UserError, match="not 'int8'"):
        lesson8.choose_precision("int8", cpu, translating=True)


def test_fp16_on_a_cpu_is_refused(full):
    assert "fp16" in full("--precision", "fp16").refused()


def test_curve_is_drawn(full, tmp_path):
    pytest.importorskip("matplotlib")
    result = full("--epochs", 1)
    assert "curve.png" in result.out
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_run_ends_well_and_says_that_the_curve_is_missing(
    full, monkeypatch, tmp_path
):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    result = full("--epochs", 1)
    assert result.status == 0
    assert "matplotlib" in result.out + result.err
    assert not (tmp_path / "run" / "curve.png").exists()


# ------------------------------------------------------------------------------------------------
# Several processes
# ------------------------------------------------------------------------------------------------

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch has no gloo",
)


@needs_gloo
def test_two_processes_compute_what_one_does_with_two_batches(lesson8, full, corpus, tmp_path):
    settings = [*HARD, "--dropout", "0"]
    # After "--", since torchrun itself takes --run for an abbreviation of its --run-path.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--"]
    where = ["--data", corpus, "--run", tmp_path / "two"]
    two = python(*launcher, lesson8.__file__, "--full", *where, *settings, "--accumulate", 1)
    assert two.returncode == 0, two.stderr.decode()
    one = full("--dropout", 0, "--accumulate", 2, run=tmp_path / "one")
    assert one.status == 0

    # Only one of the two speaks: as many lines about the run as a single process prints.
    text = two.stdout.decode()
    for fragment in ("train:", "parameters", "dev loss", "->", "Best dev loss"):
        assert text.count(fragment) == one.out.count(fragment), text
    assert "2 process" in text

    states = [load(tmp_path / name / lesson8.STATE) for name in ("two", "one")]
    assert states[0]["progress"][:2] == states[1]["progress"][:2]
    for name, weights in states[0]["model"].items():
        # A bias of the keys adds the same to all scores of a row, which softmax ignores: its
        # gradient is nothing but rounding, which Adam blows up to steps of full size.
        if not name.endswith("w_k.bias"):
            torch.testing.assert_close(weights, states[1]["model"][name], rtol=0, atol=2e-5)


@needs_gloo
@pytest.mark.slow
def test_two_processes_end_bit_identical_each_time(lesson8, corpus, tmp_path):
    """On one machine with one seed, as one process does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--"]
    for name in ("first", "second"):
        where = ["--data", corpus, "--run", tmp_path / name]
        ended = python(*launcher, lesson8.__file__, "--full", *where, *HARD)
        assert ended.returncode == 0, ended.stderr.decode()
    assert_ended_alike(lesson8, tmp_path / "first", tmp_path / "second")


@needs_gloo
@pytest.mark.skipif(os.name == "nt", reason="signals are sent to a process only on POSIX")
def test_signal_to_one_process_stops_all_after_the_same_step(lesson8, full, corpus, tmp_path):
    run = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = ["--full", "--data", corpus, "--run", run, *HARD, "--accumulate", "1"]
    processes = []
    for rank in (0, 1):
        moment = 9 if rank == 1 else 0  # only the second gets the signal
        code = ["-c", INTERRUPTED, lesson8.__file__, int(signal.SIGTERM), "step", moment]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, [*code, *arguments])],
                env={**os.environ, **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        ended = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, ended, strict=True):
        assert process.returncode == 143, err.decode()
        assert b"Traceback" not in err
    texts = [out.decode() for out, _ in ended]
    step, total = load(run / lesson8.STATE)["progress"][:2]
    assert 0 < step < total
    assert f"step {step}" in texts[0] and "--resume" in texts[0]
    assert texts[1] == "", "only the first process speaks"


def test_restart_that_cannot_begin_loses_nothing(full, copy):
    before = contents(copy)
    assert "fp16" in full("--restart", "--precision", "fp16", run=copy).refused()
    assert contents(copy) == before


def test_resume_and_restart_together_are_refused(full, copy):
    before = contents(copy)
    assert full("--resume", "--restart", run=copy).status == 2
    assert contents(copy) == before


def test_resume_with_another_number_of_processes_is_refused(lesson8, full, unfinished, monkeypatch):
    """The batches of a step would be others, and the number of epochs too."""
    state = load(unfinished / lesson8.STATE)
    torch.save(state | {"processes": 2}, unfinished / lesson8.STATE)
    assert "2 processes" in full("--resume").refused()


@pytest.mark.parametrize("change", [{"extra": 1}, {"d_model": None}, {"d_model": 32}])
def test_checkpoint_of_another_shape_is_refused(lesson8, command, copy, change):
    best = load(copy / lesson8.BEST)
    torch.save(best | {"config": best["config"] | change}, copy / lesson8.BEST)
    sentence = command("--infer", "--device", "cpu", "--run", copy).refused()
    assert lesson8.BEST in sentence
