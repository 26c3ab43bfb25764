"""The exact ring: which tokens it holds, that it never holds a block's earlier contents, and what it evicts."""

import pytest
import torch
from helpers import AmpleRing, Request, Scheduler, build_codec, normal, plain_step, rng

from turboquant.batch import AttentionBatch
from turboquant.capture import ExactRing, KVCaptureEngine, exact_entries


class Tracked:
    """An ExactRing whose data are the numbers of the rows written, so that every read can be checked."""

    def __init__(self, num_blocks, block_size, window, capacity, sinks=0):
        self.ring = ExactRing(num_blocks, block_size, window, capacity, sinks=sinks)
        self.data = torch.full((capacity * block_size,), -1)

    def run(self, step):
        """Plan, check what is read, write; returns per request the positions that are read exactly."""
        window = self.ring.plan(step.batch)
        self.check_tables()
        exact = [self._check_reads(window, i, *part[:2]) for i, part in enumerate(step.parts)]
        assert not window.present[len(step.parts) :].any()
        rows, index = self.ring.accept(step.slots)
        assert (step.slots[rows] >= 0).all()
        self.data[index] = rows + step.first_row
        return exact

    def _check_reads(self, window, i, request, history):
        start = history - self.ring.window
        positions = (*(p if p < start else -1 for p in range(self.ring.sinks)), *range(start, history))
        exact = [p for p, here in zip(positions, window.present[i].tolist(), strict=True) if here]
        assert all(p >= 0 for p in exact)
        assert self.data[window.index[i][window.present[i]]].tolist() == [request.rows[p] for p in exact]
        assert (window.index[i][~window.present[i]] == 0).all()
        return exact

    def check_tables(self):
        """Blocks and entries point at each other."""
        ring = self.ring
        blocks = (ring.entry_of_part >= 0).nonzero().flatten()
        assert torch.equal(ring.owner[ring.entry_of_part[blocks]], blocks)
        assert int((ring.owner >= 0).sum()) == len(blocks) <= ring.capacity

    @property
    def blocks(self):
        return set(self.ring.owner[self.ring.owner >= 0].tolist())


class FirstInFirstOut(AmpleRing):
    """The replacement that the ring does not use: the entry assigned first goes first, used or not."""

    def __init__(self, window, block_size, capacity):
        super().__init__(window, block_size)
        self.capacity = capacity

    def plan(self, step):
        exact = super().plan(step)
        while len(self.held) > self.capacity:
            del self.held[next(iter(self.held))]
        return exact


class Driver:
    """Runs given numbers of new tokens of given requests through a ring; every request has its own blocks."""

    def __init__(self, ring, block_size, length=400):
        self.ring, self.block_size, self.rows = ring, block_size, 0
        self.blocks_each = length // block_size + 1
        self.requests = 0

    def request(self):
        first = self.requests * self.blocks_each
        self.requests += 1
        return Request(0, blocks=list(range(first, first + self.blocks_each)))

    def step(self, news):
        """news: {request: new tokens}; returns {request: positions read exactly}."""
        parts = [(request, len(request.rows), new) for request, new in news.items()]
        step = plain_step(parts, self.block_size, self.rows)
        exact = self.ring.run(step) if isinstance(self.ring, Tracked) else self.ring.plan(step)
        if not isinstance(self.ring, Tracked):
            self.ring.write(step)
        for request, _, new in parts:
            request.rows.extend(range(self.rows, self.rows + new))
            self.rows += new
        return dict(zip(news, exact, strict=True))


def window_of(request, window, new):
    """Positions of the last `window` tokens before the `new` ones just written."""
    history = len(request.rows) - new
    return list(range(max(0, history - window), history))


