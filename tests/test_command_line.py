"""Lesson 8, the command line: messages, filter, prompt, evaluation, demo."""

import contextlib
import importlib.util
import io
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from helpers import (
    TINY,
    Result,
    contents,
    load,
    one_thread,
    python,
    run_main,
    write_corpus,
    write_part,
)

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
    """Folders of runs that have learned a little, for each direction."""
    folder = tmp_path_factory.mktemp("runs")
    for direction in ("en-vi", "vi-en"):
        arguments = ["--full", "--direction", direction, "--data", corpus]
        more = ["--run", folder / direction, *TINY, "--epochs", 6, "--lr", 0.01]
        with one_thread():
            assert lesson8.main(list(map(str, [*arguments, *more]))) == 0
    return folder


@pytest.fixture(scope="session")
def demo(lesson8, tmp_path_factory):
    """Folders and outputs of the shortest demos, for each direction."""
    folder, texts = tmp_path_factory.mktemp("demo"), {}
    for direction in ("en-vi", "vi-en"):
        arguments = ["--demo", "--direction", direction, "--run", str(folder / direction)]
        with one_thread(), contextlib.redirect_stdout(io.StringIO()) as out:
            assert lesson8.main([*arguments, *TINY, "--epochs", "1", "--beam", "1"]) == 0
        texts[direction] = out.getvalue()
    return folder, texts


@pytest.fixture
def command(lesson8, capsys):
    """main(), as command(...) -> status, out, err."""
    return lambda *arguments: run_main(lesson8, capsys, *arguments)


@pytest.fixture
def translate(lesson8, capsys, monkeypatch, trained):
    """--infer as a filter: translate(bytes) -> lines of its output."""

    def translate(text, direction="en-vi"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "cp1252"))
        result = run_main(lesson8, capsys, "--infer", "--run", trained / direction, *CPU)
        assert result.status == 0, result.err
        assert result.out == "" or result.out.endswith("\n")
        return result.out.split("\n")[:-1]

    return translate


@pytest.fixture
def elsewhere(lesson8, tmp_path, monkeypatch):
    """A copy of the script in a folder of its own, so with runs/ of its own, as a module."""
    script = Path(shutil.copy(lesson8.__file__, tmp_path))
    spec = importlib.util.spec_from_file_location("lesson8_elsewhere", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lesson8_elsewhere", module)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------
# What is refused, and how
# ------------------------------------------------------------------------------------------------


def test_without_a_mode_usage_is_shown(command):
    result = command()
    assert result.status == 2 and "Traceback" not in result.err
    for mode in ("--demo", "--full", "--full --resume", "--evaluate", "--infer", "torchrun"):
        assert mode in result.err


def test_two_modes_are_refused(command):
    result = command("--demo", "--full")
    assert result.status == 2
    assert "not allowed with" in result.err


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--full", "--lr", "fast"], "--lr"),
        (["--full", "--preset", "huge"], "laptop"),
        (["--full", "--epoch", "3"], "--epoch"),  # no guessing: not taken for --epochs
        (["--infer", "hello"], "hello"),
    ],
)
def test_arguments_that_do_not_parse_are_named(command, arguments, fragment):
    result = command(*arguments)
    assert result.status == 2 and result.out == ""
    assert fragment in result.err.splitlines()[-1]


def test_missing_data_is_named_with_the_archive_and_the_way_to_get_it(command, tmp_path):
    sentence = command("--full", "--data", tmp_path, "--run", tmp_path / "run", *TINY).refused()
    for part in ("train.en", "train.vi", "train-en-vi.tgz", "--download", str(tmp_path)):
        assert part in sentence


def test_a_direction_cannot_lead_out_of_the_folder_of_runs(elsewhere, capsys, tmp_path):
    for direction in ("x/../../outside-vi", "x/../outside-vi"):
        result = run_main(elsewhere, capsys, "--full", "--direction", direction, *TINY)
        assert "--direction" in result.refused()
    assert not [path for path in tmp_path.rglob("*") if "outside" in path.name]


