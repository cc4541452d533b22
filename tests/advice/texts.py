"""The texts of the source that say what to do, and where those without a row are followed."""

import ast
import re
from pathlib import Path

VERBS = (
    "give|call|use|wrap|make|write|name|hook|register|leave|pass|set|run|load|shard|split|pad|say|"
    "copy|save|choose|do|keep|compute|step|remove|reduce|see|state|begin|bring|put|delete|add|"
    "restore|take|read|let|download|pip|correct"
)

# Texts that have no row: where their advice is followed, or why not here.
ELSEWHERE = dict(
    line.split(" | ") for line in Path(__file__).with_name("elsewhere.txt").read_text().splitlines()
)


def texts(path):
    """String literals of a file that say what to do, with {} for what is filled in."""
    found, parts = [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings
            parts |= {id(part) for part in ast.walk(node) if isinstance(part, ast.Constant)}
        if id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in ast.walk(node)}
            pieces = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
            found.append("".join(pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return [text for text in found if re.search(rf"[;:] (or )?({VERBS})\b|; example|\. Hook", text)]
