"""The index: a hash map over blocks with parent links.

A node is one block of one prefix. It may carry a history group (the block's bytes) and a
checkpoint group (state at the block's end); each is stored and dropped as a whole. History groups
form a tree without holes: a child's is present only where its parent's is, so eviction goes leaf
first and never leaves a dead middle. A checkpoint without the history under it is of no use and
goes with it.
"""

import dataclasses
from collections.abc import Iterator

from hetero_kv.prefix.host import Ticket
from hetero_kv.prefix.keys import Keys
from hetero_kv.prefix.payload import label

HISTORY, CHECKPOINT = "history", "checkpoint"
KINDS = (HISTORY, CHECKPOINT)


@dataclasses.dataclass(eq=False, slots=True)
class Group:
    """One stored group. Compared by identity: a group published anew is another group."""

    kind: str
    node: "Node"
    ticket: Ticket
    nbytes: int
    pins: int = 0

    @property
    def label(self) -> bytes:
        """What its payload must be."""
        return label(self.kind, self.node.key, self.node.depth)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One block of one prefix; the root is the empty prefix of a tenant and adapter.

    content: what was hashed into the key after the parent's key, compared on every match.
    depth: blocks from the root, so the node ends at `depth * B` tokens.
    """

    key: bytes
    content: bytes
    parent: "Node | None"
    depth: int
    children: set["Node"] = dataclasses.field(default_factory=set)
    history: Group | None = None
    checkpoint: Group | None = None

    def group(self, kind: str) -> Group | None:
        """The group of a kind."""
        return self.history if kind == HISTORY else self.checkpoint

    def set_group(self, kind: str, group: Group | None) -> None:
        """Attaches or detaches a group."""
        if kind == HISTORY:
            self.history = group
        else:
            self.checkpoint = group

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs on this node."""
        return not self.children


class Index:
    """Nodes by key. Holds no bytes and takes no decisions."""

    def __init__(self):
        self._nodes: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def match(self, keys: Keys) -> list[Node]:
        """The nodes of the longest known prefix, the root not included."""
        nodes = []
        parent = self._lookup(keys.root, keys.root_content, None)
        if parent is None:
            return nodes
        for key, content in zip(keys.keys, keys.contents, strict=True):
            node = self._lookup(key, content, parent)
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def root(self, keys: Keys) -> Node | None:
        """The empty prefix, made if need be; None as for `extend`."""
        return self._make(keys.root, keys.root_content, None)

    def extend(self, parent: Node, key: bytes, content: bytes) -> Node | None:
        """The parent's child of that key, made if need be.

        None: another prefix holds the key (a collision), so this one cannot be stored.
        """
        return self._make(key, content, parent)

    def prune(self, node: Node) -> None:
        """Removes the node, and ancestors, as long as they carry nothing."""
        current: Node | None = node
        while current is not None and current.is_leaf:
            if current.history is not None or current.checkpoint is not None:
                return
            if self._nodes.get(current.key) is current:
                del self._nodes[current.key]
            if current.parent is not None:
                current.parent.children.discard(current)
            current = current.parent

    def subtree(self, node: Node) -> list[Node]:
        """The node and everything under it, children before parents."""
        found, stack = [], [node]
        while stack:
            current = stack.pop()
            found.append(current)
            stack.extend(current.children)
        return found[::-1]

    def problems(self) -> list[str]:
        """What breaks the index's own rules; empty if healthy."""
        found = []
        for node in self:
            name = node.key.hex()[:12]
            if node.parent is not None:
                if self._nodes.get(node.parent.key) is not node.parent:
                    found.append(f"node {name}: its parent is not in the index")
                if node not in node.parent.children:
                    found.append(f"node {name}: its parent does not know it")
                if node.depth != node.parent.depth + 1:
                    found.append(f"node {name}: wrong depth {node.depth}")
                if node.history and node.parent.depth and not node.parent.history:
                    found.append(f"node {name}: history without the parent's history")
            if node.checkpoint and not node.history:
                found.append(f"node {name}: a checkpoint without history under it")
            if node.is_leaf and node.history is None and node.checkpoint is None:
                found.append(f"node {name}: a leaf that carries nothing")
        return found

    def _lookup(self, key: bytes, content: bytes, parent: Node | None) -> Node | None:
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or node.content != content:
            return None
        return node

    def _make(self, key: bytes, content: bytes, parent: Node | None) -> Node | None:
        node = self._nodes.get(key)
        if node is not None:
            return node if node.parent is parent and node.content == content else None
        node = Node(key, content, parent, 0 if parent is None else parent.depth + 1)
        self._nodes[key] = node
        if parent is not None:
            parent.children.add(node)
        return node