def test_a_file_in_place_of_the_run_folder_is_refused(command, corpus, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for mode in ("--full", "--infer", "--evaluate"):
        more = TINY if mode == "--full" else CPU
        result = command(mode, "--data", corpus, "--run", tmp_path / "file", *more)
        assert str(tmp_path / "file") in result.refused()
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("mode", ["--infer", "--evaluate"])
def test_folder_without_a_model_is_refused(command, tmp_path, mode):
    sentence = command(mode, "--run", tmp_path, *CPU).refused()
    assert "--demo" in sentence and "--full" in sentence


def test_failed_download_is_one_sentence_with_the_address(command, monkeypatch, tmp_path):
    def no_network(*arguments, **more):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    sentence = command("--download", "--data", tmp_path).refused()
    assert "https://" in sentence and "train-en-vi.tgz" in sentence
    assert not contents(tmp_path)


def test_download_of_something_else_is_not_kept(command, monkeypatch, tmp_path):
    class Response(io.BytesIO):
        headers = {"Content-Length": "14"}  # noqa: RUF012 (as urllib has it)

    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **more: Response(b"<html>no</html"))
    result = command("--download", "--data", tmp_path)
    assert result.status == 2 and "not the" in result.err and "Traceback" not in result.err
    assert not contents(tmp_path)


def test_help_names_every_setting_and_every_mode(lesson8, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = command("--help")
    assert result.status == 0 and result.err == ""
    settings = [lesson8.flag(item.name) for item in fields(lesson8.Config) if item.name != "demo"]
    others = "--demo --full --infer --evaluate --resume --restart --run --data --beam --device"
    for name in (*settings, *others.split()):
        assert re.search(rf"^ +{name}\b", result.out, re.MULTILINE), name
    for preset in lesson8.PRESETS:
        assert preset in result.out


# ------------------------------------------------------------------------------------------------
# Evaluation
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 4])
def test_evaluation_prints_three_scores_that_the_hypotheses_file_confirms(
    command, corpus, trained, tmp_path, beam
):
    """The references are the hypotheses and more, so swapping the two would change BLEU.

    The folder holds the test set alone: training and dev data are not read.
    """
    sacrebleu = pytest.importorskip("sacrebleu")
    run = Path(shutil.copytree(trained / "en-vi", tmp_path / "run"))
    where = ["--evaluate", "--run", run, "--device", "cpu", "--beam", beam]
    before = set(contents(run))
    write_part(tmp_path / "data", "tst2013", read_pairs(corpus, "tst2013"))
    assert command(*where, "--data", tmp_path / "data").status == 0
    (name,) = set(contents(run)) - before
    assert str(beam) in name and name.endswith("vi")
    hypotheses = (run / name).read_text("utf-8").removesuffix("\n").split("\n")
    assert len(hypotheses) == 20 and any(hypotheses)

    pairs = read_pairs(corpus, "tst2013")
    longer = [f"{line} {line} &quot; bốn &quot; ." for line in hypotheses]
    longer[0] = "con mèo đen ở Hà Nội ."
    sources = [english for english, _ in pairs]
    write_part(tmp_path / "data", "tst2013", list(zip(sources, longer, strict=True)))
    result = command(*where, "--data", tmp_path / "data")
    assert result.status == 0, result.err
    assert (run / name).read_text("utf-8").removesuffix("\n").split("\n") == hypotheses

    expected = sacrebleu.corpus_bleu(hypotheses, [longer], tokenize="none", force=True).score
    swapped = sacrebleu.corpus_bleu(longer, [hypotheses], tokenize="none", force=True).score
    assert expected > 1 and abs(expected - swapped) > 1
    corpus_bleu, bleu, chrf = re.findall(r"(?:BLEU|chrF2?) = (\d+\.\d+)", result.out)
    assert float(corpus_bleu) == pytest.approx(expected, abs=0.006)
    assert 0 < float(bleu) < 100 and 0 < float(chrf) < 100
    assert len(re.findall(r"nrefs:1\|.*version:", result.out)) == 3
    assert "tok:none" in result.out and "tok:13a" in result.out


def read_pairs(folder, stem):
    """Return the pairs of a plain part of the corpus."""
    sides = [(folder / f"{stem}.{language}").read_text("utf-8") for language in ("en", "vi")]
    return list(zip(*(side.removesuffix("\n").split("\n") for side in sides), strict=True))


