"""Lessons 1 to 7: the form they share, and what each must do when it is run, asked and graded.

Most of it happens in this process, through `main`; another process (two seconds for torch alone)
is started only where the process itself matters. Lessons 6 and 7 train models: they run once.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import Result, one_thread, python
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(path.stem for path in ROOT.glob("0[1-7]_*.py"))
SCRIPTS = sorted(path.stem for path in ROOT.glob("0[1-8]_*.py"))
QUICK = [stem for stem in LESSONS if stem < "06"]
LONG = [stem for stem in LESSONS if stem >= "06"]
LAST = LESSONS[-1] if not QUICK else QUICK[-1]  # where one lesson speaks for all
WIDTH = 88
CLOSING = r"\n(?:All (\d+) checks passed\. )?Next: .*\n\Z"
UTF8 = {"PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": ""}


@pytest.fixture(autouse=True, scope="module")
def threads():
    with one_thread():
        yield


@pytest.fixture(scope="module", params=LESSONS)
def lesson(request):
    """Each lesson as a module."""
    return importlib.import_module(request.param)


@pytest.fixture(scope="module", params=QUICK)
def quick_lesson(request):
    """Each lesson that takes no longer than importing torch."""
    return importlib.import_module(request.param)


@pytest.fixture(scope="module")
def one_lesson():
    """A lesson to try the text on that is the same in all."""
    return importlib.import_module(LAST)


def run(lesson, *arguments, stdin=""):
    """Run a lesson's command line in this process."""
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(sys, "stdin", io.StringIO(stdin))
        try:
            status = lesson.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code or 0
            if isinstance(status, str):  # Python prints such a code, and the status is 1
                print(status, file=err)
                status = 1
    return Result(status, out.getvalue(), err.getvalue())


@functools.cache
def pictures_of(stem):
    """A folder for the pictures of a lesson's whole run."""
    return tempfile.TemporaryDirectory(prefix=stem)


@functools.cache
def whole_run(stem):
    """Run a lesson in a process of its own; where that takes long, it draws its pictures as well.

    In the others a warning is an error; in these the package that draws may have its own.
    """
    quick = ("-W", "error", ROOT / f"{stem}.py")
    long = (ROOT / f"{stem}.py", "--figures", pictures_of(stem).name)
    done = python(*(quick if stem in QUICK else long), env=UTF8)
    out, err = (text.decode("utf-8").replace("\r\n", "\n") for text in (done.stdout, done.stderr))
    return Result(done.returncode, re.sub(r"(?m)^Saved .*\n\n?", "", out), err)


@functools.cache
def source(stem):
    return (ROOT / f"{stem}.py").read_text(encoding="utf-8")


def functions(lesson, prefix):
    """A lesson's functions of which the name begins so, in the order of the file."""
    names = (getattr(node, "name", "") for node in ast.parse(source(lesson.__name__)).body)
    return [getattr(lesson, name) for name in names if name.startswith(prefix)]


def titles(lesson):
    return [section.__doc__.splitlines()[0] for section in functions(lesson, "section_")]


def headings(lesson):
    return [f"{number}. {title}" for number, title in enumerate(titles(lesson), 1)]


def body(lesson, out):
    """The sections of an output: without what stands before the first and after the last."""
    start = "\n\n".join(lesson.__doc__.split("\n\n")[:2])
    assert out.startswith(start)
    return out[len(start) : re.search(CLOSING, out).start()].strip("\n")


def claimed(out):
    """How many checks an output says that it has passed."""
    return int(re.search(CLOSING, out)[1] or 0)


def too_wide(text, width=WIDTH):
    return [line for line in text.splitlines() if len(line) > width]


def test_the_lessons_are_found():
    numbers = [stem[:2] for stem in LESSONS]
    assert numbers and numbers == sorted(set(numbers))


# ------------------------------------------------------------------------------------------------
# A whole run
# ------------------------------------------------------------------------------------------------


def test_a_lesson_runs_to_its_end_without_a_warning(lesson):
    result = whole_run(lesson.__name__)
    assert (result.status, result.err) == (0, "")


def test_every_check_is_printed_and_counted(lesson):
    out = whole_run(lesson.__name__).out
    shown = re.findall(r"(?m)^  ✓ \S", out)
    assert len(shown) >= 5
    assert claimed(out) == len(shown)
    assert out.count("✓") == len(shown) and "✗" not in out


def test_every_section_is_printed_in_order(lesson):
    out = whole_run(lesson.__name__).out
    places = [out.index(f"\n{heading}\n") for heading in headings(lesson)]
    assert len(places) >= 3 and places == sorted(places)


def test_every_section_shows_something_live(lesson):
    for section, text in zip(
        functions(lesson, "section_"), parts(lesson, whole_run(lesson.__name__).out), strict=True
    ):
        explanation = inspect.getdoc(section).partition("\n\n")[2]
        assert explanation in text
        assert text.partition(explanation)[2].strip(), f"{section.__name__} only explains"


def parts(lesson, out):
    """The text of each section of a whole run."""
    text, places = f"{body(lesson, out)}\n", []
    for heading in headings(lesson):
        places.append(f"\n{text}".index(f"\n{heading}\n"))
    return [text[a:b] for a, b in zip(places, [*places[1:], len(text)], strict=True)]


def test_no_line_is_too_wide(lesson):
    assert too_wide(whole_run(lesson.__name__).out) == []


def everything(lesson):
    """All text that a lesson can show."""
    texts = [whole_run(lesson.__name__).out, run(lesson, "--help").out, lesson.quiz(), "✗"]
    return "\n".join([*texts, *(title for task in tasks(lesson) for title in task.titles)])


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_no_character_is_lost_on_a_terminal_that_is_not_utf8(lesson, encoding):
    text = everything(lesson)
    plain = {c: c.encode(encoding, "plain").decode(encoding) for c in set(text)}
    lost = {c for c, shown in plain.items() if shown == "?" != c}
    # Letters of French and Vietnamese have no plain spelling.
    assert {c for c in lost if not unicodedata.name(c).startswith("LATIN")} == set()
    out = whole_run(lesson.__name__).out
    assert too_wide("".join(plain[c] for c in out)) == []


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_such_a_terminal_gets_the_plain_characters(lesson, monkeypatch, encoding):
    expected = run(lesson, "--section", 1)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, newline="\n"))
    assert lesson.main(["--section", "1"]) == expected.status == 0
    sys.stdout.flush()
    assert written.getvalue() == expected.out.encode(encoding, "plain")
    assert b"ok " in written.getvalue() or "✓" not in expected.out


def test_the_same_seed_gives_the_same_output(quick_lesson):
    first, second = (run(quick_lesson, "--seed", 7) for _ in range(2))
    assert first == second


def test_the_default_seed_is_1(one_lesson):
    assert run(one_lesson, "--seed", 1).out == whole_run(LAST).out
    assert run(one_lesson, "--seed", 2).out != whole_run(LAST).out


