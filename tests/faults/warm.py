"""What fills once by itself, filled before anybody looks at memory.

oneDNN compiles a product for each number of rows that it meets, and keeps it: `drafter.linear` bounds how many there
are, but a run that meets the last of them late would look like one that grows.
"""

from __future__ import annotations

import gc

import torch

from drafter.linear import Linear, rows_compiled_for


def compile_products(most_rows: int) -> None:
    """Every product of this process's models, for every number of rows up to `most_rows`."""
    layers = [found for found in gc.get_objects() if type(found) is Linear]
    with torch.inference_mode():
        for num_rows in sorted({rows_compiled_for(rows) for rows in range(1, most_rows + 1)}):
            for layer in layers:
                layer(torch.zeros(num_rows, layer.in_features))
