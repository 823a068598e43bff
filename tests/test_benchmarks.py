"""The benchmarks run, with a minimum of work, and their own checks hold. Nothing is timed here."""

import json
import math
from pathlib import Path

import pytest
from helpers import python

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SHORT = {
    "train_step": "--only torch-fp32 --steps 1",
    "translate": "--only lesson8-fp32 --sentences 8 --practice 2 --repeats 2",
}


def numbers(value):
    """All numbers in nested lists and dictionaries."""
    if isinstance(value, (dict, list)):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in numbers(part)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize("name", [pytest.param("train_step", marks=pytest.mark.slow), "translate"])
def test_a_benchmark_prints_its_table_and_writes_it_as_json(name, tmp_path):
    file = tmp_path / "table.json"
    how = ["--rounds", 1, "--threads", 1, "--json", file, *SHORT[name].split()]
    done = python(BENCHMARKS / f"{name}.py", *how, timeout=600)
    out = done.stdout.decode("utf-8")
    assert done.returncode == 0, done.stderr.decode("utf-8")
    assert max(map(len, out.splitlines())) <= 100
    found = numbers(json.loads(file.read_text("utf-8")))
    assert len(found) > 5 and all(map(math.isfinite, found))
    if name == "train_step":  # its yardstick has lesson 8's weights, and must have its loss
        assert ": equal" in out and "as torch counts them" in out and "(+0)" in out