@pytest.mark.parametrize("seed", [2, 3, 4, 5, 2**31])
def test_every_check_holds_with_other_seeds(quick_lesson, seed):
    result = run(quick_lesson, "--seed", seed)
    assert result.status == 0, result.out[-500:]
    assert claimed(result.out) == claimed(whole_run(quick_lesson.__name__).out)


def test_a_terminal_gets_the_same_text():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, ROOT / f"{LAST}.py"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **UTF8},
    )
    os.close(theirs)
    shown = b""
    with process:
        with contextlib.suppress(OSError):  # how Linux says that a terminal is gone
            while block := os.read(ours, 1 << 16):
                shown += block
        err = process.stderr.read()
    os.close(ours)
    expected = whole_run(LAST)
    assert (process.returncode, err) == (expected.status, b"")
    assert shown.decode("utf-8").replace("\r\n", "\n") == expected.out


@pytest.mark.skipif(os.name == "nt", reason="Windows has no broken pipes")
@pytest.mark.parametrize("arguments", [[], ["--section", "1"], ["--help"]], ids=str)
def test_a_reader_who_leaves_early_is_no_error(arguments):
    reading, writing = os.pipe()
    os.close(reading)  # as head does once it has seen enough
    done = subprocess.run(
        [sys.executable, ROOT / f"{LAST}.py", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, **UTF8},
    )
    os.close(writing)
    assert done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--section", "1"], ["--help"], ["--quiz"]], ids=str)
def test_a_full_device_is_one_sentence(arguments):
    """Python itself would end with 'Exception ignored' and status 120."""
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, ROOT / f"{LAST}.py", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, **UTF8},
        )
    sentence = Result(ended.returncode, "", ended.stderr.decode("utf-8")).refused()
    assert "output cannot be written: No space left on device" in sentence


def test_without_its_docstrings_a_lesson_is_refused_with_one_sentence():
    ended = python("-OO", ROOT / f"{LAST}.py")
    assert "-OO" in Result(ended.returncode, "", ended.stderr.decode("utf-8")).refused()


@pytest.mark.parametrize("columns", ["1", "20", "0", "many"])
@pytest.mark.parametrize("arguments", [["--help"], ["--section", "1"], ["--quiz"]], ids=str)
def test_a_terminal_of_any_width_is_no_error(one_lesson, monkeypatch, columns, arguments):
    monkeypatch.setenv("COLUMNS", columns)
    assert run(one_lesson, *arguments)[::2] == (0, "")


