"""What holds of the repository as a whole: metadata, imports, documents, portability."""

import ast
import contextlib
import doctest
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in ROOT.glob("0[0-9]_*.py"))
LESSON8 = "08_iwslt_vi_en.py"
every_script = pytest.mark.parametrize("script", SCRIPTS)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def tracked_files():
    """The files that git tracks and that are here, as paths relative to the root."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, encoding="utf-8"
    ).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


# Packages


def split_requirement(text):
    """'torch>=2.6,<3' -> ('torch', '>=2.6,<3')"""
    name, version = re.fullmatch(r"([A-Za-z0-9._-]+)\s*(.*)", text.strip()).groups()
    return name.lower(), version.replace(" ", "")


def script_metadata(source):
    """The script's PEP 723 block, read as the specification says."""
    blocks = re.findall(r"(?m)^# /// script$\s((?:^#(?:| .*)$\s)+)^# ///$", source)
    assert len(blocks) == 1, f"{len(blocks)} blocks of script metadata"
    return tomllib.loads("".join(line[2:] or "\n" for line in blocks[0].splitlines(True)))


def required(script):
    return dict(map(split_requirement, script_metadata(read(script))["dependencies"]))


def requirements():
    lines = (line.partition("#")[0].strip() for line in read("requirements.txt").splitlines())
    return dict(split_requirement(line) for line in lines if line)


def imported(source):
    """The packages that a script imports anywhere, the standard library left out."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a script imports relative to a package"
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names)


def test_the_scripts_are_found():
    assert LESSON8 in SCRIPTS


@every_script
def test_script_metadata_agrees_with_the_requirements(script):
    listed, wanted = required(script), requirements()
    assert listed == {name: wanted.get(name) for name in listed}
    assert script_metadata(read(script))["requires-python"].startswith(">=3.")


def test_lesson_8_lists_every_requirement():
    assert required(LESSON8) == requirements()


@every_script
def test_every_package_a_script_imports_is_in_its_metadata(script):
    assert imported(read(script)) <= set(required(script))


@every_script
def test_no_script_imports_another_or_the_tests(script):
    own = {Path(name).stem for name in SCRIPTS} | {"tests", "benchmarks", "conftest"}
    assert not imported(read(script)) & own
    for name in own:
        assert not re.search(rf"import_module\(['\"]{name}['\"]", read(script))


def test_every_requirement_has_a_lower_and_an_upper_bound():
    for name, version in requirements().items():
        assert re.fullmatch(r">=[\d.]+,<\d+", version), f"{name}{version}"


# Importing

IMPORT_ALL = """
import contextlib, importlib, io, json, os, random, signal, sys, warnings
from pathlib import Path
import numpy, torch
import tokenizers, tqdm
folder, result = Path(sys.argv[1]), {}
sys.path.insert(0, str(folder))

def state():
    return {
        "files": sorted(str(path) for place in (folder, Path.cwd()) for path in place.rglob("*")),
        "random numbers of torch": hash(torch.get_rng_state().numpy().tobytes()),
        "random numbers of numpy": hash(numpy.random.get_state()[1].tobytes()),
        "random numbers of python": hash(random.getstate()),
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "signal handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "environment": sorted(os.environ.items()),
        "folder": str(Path.cwd()),
    }

