"""check_assignments.py: in flex_model/, nobody assigns another object's attribute.

So what an object holds is written in its own class. `x.y = v`, `x.y += v`, `del x.y`, unpacking,
`for x.y in ...`, `with ... as x.y` and `setattr` count. Allowed, each because nobody else can see
a half-made or changed object, or because there is no other way:

- `self.y` in a method, `cls.y` in a class method: the object's own;
- an object that the same function made, by a constructor, `__new__`, `copy` or `def`: it is not
  shared yet;
- at a module's top level, what the module defines: it completes its own classes before any use;
- `ctx.y` in a static method: torch.autograd.Function keeps there what its backward needs;
- the attributes in API: torch and Python offer no other way to set them.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

API = {
    # Python's
    "__cause__",  # of an exception
    "is_agreed",  # ours, of any exception, also of Python's classes: errors.agreed
    "atexit",  # of weakref.finalize
    "propagate",  # of logging.Logger
    "disabled",  # of logging.Logger
    # of a layer of transformers, and of its configuration: integrations/attention_patterns.py and
    # integrations/expert_units.py
    "config",
    "_attn_implementation",
    # torch's
    "grad",  # of a tensor
    "data",  # of a tensor, whose device nothing else can change
    "forward",  # of a module
    "has_backward",  # of a stage of torch.distributed.pipelining
    "buffer",  # of what such a stage receives
    "CURRENT_DEVICE",  # of the thread, and of the process: integrations/torch_private.py
    "device_context",
    "require_forward_param_sync",  # of DistributedDataParallel
    "allow_non_fake_inputs",  # of FakeTensorMode
    "_torchdynamo_disable",  # of a function: integrations/compiled.py
    "_torchdynamo_disable_msg",
    "skip_nnmodule_hook_guards",  # of torch._dynamo.config
    "_training_state",  # of FSDP2's state and parameter group: integrations/cut.py
    "iter_forward_root",
    "__enter__",  # of the classes of torch's modes: sequential/traced/tracer.py
    "__init__",
    "__setattr__",  # of nn.Module: sequential/suspension.py
    "__delattr__",
    "_timeout",  # of ProcessGroupNCCL.Options, as torch.distributed sets them
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement or a call of setattr assigns."""
    if isinstance(node, ast.Assign | ast.Delete):
        yield from node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
        yield node.target
    elif isinstance(node, ast.withitem) and node.optional_vars:
        yield node.optional_vars
    elif isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func).rpartition(".")[2]
        is_own = ast.unparse(node.func).startswith("super().")
        if name in {"setattr", "delattr", "__setattr__", "__delattr__"} and not is_own:
            attribute = node.args[1].value if isinstance(node.args[1], ast.Constant) else "?"
            yield ast.Attribute(node.args[0], str(attribute), lineno=node.lineno)


def parts_of(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from parts_of(part)
    elif isinstance(target, ast.Starred):
        yield from parts_of(target.value)
    else:
        yield target


def is_constructor(value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    return name.lstrip("_")[:1].isupper() or name in {
        "__new__",
        "cls",
        "copy",
        "deepcopy",
        "make_subclass",
    }


def walk_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope without those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from walk_scope(child)


def made_in(scope: ast.AST) -> set[str]:
    """The names that a function binds to objects that it makes, and to nothing else."""
    made: set[str] = set()
    bound: set[str] = set()
    for node in walk_scope(scope):
        if isinstance(node, Function):
            made.add(node.name)
        for target in targets_of(node):
            for part in parts_of(target):
                if isinstance(part, ast.Name):
                    names = made if is_constructor(getattr(node, "value", None)) else bound
                    names.add(part.id)
    return made - bound


def defined_in(module: ast.Module) -> set[str]:
    """The names that a module's top level binds, other than by imports."""
    nodes = list(walk_scope(module))
    stored = (node for node in nodes if isinstance(node, ast.Name))
    names = {node.id for node in stored if isinstance(node.ctx, ast.Store)}
    return names | {node.name for node in nodes if isinstance(node, ast.ClassDef | Function)}


def first_argument(function: Function, in_class: bool) -> set[str]:
    """`self` or `cls` of a method, `ctx` of a static one."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    if not in_class or not arguments:
        return set()
    is_static = any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)
    return {arguments[0].arg} & {"ctx"} if is_static else {arguments[0].arg}


def check(scope: ast.AST, own: set[str], in_class: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each assignment to another object's attribute.

    Args:
        own: The names of objects that are its own.
    """
    for node in walk_scope(scope):
        for target in targets_of(node):
            for part in parts_of(target):
                if not isinstance(part, ast.Attribute) or part.attr in API:
                    continue
                if not is_constructor(part.value) and ast.unparse(part.value) not in own:
                    yield part.lineno, ast.unparse(part)
        if isinstance(node, Function):
            taken = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            outer = set() if isinstance(scope, ast.Module) else own - taken
            yield from check(node, outer | made_in(node) | first_argument(node, in_class))
        elif isinstance(node, ast.ClassDef):
            yield from check(node, set() if isinstance(scope, ast.Module) else own, in_class=True)


def check_source(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    return sorted(check(tree, defined_in(tree)))


def main() -> int:
    root, found = Path(__file__).parents[1], 0
    for file in sorted((root / "flex_model").rglob("*.py")):
        path = file.relative_to(root).as_posix()
        for line, text in check_source(file.read_text()):
            found += 1
            print(f"{path}:{line}: {text} is another object's; give its class a method for it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