def test_evaluation_of_the_other_direction_reads_the_files_the_other_way(
    command, corpus, trained, tmp_path
):
    sacrebleu = pytest.importorskip("sacrebleu")
    run = Path(shutil.copytree(trained / "vi-en", tmp_path / "run"))
    before = set(contents(run))
    result = command("--evaluate", "--run", run, "--data", corpus, *CPU)
    assert result.status == 0, result.err
    (name,) = set(contents(run)) - before
    assert name.endswith("en")
    hypotheses = (run / name).read_text("utf-8").removesuffix("\n").split("\n")
    references = [english for english, _ in read_pairs(corpus, "tst2013")]
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True).score
    printed = re.search(r"BLEU = (\d+\.\d+)", result.out)[1]
    assert float(printed) == pytest.approx(expected, abs=0.006)


def test_evaluation_of_a_demo_is_refused(command, corpus, demo):
    folder, _ = demo
    where = ("--run", folder / "en-vi", "--data", corpus)
    assert "no test set" in command("--evaluate", *where, *CPU).refused()


# ------------------------------------------------------------------------------------------------
# The filter
# ------------------------------------------------------------------------------------------------

NASTY = [
    b"I saw the river.",
    b"",
    b"   ",
    b"A black cat didn't find nothing.\r",  # from Windows
    b"I\rsaw\rher\rbook",
    b"I saw\x00 the \x07river",
    b"She liked \xf0\x9f\x98\x80 Hanoi \xe2\x80\x94 yes",
    b"broken \xff\xfe\xc3 bytes \xe1\xba",
    b"<pad> </s> <bos> <eos> [UNK] &lt;pad&gt;",
    b"a \xe2\x80\xa8 line \xc2\x85 and \xe2\x80\xa9 paragraph \x0b\x0c break",
    b"\xef\xbb\xbfShe liked her book.",
    b'"green" & <b>door</b> | [x] &quot; &amp;quot;',
    b"\xed\xa0\x80 lone surrogate",
    b". . . ? ! ...",
    b"x" * 3000,
    b"no newline at the end",
]


def test_filter_writes_a_line_for_each_line_and_nothing_else(translate):
    lines = translate(b"\n".join(NASTY))
    assert len(lines) == len(NASTY)
    assert [line == "" for line in lines[1:3]] == [True, True]
    for line in lines:
        assert len(line.splitlines()) <= 1
        assert not re.search("[\x00-\x1f\x7f-\x9f]", line)
        assert not re.search("<(pad|bos|eos)>", line)


def test_filter_translates_every_nonempty_plain_line(translate):
    """A tiny model may answer nonsense, but it has learned to answer."""
    lines = translate(b"I saw the river .\nMy brother liked her book.\nShe liked nothing?\n")
    assert all(lines) and len(set(lines)) > 1


def test_filter_of_nothing_writes_nothing(translate):
    assert translate(b"") == []
    assert translate(b"\n") == [""]
    assert translate(b"\n\n\n") == ["", "", ""]


def test_filter_gives_a_line_the_same_translation_alone_and_among_others(lesson8, translate):
    """Whatever shares the batch with it, padding included; 70 lines are more than one helping."""
    lines = [
        NASTY[i % len(NASTY)] if i % 5 == 0 else f"I saw {i} cats.".encode() for i in range(70)
    ]
    lines = [line for line in lines if len(line) < 100]
    together = translate(b"\n".join(lines))
    assert len(together) > 64
    for i in range(0, len(lines), 5):
        assert translate(lines[i] + b"\n") == [together[i]]


def test_line_ends_of_windows_change_nothing(translate):
    lines = [b"I saw the river.", b"", b"She liked nothing."]
    assert translate(b"\r\n".join(lines)) == translate(b"\n".join(lines))


def test_decomposed_vietnamese_is_translated_like_composed(translate):
    composed = "Anh trai tôi đã thấy dòng sông ở Hà Nội.\nThầy giáo già đã thích quyển sách.\n"
    decomposed = unicodedata.normalize("NFD", composed)
    assert len(decomposed) > len(composed)
    expected = translate(composed.encode(), "vi-en")
    assert all(expected)
    assert translate(decomposed.encode(), "vi-en") == expected


def test_very_long_line_is_translated_to_one_line(translate):
    lines = translate(b"I saw the river.\n" + b"river " * 5000 + b"\nI saw the river.\n")
    assert len(lines) == 3 and lines[1]
    assert lines[0] == lines[2]


