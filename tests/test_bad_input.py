"""Every bad input of lesson 8 and the sentence that it gets: one, on stderr, with exit status 2.

A row of a table is: what is wrong, how to make it, the command line, what the sentence says. That
nothing is lost by it is tested with each row; the parts behind it have tests of their own.
"""

import contextlib
import io
import os
import pickle
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import (
    TINY,
    contents,
    identical,
    load,
    made_up_pairs,
    one_thread,
    run_main,
    write_corpus,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CPU = ("--device", "cpu", "--beam", "1")


@pytest.fixture(autouse=True)
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def trained(lesson8, corpus, tmp_path_factory):
    """The folder of a finished run; tests copy it."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    with one_thread():
        arguments = ["--full", "--data", corpus, "--run", run, *TINY, "--epochs", 1]
        assert lesson8.main(list(map(str, arguments))) == 0
    return run


@pytest.fixture
def command(lesson8, capsys):
    """main(), as command(...) -> status, out, err."""
    return lambda *arguments: run_main(lesson8, capsys, *arguments)


# ------------------------------------------------------------------------------------------------
# The corpus
# ------------------------------------------------------------------------------------------------


def lines(*texts):
    return "".join(text + "\n" for text in texts).encode("utf-8")


def plain(english, vietnamese, stem="train"):
    """Put two files beside, or in place of, what is there."""

    def make(data):
        (data / f"{stem}.en").write_bytes(english)
        (data / f"{stem}.vi").write_bytes(vietnamese)

    return make


def archive(change=lambda content: content, kind=tarfile.REGTYPE, name="train.en"):
    """Put the training text into an archive; `change` its bytes, or make one member a trap."""

    def make(data):
        block = io.BytesIO()
        with tarfile.open(fileobj=block, mode="w:gz") as tar:
            tar.add(data / "train.vi", "train.vi")
            member, text = tarfile.TarInfo(name), (data / "train.en").read_bytes()
            member.type, member.linkname = kind, "../secret"
            member.size = len(text) if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(text))
        for language in ("en", "vi"):
            (data / f"train.{language}").unlink()
        (data / "train-en-vi.tgz").write_bytes(change(block.getvalue()))

    return make


def gone(data):
    shutil.rmtree(data)


def one_side_missing(data):
    (data / "train.vi").unlink()


def a_file(data):
    shutil.rmtree(data)
    data.write_bytes(b"no folder")


def a_folder_for_a_file(data):
    (data / "train.vi").unlink()
    (data / "train.vi").mkdir()


def zipped(content):
    block = io.BytesIO()
    with zipfile.ZipFile(block, "w") as archive:
        archive.writestr("train.en", content)
    return block.getvalue()


def one_pair(data):
    plain(b"a\n", b"b\n")(data)
    for language in ("en", "vi"):
        (data / f"tst2012.{language}").unlink()


PUT = "put train.en and train.vi, or the archives train-en-vi.tgz dev-2012-en-vi.tgz test-2013-en"
SOUND = "train-en-vi.tgz is no sound .tgz ("
LONG = "word " * 100_000

CORPORA = [  # what is wrong, how to make it, what the sentence says besides the folder's name
    ("no folder", gone, [PUT, "--download fetches them"]),
    ("a file, no folder", a_file, [PUT]),
    ("one side is missing", one_side_missing, [PUT]),
    ("a folder in place of a file", a_folder_for_a_file, [PUT]),
    ("empty files", plain(b"", b""), ["No usable sentence pair. train: 0 pairs read"]),
    (
        "only empty lines",
        plain(b"\n\n \n", b"\n\t\na\n"),
        ["train: 3 pairs read, 0 kept; dropped: 3 with an empty side. Line n must"],
    ),
    (
        "only control characters",
        plain(b"\0\x07\n", b"\x1b\x7f\n"),
        ["train: 1 pairs read, 0 kept; dropped: 1 with an empty side"],
    ),
    (
        "only a line of 100,000 words",
        plain(LONG.encode() + b"\n", LONG.encode() + b"\n"),
        ["train: 1 pairs read, 0 kept; dropped: 1 longer than 200 subwords"],
    ),
    ("one pair and no dev files", one_pair, ["No usable sentence pair. train: 0 pairs read"]),
    (
        "different line counts",
        plain(lines("a", "b", "c"), lines("a", "b")),
        ["train.en has 3 lines but train.vi has 2 lines; line n must translate line n."],
    ),
    (
        "different line counts of the dev set",
        plain(lines("a"), lines("a", "b", "c"), "tst2012"),
        ["tst2012.en has 1 lines but tst2012.vi has 3 lines; line n must translate line n."],
    ),
    (
        "not UTF-8",
        plain(lines("a", "b", "c"), b"a\nb\n\xe1\xba\n"),
        ["train.vi, line 3 is not UTF-8: convert it."],
    ),
    (
        "UTF-16",
        plain("a\nb\n".encode("utf-16"), lines("a", "b")),
        ["train.en, line 1 is not UTF-8: convert it."],
    ),
    ("an empty archive", archive(lambda content: b""), [SOUND, "fetch it again."]),
    ("a truncated archive", archive(lambda content: content[:900]), [SOUND, "fetch it again."]),
    (
        "a corrupt archive",
        archive(lambda content: content[:700] + b"\0\xff" * 40 + content[780:]),
        [SOUND, "fetch it again."],
    ),
    ("a web page", archive(lambda content: b"<html>404</html>"), [SOUND, "fetch it again."]),
    ("a zip", archive(zipped), [SOUND, "fetch it again."]),
    ("a symbolic link in the archive", archive(kind=tarfile.SYMTYPE), [PUT]),
    ("a hard link in the archive", archive(kind=tarfile.LNKTYPE), [PUT]),
    ("a device in the archive", archive(kind=tarfile.CHRTYPE), [PUT]),
    ("a pipe in the archive", archive(kind=tarfile.FIFOTYPE), [PUT]),
    ("a folder in the archive", archive(kind=tarfile.DIRTYPE), [PUT]),
    ("an archive of something else", archive(name="../../valid.en"), [PUT]),
]


@pytest.mark.parametrize(
    ("make", "fragments"), [row[1:] for row in CORPORA], ids=[row[0] for row in CORPORA]
)
def test_bad_corpus_is_one_sentence_and_leaves_nothing_behind(
    command, corpus, tmp_path, request, make, fragments
):
    (tmp_path / "secret").write_bytes(lines("secret"))
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    make(data)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    sentence = command("--full", "--data", data, "--run", tmp_path / "run", *TINY).refused()
    for fragment in fragments:
        assert fragment in sentence
    assert "No usable" in sentence or str(data) in sentence
    assert "secret" not in sentence
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


ODD = [
    "I saw the river .",
    "",
    "a\0b \x07 c \x1b[1m .",
    "word " * 100_000,
    "tie\u0302\u0301ng 😀 مرحبا",
]
ODD_TOLD = "305 pairs read, 303 kept; dropped: 1 with an empty side, 1 longer than 200 subwords"


def test_odd_lines_of_a_corpus_are_cleaned_or_dropped_and_counted(command, corpus, tmp_path):
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    for language in ("en", "vi"):
        with open(data / f"train.{language}", "ab") as file:
            file.write(lines(*ODD))
    result = command("--full", "--data", data, "--run", tmp_path / "run", *TINY, "--epochs", 1)
    assert result.status == 0, result.err
    assert ODD_TOLD in result.out


def test_a_corpus_smaller_than_a_batch_and_than_the_vocabulary_is_trained_on(
    lesson8, command, tmp_path
):
    pairs = made_up_pairs(4, 1)
    plain(*(lines(*side) for side in zip(*pairs, strict=True)))(tmp_path)
    where = ["--data", tmp_path, "--run", tmp_path / "run"]
    result = command("--full", *where, *TINY, "--vocab-size", 8000, "--batch-tokens", 4096)
    assert result.status == 0, result.err
    assert max(load(tmp_path / "run" / lesson8.BEST)["vocab_sizes"]) < 500


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------

ARGUMENTS = [
    (["--full", "--direction", "en_vi"], "--direction must be two languages, like en-vi: en_vi."),
    (["--full", "--direction", "en-en"], "--direction must be two languages, like en-vi: en-en."),
    (["--full", "--direction", "en-vi-de"], "--direction must be two languages"),
    (["--full", "--direction", "en"], "--direction must be two languages"),
    (["--full", "--direction", "xx-yy"], "put train.xx and train.yy there."),
    (["--demo", "--direction", "en-de"], "The demo translates en-vi and vi-en, not en-de."),
    (["--infer", "--direction", "xx-yy"], "translates en-vi, not xx-yy."),
    (["--full", "--n-heads", "3"], "--d-model must be even, and --n-heads must divide it."),
    (["--full", "--n-heads", "-2"], "--n-heads must be at least 1 and below 2**32, not -2."),
    (["--full", "--d-model", "15", "--n-heads", "3"], "--d-model must be even"),
    (["--full", "--d-model", "0"], "--d-model must be at least 2 and below 2**32, not 0."),
    (["--full", "--dropout", "1.5"], "--dropout and --lr must be below 1."),
    (["--full", "--dropout", "-0.1"], "--dropout must be at least 0 and below 2**32, not -0.1."),
    (["--full", "--dropout", "nan"], "--dropout must be at least 0 and below 2**32, not nan."),
    (["--demo", "--lr", "-1"], "--lr must be at least 1e-09 and below 2**32, not -1.0."),
    (["--full", "--lr", "nan"], "--lr must be at least 1e-09 and below 2**32, not nan."),
    (["--full", "--lr", "inf"], "--lr must be at least 1e-09 and below 2**32, not inf."),
    (["--full", "--minutes", "-3"], "--minutes must be at least 0 and below 2**32, not -3.0."),
    (["--full", "--minutes", "inf"], "--minutes must be at least 0 and below 2**32, not inf."),
    (["--full", "--epochs", "0"], "--epochs must be at least 1 and below 2**32, not 0."),
    (["--full", "--batch-tokens", "0"], "--batch-tokens must be at least 16 and below 2**32"),
    (["--full", "--accumulate", "0"], "--accumulate must be at least 1 and below 2**32, not 0."),
    (["--full", "--vocab-size", "3"], "--vocab-size must be at least 300 and below 2**32, not 3."),
    (["--full", "--warmup", "0"], "--warmup must be at least 1 and below 2**32, not 0."),
    (["--full", "--seed", "-1"], "--seed must be at least 0 and below 2**32, not -1."),
    (["--full", "--seed", str(2**70)], "--seed must be at least 0 and below 2**32"),
    (["--full", "--beam", "0"], "--beam must be between 1 and 1,000."),
    (["--infer", "--beam", "-4"], "--beam must be between 1 and 1,000."),
    (["--full", "--precision", "fp16"], "--precision fp16 is not for training on cpu: use auto."),
    (["--full", "--device", "cuda:99"], "--device cuda:99 cannot be used here ("),
    (["--infer", "--device", "cuda:99"], "--device cuda:99 cannot be used here ("),
    (["--full", "--device", "toaster"], "--device toaster cannot be used here ("),
    (["--full", "--data", "nowhere"], "No train data in nowhere: put train.en and train.vi"),
    (["--evaluate", "--data", "nowhere"], "No test data in nowhere: put tst2013.en and tst2013.vi"),
    (["--full", "--run", "x" * 300], "cannot be used: File name too long."),
    (["--infer", "--run", "nowhere"], "No trained model in nowhere: --demo or --full trains one."),
]


@pytest.mark.parametrize(
    ("arguments", "fragment"), ARGUMENTS, ids=[" ".join(case[0])[:60] for case in ARGUMENTS]
)
def test_wrong_arguments_are_refused_with_one_sentence(
    command, corpus, trained, tmp_path, monkeypatch, arguments, fragment
):
    monkeypatch.chdir(tmp_path)
    training, before = arguments[0] in ("--full", "--demo"), contents(trained)
    common = ["--data", corpus, "--run", tmp_path / "run" if training else trained]
    more = TINY if training else CPU
    assert fragment in command(arguments[0], *common, *more, *arguments[1:]).refused()
    assert not list(tmp_path.iterdir()), "a refused run left something behind"
    assert contents(trained) == before


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------


class Code:
    """Where this is unpickled, a folder appears."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def other(**changes):
    """Change a checkpoint's entries, those of its configuration, or a shape in its weights."""

    def make(path):
        stored = load(path)
        if "config" in changes:
            stored["config"] |= changes["config"]
        else:
            stored |= changes
        torch.save(stored, path)

    return make


def tokenizer_of_the_other_language(path):
    shutil.copy(path.with_name("vi_tokenizer.json"), path.with_name("en_tokenizer.json"))


DAMAGED = "cannot be read: it is damaged, or not saved by this program."
MISFIT = "does not fit this program ("

CHECKPOINTS = [
    ("missing", lambda path: path.unlink(), "No trained model in "),
    ("empty", lambda path: path.write_bytes(b""), DAMAGED),
    ("truncated", lambda path: path.write_bytes(path.read_bytes()[:-5000]), DAMAGED),
    ("text", lambda path: path.write_bytes(b"hello\n"), DAMAGED),
    ("of another program", lambda path: torch.save({"model": {}, "step": 3}, path), DAMAGED),
    ("of an earlier format", other(format="iwslt-transformer-0"), DAMAGED),
    ("a tensor", lambda path: torch.save(torch.zeros(3), path), DAMAGED),
    ("a pickle with code", lambda path: path.write_bytes(pickle.dumps(Code())), DAMAGED),
    ("a torch file with code", lambda path: torch.save({"format": Code()}, path), DAMAGED),
    ("of another size", other(config={"d_model": 32}), MISFIT),
    ("of another depth", other(config={"n_layers": 2}), MISFIT),
    ("of other vocabularies", other(vocab_sizes=[7, 7]), MISFIT),
    ("with an unknown setting", other(config={"colour": "red"}), MISFIT),
    ("without weights", other(weights={}), MISFIT),
    (
        "with another tokenizer",
        tokenizer_of_the_other_language,
        "en_tokenizer.json is not the tokenizer that best_iwslt_transformer.pth was trained with.",
    ),
    (
        "without its tokenizer",
        lambda path: path.with_name("en_tokenizer.json").unlink(),
        "en_tokenizer.json is not the tokenizer that best_iwslt_transformer.pth was trained with.",
    ),
]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_checkpoint_with_a_wrong_byte_or_cut_short_is_read_or_refused(
    lesson8, trained, tmp_path, data
):
    """Nothing else may happen; what is read has the entries of a checkpoint, and cut is refused."""
    content, path = bytearray((trained / lesson8.BEST).read_bytes()), tmp_path / lesson8.BEST
    place = data.draw(st.integers(0, len(content) - 1))
    cut = data.draw(st.booleans())
    if cut:
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        stored = lesson8.load_file(path)
    except lesson8.UserError as error:
        assert DAMAGED in str(error)
    else:
        assert not cut and stored["format"] == lesson8.FORMAT


def plain_values():
    """Whatever a checkpoint may hold: numbers, texts, tensors, in lists and dictionaries."""
    tensors = st.lists(st.floats(width=32), max_size=9).map(torch.tensor)
    leaves = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=9)
    return st.recursive(
        leaves | st.booleans() | st.none() | tensors.filter(lambda x: not x.isnan().any()),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=12,
    )


@settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(value=plain_values())
def test_a_checkpoint_gives_back_what_was_saved(lesson8, tmp_path, value):
    content = {"format": lesson8.FORMAT, "value": value}
    lesson8.write_file(tmp_path / "file", lambda file: torch.save(content, file))
    assert identical(lesson8.load_file(tmp_path / "file"), content)


@pytest.mark.parametrize("part", ["config", "processes", "progress", "model", "optimizer", "data"])
def test_state_without_a_part_is_refused_with_one_sentence(
    lesson8, command, corpus, trained, tmp_path, part
):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    state = load(run / lesson8.STATE)
    del state[part]
    torch.save(state, run / lesson8.STATE)
    before = contents(run)
    where = ["--data", corpus, "--run", run, *TINY, "--epochs", 1]
    assert f"{lesson8.STATE} {MISFIT}" in command("--full", "--resume", *where).refused()
    assert contents(run) == before


@pytest.mark.filterwarnings("error")  # on stderr a warning would be more than the sentence
@pytest.mark.parametrize(
    ("make", "fragment"),
    [row[1:] for row in CHECKPOINTS],
    ids=[row[0] for row in CHECKPOINTS],
)
@pytest.mark.parametrize("mode", ["--infer", "--evaluate"])
def test_checkpoint_that_does_not_fit_is_refused_with_one_sentence(
    lesson8, command, corpus, trained, tmp_path, monkeypatch, mode, make, fragment
):
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    make(run / lesson8.BEST)
    before = contents(run)
    sentence = command(mode, "--data", corpus, "--run", run, *CPU).refused()
    assert fragment in sentence and str(run) in sentence
    assert contents(run) == before
    assert not Path("executed").exists(), "code in a checkpoint was executed"