def test_a_lesson_can_do_without_standard_output(one_lesson, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # what Python makes of one that was closed before
    assert one_lesson.main(["--section", "1"]) == 0


def test_a_lesson_that_is_interrupted_ends_quietly(one_lesson, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    interrupted.__doc__ = "A title\n\nAnd more."
    monkeypatch.setattr(one_lesson, functions(one_lesson, "section_")[1].__name__, interrupted)
    try:
        result = run(one_lesson)
    except KeyboardInterrupt:  # which would end the tests
        pytest.fail("main does not catch it")
    assert (result.status, result.err) == (130, "")


# ------------------------------------------------------------------------------------------------
# What fails, fails
# ------------------------------------------------------------------------------------------------


def test_a_check_that_does_not_hold_ends_the_run(one_lesson, capsys):
    with pytest.raises(SystemExit) as stop:
        one_lesson.check("the moon is a cheese", False, "it is not")
    assert isinstance(stop.value.code, str)  # Python prints it and ends with status 1
    assert capsys.readouterr().out == "  ✗ the moon is a cheese (it is not)\n"


def test_a_failed_check_in_a_lesson_gives_status_1(lesson, monkeypatch):
    def section():
        """A title

        And more.
        """
        lesson.check("one is two", 1 == 2, "it is not")

    monkeypatch.setattr(lesson, functions(lesson, "section_")[0].__name__, section)
    result = run(lesson, "--section", 1)
    assert result.status == 1
    assert "✗ one is two (it is not)" in result.out and "checks passed" not in result.out
    assert len(result.err.splitlines()) == 1


def test_check_close_sees_differences_shapes_and_nan(one_lesson, capsys):
    close, x = one_lesson.check_close, torch.arange(4.0)
    close("the same", x, x.tolist())
    close("near", x + 1e-6, x)
    close("within the tolerance", x + 0.5, x, 0.6)
    capsys.readouterr()
    for other in (x + 2e-5, x.view(2, 2), x[:1], x * float("nan")):
        with pytest.raises((SystemExit, AssertionError)):
            close("the same", other, x)


MUTATIONS = {
    "01": {
        "the biases of attention": ("return 4 * (d * d + d)", "return 4 * d * d"),
        "a norm of the decoder": ("n * (2 + 3) * norm", "n * (2 + 2) * norm"),
        "an attention of the decoder": ("n * (1 + 2) * attention", "n * (1 + 1) * attention"),
        "the biases of feed-forward": ("2 * d * d_ff + d_ff + d", "2 * d * d_ff"),
    },
    "02": {
        "a table of size 1": ("std=d_model**-0.5", "std=1.0"),
        "no factor": (" * math.sqrt(self.table.embedding_dim)", ""),
        "another base": ("-math.log(10000.0)", "-math.log(1000.0)"),
        "a wrong exponent": ("-math.log(10000.0) / d_model", "-2 * math.log(10000.0) / d_model"),
        "positions from 1": ("torch.arange(max_len,", "torch.arange(1, max_len + 1,"),
    },
    "03": {
        "no square root": ("(query / math.sqrt(query.size(-1)))", "query"),
        "d_k itself": ("(query / math.sqrt(query.size(-1)))", "(query / query.size(-1))"),
        "softmax over queries": (
            "    weights = scores.softmax(dim=-1)\n    return",
            "    weights = scores.softmax(dim=-2)\n    return",
        ),
        "mask ignored": (
            "if mask is not None:\n        scores = scores.m",
            "if 0:\n        scores.m",
        ),
        "mask inverted": ("masked_fill(~mask", "masked_fill(mask"),
        "blocked is -inf": ("torch.finfo(scores.dtype).min", "-math.inf"),
        "blocked is 0": ("torch.finfo(scores.dtype).min", "0.0"),
        "padding inverted": ("(ids != PAD)", "(ids == PAD)"),
        "causal the wrong way": (".tril()", ".triu()"),
        "heads without transpose": (
            "x.view(x.size(0), -1, self.n_heads, self.d_k).transpose(1, 2)",
            "x.view(x.size(0), self.n_heads, -1, self.d_k)",
        ),
        "merge without transpose": (
            "self.w_o(heads.transpose(1, 2).flatten(2))",
            "self.w_o(heads.reshape(query.shape))",
        ),
        "keys as values": (
            "self.split_heads(self.w_v(memory))",
            "self.split_heads(self.w_k(memory))",
        ),
        "no w_o": (
            "self.w_o(heads.transpose(1, 2).flatten(2))",
            "heads.transpose(1, 2).flatten(2)",
        ),
        "no w_q": ("self.split_heads(self.w_q(query))", "self.split_heads(query)"),
        "attend without the mask": ("keys, values, mask, self.dropout)", "keys, values)"),
        "forward without the mask": (
            "*self.keys_values(memory), mask)",
            "*self.keys_values(memory))",
        ),
    },
    "04": {
        "no relu": ("self.linear1(x).relu()", "self.linear1(x)"),
        "pre-norm without residual": (
            "return x + self.dropout(sublayer(self.norm(x)))",
            "return self.dropout(sublayer(self.norm(x)))",
        ),
        "post-norm without residual": (
            "return self.norm(x + self.dropout(sublayer(x)))",
            "return self.norm(self.dropout(sublayer(x)))",
        ),
        "post-norm only": ("        if self.norm_first:\n", "        if False:\n"),
        "mask ignored": ("self.self_attention(y, y, mask)[0]", "self.self_attention(y, y)[0]"),
        "no feed-forward": ("return self.residual2(x, self.feed_forward)", "return x"),
        "unbiased variance": (
            "variance = (centred**2).mean(dim=-1, keepdim=True)",
            "variance = x.var(dim=-1, keepdim=True)",
        ),
        "mean over tokens": ("centred = x - x.mean(dim=-1", "centred = x - x.mean(dim=-2"),
        "eps outside the root": ("(variance + self.eps).sqrt()", "(variance.sqrt() + self.eps)"),
    },
    "05": {
        "target's mask ignored": ("*keys_values, tgt_mask)[0]", "*keys_values)[0]"),
        "source's mask ignored": ("*cache.memory, src_mask)[0]", "*cache.memory)[0]"),
        "causal the wrong way": ("device=device).tril()", "device=device).triu()"),
        "may look one ahead": ("device=device).tril()", "device=device).tril(1)"),
        "cache forgets": ("        self.target = newest\n", ""),
        "no feed-forward": ("return self.residual3(x, self.feed_forward)", "return x"),
    },
}


@pytest.mark.parametrize(
    ("stem", "mutation"),
    [(stem, name) for stem in LESSONS for name in MUTATIONS.get(stem[:2], ())],
    ids=lambda value: value[:2] if value in LESSONS else value,
)
def test_a_lesson_with_a_fault_in_its_code_fails(stem, mutation, monkeypatch):
    right, wrong = MUTATIONS[stem[:2]][mutation]
    assert source(stem).count(right) == 1, "this fault has no place in the lesson any more"
    lesson = types.ModuleType("faulty")
    monkeypatch.setitem(sys.modules, "faulty", lesson)
    exec(compile(source(stem).replace(right, wrong), "faulty", "exec"), lesson.__dict__)
    try:
        status = run(lesson).status
    except Exception:
        status = 1
    assert status == 1


# ------------------------------------------------------------------------------------------------
# Sections, help, flags
# ------------------------------------------------------------------------------------------------


def test_a_section_alone_shows_the_same_as_in_the_whole_run(quick_lesson):
    whole = parts(quick_lesson, whole_run(quick_lesson.__name__).out)
    for number, text in enumerate(whole, 1):
        result = run(quick_lesson, "--section", number)
        assert (result.status, result.err) == (0, "")
        assert body(quick_lesson, result.out).rstrip() == text.rstrip()
        assert claimed(result.out) == text.count("✓")


def test_sections_are_shown_in_the_order_asked_for(one_lesson):
    whole = parts(one_lesson, whole_run(one_lesson.__name__).out)
    result = run(one_lesson, "--section", 2, "--section", 1, "--section", 2)
    assert result.status == 0
    asked = [whole[1], whole[0], whole[1]]
    assert body(one_lesson, result.out).split() == "".join(asked).split()
    assert claimed(result.out) == "".join(asked).count("✓")


def test_a_section_that_does_not_exist_is_refused(lesson):
    for number in (0, -1, len(titles(lesson)) + 1, "one", ""):
        result = run(lesson, "--section", number)
        assert result.status == 2 and result.out == "", number
        assert "--section" in result.err and "Traceback" not in result.err


def test_help_names_every_section_and_flag(lesson, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run(lesson, "--help")
    assert (result.status, result.err) == (0, "")
    for number, title in enumerate(titles(lesson), 1):
        assert re.search(rf"(?m)^ *{number}\.? +{re.escape(title)}$", result.out)
    for flag in ("--section", "--quiz", "--check", "--figures", "--seed", *lesson.FLAGS):
        assert re.search(rf"(?m)^  {flag}\b.*", result.out)


def test_help_is_not_too_wide(lesson, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert too_wide(run(lesson, "--help").out) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        ["3"],
        ["--seed", "one"],
        ["--seed"],
        ["--section"],
        ["--check"],
        ["--figures"],
    ],
    ids=" ".join,
)
def test_a_wrong_flag_is_refused(lesson, arguments):
    result = run(lesson, *arguments)
    assert result.status == 2 and result.out == ""
    assert "Traceback" not in result.err and "error: " in result.err.splitlines()[-1]


def test_two_modes_are_refused_with_one_sentence(lesson, tmp_path):
    modes = {"--section": ["1"], "--quiz": [], "--check": [tmp_path / "none.py"]}
    values = {"--microscope": ["0"], "--experiment": ["init"], "--infer": []}
    modes |= {name: values.get(name, ["64"]) for name in lesson.FLAGS}
    for first, second in itertools.combinations(modes, 2):
        typed = [first, *modes[first], second, *modes[second]]
        if first in lesson.FLAGS and lesson.FLAGS[first][0] is lesson.FLAGS.get(second, [0])[0]:
            continue  # both set what one and the same mode computes with
        sentence = run(lesson, *typed).refused()
        assert first in sentence and second in sentence and "do not go together" in sentence


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64, -(2**70)])
def test_a_seed_of_any_size_is_taken_or_refused(one_lesson, seed):
    result = run(one_lesson, "--section", 1, f"--seed={seed}")
    assert result.status in (0, 2)
    assert result.status == 0 or "error: " in result.err.splitlines()[-1]


# ------------------------------------------------------------------------------------------------
# The quiz
# ------------------------------------------------------------------------------------------------


def questions(lesson):
    """(question, answer, explanation) of each question."""
    found = []
    for block in re.split(r"\n(?=\? )", lesson.quiz().strip()):
        assert block.startswith("? ") and block.count("\n= ") == block.count("\n! ") == 1, block
        found.append(re.fullmatch(r"\? (.+)\n= (.+)\n! (.+)", block.strip(), re.DOTALL).groups())
    return found


def kind(answer):
    return "shape" if answer.startswith("(") else "choice" if answer.isalpha() else "number"


def quizzed(lesson, answers):
    result = run(lesson, "--quiz", stdin="".join(f"{answer}\n" for answer in answers))
    assert (result.status, result.err) == (0, "")
    return result.out


def score(out):
    """(questions, right at once, right at the second try)"""
    pattern = r"Of (\d+) questions, (\d+) right at once, (\d+) at the second try\."
    return tuple(map(int, re.fullmatch(pattern, out.splitlines()[-1]).groups()))