def test_sentences_of_a_line_are_translated_one_by_one(translate):
    sentences = ["I saw the river.", "My brother liked her book.", "She didn't find nothing?"]
    apart = translate("\n".join(sentences).encode())
    (together,) = translate(" ".join(sentences).encode())
    assert "".join(together.split()) == "".join("".join(apart).split())


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_filter_is_utf8_whatever_the_locale(lesson8, trained, env):
    text = "Tôi đã thấy dòng sông.\n\nThầy giáo già 😀\n".encode()
    run = trained / "vi-en"
    ended = python(lesson8.__file__, "--infer", "--run", run, *CPU, stdin=text, env=env)
    assert ended.returncode == 0, ended.stderr.decode()
    translator = lesson8.Translator(run, torch.device("cpu"), 1)
    expected = translator.translate(text.decode().split("\n")[:-1])
    assert ended.stdout.decode("utf-8") == "".join(line + "\n" for line in expected)
    assert str(run) in ended.stderr.decode("utf-8")


def test_training_messages_survive_a_terminal_that_is_not_utf8(lesson8, corpus, tmp_path):
    """Each epoch prints samples in Vietnamese."""
    arguments = ["--full", "--data", corpus, "--run", tmp_path / "run", *TINY, "--epochs", 1]
    ended = python(lesson8.__file__, *arguments, env={"PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 0, ended.stderr.decode()
    assert "dev loss" in ended.stdout.decode("utf-8")


@pytest.mark.skipif(os.name == "nt", reason="pipes break otherwise on Windows")
def test_filter_ends_quietly_when_its_reader_has_left(lesson8, trained):
    process = subprocess.Popen(
        [sys.executable, lesson8.__file__, "--infer", "--run", trained / "en-vi", *CPU],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"I saw the river.\n" * 200)
        process.stdin.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=300) == 141
    assert "Traceback" not in error and "Exception ignored" not in error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["--infer"], ["--evaluate"]], ids=str)
def test_a_full_device_is_one_sentence(lesson8, corpus, trained, arguments):
    """Python itself would end with 'Exception ignored' and status 120."""
    if arguments != ["--help"]:
        arguments = [*arguments, "--run", trained / "en-vi", "--data", corpus, *CPU]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, lesson8.__file__, *map(str, arguments)],
            input=b"I saw the river.\n",
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""},
        )
    sentence = Result(ended.returncode, "", ended.stderr.decode("utf-8")).refused()
    assert sentence == "error: output cannot be used: No space left on device."


@pytest.mark.parametrize(
    "line", ["river " * 16_667, "x" * 100_000, "a.b. " * 20_000, "A. b? " * 2000, "\"'" * 2000]
)
def test_a_line_cut_into_pieces_is_told_on_stderr_and_any_line_is_quick_at_the_border(
    lesson8, capsys, monkeypatch, trained, line
):
    told = []

    def translate_ids(model, pieces, *rest):
        told.extend(len(piece) for piece in pieces)
        return [[] for _ in pieces]

    monkeypatch.setattr(lesson8, "translate_ids", translate_ids)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"Hi.\n{line}\n".encode())))
    start = time.monotonic()
    result = run_main(lesson8, capsys, "--infer", "--run", trained / "en-vi", *CPU)
    assert time.monotonic() - start < 10  # for the third sacremoses alone took 27
    assert (result.status, result.out) == (0, "\n\n")
    assert max(told) <= lesson8.MAX_POSITIONS - lesson8.EXTRA_OUTPUT
    warnings = result.err.splitlines()[1:]
    if max(told) < lesson8.MAX_POSITIONS - lesson8.EXTRA_OUTPUT:
        assert warnings == []
    else:
        (warning,) = warnings
        assert f"pieces of {max(told) - 1}" in warning and repr(line[:30]) in warning


@pytest.mark.parametrize("text", ["a.b. U.S. p.m. Ü.x ế.b", "no. 5", "1. a", ". . .", "Ω.ω. a"])
def test_the_quicker_test_for_letters_changes_no_token(lesson8, text):
    from sacremoses import MosesTokenizer

    for language in ("en", "vi"):
        moses, original = lesson8.Moses(language), MosesTokenizer(language)
        for word in text.split():
            assert moses.tokenizer.isanyalpha(word) == original.isanyalpha(word)
            assert moses.tokenizer.islower(word) == original.islower(word)
        assert moses.tokenizer.tokenize(text) == original.tokenize(text)