for name in sys.argv[2:]:
    before, printed = state(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        importlib.import_module(name)
    after = state()
    result[name] = [key for key in before if before[key] != after[key]]
    if printed.getvalue():
        result[name].append("printed " + printed.getvalue())
json.dump(result, sys.stdout)
"""


@pytest.fixture(scope="module")
def changed_by_importing(tmp_path_factory):
    """What importing each script changes, in a fresh process whose folders hold nothing else."""
    scripts, empty = tmp_path_factory.mktemp("scripts"), tmp_path_factory.mktemp("empty")
    for script in SCRIPTS:
        shutil.copy(ROOT / script, scripts)
    done = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_ALL, str(scripts), *(Path(s).stem for s in SCRIPTS)],
        cwd=empty,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    assert list(empty.iterdir()) == []
    return json.loads(done.stdout)  # raises where anything else was written to stdout


@every_script
def test_importing_a_script_has_no_side_effects(changed_by_importing, script):
    assert changed_by_importing[Path(script).stem] == []


def test_pydoc_shows_lesson_8():
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pydoc", f"./{LESSON8}"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PAGER": "cat", "MANPAGER": "cat"},
    )
    assert done.returncode == 0, done.stderr
    first_line = ast.get_docstring(ast.parse(read(LESSON8))).splitlines()[0]
    assert first_line.rstrip(".") in done.stdout
    assert "class Transformer" in done.stdout and "train_bpe(" in done.stdout


@every_script
def test_the_examples_in_the_docstrings_are_right(script):
    report = []
    runner = doctest.DocTestRunner(verbose=False)
    for example in doctest.DocTestFinder().find(importlib.import_module(Path(script).stem)):
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_lesson_8_has_examples_in_its_docstrings(lesson8):
    examples = [e for test in doctest.DocTestFinder().find(lesson8) for e in test.examples]
    assert len(examples) >= 3


@every_script
def test_every_script_has_a_main_guard(script):
    guards = [
        node
        for node in ast.parse(read(script)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    assert len(guards) == 1


# Portability


def without_encoding(source):
    """The lines on which text is read or written in whatever encoding the system happens to use."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        function, keywords = node.func, {keyword.arg: keyword.value for keyword in node.keywords}
        name = getattr(function, "id", None) or getattr(function, "attr", None)
        owner = getattr(getattr(function, "value", None), "id", None)
        if name in ("open", "fdopen") and owner not in ("tarfile", "gzip", "zipfile", "webbrowser"):
            if owner == "os" and name == "open":
                continue
            is_method = isinstance(function, ast.Attribute) and owner not in ("io", "os", "codecs")
            position = 0 if is_method else 1
            mode = keywords.get("mode") or (node.args[position:] or [ast.Constant("r")])[0]
            is_text = not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
        elif name in ("NamedTemporaryFile", "TemporaryFile"):
            mode = keywords.get("mode") or (node.args or [ast.Constant("w+b")])[0]
            is_text = not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
        elif name in ("run", "Popen", "check_output") and owner == "subprocess":
            is_text = bool({"text", "universal_newlines"} & keywords.keys())
        else:
            # The encoding may also come by position: read_text("utf-8"), write_text(text, "utf-8").
            is_text = len(node.args) <= {"read_text": 0, "write_text": 1}.get(name, -1)
        if is_text and "encoding" not in keywords:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "call",
    [
        "open(path)",
        "open(path, 'w')",
        "open(path, mode='a')",
        "io.open(path)",
        "path.open()",
        "path.open('w')",
        "os.fdopen(3, 'w')",
        "path.read_text()",
        "path.write_text('x')",
        "(a / b).write_text('x')",
        "tempfile.NamedTemporaryFile('w')",
        "subprocess.run(command, text=True)",
    ],
)
def test_the_check_below_sees_text_without_an_encoding(call):
    assert without_encoding(call) == [1]
    assert without_encoding(call[:-1] + (", " * (call[-2] != "(")) + "encoding='utf-8')") == []


def test_the_check_below_lets_binary_files_and_named_encodings_pass():
    calls = ["open(p, 'rb')", "p.open('wb')", "open(p, mode='wb')", "tarfile.open(p)"]
    calls += ["os.open(p, 0)", "p.read_bytes()", "NamedTemporaryFile()", "subprocess.run(c)"]
    calls += ["p.read_text('utf-8')", "p.write_text('x', 'utf-8')"]
    assert without_encoding("\n".join(calls)) == []