def test_the_quiz_has_questions_of_every_kind(lesson):
    asked = questions(lesson)
    assert len(asked) >= 6
    assert {kind(answer) for _, answer, _ in asked} == {"shape", "number", "choice"}
    assert len({question for question, _, _ in asked}) == len(asked)


def test_the_answers_of_the_quiz_have_a_form_that_can_be_judged(lesson):
    for question, answer, _ in questions(lesson):
        if kind(answer) == "shape":
            assert re.fullmatch(r"\(\d+,\)|\(\d+(, \d+)+\)", answer)
        elif kind(answer) == "number":
            float(answer.replace(",", ""))
        else:
            letters = re.findall(r"(?m)^ +([a-z])\) \S", question)
            assert letters == list("abcdef"[: len(letters)]) and answer in letters
            assert len(letters) >= 2
        assert lesson.means(answer, answer)


def test_the_right_choices_are_not_all_the_same(lesson):
    answers = [answer for _, answer, _ in questions(lesson) if kind(answer) == "choice"]
    assert len(answers) < 2 or len(set(answers)) > 1


def test_the_quiz_does_not_depend_on_chance(lesson):
    torch.manual_seed(5)
    first = questions(lesson)
    torch.manual_seed(6)
    assert first == questions(lesson)


def test_the_quiz_is_not_too_wide(lesson):
    assert too_wide(quizzed(lesson, ["never"] * 2 * len(questions(lesson)))) == []


def test_a_quiz_with_all_answers_right(lesson):
    asked = questions(lesson)
    out = quizzed(lesson, [answer for _, answer, _ in asked])
    assert score(out) == (len(asked), len(asked), 0)
    for question, _, why in asked:
        assert question in out and why in out
    assert "Once more" not in out


def test_a_quiz_with_all_answers_wrong(lesson):
    asked = questions(lesson)
    out = quizzed(lesson, ["never"] * 2 * len(asked))
    assert score(out) == (len(asked), 0, 0)
    for _, answer, why in asked:
        assert why in out and f"The answer is {answer}." in out


def test_a_quiz_with_all_answers_right_at_the_second_try(lesson):
    asked = questions(lesson)
    out = quizzed(lesson, [word for _, answer, _ in asked for word in ("", answer)])
    assert score(out) == (len(asked), 0, len(asked))
    assert all(why in out for _, _, why in asked) and "The answer is" not in out


def test_the_first_answer_decides_which_try_is_counted(lesson):
    asked = questions(lesson)
    words = [asked[0][1], "never", asked[1][1], "never", "never", *(a for _, a, _ in asked[3:])]
    assert score(quizzed(lesson, words)) == (len(asked), len(asked) - 2, 1)


def test_a_quiz_may_end_at_any_time(lesson):
    answers = [answer for _, answer, _ in questions(lesson)]
    assert score(quizzed(lesson, [])) == (len(answers), 0, 0)
    assert score(quizzed(lesson, answers[:2])) == (len(answers), 2, 0)
    assert score(quizzed(lesson, [*answers[:2], "never"])) == (len(answers), 2, 0)
    assert score(quizzed(lesson, ["never"])) == (len(answers), 0, 0)


RIGHT = {  # divided by |
    "(2, 3, 6)": "(2, 3, 6)|(2,3,6)|2,3,6|2, 3, 6|2 3 6| 2 , 3 , 6 |(2, 3, 6,)|2 x 3 x 6|2x3x6"
    "|2 X 3 X 6|2×3×6|2 × 3 × 6|2*3*6|[2, 3, 6]|[2 3 6]|torch.Size([2, 3, 6])|TORCH.SIZE([2,3,6])",
    "(5, 7)": "5 x 7|(5, 7)|5,7",
    "9625600": "9,625,600|9625600|9 625 600|9_625_600| 9625600 |9625600.0",
    "9,625,600": "9,625,600|9625600|9 625 600|9_625_600|9625600 parameters",
    "1000": "1000|1,000|1 000|1e3|1000 rows",
    "0.75": "0.75|0,75|3/4|75%|.75|3 / 4|0.750|0.7499|+0.75|75.0%",
    "8": "8|8.0|16/2|8 heads|08",
    "0": "0|0.0|0/5|0%|-0",
    "1": "1|1.0|100%|4/4",
    "-1.5": "-1.5|-1,5|-3/2|-1.50",
    "b": "b|B|(b)|b)|b.| b |(B)",
}
WRONG = {
    "(2, 3, 6)": "(2, 6, 3)|2,3|2,3,6,1|1,2,3,6|2.3.6|236|(23, 6)|(2, 36)||()|(2, -3, 6)|-2, 3, 6"
    "|2 + 3 + 6|36|b|(2, 3, 6) or (2, 6, 3)|2, 3, n|x",
    "9625600": "9625601|9625599|9,625,60|962560|96256000|-9625600|9.6256|b||9625600 or 1|1/9625600"
    "|9625600%|9600000",
    "9,625,600": "9|9625|9,625|9625601|-9,625,600",
    "0.75": "-0.75|0.77|0.73|1/0|0/0|nan|inf|-inf||c|1e999999999|75|0.075|7.5|4/3|3/4/1|3//4|3/|/4"
    "|0.75 or 0.25|0x1|/|%",
    "0": "|-1|1|1e-9|none|nan|0.001",
    "8": "9|7.99|8.01|64|88|8 8|8,8|eight",
    "b": "a|c||ab|bb|a or b|a b|8|not b|()|(|b)c",
}


def pairs(table):
    return [(answer, typed) for answer, forms in table.items() for typed in forms.split("|")]


@pytest.mark.parametrize(("answer", "typed"), pairs(RIGHT))
def test_the_quiz_forgives_form(one_lesson, answer, typed):
    assert one_lesson.means(typed, answer)


@pytest.mark.parametrize(("answer", "typed"), pairs(WRONG))
def test_the_quiz_does_not_forgive_substance(one_lesson, answer, typed):
    assert not one_lesson.means(typed, answer)


shapes = st.lists(st.integers(0, 40_000), min_size=2, max_size=5).map(tuple)
separators = st.sampled_from([", ", ",", " ", " x ", "x", "×", " × ", " * ", " , "])
brackets = st.sampled_from(["{}", "({})", "[{}]", "torch.Size([{}])", " {} ", "Torch.size([{}])"])


@given(shapes, shapes, separators, brackets)
def test_a_shape_is_its_sizes_in_order_however_it_is_written(
    one_lesson, shape, other, separator, bracket
):
    typed = bracket.format(separator.join(map(str, shape)))
    assert one_lesson.means(typed, str(shape))
    assert one_lesson.means(typed, str(other)) == (shape == other)
    assert not one_lesson.means(typed, str((*shape, 1)))


groups = st.sampled_from(["", ",", " ", "_"])