def random_lines(count):
    """Lines of any Unicode characters but a newline; some long, some of one script, some empty."""
    chance = random.Random(11)
    scripts = [(0x20, 0x7F), (0x00, 0x20), (0xC0, 0x250), (0x300, 0x370), (0x590, 0x700)]
    scripts += [(0x1E00, 0x1F00), (0x2000, 0x2070), (0xD800, 0xE000), (0x1F300, 0x1FA00)]
    for _ in range(count):
        low, high = chance.choice([*scripts, (0, 0x110000)])
        length = chance.choice([0, 1, 5, 20, 20, 40])
        codes = (chance.randrange(low, high) for _ in range(length))
        yield "".join(map(chr, codes)).replace("\n", " ").encode("utf-8", "surrogatepass") + b"\n"


@pytest.mark.parametrize("count", [256, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_lines_give_as_many_lines_and_memory_stays_flat(lesson8, trained, tmp_path, count):
    lines = list(random_lines(count))
    command = [sys.executable, lesson8.__file__, "--infer", "--run", trained / "en-vi", *CPU]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    peaks, out = [], 0
    with (
        open(tmp_path / "err", "wb") as err,
        subprocess.Popen(list(map(str, command)), stderr=err, **pipes) as process,
    ):
        status = Path(f"/proc/{process.pid}/status")
        for start in range(0, count, 64):  # as many lines as it takes at once
            helping = lines[start : start + 64]
            process.stdin.write(b"".join(helping))
            process.stdin.flush()
            for _ in range(len(helping) if len(helping) == 64 else 0):
                out += process.stdout.readline().endswith(b"\n")
            if status.exists():
                peaks.append(int(re.search(r"VmHWM:\s+(\d+)", status.read_text("utf-8"))[1]))
        process.stdin.close()
        out += sum(line.endswith(b"\n") for line in process.stdout)
        assert process.wait(timeout=60) == 0, (tmp_path / "err").read_text("utf-8")
    assert out == count
    assert b"Traceback" not in (tmp_path / "err").read_bytes()
    if len(peaks) >= 100:  # in kB: what a tenth of the lines needed is enough for all
        assert peaks[-1] < peaks[len(peaks) // 10] + 30_000


# ------------------------------------------------------------------------------------------------
# Which run, and the prompt
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["--infer", "--evaluate"])
def test_with_nothing_trained_it_says_what_to_run(elsewhere, capsys, mode):
    sentence = run_main(elsewhere, capsys, mode, "--direction", "vi-en", *CPU).refused()
    assert "--demo --direction vi-en" in sentence and "--full --direction vi-en" in sentence


def test_newest_full_run_of_the_direction_is_taken_else_the_demo(
    elsewhere, capsys, monkeypatch, trained
):
    runs = Path(elsewhere.__file__).parent / "runs"

    def fabricate(name, age, source="en-vi", **changes):
        shutil.copytree(trained / source, runs / name)
        path = runs / name / elsewhere.BEST
        checkpoint = load(path)
        checkpoint["config"] |= changes
        torch.save(checkpoint, path)
        os.utime(path, (time.time() - age, time.time() - age))
        return runs / name

    def chosen(direction):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
        result = run_main(elsewhere, capsys, "--infer", "--direction", direction, *CPU)
        assert (result.status, result.out) == (0, "\n"), result.err
        return Path(re.search(r"\S*runs\S+", result.err)[0].rstrip(".,:;"))

    demo = fabricate("demo-en-vi", 1, demo=True)
    assert chosen("en-vi") == elsewhere.find_run("en-vi") == demo
    fabricate("full-vi-en", 2, source="vi-en")
    assert chosen("en-vi") == demo
    old = fabricate("full-en-vi", 900)
    assert chosen("en-vi") == old  # though the demo is newer
    new = fabricate("another", 300)
    assert chosen("en-vi") == elsewhere.find_run("en-vi") == new
    assert chosen("vi-en") == runs / "full-vi-en"

    (runs / "broken").mkdir()
    (runs / "broken" / elsewhere.BEST).write_text("no checkpoint", encoding="utf-8")
    (runs / "strange").mkdir()
    torch.save([1, 2], runs / "strange" / elsewhere.BEST)
    assert chosen("en-vi") == new


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("end", "status"), [(b"\x04", 0), (b"\n", 0), (b"\x03", 130)], ids=repr)
def test_prompt_shows_the_languages_and_ends_with_ctrl_d_an_empty_line_or_ctrl_c(
    lesson8, trained, end, status
):
    import fcntl
    import termios

    def own_terminal():  # one whose Ctrl-C reaches the process, even if ours ignores it
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    run = trained / "en-vi"
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, lesson8.__file__, "--infer", "--run", run, *CPU],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "dumb", "LC_ALL": "C"},
        preexec_fn=own_terminal,
    )
    os.close(slave)
    seen = b""

    def read_until(fragment, count=1):
        nonlocal seen
        deadline = time.monotonic() + 200
        while seen.count(fragment) < count:
            ready = select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"waited for {fragment}: {seen.decode()}"
            try:
                seen += os.read(master, 4096)
            except OSError:  # Linux: the other side is closed
                break

    try:
        read_until(b"EN> ")
        os.write(master, b"I saw the river.\n")
        read_until(b"EN> ", 2)
        for _ in range(100):  # Python misses a Ctrl-C just before its prompt begins to wait
            with contextlib.suppress(OSError):
                os.write(master, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
                break
        assert process.poll() == status
    finally:
        process.kill()
        process.wait()
        os.close(master)
    translator = lesson8.Translator(run, torch.device("cpu"), 1)
    expected = translator.translate(["I saw the river."])[0]
    assert f"VI> {expected}\r\n" in seen.decode("utf-8")
    assert b"Traceback" not in seen


# ------------------------------------------------------------------------------------------------
# The demo
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["en-vi", "vi-en"])
def test_demo_reports_its_held_out_pairs_and_how_to_open_the_prompt(lesson8, demo, direction):
    folder, texts = demo
    held_out = lesson8.demo_pairs()[1]
    right, of = map(int, re.search(r"(\d+) of (\d+) exactly right", texts[direction]).groups())
    assert of == len(held_out) and 0 <= right <= of
    assert re.search(rf"--infer --run .*{direction}$", texts[direction], re.MULTILINE)
    config = load(folder / direction / lesson8.BEST)["config"]
    assert config["demo"] and config["direction"] == direction
    # The samples go the right way round.
    side = ("en-vi", "vi-en").index(direction)
    samples = re.findall(r"^  (\S.*?) -> ", texts[direction], re.MULTILINE)
    assert len(samples) >= 5
    assert set(samples) <= {pair[side] for pair in held_out}


