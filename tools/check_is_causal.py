"""Refuse `is_causal` outside the one function that guards it: `python tools/check_is_causal.py [FILE ...]`.

With T_q != T_k torch aligns the causal mask to the top left, so that a decode step sees only the first key. The function in
ALLOWED refuses such shapes; all other code calls it. Prints one line per finding and exits 1 if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = Path("packages/nsa-core/src/nsa_core/reference/causal.py")
SEARCHED = ("packages", "tests", "tools", "examples")
SDPA = "scaled_dot_product_attention"
SDPA_POSITIONAL_BEFORE_IS_CAUSAL = 5


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every use of `is_causal` other than a literal False."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from _in_call(node)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from ((node.lineno, "a dict entry 'is_causal'") for key, value in pairs if _is_name(key) and not _is_false(value))


def _in_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    for keyword in call.keywords:
        if keyword.arg == "is_causal" and not _is_false(keyword.value):
            yield call.lineno, f"is_causal={ast.unparse(keyword.value)}"
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == SDPA and len(call.args) > SDPA_POSITIONAL_BEFORE_IS_CAUSAL:
        yield call.lineno, f"is_causal given by position to {SDPA}"


def _is_name(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "is_causal"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def searched_files(root: Path) -> Iterator[Path]:
    """Yield every Python file of the tree that the rule covers."""
    for folder in SEARCHED:
        yield from sorted(path for path in (root / folder).rglob("*.py") if path.relative_to(root) != ALLOWED)


def main(arguments: list[str]) -> int:
    """Check the files named in `arguments`, or the whole tree, and return the exit code."""
    if any(word.startswith("-") for word in arguments):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    found = 0
    for path in map(Path, arguments) if arguments else searched_files(ROOT):
        for line, what in findings(path.read_text(encoding="utf-8")):
            found += 1
            print(f"{path}:{line}: {what}: only right where T_q == T_k; call the helper in {ALLOWED} instead")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
