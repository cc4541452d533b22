import pytest
import torch

from flex_model import pytree, traverse
from flex_model.traverse import InternalNode, LeafNode, flatten, nodes, ops, unflatten
from flex_model.traverse.nodes import register_internal_node_type, register_leaf_node_type


class Box:
    def __init__(self, *items, name="box"):
        self.items, self.name = items, name


class Array:
    def __init__(self, values):
        self.values = values


@pytest.fixture
def box_node():
    @register_internal_node_type(Box)
    class BoxNode(InternalNode):
        def flatten(self, instance):
            self.name = instance.name
            return instance.items

        def unflatten(self, children):
            return Box(*children, name=self.name)

    yield BoxNode
    pytree.unregister(Box)


def test_names():
    for name in ("InternalObject", "LeafObject", "ScalarObject", "ScalarNode"):
        assert getattr(traverse, name) is getattr(nodes, name)
    assert ops.flatten is traverse.flatten
    assert ops.unflatten is traverse.unflatten


def test_flatten_and_unflatten():
    tree = [1, torch.ones(1), "zzz", (torch.ones(1) * 2, torch.ones(1) * 3)]
    treedef, leaves = flatten(tree)
    assert [leaf.item() for leaf in leaves] == [1, 2, 3]
    edited = [leaf * 2 for leaf in leaves]
    again, leaves = flatten(unflatten(treedef, edited))
    assert again == treedef
    assert leaves == edited
    assert treedef != flatten([1, torch.ones(1)])[0]


def test_internal_nodes(box_node):
    a, b = torch.ones(1), torch.zeros(1)
    treedef, leaves = flatten([Box(a, (b, 3), name="mine"), None])
    assert leaves[0] is a
    assert leaves[1] is b
    built = unflatten(treedef, [b, a])[0]
    assert built.items[0] is b
    assert built.items[1] == (a, 3)
    assert built.name == "mine"
    assert treedef == flatten([Box(a, (b, 3), name="mine"), None])[0]
    assert pytree.replace_leaf(Box(a), 0, b).items[0] is b
    assert box_node.__name__ == "BoxNode"
    assert repr(box_node()) == "BoxNode([])"


def test_registering_again_replaces(box_node):
    @register_internal_node_type(Box)
    class Closed(InternalNode):
        def flatten(self, instance):
            return ()

        def unflatten(self, children):
            return Box()

    assert flatten(Box(torch.ones(1)))[1] == []


def test_registering_after_unregister(box_node):
    pytree.unregister(Box)
    register_internal_node_type(Box)(box_node)
    assert len(flatten(Box(torch.ones(1)))[1]) == 1


def test_leaf_nodes():
    @register_leaf_node_type(Array)
    class ArrayNode(LeafNode):
        pass

    array = Array([1])
    assert flatten((array, torch.ones(1)))[1][0] is array
    assert pytree.leaf_at([array], 0) is array
    pytree.unregister(Array)
    assert flatten((array,))[1] == []
    assert register_leaf_node_type(torch.Tensor)(ArrayNode) is ArrayNode  # already a leaf


def test_nodes_compare(box_node):
    assert box_node() == box_node()
    assert box_node([1]) != box_node()
    assert box_node() != InternalNode()
    assert LeafNode(1) == LeafNode(1)
    assert LeafNode(1) != LeafNode(2)
    assert box_node() != 1
    assert LeafNode() != 1
    assert repr(LeafNode((2, 3))) == "LeafNode<(2, 3)>"


def test_wrong_nodes():
    with pytest.raises(ValueError, match=r"^register: tuple is built in and cannot be registered"):
        register_internal_node_type(tuple)(InternalNode)
    with pytest.raises(
        ValueError, match=r"^register_leaf_node_type: list is built in and cannot be"
    ):
        register_leaf_node_type(list)(LeafNode)
    with pytest.raises(TypeError, match=r"^register: expected a class, got 3"):
        register_internal_node_type(3)(InternalNode)
    with pytest.raises(NotImplementedError, match=r"^InternalNode must define flatten\(self, inst"):
        InternalNode().flatten(())
    with pytest.raises(NotImplementedError, match=r"^InternalNode must define unflatten\(self, ch"):
        InternalNode().unflatten(())
