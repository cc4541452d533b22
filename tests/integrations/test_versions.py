"""Versions of torch and transformers: newer ones than those tested warn, once."""

import importlib.metadata
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from flex_model import FlexModel
from flex_model.integrations import versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_newer_version_warns_once_and_by_name(monkeypatch, package):
    monkeypatch.setattr(versions, "_warned", set())
    newer = types.ModuleType(package)
    newer.__version__ = "99.1.0.dev5+cpu"
    monkeypatch.setitem(sys.modules, package, newer)
    text = rf"tested with {package} up to {versions.TESTED[package][1]}, and 99\.1\.0\.dev5\+cpu is"
    with pytest.warns(UserWarning, match=text):
        FlexModel(torch.nn.Identity())
    FlexModel(torch.nn.Identity())  # warnings are errors here


@pytest.mark.parametrize("patch", ["2.15.1", "2.15.0+cu132", "2.9.1", "2.15.0a0+git12"])
def test_no_warning_for_patches_and_older_versions(monkeypatch, patch):
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(torch, "__version__", patch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_newer()


def test_the_tested_versions_are_those_of_the_requirements():
    for package, (oldest, newest) in versions.TESTED.items():
        found = re.findall(
            rf"^{package}==(.*)$",
            "\n".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt")),
            re.MULTILINE,
        )
        assert newest in found
        assert versions._minor(oldest) <= versions._minor(importlib.metadata.version(package))
