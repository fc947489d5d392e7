"""What every copier must do: the class that each copier's tests inherit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvweave.errors import BadCopy
from kvweave.operation import OperationState
from kvweave.plan import Layout, Plan
from kvweave.pool import NULL
from kvweave.transfer import (
    ChunkLayout,
    Copier,
    CopyPlan,
    Move,
    Mover,
    ReferenceCopier,
    Transfer,
    make_move,
    needed,
    whole_chunks,
)
from tests import strategies
from tests.tensor.models import DSA, HYBRID
from tests.transfer.worlds import EXAMPLES, World, buffers, chunk_tokens, in_rows, planned, shrunk

LAYOUTS = tuple(Layout)
MOST_BYTES = 5_000_000


@cache
def example(name: str, layout: Layout, split: bool) -> Plan:
    """An example model in little memory; `split`: as fp8, its pages of two kernel blocks."""
    spec = shrunk(name, "fp8" if split else "auto")
    unit = max(cache.unit_tokens for cache, _ in spec.groups().values())
    size = max(32 if split else 16, unit * (2 if split else 1))
    wishes: dict[str, Any] = {"layout": layout, "block_tokens": size, "kernel_tokens": size // 2 if split else None}
    made = planned(spec, 2, **wishes)
    return made if made.num_bytes < MOST_BYTES else planned(spec, 2, **wishes, pools="independent")


def hybrid(layout: Layout, chunks: int = 6, **wishes: Any) -> Plan:
    return planned(HYBRID, 3, chunks, layout=layout, **{"block_tokens": 8, "kernel_tokens": 4, **wishes})


class CopierContract:
    device = "cpu"

    @pytest.fixture
    def copier(self) -> Copier:
        raise NotImplementedError

    def store(self, copier: Copier, world: World, copies: CopyPlan, **how: Any) -> list[np.ndarray]:
        """The chunks that a plan fills, 0xEE where it does not."""
        chunks = buffers(copies.layout, len(copies.chunks), self.device)
        self.over(Mover(world.arena, copier, background=False).store(copies, chunks, **how))
        return [chunk.numpy() for chunk in chunks]

    def load(self, copier: Copier, world: World, copies: CopyPlan, chunks: list[np.ndarray], **how: Any) -> None:
        self.over(Mover(world.arena, copier, background=False).load(copies, chunks, **how))

    def over(self, transfer: Transfer) -> None:
        transfer.wait(20)
        assert (transfer.state, transfer.bytes_done) == (OperationState.DONE, transfer.num_bytes)

    def there_and_back(self, copier: Copier, one: World, other: World, num_chunks: int, **how: Any) -> None:
        """Sign pages of one arena, store them, load them into other pages of another, and read them there."""
        layout = ChunkLayout.of(one.plan, chunk_tokens(one.plan), ends_only=True)
        tables = one.tables(layout, num_chunks)
        one.sign(tables)
        chunks = self.store(copier, one, whole_chunks(layout, tables, 0, num_chunks, absent=True), **how)
        signed = one.read(tables)
        one.scramble()
        targets = other.tables(layout, num_chunks)
        before = other.memory()
        self.load(copier, other, whole_chunks(layout, targets, 0, num_chunks, absent=True), chunks, **how)
        found, after = other.read(targets), other.memory()
        assert found.keys() == signed.keys()
        for name in signed:
            assert np.array_equal(found[name], signed[name]), f"{name} is not what was stored"
        for pool, mask in other.outside(targets).items():
            assert np.array_equal(after[pool][mask], before[pool][mask]), f"pool {pool}: bytes of others changed"

    @pytest.mark.parametrize("split", [False, True], ids=["", "fp8, two kernel blocks"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", EXAMPLES)
    def test_pages_of_every_example_go_and_come_back_to_the_byte(
        self, name: str, layout: Layout, split: bool, copier: Copier
    ) -> None:
        with World(example(name, layout, split), 1, self.device) as world:
            self.there_and_back(copier, world, world, 1)

    @pytest.mark.parametrize("layers", [None, 1, 2, 4])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layers_may_go_some_at_a_time_to_pools_cut_otherwise(
        self, layout: Layout, layers: int | None, copier: Copier
    ) -> None:
        other = Layout.PAGE_MAJOR if layout is Layout.LAYER_MAJOR else Layout.LAYER_MAJOR
        with World(hybrid(layout), 2, self.device) as one, World(hybrid(other), 3, self.device) as two:
            self.there_and_back(copier, one, two, 3, layers=layers)

    def test_chunks_do_not_depend_on_the_pools_they_come_from(self, copier: Copier) -> None:
        """Layer-major, page-major, pools apart: the same rows, the same bytes."""
        found = []
        for layout, pools in ((Layout.LAYER_MAJOR, "shared"), (Layout.PAGE_MAJOR, "shared"), (None, "independent")):
            made = hybrid(layout or Layout.LAYER_MAJOR, pools=pools)
            with World(made, 4, self.device) as world:
                chunk = ChunkLayout.of(made, chunk_tokens(made))
                tables = world.tables(chunk, 2)
                world.rng = np.random.default_rng(7)
                world.sign(tables)
                chunks = self.store(copier, world, whole_chunks(chunk, tables, 0, 2))
                found.append((chunk.digest, *(memory[in_rows(chunk)].tobytes() for memory in chunks)))
        assert len(set(found)) == 1

    def test_only_what_is_needed_at_a_position_moves(self, copier: Copier) -> None:
        made = hybrid(Layout.LAYER_MAJOR)
        with World(made, 5, self.device) as world:
            layout = ChunkLayout.of(made, 16)
            tables = world.tables(layout, 4)
            world.sign(tables)
            tables["window"][:3] = tables["state"][:2] = NULL
            copies = needed(layout, tables, 48)
            assert {m.tag: len(m) for m in copies.moves} == {"full": 6, "window": 3, "state": 1}
            chunks = self.store(copier, world, needed(layout, tables, 48))
            window = layout.group("window")
            assert (chunks[0][window.offset : window.end] == 0xEE).all()
            assert (chunks[1][window.offset : window.offset + window.block_bytes] == 0xEE).all()
            signed = world.read({"full": tables["full"][:6], "window": tables["window"][3:6]})
            world.scramble()
            self.load(copier, world, copies, chunks)
            found = world.read({"full": tables["full"][:6], "window": tables["window"][3:6]})
            assert all(np.array_equal(found[name], signed[name]) for name in signed)

    def test_skipped_blocks_are_left_alone(self, copier: Copier) -> None:
        made = hybrid(Layout.PAGE_MAJOR)
        with World(made, 6, self.device) as world:
            layout = ChunkLayout.of(made, 32, ["full"])
            tables = world.tables(layout, 2)
            world.sign(tables)
            chunks = self.store(copier, world, whole_chunks(layout, tables, 0, 2))
            world.scramble()
            before = world.read({"full": tables["full"][:3]})
            self.load(copier, world, needed(layout, tables, 64, skip=24), chunks)
            after = world.read({"full": tables["full"][:3]})
            assert all(np.array_equal(before[name], after[name]) for name in before)

    def test_chunks_may_lie_askew(self, copier: Copier) -> None:
        """Buffers at odd addresses, as a file's header would leave them."""
        made = planned(DSA, 2, 2, layout=Layout.LAYER_MAJOR, block_tokens=64)
        with World(made, 7, self.device) as world:
            layout = ChunkLayout.of(made, 64)
            tables = world.tables(layout, 2)
            copies = whole_chunks(layout, tables, 0, 2)
            straight = self.store(copier, world, copies)
            (memory,) = buffers(layout, 1, self.device)
            wide = memory.new_zeros(2 * layout.num_bytes + 64)
            askew = [wide[3 : 3 + layout.num_bytes], wide[layout.num_bytes + 5 :][: layout.num_bytes]]
            self.over(Mover(world.arena, copier, background=False).store(copies, askew))
            for one, two in zip(straight, askew, strict=True):
                assert np.array_equal(one[in_rows(layout)], two.numpy()[in_rows(layout)])
            before = world.read(tables)
            world.scramble()
            self.load(copier, world, copies, [chunk.numpy() for chunk in askew])
            after = world.read(tables)
            assert all(np.array_equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("background", [False, True])
    def test_a_transfer_of_nothing_is_done_at_once(self, background: bool, copier: Copier) -> None:
        made = hybrid(Layout.LAYER_MAJOR)
        with World(made, 8, self.device) as world, Mover(world.arena, copier, background=background) as mover:
            transfer = mover.load(CopyPlan(ChunkLayout.of(made, 16), (), ()), [])
            assert transfer.state is OperationState.DONE
            transfer.wait(0)
            transfer.wait_layer(3, 0)

    def test_a_bad_copy_moves_nothing(self, copier: Copier) -> None:
        made = hybrid(Layout.LAYER_MAJOR)
        with World(made, 9, self.device) as world:
            layout = ChunkLayout.of(made, 16)
            tables = world.tables(layout, 2)
            copies = whole_chunks(layout, tables, 0, 2)
            chunks = buffers(layout, 2, self.device)
            before = world.memory()
            first = made.group("full").pages_per_superpage
            twice = CopyPlan(layout, (0,), (make_move("full", [first, first], [0, 0], [0, 1]),))
            null = CopyPlan(layout, (0,), (make_move("full", [NULL], [0], [0]),))
            mover = Mover(world.arena, copier, background=False)
            for plan, given_chunks, why in (
                (copies, chunks[:1], "1 buffers for 2 chunks"),
                (copies, [chunks[0], chunks[1][:-1]], "a chunk takes"),
                (twice, chunks[:1], "filled twice"),
                (null, chunks[:1], "the NULL page"),
            ):
                with pytest.raises(BadCopy, match=why):
                    mover.load(plan, given_chunks)
            with pytest.raises(BadCopy, match="buffers of chunks 0 and 1 overlap"):
                mover.store(copies, [chunks[0], chunks[0]])
            assert all(np.array_equal(before[name], now) for name, now in world.memory().items())
            assert all((chunk == 0xEE).all() for chunk in chunks)

    @settings(
        suppress_health_check=[  # fixtures hold no state, and each copier's class runs its own examples
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ]
    )
    @given(data=st.data())
    def test_random_plans_do_what_the_reference_does(self, data: st.DataObject, copier: Copier) -> None:
        made = data.draw(strategies.plans(most_bytes=100_000, most_layers=5, most_tags=3))
        layout = ChunkLayout.of(made, chunk_tokens(made) * data.draw(st.integers(1, 2)))
        layers = data.draw(st.sampled_from((None, None, 1, 2)))
        with World(made, 10, self.device) as mine, World(made, 10) as yours:
            copies = data.draw(random_copies(layout, made))
            found = self.store(copier, mine, copies, layers=layers)
            expected = CopierContract().store(ReferenceCopier(), yours, copies)
            rows, inside = in_rows(layout), in_rows(layout, padding=True)
            for one, two in zip(found, expected, strict=True):
                assert np.array_equal(one[rows], two[rows])
                assert (one[~inside] == 0xEE).all()
            targets = data.draw(random_copies(layout, made, len(copies.chunks), apart=True))
            self.load(copier, mine, targets, expected, layers=layers)
            CopierContract().load(ReferenceCopier(), yours, targets, expected)
            tables = {move.tag: move.pages for move in targets.moves}
            ours, theirs = mine.read(tables), yours.read(tables)
            assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@st.composite
def random_copies(
    draw: st.DrawFn, layout: ChunkLayout, made: Plan, num_chunks: int | None = None, apart: bool = False
) -> CopyPlan:
    """Any pages to any places; `apart`: no page twice, no super-page of two groups."""
    count = draw(st.integers(1, 3)) if num_chunks is None else num_chunks
    taken: set[tuple[str, int]] = set()
    moves: list[Move] = []
    for part in layout.groups:
        group = made.group(part.tag)
        places = [(c, b) for c in range(count) for b in range(part.first_block, part.end_block)]
        pages = [
            page
            for page in range(group.pages_per_superpage, made.num_pages(part.tag) + group.pages_per_superpage)
            if not apart or (group.pool, page // group.pages_per_superpage) not in taken
        ]
        some = draw(st.lists(st.sampled_from(places), unique=True, max_size=6)) if places else []
        chosen = [draw(st.sampled_from(pages)) for _ in some] if pages else []
        if apart:
            chosen = list(dict.fromkeys(chosen))
            taken |= {(group.pool, page // group.pages_per_superpage) for page in chosen}
        some = some[: len(chosen)]
        if some:
            moves.append(make_move(part.tag, chosen, [c for c, _ in some], [b for _, b in some]))
    return CopyPlan(layout, tuple(range(count)), tuple(moves))
