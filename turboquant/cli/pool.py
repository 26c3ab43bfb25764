"""How vLLM divides cache memory into blocks: its rules of 0.26.0 to 0.33.0 as arithmetic on bytes.

Layers that keep the same tokens form a group with one block table.  Where a model has several kinds of layers, vLLM
makes their pages equally large and cuts every kind into groups of about as many layers; all groups draw from one pool.
The tests compare this with vLLM's own functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turboquant.cli.model import Kind

NATIVE_BLOCK = 16  # tokens of a block of vLLM's own cache on CUDA, where nobody asked for a size
BLOCK_MULTIPLE = 16  # what pages of any kind need
CONCURRENT_BATCHES = 2  # steps that hold blocks at once, with asynchronous scheduling
STATE_BLOCKS = 3  # recurrent states of a request, with prefix caching: up to 3 (2 in some layers and before 0.32)
MUCH_LARGER = 1.5  # how many times more layers a kind must have to be cut into several groups


@dataclass(frozen=True)
class Page:
    """A block of one layer: `size` bytes for `block_size` tokens of `token_bytes` (a recurrent state: 0 tokens)."""

    kind: Kind
    size: int
    block_size: int = 0
    token_bytes: int = 0
    window: int = 0

    def blocks_of_request(self, length: int, in_flight: int) -> int:
        """Blocks that a request of `length` tokens holds at most; in_flight: tokens of the running steps."""
        if self.kind is Kind.RECURRENT:
            return STATE_BLOCKS
        if self.kind is Kind.FULL:
            return ceil_div(length, self.block_size)
        if self.kind is Kind.CHUNKED:
            return ceil_div(min(self.window + in_flight, length), self.block_size)
        return ceil_div(min(self.window - 1 + in_flight, length), self.block_size) + 1  # it starts inside a block


@dataclass(frozen=True)
class Pool:
    """block_bytes: of a block in all layers that share it; groups: a page of each group."""

    block_bytes: int
    groups: tuple[Page, ...]

    def groups_of(self, token_bytes: set[int]) -> int:
        """Groups of layers with so many bytes a token; layers of different sizes share a group only where it is one."""
        return len(self.groups) if len(self.groups) == 1 else sum(p.token_bytes in token_bytes for p in self.groups)

    def blocks(self, memory: int) -> int:
        """vLLM's num_gpu_blocks for so many bytes."""
        return memory // self.block_bytes

    def blocks_of_request(self, length: int, in_flight: int) -> int:
        return sum(page.blocks_of_request(length, in_flight) for page in self.groups)


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def attention_page(kind: Kind, token_bytes: int, block_size: int, window: int = 0) -> Page:
    return Page(kind, token_bytes * block_size, block_size, token_bytes, window)


def hybrid_block(block_size: int, token_bytes: int, state_bytes: int) -> int:
    """Tokens of a block beside recurrent layers: so many that a page of attention holds a state."""
    return block_size * max(1, ceil_div(state_bytes, block_size * token_bytes))


def make_pool(pages: Sequence[Page]) -> Pool:
    """The pool of layers with these pages."""
    if len({(page.kind, page.block_size, page.window) for page in pages}) == 1:  # sizes may differ
        return Pool(sum(page.size for page in pages), (pages[0],))
    largest = max(page.size for page in pages)
    buckets: dict[Page, int] = {}
    for page in pages:
        unified = unify(page, largest)
        buckets[unified] = buckets.get(unified, 0) + 1
    layers = layers_of_group(list(buckets.values()))
    groups = [page for page, count in buckets.items() for _ in range(ceil_div(count, layers))]
    return Pool(layers * largest, tuple(groups))


def unify(page: Page, size: int) -> Page:
    """The page with another size: more tokens where that comes out even, padding otherwise."""
    if page.kind is Kind.RECURRENT or size % page.size:
        return replace(page, size=size)
    return replace(page, size=size, block_size=page.block_size * (size // page.size))


def layers_of_group(counts: list[int]) -> int:
    fewest, most = min(counts), max(counts)
    return most if most < fewest * MUCH_LARGER else fewest