def test_word_that_the_demo_never_saw_gives_a_hint_beside_the_translation(
    lesson8, capsys, monkeypatch, demo
):
    folder, _ = demo
    text = b"I am happy.\nI am Quantum-mechanical today, you are zebra.\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    result = run_main(lesson8, capsys, "--infer", "--run", folder / "en-vi", *CPU)
    assert result.status == 0 and len(result.out.splitlines()) == 2
    hints = [line for line in result.err.splitlines() if "never" in line]
    assert len(hints) == 1
    for word in ("quantum", "mechanical", "zebra"):
        assert word in hints[0]
    assert "happy" not in hints[0] and "today" not in hints[0]
    assert "never" not in result.out


def test_demo_replaces_a_demo_even_one_that_was_killed_early(command, lesson8, demo, tmp_path):
    run = Path(shutil.copytree(demo[0] / "en-vi", tmp_path / "run"))
    (run / lesson8.STATE).unlink()  # killed after the first checkpoint, before the first state
    result = command("--demo", "--run", run, *TINY, "--epochs", 1, "--beam", 1, "--seed", 3)
    assert result.status == 0, result.err
    assert load(run / lesson8.BEST)["config"]["seed"] == 3


def test_full_does_not_replace_a_demo_silently(command, corpus, demo):
    folder, _ = demo
    before = contents(folder / "en-vi")
    result = command("--full", "--data", corpus, "--run", folder / "en-vi", *TINY)
    assert "--restart" in result.refused()
    assert contents(folder / "en-vi") == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("direction", ["en-vi", "vi-en"])
def test_demo_translates_sentences_it_never_saw(lesson8, command, tmp_path, direction, seed):
    run = tmp_path / "run"
    result = command("--demo", "--direction", direction, "--run", run, "--seed", seed)
    assert result.status == 0, result.err
    right, of = map(int, re.search(r"(\d+) of (\d+) exactly right", result.out).groups())
    assert right >= 0.9 * of
    sentences = [["i am happy", "I am happy."], ["tôi vui", "Tôi vui."]]
    source, target = sentences if direction == "en-vi" else sentences[::-1]
    assert lesson8.Translator(run, torch.device("cpu")).translate(source) == target
