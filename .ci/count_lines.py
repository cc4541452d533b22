"""Counts lines of code by folder, without blank lines, comments and docstrings.

python .ci/count_lines.py flex_model csrc tests
"""

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
CPP = (".cpp", ".h", ".cu", ".cuh")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def of_python(source: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and isinstance(first.value.value, str):
                docstrings.update(range(first.lineno, first.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def of_cpp(source: str) -> int:
    return sum(bool(line.strip()) for line in COMMENT.sub("", source).splitlines())


for folder in sys.argv[1:]:
    python = list(Path(folder).rglob("*.py"))
    cpp = [path for path in Path(folder).rglob("*") if path.suffix in CPP]
    counts = [sum(of_python(path.read_text()) for path in python)]
    counts.append(sum(of_cpp(path.read_text()) for path in cpp))
    print(f"{folder:12} {counts[0]:6} of Python, {counts[1]:6} of C++")