# ------------------------------------------------------------------------------------------------
# The machine: memory, disk, folders
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_names_the_flags_to_lower(
    lesson8, command, corpus, tmp_path, monkeypatch, error
):
    def batch_loss(*arguments):
        raise error

    monkeypatch.setattr(lesson8, "batch_loss", batch_loss)
    sentence = command("--full", "--data", corpus, "--run", tmp_path / "run", *TINY).refused()
    expected = "out of memory: lower --batch-tokens, --beam, --d-model or --n-layers."
    assert sentence == f"error: {expected}"


def test_memory_that_the_system_refuses_is_out_of_memory(command, corpus, tmp_path):
    resource = pytest.importorskip("resource")
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux limits the address space")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * resource.getpagesize()
    where = ["--data", corpus, "--run", tmp_path / "run", *TINY]
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, hard))
    try:  # a matrix of 19 GB
        sentence = command("--full", *where, "--d-ff", 300_000_000).refused()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "out of memory: lower --batch-tokens" in sentence


@pytest.fixture
def after_two_saves(lesson8, monkeypatch):
    """Have something happen to the run's folder after its second validation is saved."""

    def after_two_saves(action):
        original, done = lesson8.Trainer.save_state, []

        def save_state(trainer):
            original(trainer)
            done.append(trainer.step)
            if len(done) == 2:
                action(trainer.run)

        monkeypatch.setattr(lesson8.Trainer, "save_state", save_state)

    return after_two_saves


