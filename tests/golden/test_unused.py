"""No function, class or constant of the package is without a use.

A use is a name in the package's own code, or a word of the guides, whose code the tests run.
`interop/qwix` has Qwix's names for others to call.
"""

import ast
import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "midtread"
# What somebody else calls, and who.
CALLED_BY = {
    "flat_map": "grain, for each document",
    "_pass_on": "jax, as a gradient",
    "_no_second_order": "jax, as a derivative",
    "get_unused_rules": "programs written for Qwix",
    "zero_point_tile_shape": "programs written for Qwix",
    "_inputs_have_activations": "subclasses of Qwix's LiteRT providers",
    "_fake_quant_inputs": "subclasses of Qwix's LiteRT providers",
    "_maybe_fake_quant": "subclasses of Qwix's LiteRT providers",
    "_fake_quant_output": "subclasses of Qwix's LiteRT providers",
    "tree_flatten_with_keys": "jax, of a node of a tree",
    "tree_unflatten": "jax, of a node of a tree",
    "pretend_gpu": "tests, to lower kernels for a GPU that is not there",
}


def mentioned(tree: ast.AST) -> collections.Counter:
    """Names that code uses, and words of short texts: tables name functions by text."""
    names = collections.Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.keyword(arg=str(name)):
                names[name] += 1
            case ast.Attribute(attr=name):
                names[name] += 1
            case ast.alias(name=name):
                names[name.split(".")[-1]] += 1
            case ast.Constant(value=str(text)) if " " not in text.strip():
                names.update(re.findall(r"\w+", text))
    return names


def defined(tree: ast.Module) -> list[str]:
    kinds = ast.FunctionDef | ast.ClassDef
    names = [node.name for node in ast.walk(tree) if isinstance(node, kinds)]
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names += [x.id for x in node.targets if isinstance(x, ast.Name)]
    return [name for name in names if not name.startswith("__") and name != "_"]


def unused(files: dict[str, str], words: set[str]) -> list[str]:
    trees = {path: ast.parse(text) for path, text in files.items()}
    uses = sum(map(mentioned, trees.values()), collections.Counter())
    return [
        f"{path}: {name}"
        for path, tree in trees.items()
        for name in defined(tree)
        if not uses[name] and name not in words
    ]


def test_everything_has_a_use():
    files = {str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")}
    guides = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")]
    words = set(re.findall(r"\w+", " ".join(p.read_text() for p in guides)))
    known = words | CALLED_BY.keys()
    left = [x for x in unused(files, known) if not x.startswith("interop/qwix/")]
    assert not left, left
    assert CALLED_BY.keys() <= {x.split(": ")[1] for x in unused(files, set())}


def test_what_has_none_is_seen():
    code = "LIMIT = 3\ndef used(): ...\ndef spare(): ...\nclass A:\n  def lost(self): used()"
    assert unused({"a": code}, set()) == ["a: spare", "a: A", "a: lost", "a: LIMIT"]