@given(st.integers(0, 10**15), st.integers(-(10**15), 10**15), groups, st.sampled_from(["", ","]))
def test_a_whole_number_is_that_number_and_no_other(one_lesson, number, other, group, written):
    typed = f"{number:,}".replace(",", group)
    assert one_lesson.means(typed, f"{number:{written}}")
    assert one_lesson.means(typed, f"{other:{written}}") == (number == other)
    assert not one_lesson.means(f"{number + 1:,}".replace(",", group), f"{number:{written}}")


@given(st.text(max_size=12), st.sampled_from(sorted(WRONG)))
def test_nothing_that_can_be_typed_breaks_the_quiz(one_lesson, typed, answer):
    assert one_lesson.means(typed, answer) in (True, False)


# ------------------------------------------------------------------------------------------------
# The exercise
# ------------------------------------------------------------------------------------------------

BORROWED = """\
import importlib
import numpy as np
import torch

def changed(change, results):
    results = results if isinstance(results, tuple) else (results,)
    results = (torch.as_tensor(result, dtype=torch.float64).detach().clone() for result in results)
    results = tuple(map(change, results))
    return results if len(results) > 1 else results[0]

tasks = {task[0]: task for task in importlib.import_module({lesson!r}).exercise()}
globals().update({task[0]: task[1] for task in tasks.values()})
_, solution, _, mistakes = tasks[{name!r}]

"""
OWN = {  # written from the docstrings alone
    "count_parameters": """\
        def linear(a, b):
            return a * b + b

        def count_parameters(d_model, n_heads, d_ff, n_layers, vocab_size):
            attention = sum(linear(d_model, d_model) for _ in range(4))
            feed_forward = linear(d_model, d_ff) + linear(d_ff, d_model)
            encoder = attention + feed_forward + 2 * (d_model + d_model)
            decoder = 2 * attention + feed_forward + 3 * (d_model + d_model)
            return n_layers * (encoder + decoder) + vocab_size * d_model
        """,
    "positional_encoding": """\
        import math

        def hand(p, column, d_model):
            angle = p / 10000 ** (2 * (column // 2) / d_model)
            return math.cos(angle) if column % 2 else math.sin(angle)

        def positional_encoding(length, d_model):
            return [[hand(p, c, d_model) for c in range(d_model)] for p in range(length)]
        """,
    "attention": """\
        import torch

        NEVER = -1e30

        def attention(query, key, value, mask=None):
            scores = torch.einsum("...td,...sd->...ts", query, key) / query.shape[-1] ** 0.5
            if mask is not None:
                scores = torch.where(mask, scores, torch.full_like(scores, NEVER))
            weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
            return weights / weights.sum(-1, keepdim=True) @ value
        """,
    "layer_norm": """\
        import numpy as np

        def layer_norm(x, gain, bias, eps=1e-5):
            x, gain, bias = (np.asarray(values, dtype=np.float64) for values in (x, gain, bias))
            centred = x - x.mean(axis=-1)[..., None]
            return centred / np.sqrt((centred**2).mean(axis=-1) + eps)[..., None] * gain + bias
        """,
    "build_masks": """\
        import numpy as np

        def build_masks(src, tgt):
            src, tgt = (np.asarray(ids) != 0 for ids in (src, tgt))
            length = tgt.shape[1]
            decoder = np.zeros((len(tgt), 1, length, length), dtype=bool)
            for row in range(length):
                decoder[:, 0, row, : row + 1] = tgt[:, : row + 1]
            return src[:, None, None], decoder, src[:, None, None]
        """,
    "cross_attention_head": """\
        import numpy as np

        def cross_attention_head(states, memory, w_q, w_k, w_v, mask):
            query = np.asarray(states) @ np.asarray(w_q)
            key, value = (np.asarray(memory) @ np.asarray(w) for w in (w_k, w_v))
            scores = np.einsum("...td,...sd->...ts", query, key) / np.sqrt(w_q.shape[1])
            weights = np.where(np.asarray(mask), np.exp(scores), 0)
            return weights / weights.sum(axis=-1, keepdims=True) @ value
        """,
    "label_smoothed_loss": """\
        import numpy as np

        def label_smoothed_loss(logits, targets, smoothing):
            losses = []
            for row, target in zip(np.asarray(logits, dtype=np.float64), np.asarray(targets)):
                log_p = row - row.max() - np.log(np.exp(row - row.max()).sum())
                if target != 0:
                    losses.append(-(1 - smoothing) * log_p[target] - smoothing * log_p.mean())
            return sum(losses) / len(losses)
        """,
}


class Task(NamedTuple):
    """One function that an exercise asks for."""

    name: str
    solution: Callable
    cases: dict[str, tuple]
    mistakes: dict[str, Callable]

    @property
    def titles(self):
        return [*self.cases, *self.mistakes]

    @property
    def first(self):
        return next(iter(self.cases))


def tasks(lesson):
    return [Task(*task) for task in lesson.exercise()]


@pytest.fixture
def graded(lesson, tmp_path):
    """Grade a file with this text, in which {name} is the function that the task asks for.

    All that the exercise asks for is solved in it already, unless it is to be empty at the start.
    """

    def graded(text, task=None, empty=False):
        name = (task or tasks(lesson)[0]).name
        start = BORROWED.replace("{lesson!r}", repr(lesson.__name__)).replace(
            "{name!r}", repr(name)
        )
        text = textwrap.dedent(text).replace("{name}", name)
        file = tmp_path / "my answer.py"
        file.write_text(text if empty else start + text, encoding="utf-8")
        return run(lesson, "--check", file)

    return graded


def judged(lesson, task, function):
    """The cases in which a function is not right."""
    return [
        title
        for title, inputs in task.cases.items()
        if lesson.difference(*(lesson.outcome(f, inputs) for f in (task.solution, function)))
    ]


def passed(lesson, result):
    shown = [line[2:] for line in result.out.splitlines() if line.startswith("✓ ")]
    return (result.status, result.err) == (0, "") and shown == [
        title for task in tasks(lesson) for title in task.cases
    ]


def test_an_exercise_has_cases_and_mistakes_enough(lesson):
    titles = [title for task in tasks(lesson) for title in task.cases]
    assert titles and len(set(titles)) == len(titles)
    for task in tasks(lesson):
        assert task.name.isidentifier() and len(task.cases) >= 5 and len(task.mistakes) >= 4
        assert judged(lesson, task, task.solution) == []
        for title in task.titles:
            assert title.strip() == title and not title.endswith(".")


def test_the_inputs_of_an_exercise_do_not_depend_on_chance(lesson):
    results = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        results.append(
            [
                result
                for task in tasks(lesson)
                for inputs in task.cases.values()
                for result in lesson.outcome(task.solution, inputs)
            ]
        )
    assert all(map(torch.equal, *results))


def test_every_mistake_of_an_exercise_is_one(lesson):
    for task in tasks(lesson):
        for hint, wrong in task.mistakes.items():
            assert judged(lesson, task, wrong) != [], hint