def test_text_is_read_and_written_with_an_encoding_named():
    files = [name for name in tracked_files() if name.endswith(".py")]
    assert LESSON8 in files
    found = {name: without_encoding(read(name)) for name in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


MACHINE_PATH = re.compile(
    r"(?<![\w.$}~/-])/(?:tmp|home|root|work|Users|mnt)(?:/|\b)|\b[A-Z]:\\\\?\w"
)


@pytest.mark.parametrize("folder", ["tmp", "home", "root", "work", "Users"])
def test_the_check_below_sees_paths_of_one_machine(folder):
    for text in (f'"/{folder}/x"', f"=/{folder}/x", f"see /{folder}.", f"`/{folder}/data`"):
        assert MACHINE_PATH.search(text)
    for text in (f"https://a.org/{folder}/x", f"./{folder}/x", f"$x/{folder}", f"a/{folder}/b"):
        assert not MACHINE_PATH.search(text)


def test_no_file_names_a_path_of_one_machine():
    found = []
    for name in tracked_files():
        if name.startswith("tests/"):
            continue
        with contextlib.suppress(UnicodeDecodeError):  # pictures
            for number, line in enumerate(read(name).splitlines(), 1):
                if MACHINE_PATH.search(line):
                    found.append(f"{name}:{number}: {line.strip()}")
    assert found == []


def test_no_corpus_run_or_checkpoint_is_tracked():
    wrong = re.compile(r"^(data/(?!README\.md$)|runs/|\.venv/)|\.(pth|pt|tgz|pyc)$")
    assert [name for name in tracked_files() if wrong.search(name)] == []


# Documents


@pytest.fixture(scope="module")
def readme():
    if not (ROOT / "README.md").is_file():
        pytest.skip("there is no README.md yet")
    return read("README.md")


def flags_of(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))


@pytest.fixture(scope="module")
def lesson8_flags(lesson8):
    return flags_of(lesson8.build_parser().format_help())


def test_the_files_that_the_readme_names_exist(readme):
    named = set(re.findall(r"\b0\d_\w+\.py\b", readme))
    named |= set(re.findall(r"(?<![\w./-])(?:tests|benchmarks|\.ci)/[\w./-]*\w", readme))
    named |= set(re.findall(r"`((?:data/README\.md|requirements\.txt|pyproject\.toml))`", readme))
    links = re.findall(r"\]\(([^)\s]+)\)", readme)
    named |= {link.partition("#")[0] for link in links if not re.match(r"\w+:|#", link)}
    assert LESSON8 in named
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_lesson_is_in_the_readme(readme):
    assert [script for script in SCRIPTS if script not in readme] == []


def test_the_flags_after_lesson_8_in_the_readme_exist(readme, lesson8_flags):
    commands = re.findall(rf"{re.escape(LESSON8)}([^`\n|;&#]*)", readme)
    used = set().union(*map(flags_of, commands))
    assert used
    assert used - lesson8_flags == set()


def test_the_flags_that_the_readme_mentions_by_themselves_exist(readme, lesson8_flags):
    spans = [span for span in re.findall(r"`([^`\n]+)`", readme) if span.startswith("--")]
    known = set(lesson8_flags).union(*(flags_of(read(script)) for script in SCRIPTS))
    assert set().union(*map(flags_of, spans)) - known == set()


def test_the_flags_in_the_docstring_of_lesson_8_exist(lesson8, lesson8_flags):
    commands = re.findall(rf"{re.escape(LESSON8)}([^\n]*)", lesson8.__doc__)
    used = set().union(*map(flags_of, commands))
    assert {"--demo", "--full", "--infer", "--evaluate", "--resume"} <= used
    assert used - lesson8_flags == set()


def test_the_data_document_lists_the_archives_that_the_program_expects(lesson8):
    rows = [line for line in read("data/README.md").splitlines() if ".tgz`" in line and "|" in line]
    assert len(rows) == len(lesson8.ARCHIVES)
    for (archive, blob_id, stems), row in zip(lesson8.ARCHIVES.values(), rows, strict=True):
        assert f"`{archive}`" in row and f"`{blob_id}`" in row
        assert f"`{stems[0]}.en`" in row and f"`{stems[0]}.vi`" in row


def test_the_data_document_names_every_file_that_is_looked_for(lesson8):
    text = read("data/README.md")
    for _, _, stems in lesson8.ARCHIVES.values():
        for stem in stems:
            assert f"`{stem}.X`" in text and f"`{stem}.Y`" in text