def test_a_folder_that_vanishes_is_one_sentence(command, corpus, tmp_path, after_two_saves):
    after_two_saves(shutil.rmtree)
    result = command("--full", "--data", corpus, "--run", tmp_path / "run", *TINY)
    assert "could not be written" in last_line(result) and str(tmp_path / "run") in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["read-only", "full"])
def test_a_disk_that_takes_no_more_leaves_the_checkpoint_and_resume_goes_on(
    lesson8, command, corpus, trained, tmp_path, monkeypatch, after_two_saves, how
):
    """As root nothing is read-only, so that opening a file is made to fail instead."""
    number = {"read-only": 30, "full": 28}[how]

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    def close(run):
        seen.update(contents(run))
        monkeypatch.setattr(lesson8, "open", refuse, raising=False)

    seen = {}
    after_two_saves(close)
    where = ["--full", "--data", corpus, "--run", tmp_path / "run", *TINY]
    sentence = last_line(command(*where))
    assert "could not be written" in sentence and os.strerror(number) in sentence
    assert "nothing was changed" in sentence
    seen.pop("lock-journal", None)
    assert contents(tmp_path / "run") == seen and lesson8.BEST in seen
    monkeypatch.undo()
    assert command(*where, "--resume").status == 0


def last_line(result):
    """The only sentence on stderr of a run that was stopped on its way."""
    assert result.status == 2 and "Traceback" not in result.err
    (sentence,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.err.splitlines()[-1] == sentence
    return sentence


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="needs a folder nobody can write")
def test_a_folder_nobody_can_write_is_one_sentence(command, corpus):
    sentence = command("--full", "--data", corpus, "--run", "/proc/run", *TINY).refused()
    assert "/proc/run" in sentence and "take another --run" in sentence


