"""The page in the documentation: its table, and its blocks."""

import re

import optimizer_twins as twins
import torch
from comparison import FLOAT32_TOLERANCE, FLOAT64_TOLERANCE
from write_optimizer_table import PAGE, table_on_the_page

from funcgrad import torch_optim

NO_OPTIMIZERS = {"clip_grad_norm", "clip_grad_value", "from_torch_state", "per_parameter", "schedules", "to_torch_state"}
WRITTEN_AGAIN = "write it again: python tests/write_optimizer_table.py"


def test_every_optimizer_has_a_row_within_the_tolerances():
    rows = table_on_the_page()
    assert list(rows) == sorted(set(torch_optim.__all__) - NO_OPTIMIZERS), WRITTEN_AGAIN
    for name, cells in rows.items():
        twin = twins.TWINS.get(name)
        tolerances = (twin.float64, twin.float32, twin.bfloat16) if twin else (FLOAT64_TOLERANCE, FLOAT32_TOLERANCE)
        for cell, tolerance in zip(cells[1:4], tolerances, strict=False):
            assert float(cell) <= tolerance


def test_the_blocks_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    names = {"torch_optimizer": torch.optim.AdamW(module.parameters())}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)
    assert [entry["step"] for entry in names["torch_optimizer"].state_dict()["state"].values()] == [1, 1]
