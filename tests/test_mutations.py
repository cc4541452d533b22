"""The mutations of `mutations.py` are of the code as it is."""

import pytest

from mutations import MUTATIONS, ROOT


def test_there_are_thirty():
    assert len({one.name for one in MUTATIONS}) >= 30


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[one.name for one in MUTATIONS])
def test_the_text_is_there_once_and_its_tests_exist(mutation):
    source = (ROOT / "flex_model" / mutation.file).read_text()
    assert source.count(mutation.old) == 1
    compile(source.replace(mutation.old, mutation.new), mutation.file, "exec")
    for test in mutation.tests.split():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / "tests" / path).read_text()