def test_diverged_training_names_step_batch_and_what_to_try(
    lesson8, command, corpus, tmp_path, monkeypatch
):
    original = lesson8.Trainer.loss

    def loss(trainer, *rest):
        return original(trainer, *rest) * (float("inf") if trainer.step == 9 else 1)

    monkeypatch.setattr(lesson8.Trainer, "loss", loss)
    result = command("--full", "--data", corpus, "--run", tmp_path / "run", *TINY, "--epochs", 40)
    sentence = last_line(result)
    told = re.search(r"diverged in step 10, a batch with '([^']+?)': loss inf, gradient", sentence)
    assert told[1] in (corpus / "train.en").read_text("utf-8").replace("&apos;", "'")
    for advice in ("--restart", "--lr", "--warmup", "--precision fp32"):
        assert advice in sentence
    assert load(tmp_path / "run" / lesson8.STATE)["progress"][0] <= 9


# ------------------------------------------------------------------------------------------------
# What is left in the folder
# ------------------------------------------------------------------------------------------------


def test_what_a_killed_save_left_is_removed_by_the_next_run(lesson8, command, corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    left = [f".{name}.4711.tmp" for name in (lesson8.BEST, lesson8.STATE, "curve.png")]
    for name in (*left, ".mine.tmp", ".my.own.tmp", "notes.tmp"):
        (run / name).write_bytes(b"half")
    assert command("--full", "--data", corpus, "--run", run, *TINY, "--epochs", 1).status == 0
    assert [path.name for path in sorted(run.glob(".*"))] == [".mine.tmp", ".my.own.tmp"]
    assert (run / "notes.tmp").exists()


def test_what_a_killed_download_left_is_removed_by_the_next(lesson8, tmp_path, monkeypatch):
    (tmp_path / ".archive.4711.tmp").write_bytes(b"half")
    (tmp_path / "archive").write_bytes(b"")
    empty = ("archive", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", ())  # git's id of no bytes
    monkeypatch.setattr(lesson8, "ARCHIVES", {"train": empty})
    lesson8.download(tmp_path)
    assert contents(tmp_path) == {"archive": b""}


def test_the_curve_of_an_old_run_goes_with_it(lesson8, command, corpus, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "curve.png").write_bytes(b"old")
    with pytest.MonkeyPatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        where = ["--data", corpus, "--run", run]
        assert command("--full", *where, *TINY, "--epochs", 1, "--restart").status == 0
    assert not (run / "curve.png").exists()


def test_a_refused_run_leaves_a_folder_that_was_there(command, tmp_path):
    (tmp_path / "run").mkdir()
    command("--full", "--data", tmp_path, "--run", tmp_path / "run", *TINY).refused()
    assert (tmp_path / "run").is_dir()
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "run" / "lock").unlink()
    assert not list((tmp_path / "run").iterdir())
