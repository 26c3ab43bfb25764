"""The fast decode of one layer: prepare the queries, one attention launch, merge.

Serves decode and verify steps (1 + k query rows) and short chunks on NVIDIA GPUs from compute capability 8.0, for
Lloyd-Max values, Lloyd-Max or fp8 keys, and power-of-two head sizes; everything else takes the other kernels.  The
launches depend on the shapes of a batch alone, never on its lengths, so that a captured graph stays right.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from turboquant.capture import ExactRing, LayerCache
from turboquant.codec import KVCodec
from turboquant.kernels import gluon_decode, gluon_rows, tiles
from turboquant.kernels.decoders import BF16_128, table_words
from turboquant.kernels.launch import Launch, Operand, Operands, kind_of
from turboquant.kernels.matrix import SplitMatrix
from turboquant.quantizer import FP8Quantizer, TurboQuantMSE
from turboquant.score import WORKSPACE_TOKENS, Own, QueryGroup

LOG2E = 1 / math.log(2)
ROW_CHOICES = (4, 8, 16)
MAX_VERIFY = 16  # query rows of a request that are served whatever its length, so that a graph may hold them
MAX_CHUNK = 512  # query rows of a request that can be faster here than by decoding its history first
# (KV head, tile of query rows, token) triples of a request from which decoding its history first is faster, up to head
# size 128: what one of its pieces costs in launches, measured on an H200.
MAX_WORK = 5_000_000
PARTIAL_BYTES = 128 << 20  # of the segments of the requests that are served at once
MAX_SPLITS = 176  # 11 rounds of the 16 groups of the merge, all in flight at once
EXACT_TOKENS = 16  # tokens of a tile of the exact segment
FEW = 4  # segments of a group from which the merge loads as many as registers hold: few variants, and few idle loads
LONG_PIECE, SHORT_PIECE = 8, 2  # tiles of an exact piece: few requests need short pieces for latency
REGISTERS_PER_SM = 65536
PREPARED = ("rows", "factors", "offsets", "waves")  # what `gluon_rows.prepare_kernel` makes
KEPT_BYTES = 8 << 20  # of memory that layers use one after the other, and that is kept for a whole step
Shape = tuple[int, int, int, int, int]  # requests, KV heads, row tiles, segments, rows of a tile
Segments = tuple[int, int, int]  # splits of the history, exact pieces, tiles of a piece


def unsupported(layer: LayerCache) -> str | None:
    """Why the fast decode cannot serve a layer on a device that `gluon_objection` accepts, or None."""
    codec, device = layer.codec, layer.store.pages.device
    dim, size = codec.key.dim, layer.store.block_size
    if not isinstance(codec.value, TurboQuantMSE) or not isinstance(codec.key, TurboQuantMSE | FP8Quantizer):
        return "it serves Lloyd-Max values, and Lloyd-Max or fp8 keys"
    if isinstance(codec.key, FP8Quantizer) and torch.cuda.get_device_capability(device) < (8, 9):
        return "fp8 keys need compute capability 8.9"
    if dim not in (64, 128, 256) or size % 16:
        return f"it serves head sizes 64, 128 and 256 and pages of a multiple of 16 tokens, not {dim} and {size}"
    if any(bits not in (2, 3, 4, 8) or tiles.code_rows(bits, dim) < 16 for bits in (codec.key.bits, codec.value.bits)):
        return f"it serves 2 to 4 bits, 3 bits from head size 128, not {codec.key.bits} and {codec.value.bits} at {dim}"
    if layer.recent.keys.dtype not in (torch.bfloat16, torch.float16):
        return f"it serves bfloat16 and float16 models, not {layer.recent.keys.dtype}"
    return None


def query_tile(rows: int, dim: int) -> int:
    """Query rows of a tile: what the registers hold."""
    most = 8 if dim == 256 else 16
    return next(choice for choice in ROW_CHOICES if choice >= min(rows, most))


def row_tiling(rows: int, dim: int) -> tuple[int, int]:
    """Rows of a tile, and tiles, for the query rows of a request and KV head."""
    tile = query_tile(rows, dim)
    return tile, -(-rows // tile)


def max_registers(tile: int, dim: int, key_bits: int) -> int:
    """Registers a thread: the least that needs no memory for variables, in steps that give another program a place."""
    if dim == 256 or tile == 16:
        return 255
    return 128 if tile == 4 and key_bits != 8 else 168


def is_plain(rows: torch.Tensor) -> bool:
    """Whether rows [T, H, d] have their heads side by side and start on multiples of 16 bytes, as copies need."""
    heads_together = rows.stride(-1) == 1 and rows.stride(-2) == rows.shape[-1]
    return heads_together and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


def program_rows(dim: int, many: bool) -> tuple[int, int, int]:
    """Rows, warps, and registers a thread, of a program that multiplies rows with a [dim, dim] matrix.

    Few programs wait for one instruction after the other, so that more warps finish sooner; where they are many, one
    load of the matrix should serve more rows.  Head size 256 leaves registers for neither.
    """
    least = gluon_rows.ROWS.value
    if dim == 256:
        return least, 8, 255
    return (2 * least, 4, 255) if many else (least, dim // 8, 128)


def rows_in_flight(dim: int, rows: int, warps: int) -> int:
    """Segments that a thread of the merge loads at once: what 48 registers hold."""
    return 48 * 32 * warps // (rows * dim)


def lookup_table(levels: tuple[int, ...]) -> list[int]:
    """Five words, each twice: up to four of the lookup table, and the upper bytes of bfloat16 values."""
    words = [*table_words(levels), 0, 0, 0, 0][:4]
    return [word for word in (*words, BF16_128) for _ in range(2)]


@dataclass(frozen=True, eq=False)
class DecodeTables:
    """Constants of a layer on its device.

    query_matrix [H_kv, d, d]: `KVCodec.query_matrix`, transposed, rows in key order; output_matrix [d, d]: from value
    order back to the original basis, transposed; lookup int32 [20]; axes, weights: `turning_terms`.
    """

    query_matrix: SplitMatrix
    output_matrix: SplitMatrix
    lookup: torch.Tensor
    axes: torch.Tensor
    weights: torch.Tensor
    key_step: float
    value_step: float

    @classmethod
    def of(cls, layer: LayerCache) -> "DecodeTables":
        codec, dim = layer.codec, layer.codec.key.dim
        assert isinstance(codec.value, TurboQuantMSE)
        device = layer.store.pages.device
        key_order = tiles.key_order(codec.key.bits, dim).to(device)
        value_order = tiles.value_order(codec.value.bits, dim).to(device)
        grid = codec.key.grid if isinstance(codec.key, TurboQuantMSE) else None
        words = lookup_table(grid.levels if grid else ()) + lookup_table(codec.value.grid.levels)
        return cls(
            SplitMatrix.of(codec.query_matrix[:, :, key_order].transpose(1, 2), layer.recent.keys.dtype),
            SplitMatrix.of(codec.value.rotation.matrix[value_order].T, torch.bfloat16),
            torch.tensor(words, dtype=torch.int32, device=device),
            *turning_terms(codec),
            grid.step if grid else 1.0,
            codec.value.grid.step,
        )

    @property
    def nbytes(self) -> int:
        tensors = (self.query_matrix.parts, self.output_matrix.parts, self.lookup, self.axes, self.weights)
        return sum(tensor.nbytes for tensor in tensors)


def turning_terms(codec: KVCodec) -> tuple[torch.Tensor, torch.Tensor]:
    """`KVCodec.waves` as two products: axes int32 [2, d], weights float32 [2, H_kv, d], waves the sum over both of
    query[..., axes] * weights.
    """
    x, y = codec.rotary.pairs
    center_x, center_y = codec.transform.center[:, x], codec.transform.center[:, y]
    weights = torch.stack((center_x, center_y)).repeat(1, 1, 2)
    weights[1, :, len(x) :] *= -1
    return torch.stack((torch.cat((x, y)), torch.cat((y, x)))).int(), weights


class Scratch:
    """Memory that launches of a layer hand on to one another: kept for the other layers of a step where it is small.

    wanted: shape and dtype by the name of the operand.
    """

    def __init__(self, device: torch.device, **wanted: tuple[tuple[int, ...], torch.dtype]):
        self.device, self.wanted = device, wanted
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in wanted.values())
        self.kept = self._new() if size <= KEPT_BYTES else None

    def take(self) -> dict[str, torch.Tensor]:
        return self._new() if self.kept is None else self.kept

    def _new(self) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in self.wanted.items()
        }


@dataclass(frozen=True)
class Part:
    """Requests that are served at once."""

    partial: Scratch
    attend: Launch
    merge: Launch


@dataclass(frozen=True)
class DecodePlan:
    """The launches of a group, for all layers of a kind."""

    prepared: Scratch
    prepare: Launch
    parts: tuple[Part, ...]


class FastDecode:
    """The fast decode of one layer."""

    def __init__(self, layer: LayerCache, ring: ExactRing):
        self.layer, self.tables = layer, DecodeTables.of(layer)
        self.columns, self.sinks = ring.columns, ring.sinks
        self.constants = kernel_constants(layer)
        device = layer.store.pages.device
        self.overlap = torch.cuda.get_device_capability(device) >= (9, 0)  # programmatic dependent launch
        self.nbytes = self.tables.nbytes
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.kind = self._kind()
        self.operands = Operands(self._own_operands())

    def _kind(self) -> int:
        """The same for layers that launch alike, in steps that are alike: everything of a layer that launches depend on
        but for `_own_operands`.
        """
        layer, tables, rotary = self.layer, self.tables, self.layer.codec.rotary
        facts = (
            layer.store.num_kv_heads, layer.recent.keys.stride(0), layer.recent.keys.dtype, layer.store.pages.device,
            isinstance(layer.codec.key, FP8Quantizer), rotary.turns, rotary.cos_sin.shape[0],
            tables.query_matrix.exact, tables.output_matrix.exact, tables.value_step,
        )  # fmt: skip
        return kind_of("decode", self.columns, self.sinks, *self.constants.items(), *facts)

    def _own_operands(self) -> dict[str, Operand]:
        layer, tables = self.layer, self.tables
        return {
            "query_matrix": tables.query_matrix.parts, "query_scale": tables.query_matrix.scale,
            "center": layer.codec.transform.center, "axes": tables.axes, "weights": tables.weights,
            "key_step": tables.key_step, "cos_sin": layer.codec.rotary.cos_sin, "lookup": tables.lookup,
            "recent_keys": layer.recent.keys, "recent_values": layer.recent.values,
            "output_matrix": tables.output_matrix.parts, "output_scale": tables.output_matrix.scale,
        }  # fmt: skip

    def serves(self, group: QueryGroup, query: torch.Tensor, own: Own, softcap: float) -> bool:
        """See `turboquant.score.FusedKernel`."""
        dtype = self.layer.recent.keys.dtype
        return self._is_short(group, query) and all(x.dtype == dtype and is_plain(x) for x in (query, *own))

    def _is_short(self, group: QueryGroup, query: torch.Tensor) -> bool:
        """Whether rows are so few that reading the compressed history for each tile of them is cheapest."""
        if group.length <= MAX_VERIFY or group.length > MAX_CHUNK:
            return group.length <= MAX_VERIFY
        heads, dim = self.layer.store.num_kv_heads, query.shape[2]
        _, row_tiles = row_tiling(query.shape[1] // heads * group.length, dim)
        tokens = min(group.most_cached, WORKSPACE_TOKENS) + group.length
        return heads * row_tiles * tokens * max(dim, 128) <= 128 * MAX_WORK

    def attend(
        self, group: QueryGroup, query: torch.Tensor, own: Own, output: torch.Tensor, scale: float, softcap: float
    ) -> None:
        """Attention of the requests of `group`: query [T, H_q, d] -> output [T, H_q, d].

        own: keys and values [T, H_kv, d] of the step's rows; all in the dtype of the exact ring.
        """
        pages = self.layer.store.pages
        key = (
            self.kind, query.shape, query.stride(0), *[rows.stride(0) for rows in own], output.stride(0), output.dtype,
            pages.stride(0), scale, softcap,
        )  # fmt: skip
        plan = group.launches.get(key)
        if plan is None:
            plan = group.launches[key] = self._plan(group, query, own, output, scale, softcap)
        operands = self.operands.joined(
            query=query, keys=own[0], values=own[1], output=output, pages=pages, **plan.prepared.take()
        )
        plan.prepare(operands)
        for part in plan.parts:
            joined = operands.joined(**part.partial.take())
            part.attend(joined)
            part.merge(joined)

    def _plan(
        self, group: QueryGroup, query: torch.Tensor, own: Own, output: torch.Tensor, scale: float, softcap: float
    ) -> DecodePlan:
        heads, dim = self.layer.store.num_kv_heads, query.shape[2]
        factor = scale / softcap if softcap else scale * LOG2E
        tile, row_tiles = row_tiling(query.shape[1] // heads * group.length, dim)
        parts = []
        for entries in group.entries.split(self._most_requests(tile, row_tiles)):
            segments = self._segments(len(entries) * heads * row_tiles, tile)
            shape = (len(entries), heads, row_tiles, segments[0] + segments[1], tile)
            attend = self._attend(group, entries, query, own, shape, segments, factor, softcap)
            scratch = Scratch(query.device, partial=((*shape, dim), torch.float32), lse=(shape, torch.float32))
            parts.append(Part(scratch, attend, self._merge(entries, shape, segments, output)))
        return DecodePlan(self._prepared(query), self._prepare(query, factor), tuple(parts))

    def variant(self, requests: int, new: int, query_heads: int) -> tuple[object, ...]:
        """See `turboquant.score.FusedKernel`."""
        heads = self.layer.store.num_kv_heads
        tile, row_tiles = row_tiling(query_heads // heads * new, self.layer.codec.key.dim)
        programs = min(requests, self._most_requests(tile, row_tiles)) * heads * row_tiles
        splits, pieces, _ = self._segments(programs, tile)
        merge = self._merge_shape(programs, tile, splits, pieces)
        return tile, self._has_many_rows(requests * new * query_heads), merge

    def _slots(self, tile: int) -> int:
        """Programs that the device runs at once."""
        registers = max_registers(tile, self.layer.codec.key.dim, self.layer.codec.key.bits)
        return self.processors * (REGISTERS_PER_SM // (32 * registers))

    def _most_requests(self, tile: int, row_tiles: int) -> int:
        """Requests that are served at once, with one split and one piece each at least."""
        segments = max(self._slots(tile), PARTIAL_BYTES // (8 * tile * self.layer.codec.key.dim))
        return max(1, segments // (self.layer.store.num_kv_heads * row_tiles))

    def _segments(self, programs: int, tile: int) -> Segments:
        """Splits of the history, so that all programs fill the device once; exact pieces, and tiles of a piece."""
        slots = self._slots(tile)
        tiles = SHORT_PIECE if programs * 2 < slots else LONG_PIECE
        pieces = max(1, -(-self.columns // (EXACT_TOKENS * tiles)))  # one at least, for the step's own rows
        return max(1, min(MAX_SPLITS, slots // programs)), pieces, tiles

    def _has_many_rows(self, rows: int) -> bool:
        """Whether query rows (of all heads) are more than one program on each processor takes."""
        return rows > gluon_rows.ROWS.value * self.processors

    def _merge_shape(self, programs: int, tile: int, splits: int, pieces: int) -> tuple[int, int, int, int, int, int]:
        """Of the merge: groups of a row; rows, warps and registers of a program; segments loaded at once; steps of
        reading all their sums.  Few values, for each is a variant to compile.
        """
        least, dim = gluon_rows.ROWS.value, self.layer.codec.key.dim
        groups, room = 1, least * self.processors // (programs * tile)
        while groups < min(least, splits) and 2 * groups <= room:
            groups *= 2
        rows, warps, registers = program_rows(dim, not room)
        most = rows_in_flight(dim, rows, warps)
        steps = -(-(MAX_SPLITS + pieces) // dim) if splits + pieces > dim else 1
        return groups, rows, warps, registers, most if splits > FEW * groups else min(most, FEW), steps

    def _prepared(self, query: torch.Tensor) -> Scratch:
        """For what `gluon_rows.prepare_kernel` makes of query [T, H_q, d]."""
        tokens, query_heads, dim = query.shape
        heads, floating = self.layer.store.num_kv_heads, isinstance(self.layer.codec.key, FP8Quantizer)
        shape = (tokens, heads, query_heads // heads)
        waves = (tokens if self.layer.codec.rotary.turns else 0, *shape[1:], 2, dim)
        return Scratch(
            query.device, rows=((*shape, 2, dim), torch.float16 if floating else torch.int8),
            factors=((*shape, 2), torch.float32), offsets=(shape, torch.int32), waves=(waves, torch.float16),
        )  # fmt: skip

    def _prepare(self, query: torch.Tensor, factor: float) -> Launch:
        tokens, query_heads, dim = query.shape
        heads = self.layer.store.num_kv_heads
        group = query_heads // heads
        size, warps, registers = program_rows(dim, self._has_many_rows(tokens * query_heads))
        constants = {
            "G": group, "D": dim, "FLOAT": isinstance(self.layer.codec.key, FP8Quantizer),
            "EXACT": self.tables.query_matrix.exact, "TURNS": self.layer.codec.rotary.turns, "PDL": self.overlap,
            "WARPS": warps, "ROWS": size,
        }  # fmt: skip
        return Launch(
            gluon_rows.prepare_kernel, (-(-tokens * group // size), heads),
            ("query", "query_matrix", "center", "axes", "weights", *PREPARED),
            (tokens, query.stride(0), factor, "query_scale", "key_step", heads),
            constants, num_warps=warps, maxnreg=registers, launch_pdl=self.overlap,
        )  # fmt: skip

    def _attend(
        self,
        group: QueryGroup,
        entries: torch.Tensor,
        query: torch.Tensor,
        own: Own,
        shape: Shape,
        segments: Segments,
        factor: float,
        softcap: float,
    ) -> Launch:
        """Fill "partial" float32 [n, H_kv, row tiles, segments, rows, d], "lse" [.., rows] (base 2, -inf: nothing)."""
        batch, window, (splits, pieces, exact_tiles) = group.plan.batch, group.plan.window, segments
        rotary, pages, recent = self.layer.codec.rotary, self.layer.store.pages, self.layer.recent
        n, heads, row_tiles, count, tile = shape
        constants = {
            **self.constants, "G": query.shape[1] // heads, "R": tile, "COLUMNS": self.columns, "SINKS": self.sinks,
            "SLIDING": group.window > 0, "SOFTCAP": softcap > 0, "VSTEP": self.tables.value_step,
            "TURNS": rotary.turns, "PDL": self.overlap,
        }  # fmt: skip
        return Launch(
            gluon_decode.decode_kernel, (n * heads, count, row_tiles),
            (*PREPARED, "cos_sin", "query", "pages", "lookup", batch.block_table, entries, window.index, window.flags,
             "recent_keys", "recent_values", "keys", "values", "partial", "lse"),
            (batch.block_table.stride(0), pages.stride(0), query.stride(0), own[0].stride(0), own[1].stride(0),
             recent.keys.stride(0), heads, rotary.cos_sin.shape[0], splits, pieces, exact_tiles, factor,
             softcap * LOG2E, group.window),
            constants, num_warps=1, maxnreg=max_registers(tile, query.shape[2], self.layer.codec.key.bits),
            launch_pdl=self.overlap,
        )  # fmt: skip

    def _merge(self, entries: torch.Tensor, shape: Shape, segments: Segments, output: torch.Tensor) -> Launch:
        """Merge the segments into the requests' rows of output [T, H_q, d]."""
        n, heads, row_tiles, count, tile = shape
        splits, pieces, _ = segments
        groups, rows, warps, registers, unroll, steps = self._merge_shape(n * heads * row_tiles, tile, splits, pieces)
        constants = {
            "G": output.shape[1] // heads, "D": output.shape[2], "GROUPS": groups,
            "EXACT": self.tables.output_matrix.exact, "PDL": self.overlap, "WARPS": warps, "UNROLL": unroll,
            "LSE_STEPS": steps, "ROWS": rows,
        }  # fmt: skip
        return Launch(
            gluon_rows.merge_kernel, (-(-n * row_tiles * tile * groups // rows), heads),
            ("partial", "lse", "output_matrix", entries, "output"),
            (n, output.stride(0), "output_scale", heads, row_tiles, tile.bit_length() - 1, pieces, count),
            constants, num_warps=warps, maxnreg=registers, launch_pdl=self.overlap,
        )  # fmt: skip


def kernel_constants(layer: LayerCache) -> dict[str, Any]:
    """Constants of the attention kernel that depend on the page format."""
    layout = layer.store.format
    offsets = {plane.name: plane.offset for plane in layout.planes}
    tokens = 32 if layout.block_size % 32 == 0 else 16
    key_rows = tiles.code_rows(layout.key_bits, layout.head_dim)
    value_rows = tiles.code_rows(layout.value_bits, layout.head_dim)
    run = 8 if layout.key_bits == 8 else tiles.byte_run(key_rows)
    return {
        "D": layout.head_dim, "T": tokens, "BS": layout.block_size, "KBITS": layout.key_bits,
        "VBITS": layout.value_bits, "K0": offsets["key_codes_0"], "K1": offsets.get("key_codes_1", 0),
        "V0": offsets["value_codes_0"], "V1": offsets.get("value_codes_1", 0), "KS": offsets["key_scalars"],
        "VS": offsets["value_scalars"],
        "KROWS": key_rows, "VROWS": value_rows,
        "RUN": run, "PAGE": layout.page_bytes,
    }  # fmt: skip