def test_the_right_answer_passes(lesson, graded):
    result = graded("{name} = solution")
    assert passed(lesson, result)
    count = sum(len(task.cases) for task in tasks(lesson))
    assert result.out.splitlines()[-1] == f"All {count} cases right."


def test_an_answer_of_ones_own_passes(lesson, graded):
    names = [task.name for task in tasks(lesson)]
    if not OWN.keys() >= {*names}:
        pytest.skip(f"there is no other solution of {' and '.join(names)} here")
    text = "".join(textwrap.dedent(OWN[name]) for name in names)
    assert passed(lesson, graded(text, empty=True))


def test_each_usual_mistake_is_named_in_a_sentence_that_is_not_too_wide(lesson, graded):
    for task in tasks(lesson):
        for hint in task.mistakes:
            result = graded(f"{{name}} = mistakes[{hint!r}]", task)
            assert (result.status, result.err) == (1, ""), hint
            assert result.out.count("✗") == 1 and "cases right" not in result.out
            assert f"It looks as if {hint}." in " ".join(result.out.split()), (hint, result.out)
            assert too_wide(result.out) == []


def test_a_mistake_that_is_not_usual_is_shown_with_its_first_number(lesson, graded):
    for task in tasks(lesson):
        result = graded(
            """\
            def {name}(*inputs):
                return changed(lambda result: result + 0.37, solution(*inputs))
            """,
            task,
        )
        assert (result.status, result.err) == (1, "")
        assert f"✗ {task.first}: " in result.out and "It looks as if" not in result.out
        want, have = map(float, re.search(r"expected (\S+), got (\S+)\.\n", result.out).groups())
        assert have - want == pytest.approx(0.37, rel=1e-4)
        first = lesson.outcome(task.solution, task.cases[task.first])[0].flatten()[0]
        assert want == pytest.approx(first.item(), rel=1e-4, abs=1e-6)


def test_a_wrong_shape_is_shown_beside_the_right_one(lesson, graded):
    for task in tasks(lesson):
        result = graded(
            """\
            def {name}(*inputs):
                return changed(lambda result: result[None], solution(*inputs))
            """,
            task,
        )
        assert (result.status, result.err) == (1, "")
        shape = tuple(lesson.outcome(task.solution, task.cases[task.first])[0].shape)
        assert f"shape expected {shape}, got {(1, *shape)}." in result.out


def test_a_wrong_number_of_results_is_shown_beside_the_right_one(lesson, graded):
    for task in tasks(lesson):
        result = graded(
            """\
            def {name}(*inputs):
                results = solution(*inputs)
                return (*results, 0) if isinstance(results, tuple) else (results, 0)
            """,
            task,
        )
        assert (result.status, result.err) == (1, "")
        count = len(lesson.outcome(task.solution, task.cases[task.first]))
        assert f"expected {count}, got {count + 1}." in result.out


def test_one_wrong_number_is_found(lesson, graded):
    for task in tasks(lesson):
        result = graded(
            """\
            def wrong(result):
                result.view(-1)[-1] += 1
                return result

            def {name}(*inputs):
                return changed(wrong, solution(*inputs))
            """,
            task,
        )
        assert (result.status, result.err) == (1, "") and f"✗ {task.first}: " in result.out


def test_nan_is_no_answer(lesson, graded):
    for task in tasks(lesson):
        result = graded(
            """\
            def {name}(*inputs):
                return changed(lambda result: result * float("nan"), solution(*inputs))
            """,
            task,
        )
        assert result.status == 1 and "got nan" in result.out


@pytest.mark.parametrize("form", ["numpy()", "tolist()", "float().requires_grad_()"])
def test_an_answer_may_be_an_array_a_list_or_a_tensor_with_gradient(lesson, graded, form):
    for task in tasks(lesson):
        text = """\
            def {name}(*inputs):
                return changed(lambda result: result.FORM, solution(*inputs))
            """.replace("FORM", form)
        assert passed(lesson, graded(text, task))


def test_an_answer_may_print(lesson, graded):
    result = graded("""\
        print("at the start")
        def {name}(*inputs):
            print("here I am")
            return solution(*inputs)
        """)
    assert passed(lesson, result) and "here I am" in result.out


def test_an_answer_may_try_itself_out_below_a_main_guard(lesson, graded):
    assert passed(lesson, graded('{name} = solution\nif __name__ == "__main__":\n    1 / 0'))


@pytest.mark.parametrize("which", ["solution", "next(iter(mistakes.values()))"])
def test_an_answer_that_spoils_its_inputs_is_judged_as_any_other(lesson, graded, which):
    text = """\
        def {name}(*inputs):
            results = changed(lambda result: result, WHICH(*inputs))
            for value in inputs:
                if isinstance(value, torch.Tensor):
                    value.detach().zero_()
                elif isinstance(value, list):
                    value.clear()
            return results
        """.replace("WHICH", which)
    for task in tasks(lesson):
        result = graded(text, task)
        if which == "solution":
            assert passed(lesson, result)
        else:
            assert f"It looks as if {next(iter(task.mistakes))}." in result.out


def test_each_function_of_an_exercise_must_be_there(lesson, graded):
    for task in tasks(lesson):
        assert f" {task.name} " in graded("del {name}", task).refused()


