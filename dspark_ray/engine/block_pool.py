"""Blocks of KV: who owns them, which hold a reusable prefix, which can be taken.

A block holds `block_size` tokens of target KV *and* drafter context, so one table serves both and a
prefix hit brings the drafter's context along. A full block of committed tokens is found again by the
hash of everything up to its end; it stays findable after its last owner leaves, until it is evicted
(least recently used first). The drafter's half belongs to one drafter, by digest: to another one a hit
brings the target's half only.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

PrefixKey = tuple[int, tuple[int, ...]]  # (identity of the preceding prefix, this block's token ids)


class BlockPool:
    """Reference-counted blocks with a prefix cache. Not thread-safe: the step loop owns it."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self._key_of_block: dict[int, PrefixKey] = {}
        self._block_of_key: dict[PrefixKey, tuple[int, int]] = {}  # key → (block, identity of its prefix)
        self._contexts: tuple[str, ...] = ()  # digests of the drafters whose context is stored now
        self._contexts_of_block: dict[
            int, frozenset[str]
        ] = {}  # whose context a registered block holds whole
        self._roots: dict[str, int] = {}
        self._next_identity = 1  # 0 is the empty prefix of the model; identities are never used twice

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached but unowned ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one owner, or None (and nothing taken) when there are too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """One owner lets go. Later blocks of a prefix become evictable before earlier ones."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._key_of_block:
                    self._free.move_to_end(block, last=False)  # holds nothing worth keeping

    def root(self, digest: str) -> int:
        """Identity of the empty prefix under an adapter: nothing cached is shared with another one, or with
        the model itself, whose is 0.
        """
        if digest not in self._roots:
            self._roots[digest] = self._next_identity
            self._next_identity += 1
        return self._roots[digest]

    def match_prefix(self, token_ids: Sequence[int], root: int = 0) -> list[int]:
        """Blocks that already hold the longest cached prefix, now owned by the caller too.

        At least one token is left out: its logits must be computed. root: identity of the empty prefix.
        """
        blocks: list[int] = []
        if not self.prefix_cache:
            return blocks
        identity = root
        for chunk in self._full_chunks(token_ids[:-1], 0):
            entry = self._block_of_key.get((identity, chunk))
            if entry is None:
                break
            block, identity = entry
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def register(
        self,
        blocks: Sequence[int],
        token_ids: Sequence[int],
        num_registered: int,
        identity: int,
        context_from: Mapping[str, int] | None = None,
    ) -> tuple[int, int]:
        """Makes the full blocks of committed `token_ids` findable, from block `num_registered` on.

        `identity` is that of the prefix before it; returns the new (num_registered, identity). A block
        whose content another block already holds shares its identity, and takes its place only if it has
        the context of more drafters. `context_from`: by drafter, the first position whose context it has
        stored there.
        """
        if not self.prefix_cache:
            return num_registered, identity
        for chunk in self._full_chunks(token_ids, num_registered):
            key, start = (identity, chunk), num_registered * self.block_size
            contexts = frozenset(d for d, first in (context_from or {}).items() if first <= start)
            known = self._block_of_key.get(key)
            if known is None:
                self._keep(blocks[num_registered], key, self._next_identity, contexts)
                self._next_identity += 1
            elif contexts > self._contexts_of_block[known[0]]:  # the same for the target, more for drafters
                self._key_of_block.pop(known[0])
                self._contexts_of_block.pop(known[0])
                self._keep(blocks[num_registered], key, known[1], contexts)
            identity = self._block_of_key[key][1]
            num_registered += 1
        return num_registered, identity

    def context_from(self, blocks: Sequence[int]) -> dict[str, int]:
        """By drafter that stores context now, where its context of these matched blocks begins."""
        found = {}
        for digest in self._contexts:
            missing = [
                i for i, block in enumerate(blocks) if digest not in self._contexts_of_block.get(block, ())
            ]
            found[digest] = (missing[-1] + 1) * self.block_size if missing else 0
        return found

    def keep_contexts(self, digests: Sequence[str]) -> None:
        """These drafters store context from now on. What others have stored is gone: the target's half of
        their blocks still hits."""
        self._contexts = tuple(digests)
        kept = frozenset(digests)
        for block, contexts in self._contexts_of_block.items():
            self._contexts_of_block[block] = contexts & kept

    def identity_of(self, blocks: Sequence[int], root: int = 0) -> int:
        """Identity of the prefix that ends with these matched blocks; `root` for none."""
        return self._block_of_key[self._key_of_block[blocks[-1]]][1] if blocks else root

    def _full_chunks(self, token_ids: Sequence[int], first_block: int) -> Iterator[tuple[int, ...]]:
        size = self.block_size
        for start in range(first_block * size, len(token_ids) - size + 1, size):
            yield tuple(token_ids[start : start + size])

    def _keep(self, block: int, key: PrefixKey, identity: int, contexts: frozenset[str]) -> None:
        self._block_of_key[key] = (block, identity)
        self._key_of_block[block] = key
        self._contexts_of_block[block] = contexts

    def _forget(self, block: int) -> None:
        key = self._key_of_block.pop(block, None)
        if key is not None:
            del self._block_of_key[key]
            self._contexts_of_block.pop(block, None)
