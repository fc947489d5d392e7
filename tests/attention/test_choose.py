"""Which backend serves a layer."""

from __future__ import annotations

import pytest

from kvweave.attention import AttentionOptions, open_attention
from kvweave.attention.cpu import IS_NATIVE
from kvweave.errors import NoKernel, UnknownName
from kvweave.tensor import Arena
from tests.attention.contract import close
from tests.attention.worlds import Kind, World, wanted
from tests.tensor.models import lives


def test_auto_takes_what_was_measured_fastest_for_the_device() -> None:
    assert open_attention(World(Kind()).view).name == ("cpu" if IS_NATIVE else "reference")


def test_auto_leaves_to_the_reference_what_kernels_cannot_read() -> None:
    world = World(Kind(quant="int4"))
    attention = open_attention(world.view)
    assert attention.name == "reference"
    step = world.step([50], [3])
    queries = world.queries(step)
    close(attention.attend(queries, step), wanted(world, queries, step, AttentionOptions()))
    with pytest.raises(NoKernel, match="4 bits"):
        open_attention(world.view, backend="cpu")


def test_packed_rows_of_others_are_read_by_the_reference() -> None:
    with Arena(lives()["v4"]) as arena:
        attention = open_attention(arena.layer(0))
        assert (attention.name, attention.key_dim, attention.value_dim) == ("reference", 512, 512)


def test_an_unknown_backend_is_told_apart_from_one_that_cannot() -> None:
    view = World(Kind()).view
    with pytest.raises(UnknownName, match="did you mean 'triton'"):
        open_attention(view, backend="tritn")


def test_latents_without_a_width_of_values_are_their_own_values() -> None:
    view = World(Kind(heads=4, latent=(48, 16))).view
    assert open_attention(view).value_dim == 64
    assert open_attention(view, AttentionOptions(value_dim=48)).value_dim == 48
