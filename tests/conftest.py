"""Shared by all tests: the lessons as modules, small models, and the real text where it exists."""

import importlib
import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def lesson8():
    """Lesson 8 as a module."""
    return importlib.import_module("08_iwslt_vi_en")


@pytest.fixture(scope="session")
def iwslt():
    """The folder with the IWSLT archives: IWSLT_DATA, else data/; without them the test skips."""
    folder = Path(os.environ.get("IWSLT_DATA", ROOT / "data"))
    if not (folder / "test-2013-en-vi.tgz").is_file():
        pytest.skip(f"needs the IWSLT'15 archives in {folder} (or set IWSLT_DATA)")
    return folder


@pytest.fixture
def tiny_model(lesson8):
    """An untrained pre-norm model of lesson 8, small enough for anything, with random gains."""
    torch.manual_seed(3)
    model = lesson8.Transformer(40, 37, 16, 4, 32, 2, 0.0, norm_first=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()