BROKEN = {
    "nothing": ("", ["{name}"]),
    "another name": ("def other(*inputs):\n    return 0", ["{name}"]),
    "no function": ("{name} = 3", ["{name}"]),
    "syntax error": ("x = 1\ndef {name}(:\n    pass", ["SyntaxError", "line 2"]),
    "indentation": ("def {name}(*inputs):\nreturn 0", ["IndentationError", "line 2"]),
    "raises at once": ("x = 1\nraise ValueError('my words')", ["line 2", "ValueError: my words"]),
    "exits": ("import sys\n\nsys.exit()", ["line 3", "SystemExit"]),
    "exits with a message": ("raise SystemExit('my words')", ["line 1", "my words"]),
    "unknown import": ("import no_such_package", ["line 1", "no_such_package"]),
    "raises": (
        "def {name}(*inputs):\n\n    return 1 / 0",
        ["line 3", "ZeroDivisionError", "{case}"],
    ),
    "raises deeper": (
        "def {name}(*inputs):\n    return deeper()\n\ndef deeper():\n    return 1 / 0",
        ["line 5", "ZeroDivisionError", "{case}"],
    ),
    "raises in a library": (
        "import json\n\ndef {name}(*inputs):\n    return json.loads('nonsense')",
        ["line 4", "JSONDecodeError", "{case}"],
    ),
    "exits in the function": (
        "def {name}(*inputs):\n    raise SystemExit(0)",
        ["line 2", "{case}"],
    ),
    "too few parameters": ("def {name}():\n    return 0", ["{name}", "{case}"]),
    "recursion": ("def {name}(*inputs):\n    return {name}(*inputs)", ["RecursionError", "{case}"]),
    "returns nothing": ("def {name}(*inputs):\n    pass", ["{case}"]),
    "returns text": ("def {name}(*inputs):\n    return 'words'", ["{case}"]),
    "returns itself": ("def {name}(*inputs):\n    return {name}", ["{case}"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_answer_that_cannot_be_run_is_refused_with_one_sentence(lesson, graded, what):
    text, fragments = BROKEN[what]
    task = tasks(lesson)[0]
    sentence = graded(text, empty=True).refused()
    assert "my answer.py" in sentence
    for fragment in fragments:
        assert fragment.format(name=task.name, case=task.first) in sentence


def test_a_file_that_is_not_there_is_refused_with_one_sentence(lesson, tmp_path):
    sentence = run(lesson, "--check", tmp_path / "nowhere.py").refused()
    assert "nowhere.py is not there" in sentence


def test_a_folder_in_place_of_a_file_is_refused_with_one_sentence(lesson, tmp_path):
    assert f"{tmp_path} is a folder" in run(lesson, "--check", tmp_path).refused()


@pytest.mark.parametrize("content", [b"x = '\xe9'\n", b"x = 1\0\n", bytes(range(256))])
def test_a_file_that_is_no_text_is_refused_with_one_sentence(one_lesson, tmp_path, content):
    file = tmp_path / "binary.py"
    file.write_bytes(content)
    assert "binary.py" in run(one_lesson, "--check", file).refused()


# Runs a lesson whose 20 seconds for an answer are half a second.
IMPATIENT = """
import importlib, sys, threading
timer = threading.Timer
threading.Timer = lambda delay, *rest: timer(delay / 40, *rest)
sys.path.insert(0, sys.argv[1])
sys.exit(importlib.import_module(sys.argv[2]).main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    ("place", "endless"),
    [
        ("", "while True: pass"),
        ("def {name}(*inputs):\n    ", "while True: pass"),
        ("def {name}(*inputs):\n    ", "time.sleep(60)"),
        ("def {name}(*inputs):\n    ", "threading.Event().wait()"),
        ("def {name}(*inputs):\n    ", "input()"),
    ],
)
def test_an_answer_that_takes_too_long_is_stopped(one_lesson, tmp_path, place, endless):
    task = tasks(one_lesson)[0]
    file = tmp_path / "endless.py"
    text = "import threading, time\n" + place.format(name=task.name)
    file.write_text(f"{text}{endless}\n", encoding="utf-8")
    command = [sys.executable, "-c", IMPATIENT, ROOT, one_lesson.__name__, "--check", file]
    pipe = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(list(map(str, command)), **pipe) as process:  # nobody types anything
        status, error = process.wait(timeout=60), process.stderr.read().decode("utf-8")
    sentence = Result(status, "", error).refused()
    assert "endless.py" in sentence and "loop" in sentence
    assert (task.first in sentence) == bool(place)


def test_ctrl_c_while_an_answer_is_tried_is_not_told_as_a_timeout(graded):
    result = graded("def {name}(*inputs):\n    raise KeyboardInterrupt")
    assert (result.status, result.err) == (130, "")


def test_no_alarm_is_left_after_grading(lesson, graded):
    for text in ("{name} = solution", "{name} = 3", "raise KeyboardInterrupt"):
        graded(text)
        alarms = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        assert all(alarm.finished.is_set() for alarm in alarms)


# ------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------


def drawn(lesson, folder):
    """The pictures of a lesson in this folder, after checking that there is nothing else in it."""
    from matplotlib.image import imread

    files = sorted(folder.iterdir())
    assert len(files) == len(functions(lesson, "draw_"))
    assert all(file.suffix == ".png" for file in files)
    pictures = [imread(file) for file in files]
    for pixels in pictures:
        assert min(pixels.shape[:2]) > 300
        assert len(set(map(tuple, pixels.reshape(-1, pixels.shape[2]).tolist()))) > 10, "blank"
    return pictures


def test_figures_are_saved_and_replaced(quick_lesson, tmp_path):
    pytest.importorskip("matplotlib.backends.backend_agg")  # its own warnings are none of ours
    folder, pictures = tmp_path / "some" / "pictures", []
    for section in (1, 2):  # the pictures do not depend on what else is shown
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".* deprecated")  # matplotlib 3.8's own
            result = run(quick_lesson, "--section", section, "--figures", folder)
        assert (result.status, result.err) == (0, "")
        pictures.append(drawn(quick_lesson, folder))
        assert all(str(file) in result.out for file in folder.iterdir())
    assert all(map(np.array_equal, *pictures))


@pytest.mark.parametrize("stem", LONG)
def test_figures_of_a_long_lesson_are_saved(stem):
    assert whole_run(stem).status == 0
    drawn(importlib.import_module(stem), Path(pictures_of(stem).name))


def test_there_is_a_figure_somewhere():
    assert any(re.search(r"(?m)^def draw_", source(stem)) for stem in LESSONS)


def test_figures_are_refused_where_no_folder_can_be(lesson, tmp_path):
    (tmp_path / "file").write_text("here I was first", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run(lesson, "--section", 1, "--figures", place)
        assert str(tmp_path / "file") in result.refused()
        assert titles(lesson)[0] not in result.out, "told only after the lesson"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "here I was first"


def test_figures_without_matplotlib_are_refused_with_one_sentence(lesson, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(lesson, "--section", 1, "--figures", tmp_path / "new")
    assert "matplotlib" in result.refused() and titles(lesson)[0] not in result.out
    assert not (tmp_path / "new").exists()


def test_a_lesson_needs_no_matplotlib_without_figures(lesson, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(lesson, "--section", 1).status == 0


# ------------------------------------------------------------------------------------------------
# What lessons share
# ------------------------------------------------------------------------------------------------

PER_LESSON = range(1, 8)
DIFFERENT = [  # name, lessons in which it differs from others, reason
    ("batch_loss", [8], "lesson 8's cross-entropy is faster; a test holds it to torch's"),
    ("main", [8], "lesson 8 has a command line of its own"),
    ("quiz", PER_LESSON, "each lesson asks about itself"),
    ("exercise", PER_LESSON, "each lesson has an exercise of its own"),
    ("FLAGS", [1, 6, 7], "these lessons have flags of their own"),
]


def number_of(stem):
    return int(stem[:2])


@functools.cache
def definitions(stem):
    """The text of every function, class and assignment of a script, by name."""
    lines, found = source(stem).splitlines(), {}
    for node in ast.parse(source(stem)).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names, above = [node.name], [decorator.lineno for decorator in node.decorator_list]
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inner = (name for target in targets for name in ast.walk(target))
            names, above = [name.id for name in inner if isinstance(name, ast.Name)], []
        else:
            continue
        text = "\n".join(lines[min([node.lineno, *above]) - 1 : node.end_lineno])
        for name in names:  # whole lines: with what is said behind them
            found[name] = f"{found[name]}\n{text}" if name in found else text
    return found


def versions(name, leave_out=()):
    """Each text that scripts have under a name, with the scripts."""
    found = {}
    for stem in SCRIPTS:
        if name in definitions(stem) and number_of(stem) not in leave_out:
            found.setdefault(definitions(stem)[name], []).append(stem)
    return found


def test_what_scripts_share_has_one_text():
    on_purpose = {name: set(lessons) for name, lessons, _ in DIFFERENT}
    differing = {}
    for name in sorted(set().union(*map(definitions, SCRIPTS))):
        found = versions(name, on_purpose.get(name, ()))
        if len(found) > 1:
            differing[name] = list(found.values())
    assert differing == {}


def test_what_differs_on_purpose_does():
    assert len({name for name, _, _ in DIFFERENT}) == len(DIFFERENT)
    for name, lessons, reason in DIFFERENT:
        assert reason
        here = [stem for stem in SCRIPTS if number_of(stem) in lessons]
        assert all(name in definitions(stem) for stem in here), name
        elsewhere = [stem for stem in SCRIPTS if name in definitions(stem)]
        for stem in here:
            texts = {definitions(other)[name] for other in elsewhere if other != stem}
            assert not texts or texts != {definitions(stem)[name]}, f"{name} of {stem}"


def parameters(stem):
    """The names of the parameters of every function and method of a script."""
    found = {}
    for node in ast.parse(source(stem)).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for function in (node, *inner):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = function.name if function is node else f"{node.name}.{function.name}"
                arguments = [a for a in ast.walk(function.args) if isinstance(a, ast.arg)]
                found[name] = [argument.arg for argument in arguments]
    return found


def test_parameters_of_what_scripts_share_have_the_same_names():
    found = {stem: parameters(stem) for stem in SCRIPTS}
    differing = {}
    for name in set().union(*found.values()) - {"main", "quiz", "exercise"}:
        names = {stem: found[stem][name] for stem in SCRIPTS if name in found[stem]}
        if len(set(map(tuple, names.values()))) > 1:
            differing[name] = names
    assert differing == {}


@pytest.mark.parametrize(
    "line", ["# ---- Asking and grading", "# ---- Classroom"], ids=lambda line: line[7:]
)
def test_the_end_of_every_lesson_is_the_same(line):
    ends = {}
    for stem in LESSONS:
        _, mark, after = (ROOT / f"{stem}.py").read_bytes().partition(f"\n{line}".encode())
        assert mark and line.encode() not in after
        ends.setdefault(after, []).append(stem)
    assert len(ends) == 1, list(ends.values())


def test_the_classroom_is_short(lesson):
    lines = source(lesson.__name__).splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("# ---- Classroom"))
    assert len(lines) - start <= 120


IDS = torch.tensor([[3, 4, 5, 6, 2], [7, 8, 2, 0, 0]])
TARGET = torch.tensor([[1, 3, 4], [1, 9, 0]])
X, MEMORY = (
    torch.sin(torch.arange(96.0)).view(2, 3, 16),
    torch.cos(torch.arange(160.0) ** 2).view(2, 5, 16),
)
PADDING, CAUSAL = (IDS != 0)[:, None, None], torch.ones(3, 3, dtype=torch.bool).tril()


def decode(lesson, layer):
    cache = lesson.LayerCache(layer.cross_attention.keys_values(MEMORY))
    return layer(X, cache, CAUSAL, PADDING)


MODULES = [  # class, arguments of its constructor, its output
    ("TokenEmbedding", (11, 16), lambda lesson, module: module(IDS)),
    ("PositionalEncoding", (16, 20, 0.0), lambda lesson, module: module(X)),
    ("MultiHeadAttention", (16, 4), lambda lesson, module: module(X, MEMORY, PADDING)[0]),
    ("MultiHeadAttention", (16, 4), lambda lesson, module: module(X, MEMORY, PADDING)[1]),
    ("FeedForward", (16, 32), lambda lesson, module: module(X)),
    ("LayerNorm", (16,), lambda lesson, module: module(X)),
    ("Residual", (16, 0.0, False), lambda lesson, module: module(X, torch.tanh)),
    ("Residual", (16, 0.0, True), lambda lesson, module: module(X, torch.tanh)),
    ("EncoderLayer", (16, 4, 32, 0.0), lambda lesson, module: module(MEMORY, PADDING)),
    ("EncoderLayer", (16, 4, 32, 0.0, True), lambda lesson, module: module(MEMORY, PADDING)),
    ("DecoderLayer", (16, 4, 32, 0.0), decode),
    ("DecoderLayer", (16, 4, 32, 0.0, True), decode),
    ("Transformer", (11, 13, 16, 4, 32, 2, 0.0), lambda lesson, module: module(IDS, TARGET)),
    (
        "Transformer",
        (11, 11, 16, 4, 32, 2, 0.0, True, "all"),
        lambda lesson, module: module(IDS, TARGET),
    ),
]


@pytest.mark.parametrize(
    ("name", "sizes", "output"), MODULES, ids=[f"{name}{sizes}" for name, sizes, _ in MODULES]
)
def test_weights_of_a_lesson_load_into_the_next(name, sizes, output):
    owners = [stem for stem in SCRIPTS if name in definitions(stem)]
    if len(owners) < 2:
        pytest.skip(f"only {len(owners)} script has a {name}")
    lessons = [importlib.import_module(stem) for stem in owners]
    for earlier, later in itertools.pairwise(lessons):
        old, new = (getattr(lesson, name)(*sizes).eval() for lesson in (earlier, later))
        torch.manual_seed(3)
        for parameter in old.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        new.load_state_dict(old.state_dict())
        with torch.no_grad():
            first, second = output(earlier, old), output(later, new)
        assert torch.equal(first, second) and first.isfinite().all(), (earlier, later)


# ------------------------------------------------------------------------------------------------
# Prose
# ------------------------------------------------------------------------------------------------


def test_every_section_has_a_title_and_an_explanation(lesson):
    for section in functions(lesson, "section_"):
        title, blank, *explanation = inspect.getdoc(section).splitlines()
        assert title == title.strip() and not title.endswith(".") and blank == ""
        assert len(explanation) >= 2 and explanation[0].strip()
        assert too_wide(inspect.getdoc(section)) == []


def test_titles_of_sections_differ(lesson):
    assert len(set(titles(lesson))) == len(titles(lesson))


def test_the_docstring_of_a_lesson_names_its_file_exercise_and_flags(lesson, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    doc, usage = lesson.__doc__, run(lesson, "--help").out.replace(lesson.__doc__, "")
    assert doc.startswith(f"Lesson {number_of(lesson.__name__)}: ")
    assert set(re.findall(r"\b\d\d_\w+\.py\b", doc)) == {f"{lesson.__name__}.py"}
    exercise = doc.partition("\nExercise: ")[2]
    assert all(f" {task.name}(" in exercise for task in tasks(lesson))
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", doc))
    assert {"--section", "--quiz", "--check"} <= flags
    assert not lesson.FLAGS or flags & set(lesson.FLAGS)
    assert [flag for flag in flags if not re.search(rf"(?m)^  {flag}\b", usage)] == []


def test_a_lesson_compiles_without_a_warning(lesson):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile(source(lesson.__name__), lesson.__name__, "exec")
