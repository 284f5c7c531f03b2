"""The index: a hash map over blocks with parent links.

A node is one block of one prefix. It may carry a history group (the block's bytes) and a
checkpoint group (state at the block's end); each is stored and dropped as a whole. History groups
form a tree without holes: a child's is present only where its parent's is, so eviction goes leaf
first and never leaves a dead middle. A checkpoint without the history under it is of no use and
goes with it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from hetero_kv.prefix.host import Ticket
from hetero_kv.prefix.keys import Keys, read_root
from hetero_kv.prefix.payload import label
from hetero_kv.prefix.quotas import Account, Accounts

HISTORY, CHECKPOINT = "history", "checkpoint"
KINDS = (HISTORY, CHECKPOINT)


@dataclasses.dataclass(eq=False, slots=True)
class Group:
    """One stored group. Compared by identity: a group published anew is another group.

    It is in host memory (slot >= 0), on disk, or in both.

    born, used: when it was stored and last used, by the catalog's clock.
    """

    kind: str
    node: "Node"
    slot: int
    generation: int
    nbytes: int
    pins: int = 0
    queued: bool = False  # whether the host's order of eviction knows it
    disk: Ticket | None = None
    born: float = 0.0
    used: float = 0.0

    @property
    def on_host(self) -> bool:
        """Whether it was put in host memory and not taken from there alone."""
        return self.slot >= 0

    @property
    def ticket(self) -> Ticket | None:
        """Where its payload is in host memory."""
        return Ticket(self.slot, self.generation) if self.slot >= 0 else None

    @property
    def label(self) -> bytes:
        """What its payload must be."""
        return label(self.kind, self.node.key, self.node.depth)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One block of one prefix; the root is the empty prefix of a tenant and adapter.

    content: what was hashed into the key after the parent's key, compared on every match.
    depth: blocks from the root, so the node ends at `depth * B` tokens.
    child, older, newer: the newest child, and the siblings before and after (a set for every node
    would take more memory than the rest of it).
    account: whose it is, where tenants have quotas.
    """

    key: bytes
    content: bytes
    parent: "Node | None"
    depth: int
    account: Account | None = None
    child: "Node | None" = None
    older: "Node | None" = None
    newer: "Node | None" = None
    history: Group | None = None
    checkpoint: Group | None = None

    def group(self, kind: str) -> Group | None:
        """The group of a kind."""
        return self.history if kind == HISTORY else self.checkpoint

    @property
    def is_leaf(self) -> bool:
        """Whether nothing hangs on this node."""
        return self.child is None

    def children(self) -> "Iterator[Node]":
        """Newest first."""
        node = self.child
        while node is not None:
            yield node
            node = node.older


class Index:
    """Nodes by key. Holds no bytes and takes no decisions.

    accounts: of tenants, where these have quotas.
    """

    def __init__(self, accounts: Accounts | None = None):
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[Node, None] = {}
        self._accounts = accounts
        # The last match: a publish asks for what the lookup before it has found.
        self._last: tuple[Keys, list[Node]] | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def roots(self) -> list[Node]:
        """The empty prefixes."""
        return list(self._roots)

    def match(self, keys: Keys) -> list[Node]:
        """The nodes of the longest known prefix, the root not included. Not to be changed."""
        last = self._last
        if last is not None and last[0] is keys:
            return last[1]
        found = self._match(keys)
        self._last = keys, found
        return found

    def _match(self, keys: Keys) -> list[Node]:
        get, found = self._nodes.get, []
        parent = get(keys.root)
        if parent is None or parent.parent is not None or parent.content != keys.root_content:
            return found
        for key, content in zip(keys.keys, keys.contents, strict=True):
            node = get(key)
            if node is None or node.parent is not parent or node.content != content:
                break
            found.append(node)
            parent = node
        return found

    def root(self, keys: Keys) -> Node | None:
        """The empty prefix, made if need be; None as for `extend`."""
        return self.extend(None, keys.root, keys.root_content)

    def extend(self, parent: Node | None, key: bytes, content: bytes) -> Node | None:
        """The parent's child of that key, made if need be.

        None: another prefix holds the key (a collision), so this one cannot be stored.
        """
        if parent is not None:
            found = self.extend_run(parent, (key,), (content,))
            return found[0] if found else None
        node = self._nodes.get(key)
        if node is not None:
            return node if node.parent is None and node.content == content else None
        self._last = None
        node = self._nodes[key] = Node(key, content, None, 0)
        if self._accounts is not None:
            node.account = self._accounts.of(read_root(content).tenant)
        self._roots[node] = None
        return node

    def extend_run(
        self, parent: Node, keys: Sequence[bytes], contents: Sequence[bytes]
    ) -> list[Node]:
        """`extend`, one block after the other; fewer nodes if one of them collides."""
        nodes, found, depth, account = self._nodes, [], parent.depth, parent.account
        self._last = None
        for key, content in zip(keys, contents, strict=True):
            node, depth = nodes.get(key), depth + 1
            if node is None:
                node = nodes[key] = Node(key, content, parent, depth, account)
                sibling = parent.child
                if sibling is not None:
                    node.older, sibling.newer = sibling, node
                parent.child = node
            elif node.parent is not parent or node.content != content:
                break
            found.append(node)
            parent = node
        return found

    def prune(self, node: Node) -> None:
        """Removes the node, and ancestors, as long as they carry nothing."""
        current: Node | None = node
        while current is not None and current.child is None:
            if current.history is not None or current.checkpoint is not None:
                return
            parent = current.parent
            if self._nodes.get(current.key) is current:
                self._last = None
                del self._nodes[current.key]
                self._roots.pop(current, None)
                _unlink(current)
            current = parent

    def subtree(self, node: Node) -> list[Node]:
        """The node and everything under it, children before parents."""
        found, stack = [], [node]
        while stack:
            current = stack.pop()
            found.append(current)
            stack.extend(current.children())
        return found[::-1]

    def problems(self) -> list[str]:
        """What breaks the index's own rules; empty if healthy."""
        found = []
        if self._roots.keys() != {x for x in self if x.parent is None}:
            found.append("the list of roots is not that of the nodes without a parent")
        for node in self:
            name = node.key.hex()[:12]
            if node.parent is not None:
                if self._nodes.get(node.parent.key) is not node.parent:
                    found.append(f"node {name}: its parent is not in the index")
                known = node.parent.child if node.newer is None else node.newer.older
                if known is not node:
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


def _unlink(node: Node) -> None:
    parent, older, newer = node.parent, node.older, node.newer
    if older is not None:
        older.newer = newer
    if newer is not None:
        newer.older = older
    elif parent is not None:
        parent.child = older
    node.older = node.newer = None
