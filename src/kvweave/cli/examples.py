"""`kvweave examples`: the configs that come with kvweave."""

from __future__ import annotations

from kvweave.cli.format import exact, format_size
from kvweave.cli.read_config import example_names, read_config
from kvweave.cli.table import console, plain_table, print_table
from kvweave.spec.hf import from_config


def examples_command() -> None:
    """List the bundled example models; each name is a CONFIG for `kvweave plan` and a MODEL for `kvweave run`."""
    table = plain_table("\nexample", ">\nlayers", "~\ngroups (layers)", ">bytes\na token", ">fixed bytes\na sequence")
    for name in example_names():
        spec = from_config(read_config(name))
        groups = ", ".join(f"{tag} ({len(layers)})" for tag, (_, layers) in spec.groups().items())
        fixed = format_size(spec.window_bytes() + spec.state_bytes())
        table.add_row(name, str(spec.num_layers), groups, f"{exact(spec.bytes_per_token()):,}", fixed)
    print_table(console(), table)
