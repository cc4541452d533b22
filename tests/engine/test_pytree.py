import contextlib
import copy
import dataclasses
import gc
import sys
import threading
import tracemalloc
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st

import scripts
from flex_model import _C, pytree

Point = namedtuple("Point", "x y")


class Labelled(tuple):
    def __new__(cls, *items):
        made = super().__new__(cls, items)
        made.label = "new"
        return made


class Stack(list):
    pass


class Table(dict):
    def __setitem__(self, key, value):
        raise AssertionError("the class's own setter must not run")


class AttributeDict(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


@dataclasses.dataclass
class Pair:
    first: object
    second: object = None
    total: object = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        assert not isinstance(self.first, str), "__post_init__ must not run"
        self.total = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: object
    second: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    first: object
    second: object = None


class Box:
    def __init__(self, *items, name="box"):
        self.items, self.name = items, name


def tensors(count):
    return [torch.full((1,), float(i)) for i in range(count)]


def same(left, right):
    """The same objects in the same order (tensors have no useful ==)."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=False))


@pytest.fixture
def registered():
    pytree.register(
        Box, lambda box: (box.items, box.name), lambda items, name: Box(*items, name=name)
    )
    yield
    pytree.unregister(Box)


# ---- the walk ----------------------------------------------------------------------------------


def test_tensor_subclasses_are_leaves():
    class Mine(torch.Tensor):
        pass

    leaves = [torch.nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(Mine)]
    assert same(pytree.flatten(leaves)[0], leaves)
    assert pytree.leaf_at(leaves[0], 0) is leaves[0]


# ---- wrong calls -------------------------------------------------------------------------------


def spec_of(tree):
    return pytree.flatten(tree)[1]


WRONG_CALLS = [
    (
        lambda: pytree.leaf_at(tensors(2), 2),
        IndexError,
        r"leaf_at: the tree has 2 tensors; unpack_idx 2 is out of range; pass an index in \[",
    ),
    (
        lambda: pytree.replace_leaf(tensors(1), -1, None),
        IndexError,
        "replace_leaf: the tree has 1 tensor; unpack_idx -1 is out",
    ),
    (
        lambda: pytree.leaf_at(SimpleNamespace(x=1), 0),
        IndexError,
        ".* has 0 tensors; unpack_idx 0 is out of range; register the",
    ),
    (
        lambda: pytree.leaf_at(1),
        TypeError,
        r".*expected 2 positional arguments, got 1; call leaf_at\(tree",
    ),
    (lambda: pytree.leaf_at(1, "0"), TypeError, ".*integer"),
    (
        lambda: pytree.unflatten(spec_of([]), []),
        TypeError,
        r"unflatten: expected a TreeSpec, got list; call unflatten\(",
    ),
    (
        lambda: pytree.unflatten([1, 2, 3], spec_of(tensors(2))),
        ValueError,
        "unflatten: the spec has 2 leaves, got 3; pass as many as",
    ),
    (lambda: pytree.unflatten(3, spec_of(tensors(2))), TypeError, ".*not iterable"),
    (pytree.TreeSpec, TypeError, ".*cannot create"),
    (
        lambda: pytree.register(torch.nn.Parameter, list, list),
        ValueError,
        "register: Parameter is a leaf and cannot be registered; exp",
    ),
    (
        lambda: pytree.register(list, list, list),
        ValueError,
        "register: list is built in and cannot be registered; expec",
    ),
    (
        lambda: pytree.register(Box, list, list),
        ValueError,
        "register: Box is already registered; call flex_model.pytree",
    ),
    (
        lambda: pytree.unregister(Stack),
        ValueError,
        "unregister: Stack is not registered; expected a type given",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG_CALLS)
def test_wrong_calls(call, error, message, registered):
    with pytest.raises(error, match=f"^{message}"):
        call()


# ---- containers by structure -------------------------------------------------------------------


def with_attributes(container):
    container.note = {"kept": True}
    return container


def frozen_with_note(first, second):
    made = Frozen(first, second)
    object.__setattr__(made, "note", {"kept": True})
    return made


STRUCTURAL = {
    "tuple subclass": lambda a, b: with_attributes(Labelled(a, b)),
    "list subclass": lambda a, b: with_attributes(Stack([a, b])),
    "dict subclass": lambda a, b: with_attributes(Table(p=a, q=b)),
    "attribute dict": lambda a, b: AttributeDict(p=a, q=b),
    "OrderedDict attributes": lambda a, b: with_attributes(OrderedDict(q=a, p=b)),
    "dataclass": lambda a, b: with_attributes(Pair(a, b)),
    "frozen": lambda a, b: frozen_with_note(a, b),
    "UserDict": lambda a, b: with_attributes(UserDict(p=a, q=b)),
}


@pytest.mark.parametrize("make", STRUCTURAL.values(), ids=STRUCTURAL)
def test_structural_containers(make):
    a, b, c = tensors(3)
    inner = [b, "constant"]
    tree = make(a, inner)
    leaves, spec = pytree.flatten(tree)
    assert same(leaves, [a, b])
    for built in (pytree.unflatten([c, b], spec), pytree.replace_leaf(tree, 0, c)):
        assert type(built) is type(tree)
        assert built is not tree
        assert pytree.leaf_at(built, 0) is c
        assert pytree.leaf_at(built, 1) is b
        assert getattr(built, "note", None) is getattr(tree, "note", None)
        assert pytree.flatten(built)[1] == spec
        assert same(pytree.flatten(tree)[0], [a, b]), "the original was changed"
    assert repr(spec).count("*") == 2


def test_what_is_carried_over():
    a, b, c = tensors(3)
    counts = defaultdict(list, k=a)
    assert pytree.replace_leaf(counts, 0, b)["new"] == []
    assert pytree.unflatten([b], pytree.flatten(counts)[1]).default_factory is list
    assert pytree.replace_leaf(deque([a], maxlen=5), 0, b).maxlen == 5
    labelled = Labelled(a)
    labelled.label = "mine"
    assert pytree.replace_leaf(labelled, 0, b).label == "mine"
    pair = Pair(a)
    pair.total = [c]
    assert same(pytree.flatten(pair)[0], [a, c])  # init=False fields are fields
    del pair.second
    assert not hasattr(pytree.replace_leaf(pair, 1, b), "second") or pair.second is None
    assert "second" not in vars(pytree.replace_leaf(pair, 1, b))
    attributes = pytree.replace_leaf(AttributeDict(p=a), 0, b)
    assert attributes.p is b
    assert vars(attributes) is attributes


def test_ordered_dict_order_is_its_own():
    a, b = tensors(2)
    tree = OrderedDict(x=a, y=b)
    tree.move_to_end("x")
    leaves, spec = pytree.flatten(tree)
    assert same(leaves, [b, a])
    built = pytree.unflatten(leaves, spec)
    assert list(built) == ["y", "x"]
    built.move_to_end("y")
    assert list(pytree.replace_leaf(tree, 0, a)) == ["y", "x"]


def test_items_and_attributes_stay_in_step():
    class Output(dict):
        pass

    a, b, c = tensors(3)
    output = Output(first=a, second=b)
    output.first, output.second = a, "other"
    built = pytree.replace_leaf(pytree.replace_leaf(output, 0, c), 1, c)
    assert built["first"] is c
    assert built.first is c
    assert built["second"] is c
    assert built.second == "other"


def test_dataclass_that_is_a_dict_too():
    @dataclasses.dataclass
    class Output(OrderedDict):
        x: object = None
        y: object = None

    a, b, c = tensors(3)
    output = Output(x=a, y=b)
    output["x"] = a  # in step; y is an attribute only
    assert same(pytree.flatten(output)[0], [a, b])
    built = pytree.unflatten([c, a], pytree.flatten(output)[1])
    assert built["x"] is c
    assert built.x is c
    assert built.y is a
    assert list(built) == ["x"]


def test_slots_along_the_bases():
    class Base(tuple):
        __slots__ = ()

    class Named(Base):
        pass

    class Slots(list):
        __slots__ = ("_Slots__hidden", "tag", "unset")

    a, b = tensors(2)
    slots = Slots([a])
    slots.tag, slots._Slots__hidden = "tag", a
    built = pytree.replace_leaf(slots, 0, b)
    assert built.tag == "tag"
    assert built._Slots__hidden is a
    assert not hasattr(built, "unset")
    assert type(pytree.replace_leaf(Named((a,)), 0, b)) is Named


def test_struct_sequences():
    result = torch.ones(2, 3).max(dim=1)
    a = tensors(1)[0]
    leaves, spec = pytree.flatten(result)
    assert same(leaves, [result.values, result.indices])
    built = pytree.unflatten(leaves, spec)
    assert type(built) is torch.return_types.max
    assert built.indices is result.indices
    replaced = pytree.replace_leaf(result, 1, a)
    assert replaced.indices is a
    assert replaced.values is result.values


@pytest.mark.parametrize(
    "opaque", [Box(torch.ones(1)), SimpleNamespace(x=torch.ones(1)), {torch.ones(1)}]
)
def test_everything_else_is_a_constant(opaque):
    leaves, spec = pytree.flatten([opaque])
    assert leaves == []
    assert pytree.unflatten([], spec)[0] is opaque


def test_a_dataclass_with_c_state_is_a_constant():
    @dataclasses.dataclass
    class OddError(Exception):
        value: object

    assert pytree.num_leaves(OddError(torch.ones(1))) == 0


# ---- registration ------------------------------------------------------------------------------


def test_register(registered):
    a, b = tensors(2)
    box = Box(a, [b], name="mine")
    leaves, spec = pytree.flatten(box)
    assert same(leaves, [a, b])
    assert repr(spec) == "TreeSpec(Box(*, [*]))"
    for built in (pytree.unflatten([b, b], spec), pytree.replace_leaf(box, 0, b)):
        assert built.name == "mine"
        assert built.items[0] is b
    assert spec == pytree.flatten(Box(b, [a], name="mine"))[1]
    assert spec != pytree.flatten(Box(b, [a], name="other"))[1]


def test_register_after_and_unregister():
    a = tensors(1)[0]
    assert pytree.num_leaves(Box(a)) == 0
    pytree.register(Box, lambda box: (box.items, None), lambda items, _: Box(*items))
    spec = pytree.flatten(Box(a))[1]
    pytree.unregister(Box)
    assert pytree.num_leaves(Box(a)) == 0
    assert pytree.unflatten([3], spec).items == (3,)


def test_a_subclass_does_not_inherit_a_registration(registered):
    class Sub(Box):
        pass

    assert pytree.num_leaves(Sub(torch.ones(1))) == 0


def test_ours_goes_before_structure_and_torch():
    class Mine(list):
        pass

    torch_pytree.register_pytree_node(Mine, lambda x: (list(x) * 3, None), lambda x, _: Mine(x[:1]))
    assert pytree.num_leaves(Mine(tensors(1))) == 3
    pytree.register(Mine, lambda x: (list(x) * 2, None), lambda x, _: Mine(x[:1]))
    assert pytree.num_leaves(Mine(tensors(1))) == 2
    pytree.unregister(Mine)
    torch_pytree._deregister_pytree_node(Mine)
    assert pytree.num_leaves(Mine(tensors(1))) == 1


@pytest.mark.parametrize("seen_before", [False, True])
def test_types_registered_with_torch(seen_before):
    class Theirs:
        def __init__(self, *items):
            self.items = items

    a, b = tensors(2)
    if seen_before:
        assert pytree.num_leaves(Theirs(a)) == 0
    torch_pytree.register_pytree_node(
        Theirs, lambda x: (list(x.items), len(x.items)), lambda items, _: Theirs(*items)
    )
    leaves, spec = pytree.flatten([Theirs(a, b)])
    assert same(leaves, [a, b])
    assert same(pytree.unflatten(leaves, spec)[0].items, (a, b))
    assert same(pytree.replace_leaf(Theirs(a, b), 1, a).items, (a, a))
    torch_pytree._deregister_pytree_node(Theirs)
    assert pytree.num_leaves(Theirs(a)) == 0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            None,
            r"for Bad must return \(children, context\), got NoneType; return a tuple of these two",
        ),
        ((1, 2, 3), r"must return \(children, context\), got another number of items in a tuple"),
        ((3, None), "for Bad must return its children as a tuple or list, got int; return"),
        ((torch.ones(2), None), "must return its children as a tuple or list, got Tensor; return"),
        (("text", None), "must return its children as a tuple or list, got str; return"),
        (({"a": 1}, None), "must return its children as a tuple or list, got dict; return"),
    ],
)
def test_flatten_functions_that_return_nonsense(returned, message):
    class Bad:
        pass

    pytree.register(Bad, lambda bad: returned, lambda children, context: Bad())
    for walk in (pytree.flatten, pytree.num_leaves, lambda tree: pytree.leaf_at(tree, 0)):
        with pytest.raises(
            TypeError, match=r"^flatten: the function registered with flex_model.*" + message
        ):
            walk([Bad()])
    pytree.unregister(Bad)


def test_errors_of_user_code_come_through():
    class Bad:
        pass

    def fail(*_):
        raise ZeroDivisionError("mine")

    def broken():
        yield torch.ones(1)
        fail()

    pytree.register(Bad, lambda bad: (broken(), None), fail)
    with pytest.raises(ZeroDivisionError, match="mine"):
        pytree.flatten((Bad(),))
    pytree.unregister(Bad)
    pytree.register(Bad, lambda bad: ([torch.ones(1)], None), fail)
    with pytest.raises(ZeroDivisionError, match="mine"):
        pytree.unflatten([1], pytree.flatten(Bad())[1])
    with pytest.raises(ZeroDivisionError, match="mine"):
        pytree.replace_leaf([Bad()], 0, None)
    pytree.unregister(Bad)


def test_methods_of_containers_do_not_run():
    class Rude(list):
        def __len__(self):
            raise AssertionError

        __iter__ = __getitem__ = __setitem__ = append = extend = __len__

    a, b = tensors(2)
    assert list.__getitem__(pytree.replace_leaf(Rude([a]), 0, b), 0) is b


# ---- robustness --------------------------------------------------------------------------------

WALKS = [
    pytree.flatten,
    pytree.num_leaves,
    lambda tree: pytree.leaf_at(tree, 3),
    lambda tree: pytree.replace_leaf(tree, 3, None),
]


@pytest.mark.parametrize("walk", WALKS)
def test_cycles(walk, registered):
    loop, table = [torch.ones(1)], {}
    loop.append((1, loop))
    table["k"] = UserDict(inner=[table])
    box = Box()
    box.items = (box,)
    for tree, name in ((loop, "list"), (table, "dict"), (box, "Box")):
        with pytest.raises(
            ValueError, match=f": a {name} contains itself; expected a tree without"
        ):
            walk(tree)


def nested(depth, wrap):
    tree = torch.ones(1)
    for _ in range(depth):
        tree = wrap(tree)
    return tree


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x, 1), lambda x: {"k": x}, Pair])
def test_depth_is_bounded(walk, wrap):
    for depth in (1001, 100_000):
        with pytest.raises(
            RecursionError, match=": containers are nested deeper than 1000, the innermost"
        ):
            walk(nested(depth, wrap))


def test_the_greatest_depth_works_in_a_small_thread():
    results = []

    def run():
        for wrap in (lambda x: [x], lambda x: {"k": x}, Pair):
            tree = nested(1000, wrap)
            leaves, spec = pytree.flatten(tree)
            results.append(pytree.flatten(pytree.unflatten(leaves, spec))[1] == spec)
            results.append(pytree.leaf_at(pytree.replace_leaf(tree, 0, leaves[0]), 0) is leaves[0])
            results.append(len(repr(spec)) > 1000)

    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert results == [True] * 9


@pytest.mark.parametrize("make", [list, lambda items: dict(enumerate(items)), Stack])
def test_containers_changed_by_user_code_during_the_walk(make):
    class Vandal:
        pass

    def flatten(vandal):
        tree.clear()
        return (torch.ones(1),), None

    pytree.register(Vandal, flatten, lambda children, context: Vandal())
    for count in (
        lambda tree: len(pytree.flatten(tree)[0]),
        pytree.num_leaves,
        lambda tree: len(pytree.replace_leaf(tree, 3, None)),
    ):
        tree = make([Vandal(), *tensors(3)])
        assert count(tree) == 4
        assert len(tree) == 0
    pytree.unregister(Vandal)


def test_ordered_dict_changed_by_a_key():
    class Key(str):
        def __eq__(self, other):
            tree.clear()
            return str.__eq__(self, other)

        def __hash__(self):
            return 1

    tree = OrderedDict({Key("a"): 1})
    tree[Key("b")] = 2
    for _ in range(3):
        with contextlib.suppress(RuntimeError, KeyError):  # no crash: that is all
            pytree.flatten(tree)


def test_every_way_out_frees_what_it_took(registered):
    a = torch.ones(3)
    tree = {
        "a": Box(a, [a, (a, None)]),
        "b": Pair(a, Slotted(a)),
        "c": Stack([a]),
        "d": OrderedDict(k=a),
    }
    loop = [a]
    loop.append(loop)

    def once():
        leaves, spec = pytree.flatten(tree)
        pytree.unflatten(leaves, spec)
        repr(spec), spec == pytree.flatten(copy.copy(tree))[1]
        for index in range(len(leaves)):
            pytree.replace_leaf(tree, index, pytree.leaf_at(tree, index))
        for bad in (
            lambda: pytree.flatten(loop),
            lambda: pytree.leaf_at(tree, 99),
            lambda: pytree.replace_leaf(tree, 99, a),
            lambda: pytree.unflatten(leaves[1:], spec),
        ):
            with pytest.raises((ValueError, IndexError)):
                bad()

    watched = [a, tree, Pair, Slotted, Box, Stack, None, loop]
    tracemalloc.start()
    for _ in range(600):  # the free lists of Python 3.13 fill slowly
        once()
    gc.collect()
    before = [sys.getrefcount(x) for x in watched]
    start = tracemalloc.get_traced_memory()[0]
    for _ in range(200):
        once()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    after = [sys.getrefcount(x) for x in watched]
    assert max(abs(x - y) for x, y in zip(before, after, strict=False)) < 20
    assert grown < 20_000


def test_a_spec_keeps_no_leaf():
    leaf = torch.ones(1)
    alive = weakref.ref(leaf)
    pair = Pair(leaf, AttributeDict(k=leaf))
    spec = pytree.flatten((pair, OrderedDict(k=leaf), Slotted(leaf), Labelled(leaf)))[1]
    del leaf, pair
    gc.collect()
    assert alive() is None
    assert spec.num_leaves == 5


def test_dead_types_are_forgotten():
    def make():
        class Mine(list):
            __slots__ = ("x",)

        @dataclasses.dataclass
        class Data:
            x: object

        class Opaque:
            pass

        for tree in (Mine([torch.ones(1)]), Data(torch.ones(1)), Opaque()):
            pytree.unflatten(*pytree.flatten(tree))
        return [weakref.ref(type) for type in (Mine, Data, Opaque)]

    gc.collect()
    known = _C.num_known_types()
    types = [type for _ in range(20) for type in make()]
    gc.collect()
    assert all(type() is None for type in types)
    assert _C.num_known_types() <= known + 5


def test_cycles_through_a_spec_are_collected():
    class Holder:
        pass

    holder = Holder()
    holder.spec = pytree.flatten([holder])[1]
    assert "Holder" in repr(holder.spec)
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    assert alive() is None


# ---- TreeSpec ----------------------------------------------------------------------------------


def test_specs_compare_by_structure():
    a, b = tensors(2)
    spec = spec_of
    assert spec((a, {"k": [b, 1]})) == spec((b, {"k": [a, 1]}))
    different = [
        a,
        (a,),
        [a],
        [a, 1],
        [a, True],
        [a, 1.0],
        {"k": a},
        {"j": a},
        OrderedDict(k=a),
        Pair(a),
        [a, a],
    ]
    for i, left in enumerate(different):
        for j, right in enumerate(different):
            assert (spec(left) == spec(right)) is (i == j)
            assert (spec(left) != spec(right)) is (i != j)
    assert spec({"x": a, "y": b}) != spec({"y": a, "x": b})  # the order of the leaves differs
    nan = float("nan")
    assert spec([nan]) == spec([nan])
    assert spec(a) != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec(a))
    with pytest.raises(TypeError, match="not supported"):
        assert spec(a) < spec(b)


def test_reprs():
    a = tensors(1)[0]
    tree = (Point(a, 1), Pair(a), OrderedDict(k=a), UserDict(k=a), (a,), {"z": a, "a": [a, 3]}, "t")
    assert repr(spec_of(tree)) == (
        "TreeSpec((Point(*, 1), Pair(first=*, second=None, total=0), OrderedDict('k': *), "
        "UserDict(data={'k': *}), (*,), {'z': *, 'a': [*, 3]}, 't'))"
    )


# ---- against torch.utils._pytree ---------------------------------------------------------------

leaf = st.builds(lambda: torch.ones(1))
constant = st.none() | st.integers() | st.text(max_size=3) | st.booleans()


def containers(children):
    keys = st.text(max_size=3) | st.integers()
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=4).map(OrderedDict),
        st.dictionaries(keys, children, max_size=4).map(lambda items: defaultdict(int, items)),
        st.builds(Point, children, children),
        st.lists(children, max_size=4).map(deque),
    )


shared_trees = st.recursive(leaf | constant, containers, max_leaves=20)
all_trees = st.recursive(
    leaf | constant,
    lambda children: st.one_of(
        containers(children),
        st.builds(Pair, children.filter(lambda x: not isinstance(x, str)), children),
        st.builds(Slotted, children, children),
        st.lists(children, max_size=3).map(lambda items: Labelled(*items)),
        st.lists(children, max_size=3).map(Stack),
        st.dictionaries(st.text(max_size=2), children, max_size=3).map(UserDict),
    ),
    max_leaves=20,
)


def children_of(tree):
    """The children of one container as a list, or None: what the walk should do, in Python."""
    if isinstance(tree, (tuple, list, deque)):
        return list(tree)
    if isinstance(tree, dict):
        return [*tree.values(), *tree.keys()]
    if isinstance(tree, UserDict):
        return [tree.data]
    if dataclasses.is_dataclass(tree):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None


def count(tree):
    if isinstance(tree, torch.Tensor):
        return 1
    return sum(map(count, children_of(tree) or ()))


def assert_only_replaced(old, new, index, leaf):
    if not 0 <= index < count(old):
        assert new is old
    elif isinstance(old, torch.Tensor):
        assert new is leaf
    else:
        assert type(new) is type(old)
        assert new is not old
        before, after = children_of(old), children_of(new)
        assert len(before) == len(after)
        for x, y in zip(before, after, strict=False):
            assert_only_replaced(x, y, index, leaf)
            index -= count(x)


def assert_rebuilt(old, new):
    children = children_of(old)
    if children is None:
        assert new is old
        return
    assert type(new) is type(old)
    assert new is not old or old == ()
    assert len(children) == len(children_of(new))
    for x, y in zip(children, children_of(new), strict=False):
        assert_rebuilt(x, y)


@settings(deadline=None, max_examples=200)
@given(shared_trees)
def test_leaves_are_torchs(tree):
    theirs, their_spec = torch_pytree.tree_flatten(tree)
    leaves, spec = pytree.flatten(tree)
    assert same(leaves, [x for x in theirs if isinstance(x, torch.Tensor)])
    assert_rebuilt(torch_pytree.tree_unflatten(theirs, their_spec), pytree.unflatten(leaves, spec))


@settings(deadline=None, max_examples=200)
@given(all_trees)
def test_flatten_and_unflatten_are_inverse(tree):
    leaves, spec = pytree.flatten(tree)
    assert len(leaves) == spec.num_leaves == pytree.num_leaves(tree) == count(tree)
    assert same([pytree.leaf_at(tree, i) for i in range(len(leaves))], leaves)
    built = pytree.unflatten(leaves, spec)
    assert_rebuilt(tree, built)
    assert pytree.flatten(built)[1] == spec
    assert repr(spec).startswith("TreeSpec(")


@settings(deadline=None, max_examples=200)
@given(all_trees, st.data())
def test_replace_leaf_touches_nothing_else(tree, data):
    leaves, spec = pytree.flatten(tree)
    if not leaves:
        return
    index = data.draw(st.integers(0, len(leaves) - 1))
    new = torch.zeros(1)
    built = pytree.replace_leaf(tree, index, new)
    assert_only_replaced(tree, built, index, new)
    assert same(pytree.flatten(tree)[0], leaves)
    assert pytree.flatten(built)[1] == spec


# ---- Hugging Face ------------------------------------------------------------------------------


def filled(cache, layers=2):
    for layer in range(layers):
        cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), layer)
    return cache


def make_output():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    cache = filled(pytest.importorskip("transformers").DynamicCache())
    hidden = tuple(tensors(2))
    return outputs.CausalLMOutputWithPast(
        logits=torch.ones(2), past_key_values=cache, hidden_states=hidden
    )


def test_model_outputs_stay_in_step():
    output, new = make_output(), torch.zeros(2)
    leaves, spec = pytree.flatten(output)
    assert len(leaves) == 7
    assert leaves[0] is output.logits
    for built in (pytree.replace_leaf(output, 0, new), pytree.unflatten([new, *leaves[1:]], spec)):
        assert type(built) is type(output)
        assert built.logits is new
        assert built["logits"] is new
        assert built[0] is new
        assert list(built) == list(output)
        assert vars(built).keys() == vars(output).keys()
        assert built.loss is None
        assert built.hidden_states[1] is output.hidden_states[1]
        assert pytree.flatten(built)[1] == spec
        built.loss = new
        assert built["loss"] is new
        assert output.loss is None
    assert pytree.replace_leaf(output, 0, new).past_key_values is output.past_key_values


def test_every_model_output_class():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    generic = pytest.importorskip("transformers.utils.generic")
    classes = [
        x
        for x in vars(outputs).values()
        if isinstance(x, type) and generic.ModelOutput in x.__bases__
        if dataclasses.is_dataclass(x)
    ]
    assert len(classes) > 20
    for output_class in classes:
        fields = dataclasses.fields(output_class)
        if not fields:
            continue
        output = output_class(**{field.name: torch.ones(1) for field in fields})
        leaves, spec = pytree.flatten(output)
        assert same(leaves, [output[field.name] for field in fields])
        new = torch.zeros(1)
        built = pytree.replace_leaf(output, len(fields) - 1, new)
        assert built[fields[-1].name] is new
        assert getattr(built, fields[-1].name) is new
        assert pytree.flatten(built)[1] == spec


def test_dynamic_cache():
    transformers = pytest.importorskip("transformers")
    cache, new = filled(transformers.DynamicCache()), torch.zeros(1)
    keys = [(layer.keys, layer.values) for layer in cache.layers]
    leaves, spec = pytree.flatten(cache)
    assert same(leaves, [x for pair in keys for x in pair])
    for built in (
        pytree.replace_leaf(cache, 2, new),
        pytree.unflatten([*leaves[:2], new, leaves[3]], spec),
    ):
        assert type(built) is type(cache)
        assert built.layers[1].keys is new
        assert built.layers[1].values is leaves[3]
        assert built.layers[1].is_initialized
        assert all(same((x.keys, x.values), y) for x, y in zip(cache.layers, keys, strict=False))
    built = pytree.replace_leaf(cache, 2, new)
    assert built.layers[0] is cache.layers[0]
    built = pytree.replace_leaf(cache, 0, leaves[0] + 1)
    built.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert built.get_seq_length() == 4
    assert cache.get_seq_length() == 3


def test_other_caches():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=8, intermediate_size=8
    )
    static = transformers.StaticCache(config=config, max_cache_len=4)
    assert pytree.num_leaves(static) == 0
    for layer in range(2):
        static.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), layer)
    assert pytree.num_leaves(static) == 4  # its counters are no activations
    both = transformers.EncoderDecoderCache(
        filled(transformers.DynamicCache(), 1), filled(transformers.DynamicCache(), 1)
    )
    leaves = pytree.flatten(both)[0]
    cross = both.cross_attention_cache.layers[0]
    assert same(leaves[2:], [cross.keys, cross.values])
    built = pytree.replace_leaf(both, 3, leaves[0])
    assert type(built) is type(both)
    assert built.self_attention_cache is both.self_attention_cache
    assert built.cross_attention_cache.layers[0].values is leaves[0]
    assert cross.values is leaves[3]


def test_torch_is_all_that_is_imported():
    code = (
        "import sys, torch\n"
        "from flex_model import _C\n"
        "assert _C.num_leaves([torch.ones(1), {}]) == 1  # finds flex_model.pytree by itself\n"
        "from collections import UserDict\n"
        "assert _C.num_leaves(UserDict(a=torch.ones(1))) == 1\n"
        "assert 'flex_model.pytree' in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    scripts.run_code(code)
