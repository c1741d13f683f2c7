"""The table in the documentation."""

from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE
from write_optimizer_table import table_on_the_page

from funcgrad import torch_optim

NO_OPTIMIZERS = {"clip_grad_norm", "clip_grad_value", "from_torch_state", "per_parameter", "schedules", "to_torch_state"}
# These have other rounding, and tests of their own.
APART = {"adafactor", "lbfgs", "muon"}
WRITTEN_AGAIN = "write it again: python tests/write_optimizer_table.py"


def test_every_optimizer_has_a_row_within_the_tolerances():
    rows = table_on_the_page()
    assert list(rows) == sorted(set(torch_optim.__all__) - NO_OPTIMIZERS - APART), WRITTEN_AGAIN
    for cells in rows.values():
        assert float(cells[1]) <= FLOAT64_TOLERANCE
        assert float(cells[2]) <= FLOAT32_TOLERANCE
        assert float(cells[3]) <= 2.0**-8
