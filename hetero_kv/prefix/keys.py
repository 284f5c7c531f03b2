"""Block keys: a chained sha256 per block over tokens, seeded by identity, tenant and adapter.

Digests keep all 256 bits, and what was hashed is kept beside each node of the index and compared
on every match (`Keys.contents`), so that a collision, even of a digest cut short in a test, is
only a miss.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from hetero_kv.prefix.encoding import encode, frames
from hetero_kv.prefix.identity import Identity

Digest = Callable[[bytes], bytes]
MAX_TOKEN = 2**31 - 1
_WORD = np.dtype("<u4")
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


def sha256(message: bytes) -> bytes:
    """The digest of keys: 32 bytes."""
    return hashlib.sha256(message).digest()


class Keys(NamedTuple):
    """Keys of the complete blocks of one prompt, or why it is not cacheable.

    root, root_content: key of the empty prefix, and what was hashed.
    keys, contents: per block its key, and what was hashed after the parent's key.
    length: tokens of the prompt (0 if they are malformed).
    refusal: "" or the reason why nothing may be looked up or published.
    """

    root: bytes = b""
    root_content: bytes = b""
    keys: tuple[bytes, ...] = ()
    contents: tuple[bytes, ...] = ()
    length: int = 0
    refusal: str = ""


class _NotCacheable(ValueError):
    pass


def block_keys(
    identity: Identity,
    tokens: np.ndarray,
    tenant: str = "",
    extra: Mapping[str, object] | None = None,
    digest: Digest = sha256,
) -> Keys:
    """Keys of every complete block of `tokens` (i32[n]).

    `extra` may hold:
        "adapter": sha256 (64 hex digits) of the adapter's weights, or "" for none.
        "media": a sequence of (start, length, sha256): tokens `start .. start + length - 1` stand
            for the item with that digest. It enters the blocks that overlap the span, so a shared
            text prefix before it still matches.
    Anything unknown or malformed in it, a token out of range, or a placeholder token that no
    media item covers makes the prompt not cacheable. Nothing is raised: a request must not fail
    because it cannot be cached.
    """
    length = 0
    try:
        tokens = _tokens(tokens)
        length = len(tokens)
        adapter, media = _extra(extra, length)
        _check_placeholders(tokens, media, identity.placeholders)
        if not isinstance(tenant, str):
            raise _NotCacheable(f"tenant must be a string, got {type(tenant).__name__}")
        root_content = _root_content(identity.digest, tenant, adapter)
    except (_NotCacheable, UnicodeEncodeError) as error:
        return Keys(length=length, refusal=str(error))
    size = identity.block
    blocks = length // size
    raw = tokens[: blocks * size].astype(_WORD, copy=False).tobytes()
    contents = [raw[i : i + 4 * size] for i in range(0, len(raw), 4 * size)]
    for start, length, sha in media:
        # A block's tokens have a fixed size and items are framed: the content stays injective.
        for i in range(start // size, min(blocks, -(-(start + length) // size))):
            contents[i] += encode((start, length, sha))
    root = digest(root_content)
    keys = _chain(root, contents) if digest is sha256 else _chain_by(digest, root, contents)
    return Keys(root, root_content, tuple(keys), tuple(contents), length)


def of_epoch(keys: Keys, epoch: bytes, digest: Digest = sha256) -> Keys:
    """The keys that the same prompt has in another epoch."""
    root = read_root(keys.root_content)
    content = _root_content(epoch, root.tenant, root.adapter)
    key = digest(content)
    chain = _chain_by(digest, key, list(keys.contents))
    return keys._replace(root=key, root_content=content, keys=tuple(chain))


def _chain(key: bytes, contents: list[bytes]) -> list[bytes]:
    """`_chain_by(sha256, …)`, which is most of what a lookup costs."""
    hashed, keys = hashlib.sha256, []
    for content in contents:
        key = hashed(key + content).digest()
        keys.append(key)
    return keys


def _chain_by(digest: Digest, key: bytes, contents: list[bytes]) -> list[bytes]:
    keys = []
    for content in contents:
        key = digest(key + content)
        keys.append(key)
    return keys


class Root(NamedTuple):
    """Whose the empty prefix is. epoch: digest of the identity; b"" if it is not known."""

    epoch: bytes = b""
    tenant: str = ""
    adapter: str = ""


_ROOT = "hetero_kv root"


@functools.lru_cache(maxsize=1024)
def _root_content(identity: bytes, tenant: str, adapter: str) -> bytes:
    return encode((_ROOT, identity, tenant, adapter))


@functools.lru_cache(maxsize=1024)
def read_root(content: bytes) -> Root:
    """What `Keys.root_content` says; of other content, as traces have it, nothing is known."""
    found = frames(content)
    if found is None or [tag for tag, _ in found] != [b"s", b"b", b"s", b"s"]:
        return Root()
    name, identity, tenant, adapter = (body for _, body in found)
    if name != _ROOT.encode():
        return Root()
    try:
        return Root(identity, tenant.decode(), adapter.decode())
    except UnicodeDecodeError:
        return Root()


def _tokens(tokens: np.ndarray) -> np.ndarray:
    try:
        tokens = np.asarray(tokens)
    except ValueError as error:
        raise _NotCacheable(f"tokens are not an array: {error}") from error
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
        raise _NotCacheable(f"tokens must be integers [n], got {tokens.dtype}{tokens.shape}")
    # A negative token is a large unsigned one.
    if tokens.size and tokens.view(_unsigned(tokens.dtype)).max() > MAX_TOKEN:
        raise _NotCacheable(f"a token is outside 0 .. {MAX_TOKEN}")
    return tokens


@functools.lru_cache(maxsize=16)
def _unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(dtype.str.replace("i", "u"))


def _extra(extra: Mapping[str, object] | None, length: int) -> tuple[str, list[tuple]]:
    if extra is None:
        return "", []
    if not isinstance(extra, Mapping):
        raise _NotCacheable(f"extra must be a mapping, got {type(extra).__name__}")
    unknown = sorted(str(x) for x in extra if x not in ("adapter", "media"))
    if unknown:
        raise _NotCacheable(f"extra has unknown fields {unknown}")
    adapter = extra.get("adapter", "")
    if not (isinstance(adapter, str) and not adapter):
        _sha("adapter", adapter)
    media = extra.get("media", ())
    if not isinstance(media, list | tuple):
        raise _NotCacheable("extra['media'] must be a sequence of (start, length, sha256)")
    items = []
    for item in media:
        if not isinstance(item, list | tuple) or len(item) != 3:
            raise _NotCacheable(f"a media item is (start, length, sha256), got {item!r}")
        start, size, sha = item
        _sha("media", sha)
        if not all(isinstance(x, int) and not isinstance(x, bool) for x in (start, size)):
            raise _NotCacheable(f"a media span must be integers, got {(start, size)!r}")
        if start < 0 or size < 1 or start + size > length:
            raise _NotCacheable(f"media span {(start, size)} is outside the {length} tokens")
        items.append((start, size, sha))
    return adapter, sorted(items)


def _sha(name: str, value: object) -> None:
    # A short digest is a short identity: two inputs that agree in it would share state.
    if not isinstance(value, str) or not _SHA256_HEX.fullmatch(value):
        raise _NotCacheable(f"the {name} digest must be 64 lower-case hex digits of a sha256")


def _check_placeholders(tokens: np.ndarray, media: list[tuple], placeholders: tuple) -> None:
    if not placeholders:
        return
    bare = np.isin(tokens, np.asarray(placeholders))
    for start, length, _ in media:
        bare[start : start + length] = False
    if bare.any():
        at = int(np.argmax(bare))
        raise _NotCacheable(f"the placeholder token at {at} has no media digest")