# ---- what is exact ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("window", "block_size", "sinks"),
    [(1, 8, 0), (7, 8, 0), (8, 8, 8), (9, 8, 3), (24, 8, 0), (5, 1, 4), (20, 16, 4), (0, 8, 5), (17, 32, 20),
     (9, 24, 0), (0, 48, 40)],
)  # fmt: skip
def test_exact_iff_in_the_window_or_a_sink_and_still_there(window, block_size, sinks, seed):
    """With room for all blocks, exactly what plain sets say; prefix hits, preemption, rejected drafts."""
    length = max(90, 4 * block_size)
    scheduler = Scheduler(seed, num_blocks=240 // block_size + 8, block_size=block_size, max_length=length)
    ring, model = Tracked(300, block_size, window, 600, sinks), AmpleRing(window, block_size, sinks)
    seen = 0
    for _ in range(60):
        step = scheduler.step()
        exact = ring.run(step)
        assert exact == model.plan(step)
        model.write(step)
        scheduler.commit(step)
        seen += sum(len(e) for e in exact)
    assert seen > 60 and scheduler.events["shared"] and scheduler.events["reused"] and scheduler.events["rejected"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("capacity", [1, 3, 6, 10])
def test_small_ring_is_sound_and_keeps_live_windows(capacity, sinks, seed):
    """Losing an entry is never wrong: what is read is right; and no step takes an entry that its next step reads."""
    window, block_size = 13, 4
    scheduler = Scheduler(seed, num_blocks=60, block_size=block_size)
    ring, model = Tracked(60, block_size, window, capacity, sinks), AmpleRing(window, block_size, sinks)
    lost = 0
    for _ in range(80):
        step = scheduler.step()
        before = ring.blocks
        exact = ring.run(step)
        for found, possible in zip(exact, model.plan(step), strict=True):
            assert set(found) <= set(possible)
            lost += len(possible) - len(found)
        assert not (before - ring.blocks) & blocks_of_next_reads(step, window, block_size, sinks)
        model.write(step)
        scheduler.commit(step)
    assert lost > 0


def blocks_of_next_reads(step, window, block_size, sinks):
    """What the requests of the step read next if all their new tokens stay."""
    ends = [(request, history + new) for request, history, new in step.parts]
    recent = {request.blocks[p // block_size] for request, end in ends for p in range(max(0, end - window), end)}
    return recent | {request.blocks[0] for request, _ in ends if sinks}


@pytest.mark.parametrize("sinks", [0, 1, 3, 8])
@pytest.mark.parametrize("block_size", [1, 4, 8, 24])
@pytest.mark.parametrize("window", [0, 1, 3, 4, 5, 8, 11])
def test_every_residue_of_the_length(block_size, window, sinks):
    """Prompts of every length modulo the block size, then a decode over two more blocks."""
    sinks = min(sinks, block_size)
    for length in range(1, 2 * block_size + 2):
        capacity = exact_entries(window, sinks, block_size)
        driver = Driver(Tracked(64, block_size, window, capacity, sinks), block_size, length=5 * block_size + 8)
        request = driver.request()
        driver.step({request: length})
        for _ in range(2 * block_size + 1):
            exact = driver.step({request: 1})[request]
            assert exact == sorted({*range(min(sinks, length)), *window_of(request, window, 1)})
            length += 1


def test_large_blocks_cost_no_more_than_small_ones():
    """A hybrid model's block of 528 tokens holds a window of 20 in 3 entries of 16, and sinks of 4 in one."""
    ring = ExactRing(8, 528, 20, 4, sinks=4)
    assert ring.size == 16 and ring.tokens == ring.tokens_per_request == 64 and len(ring.entry_of_part) == 8 * 33
    driver = Driver(Tracked(8, 528, 20, 4, sinks=4), 528, length=1100)
    request = driver.request()
    driver.step({request: 530})
    for _ in range(40):
        exact = driver.step({request: 1})[request]
        assert exact == [*range(4), *window_of(request, 20, 1)]


def test_chunks_write_sinks_in_parts():
    """A first chunk shorter than the sinks: the entry is there from the first token on."""
    driver = Driver(Tracked(64, 8, 2, 4, sinks=6), 8, length=48)
    request = driver.request()
    for new, exact in ((3, []), (30, [0, 1, 2]), (1, [0, 1, 2, 3, 4, 5, 31, 32])):
        assert driver.step({request: new})[request] == exact


def test_a_shared_first_block_is_exact_for_all_who_share_it():
    ring = Tracked(16, 8, 8, 5, sinks=4)
    first, second = Request(0, blocks=[3, 4, 5, 6]), Request(0, blocks=[3, 4, 9], rows=list(range(16)))
    ring.run(plain_step([(first, 0, 30)], 8))
    assert ring.run(plain_step([(second, 16, 2)], 8, first_row=50))[0][:4] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("block_size", "size"), [(1, 1), (3, 1), (4, 4), (8, 8), (16, 16), (24, 8), (48, 16), (528, 16)]
)
def test_exact_entries_are_the_most_that_a_window_can_touch_and_those_of_sinks(block_size, size):
    """`window` cached tokens and the one being written, at the worst alignment; sinks lie in one block."""
    for window in range(1, 40):
        touched = [len({p // size for p in range(start, start + window + 1)}) for start in range(block_size)]
        assert exact_entries(window, 0, block_size) == max(touched)
        for sinks in (1, 4, 17, 600):
            first = {p // size for p in range(min(sinks, block_size))}
            assert exact_entries(window, sinks, block_size) == max(touched) + len(first)
    assert exact_entries(0, 0, block_size) == 0


@pytest.mark.parametrize("sinks", [0, 5])
def test_covers(sinks):
    """The scorer's question: which of these positions of these requests are read exactly."""
    scheduler, ring, model = Scheduler(5, block_size=8), ExactRing(48, 8, 11, 48, sinks=sinks), AmpleRing(11, 8, sinks)
    for _ in range(30):
        step = scheduler.step()
        window, exact = ring.plan(step.batch), model.plan(step)
        rows = torch.tensor(rng(step.first_row).permutation(len(step.parts))[:3])
        positions = torch.arange(100).expand(len(rows), -1)
        found = window.covers(step.batch, rows, positions)
        assert [f.nonzero().flatten().tolist() for f in found] == [exact[i] for i in rows]
        ring.accept(step.slots)
        model.write(step)
        scheduler.commit(step)


# ---- stale contents --------------------------------------------------------------------------------------------
def test_reused_block_outside_the_window_is_overwritten():
    """A block with an entry goes to a long prompt, for which it lies far outside the window: no stale row may stay."""
    ring = Tracked(16, 4, 4, 16)
    first, second = Request(0, blocks=[3]), Request(0, blocks=[7, 3, 8, 9])
    ring.run(plain_step([(first, 0, 4)], 4))
    assert ring.blocks == {3}
    ring.run(plain_step([(second, 0, 14)], 4, first_row=100))
    second.rows = list(range(100, 114))
    batch = plain_step([(second, 8, 1)], 4).batch  # a rewound request: its window is block 3
    window = ring.ring.locate(batch)
    assert window.present.all()
    assert ring.data[window.index[0]].tolist() == [104, 105, 106, 107]


def test_reused_block_is_exact_only_where_it_was_rewritten():
    """The tail of a reused block still holds the former owner's rows; its positions are beyond the new sequence."""
    ring = Tracked(16, 8, 8, 16)
    first, second = Request(0, blocks=[3, 4]), Request(0, blocks=[3, 5], rows=list(range(50, 53)))
    ring.run(plain_step([(first, 0, 16)], 8))
    ring.run(plain_step([(second, 0, 3)], 8, first_row=50))
    assert ring.run(plain_step([(second, 3, 1)], 8, first_row=60)) == [[0, 1, 2]]


def test_evicted_entry_comes_back_empty():
    """A block that lost its entry and gets a new one holds only what was written since."""
    ring = Tracked(16, 8, 8, 1)
    first, other = Request(0, blocks=[3], rows=[0, 1, 2, 90]), Request(0, blocks=[4])
    ring.run(plain_step([(first, 0, 3)], 8))
    ring.run(plain_step([(other, 0, 5)], 8, first_row=20))
    assert ring.blocks == {4}
    assert ring.run(plain_step([(first, 3, 1)], 8, first_row=90)) == [[]]
    assert ring.run(plain_step([(first, 4, 1)], 8, first_row=91)) == [[3]]


def test_unwritten_tokens_of_an_entry_are_absent():
    """Slots of a planned step that were never written (a dummy run) are not exact."""
    ring = ExactRing(16, 8, 8, 4)
    request = Request(0, blocks=[3])
    ring.plan(plain_step([(request, 0, 6)], 8).batch)
    assert not ring.locate(plain_step([(request, 6, 1)], 8).batch).present.any()


# ---- replacement -----------------------------------------------------------------------------------------------
def decodes_beside_a_long_prompt(ring, block_size, window):
    """Share of the decodes' windows that stays exact while a prompt of 1500 tokens streams through in chunks."""
    driver = Driver(ring, block_size, length=1600)
    decodes, prompt = [driver.request() for _ in range(3)], driver.request()
    driver.step(dict.fromkeys(decodes, 50))
    driver.step(dict.fromkeys(decodes, 1))
    kept = wanted = 0
    for _ in range(1500 // 60):
        exact = driver.step({**dict.fromkeys(decodes, 1), prompt: 60})
        for request in decodes:
            kept += len(exact[request])
            wanted += len(window_of(request, window, 1))
    return kept / wanted


@pytest.mark.parametrize(("window", "block_size"), [(32, 8), (33, 8), (48, 16), (10, 1), (40, 96)])
def test_long_prompt_does_not_push_out_live_windows(window, block_size):
    """Why the ring is not first-in-first-out: the same capacity in that order loses the windows of running requests."""
    capacity = 4 * exact_entries(window, 0, block_size)
    num_blocks = 4 * (1600 // block_size + 1)
    assert decodes_beside_a_long_prompt(Tracked(num_blocks, block_size, window, capacity), block_size, window) == 1
    assert decodes_beside_a_long_prompt(FirstInFirstOut(window, block_size, capacity), block_size, window) < 0.75


def run_decodes(seed, max_seqs, window, block_size, choose):
    """Requests come, decode when `choose` says so, and go; every step must find all windows complete."""
    random = rng(seed, 3)
    capacity = max_seqs * exact_entries(window, 0, block_size)
    driver = Driver(Tracked(4000, block_size, window, capacity), block_size, length=60)
    running, steps = [], 0
    while steps < 120:
        running = [r for r in running if len(r.rows) < r.target]
        if len(running) < max_seqs and random.random() < 0.5:
            running.append(driver.request())
            running[-1].target = int(random.integers(5, 60))
        batch = choose(random, running)
        if not batch:
            continue
        news = {r: 1 if r.rows else int(random.integers(1, r.target)) for r in batch}
        for request, exact in driver.step(news).items():
            assert exact == window_of(request, window, news[request]), f"step {steps}"
        steps += 1


@pytest.mark.parametrize(("window", "block_size"), [(1, 4), (4, 4), (5, 4), (9, 4), (16, 8), (6, 1), (20, 32), (9, 24)])
@pytest.mark.parametrize("max_seqs", [1, 2, 5])
def test_capacity_suffices_while_all_requests_run(max_seqs, window, block_size):
    """max_seqs * exact_entries entries hold all windows when every running request is in every batch."""
    run_decodes(1, max_seqs, window, block_size, lambda random, running: running)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("window", "block_size"), [(1, 4), (4, 4), (9, 4), (16, 8), (20, 32)])
def test_capacity_suffices_for_every_interleaving_of_decodes(window, block_size, seed):
    """The same when requests sit out steps, while none comes or goes: no live window goes before retired blocks."""
    random, max_seqs = rng(2, seed), 3
    driver = Driver(Tracked(200, block_size, window, max_seqs * exact_entries(window, 0, block_size)), block_size, 150)
    running = [driver.request() for _ in range(max_seqs)]
    for request in running:
        driver.step({request: int(random.integers(1, 20))})
    for _ in range(200):
        batch = [request for request in running if random.random() < 0.4 and len(request.rows) < 150]
        for request, exact in driver.step(dict.fromkeys(batch, 1)).items() if batch else ():
            assert exact == window_of(request, window, 1)


def test_requests_that_sit_out_steps_lose_exactness_only():
    """Others come meanwhile and take the entries: what is read stays right, and later windows are complete again."""
    driver = Driver(Tracked(2000, 4, 9, 2 * exact_entries(9, 0, 4)), 4, 60)
    waits = driver.request()
    driver.step({waits: 20})
    for _ in range(4):
        driver.step({driver.request(): 20})
    assert driver.step({waits: 1})[waits] == []
    for expected in range(1, 12):
        assert driver.step({waits: 1})[waits] == list(range(20, 20 + expected))[-9:]


def test_blocks_that_left_their_window_go_first():
    """One request goes on, the other one waits: the waiting window stays, though nobody used it for longer."""
    ring = Tracked(16, 4, 4, 3)
    goes_on, waits = Request(0, blocks=[1, 2, 3]), Request(0, blocks=[5, 6], rows=[90, 91, 92, 93])
    ring.run(plain_step([(waits, 0, 4)], 4, first_row=90))
    for history in range(12):
        exact = ring.run(plain_step([(goes_on, history, 1)], 4, first_row=history))
        assert exact == [list(range(max(0, history - 4), history))]
        goes_on.rows.append(history)
    assert ring.blocks >= {3, 5}
    assert ring.run(plain_step([(waits, 4, 1)], 4, first_row=94)) == [[0, 1, 2, 3]]


def test_window_of_a_long_chunk_is_read_before_it_goes():
    """A chunk longer than the window reads it for the last time; blocks that nobody reads now go before it."""
    ring = Tracked(32, 4, 4, 2)
    finished, chunked = Request(0, blocks=[1, 2]), Request(0, blocks=[5, 6, 7, 8], rows=[50, 51, 52, 53])
    ring.run(plain_step([(chunked, 0, 4)], 4, first_row=50))
    ring.run(plain_step([(finished, 0, 4)], 4, first_row=10))
    assert ring.run(plain_step([(chunked, 4, 8)], 4, first_row=54)) == [[0, 1, 2, 3]]
    assert ring.blocks == {5, 7}


def test_the_least_recently_used_goes_first():
    ring = Tracked(16, 4, 4, 2)
    first, second, third = (Request(0, blocks=[i, i + 8]) for i in (1, 2, 3))
    ring.run(plain_step([(first, 0, 2)], 4))
    ring.run(plain_step([(second, 0, 2)], 4, first_row=10))
    first.rows = [0, 1]
    ring.run(plain_step([(first, 2, 1)], 4, first_row=20))
    ring.run(plain_step([(third, 0, 2)], 4, first_row=30))
    assert ring.blocks == {1, 3}


def test_free_entries_go_before_any_block():
    """A ring with room evicts nothing: blocks of finished or rewound requests may be read again (prefix hits)."""
    ring = Tracked(32, 4, 4, 20)
    request = Request(0, blocks=list(range(1, 11)))
    for history in range(40):
        ring.run(plain_step([(request, history, 1)], 4, first_row=history))
        request.rows.append(history)
    assert ring.blocks == set(request.blocks)


def test_prefix_sharing_requests_share_entries():
    """Two requests with the same two prefix blocks read the same rows, and either one's use keeps them."""
    ring = Tracked(32, 8, 16, 6)
    first = Request(0, rows=list(range(18)), blocks=[1, 2, 3])
    ring.run(plain_step([(first, 0, 18)], 8))
    second = Request(0, rows=list(range(16)), blocks=[1, 2, 9])
    exact = ring.run(plain_step([(second, 16, 1), (first, 18, 1)], 8, first_row=20))
    assert exact == [list(range(16)), list(range(2, 18))]
    first.rows.append(21)
    second.rows.append(20)
    assert ring.blocks == {1, 2, 3, 9}
    other = Request(0, blocks=[20, 21, 22, 23, 24, 25])
    for i in range(5):
        step = [(second, 17 + i, 1), (other, 8 * i, 8)]
        assert ring.run(plain_step(step, 8, first_row=30 + 9 * i))[0] == list(range(1 + i, 17 + i))
        second.rows.append(30 + 9 * i)
        other.rows.extend(range(31 + 9 * i, 39 + 9 * i))
    assert {1, 2} <= ring.blocks and 3 not in ring.blocks


def test_more_blocks_than_entries():
    """A step that needs more than the ring has takes what there is."""
    ring = Tracked(64, 4, 16, 3)
    requests = [
        Request(0, blocks=list(range(4 * i, 4 * i + 4)), rows=list(range(16 * i, 16 * i + 16))) for i in range(4)
    ]
    ring.run(plain_step([(r, 0, 15) for r in requests], 4))
    assert len(ring.blocks) == 3


def test_live_windows_are_not_displaced_by_their_own_step():
    """All entries are read by the next step already: the blocks of a request that comes in addition get none."""
    ring = Tracked(64, 4, 8, 6)
    running = [
        Request(0, blocks=list(range(10 * i, 10 * i + 4)), rows=list(range(10 * i, 10 * i + 10))) for i in (1, 2)
    ]
    newcomer = Request(0, blocks=[0, 1, 2, 3], rows=list(range(50, 60)))
    for request in running:
        ring.run(plain_step([(request, 0, 10)], 4, first_row=request.rows[0]))
    windows = ring.run(plain_step([(newcomer, 0, 10), *((request, 10, 1) for request in running)], 4, first_row=50))
    assert windows == [[], list(range(2, 10)), list(range(2, 10))]
    assert ring.blocks == {10, 11, 12, 20, 21, 22}


# ---- edges -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("capacity", [0, 5])
def test_window_of_zero_takes_no_entries(capacity):
    ring = ExactRing(16, 8, 0, capacity)
    request = Request(0, blocks=[1, 2])
    step = plain_step([(request, 0, 9)], 8)
    window = ring.plan(step.batch)
    assert window.present.shape == window.index.shape == (1, 0)
    assert ring.accept(step.slots)[0].numel() == 0 and (ring.owner == -1).all()
    assert not window.covers(step.batch, torch.tensor([0]), torch.arange(9)[None]).any()


def test_engine_without_a_window_allocates_no_ring():
    engine = KVCaptureEngine(16, 8, 0, 5)
    layer = engine.add_layer("layer", build_codec(2, 64), 2, torch.bfloat16)
    assert engine.ring.capacity == 0 and layer.recent.nbytes == 0


def test_ring_without_capacity_holds_nothing():
    ring = ExactRing(16, 8, 8, 0)
    step = plain_step([(Request(0, blocks=[1, 2]), 0, 9)], 8)
    assert not ring.plan(step.batch).present.any()
    assert ring.accept(step.slots)[0].numel() == 0
    assert not ring.locate(plain_step([(Request(0, blocks=[1, 2]), 9, 1)], 8).batch).present.any()


@pytest.mark.parametrize("claimed_rows", [0, 1, 4])
def test_padded_requests(claimed_rows):
    """Rows with seq_len 0 whose table is garbage take no entry and read nothing, whatever query_start says."""
    ring = ExactRing(16, 8, 8, 4)
    garbage = torch.tensor([[5, 2**30], [2**30, -7], [-1, 2**31 - 1]], dtype=torch.int32)
    starts = torch.tensor([0, 3, 3 + claimed_rows, 3 + 2 * claimed_rows])
    batch = AttentionBatch(starts, torch.tensor([3, 0, 0]), garbage, 8)
    assert batch.query_lens.tolist() == [3, 0, 0] and batch.history_lens.tolist() == [3 - 3, 0, 0]
    assert not ring.plan(batch).present.any()
    assert ring.owner[ring.owner >= 0].tolist() == [5]
    slots = torch.tensor([40, 41, 42, *[-1] * 2 * claimed_rows])
    assert ring.accept(slots)[0].tolist() == [0, 1, 2]


def test_batch_of_dummy_lengths():
    """Capture metadata with 4 rows and seq_len 1 neither goes negative nor reads a cached token."""
    batch = AttentionBatch(torch.tensor([0, 4, 8]), torch.tensor([1, 1]), torch.zeros(2, 1, dtype=torch.int32), 8)
    assert batch.query_lens.tolist() == [1, 1] and batch.history_lens.tolist() == [0, 0]
    assert not ExactRing(4, 8, 8, 4).plan(batch).present.any()


def test_clear_forgets_everything():
    driver = Driver(Tracked(64, 8, 16, 4), 8, length=80)
    request = driver.request()
    driver.step({request: 30})
    driver.ring.ring.clear()
    driver.ring.check_tables()
    assert driver.ring.blocks == set()
    assert driver.step({request: 1})[request] == []
    assert driver.step({request: 1})[request] == [30]
    for _ in range(20):
        driver.step({request: 1})
    assert driver.step({request: 1})[request] == window_of(request, 16, 1)


def test_locate_changes_nothing():
    driver = Driver(Tracked(64, 8, 16, 4), 8, length=80)
    request = driver.request()
    driver.step({request: 30})
    ring = driver.ring.ring
    tables = [t.clone() for t in (ring.entry_of_part, ring.owner, ring.used, ring.written)]
    window = ring.locate(plain_step([(request, 30, 1)], 8).batch)
    assert window.present.all()
    after = (ring.entry_of_part, ring.owner, ring.used, ring.written)
    assert all(torch.equal(a, b) for a, b in zip(tables, after, strict=True))


def test_bytes_are_those_of_the_tensors():
    ring = ExactRing(100, 16, 32, 9)
    assert ring.nbytes == 101 * 8 + 10 * 8 + 10 * 8 + 10 * 16 + 101 * 4  # one more of each than is used


# ---- the engine ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ingest_keeps_the_recent_tokens_of_every_layer(dtype):
    """Layers share the ring's tables and have their own data: bit for bit what came in; padding is skipped."""
    engine = KVCaptureEngine(8, 8, 10, 3)
    layers = [engine.add_layer(str(i), build_codec(2, 64), 2, dtype) for i in range(2)]
    request = Request(0, blocks=[6, 1, 4])
    step = plain_step([(request, 0, 21)], 8)
    plan = engine.begin_step(step.batch)
    assert plan.batch is step.batch and not plan.window.present.any()
    data = normal(2, 2, 23, 2, 64, seed=1).to(dtype)
    slots = torch.cat([step.slots[:4], torch.tensor([-1]), step.slots[4:], torch.tensor([-1, -1])])
    real = [i for i in range(22) if i != 4]
    for layer, (keys, values) in zip(layers, data, strict=True):
        engine.ingest(layer, keys[:22], values[:22], slots)
    window = engine.ring.locate(plain_step([(request, 21, 1)], 8).batch)
    assert window.present.all()
    for layer, (keys, values) in zip(layers, data, strict=True):
        assert torch.equal(layer.recent.keys[window.index[0]], keys[real][-10:])
        assert torch.equal(layer.recent.values[window.index[0]], values[real][-10:])
        stored_keys, stored_values = layer.store.read_slots(step.slots)
        assert (stored_keys - keys[real].float()).norm() < 0.12 * keys[real].float().norm()
        assert (stored_values - values[real].float()).norm() < 0.12 * values[real].float().norm()


def test_engine_bytes_are_those_of_the_tensors():
    """Invariant 7: pages, exact tokens, tables of codec and ring."""
    engine = KVCaptureEngine(8, 16, 32, 3)
    layers = [engine.add_layer(str(i), build_codec(2, 64), 2, torch.bfloat16) for i in range(2)]
    for layer in layers:
        assert layer.recent.nbytes == 2 * 3 * 16 * 2 * 64 * 2
        assert layer.store.nbytes == 8 * 2 * 16 * 68
        assert layer.nbytes == layer.recent.nbytes + layer.store.nbytes + layer.codec.nbytes
    rotary = layers[0].codec.rotary.nbytes  # shared
    assert engine.nbytes == engine.ring.nbytes + sum(layer.nbytes for layer in layers) + rotary
