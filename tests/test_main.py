"""The command line, run as a user does."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import models
import pytest

from funcgrad import __main__ as command_line

SUBJECT = """
import jax, jax.numpy as jnp

def subject():
    loss_fn = lambda params, x: jnp.mean(jnp.sin(x @ params["w"]) ** 2)
    return loss_fn, {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.ShapeDtypeStruct((256, 64), jnp.float32)

def pair():
    return 1, 2
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "planned.py").write_text(SUBJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("planned", None)


class TestPlan:
    def test_a_table_and_a_plot(self, folder, capsys):
        arguments = ["plan", "planned:subject", "--budget", "170KiB", "--candidates", "1,4,16", "--optimizer", "adam"]
        assert command_line.main([*arguments, "--plot", "plan.png"]) == 0
        output, progress = capsys.readouterr()
        assert re.search(r"^ *16 .* yes <-$", output, re.MULTILINE)
        assert re.search(r"16 microbatches: [0-9.]+ KiB", progress)
        assert (folder / "plan.png").stat().st_size > 10_000

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["planned"], "the target must be module:function"),
            (["missing:subject"], "No module named 'missing'"),
            (["planned:missing"], "has no attribute 'missing'"),
            (["planned:pair"], r"must give a tuple \(loss_fn, params, batch\); got tuple of 2"),
            (["planned:subject", "--budget", "1 B"], "nothing fits the budget of 1 B"),
            (["planned:subject", "--optimizer", "adamm"], "optax has no optimizer 'adamm'"),
            (["planned:subject", "--measure"], "measure=True runs the steps and needs arrays"),
        ],
    )
    def test_what_is_wrong_is_said_in_a_line(self, folder, capsys, arguments, text):
        assert command_line.main(["plan", *arguments]) == 1
        assert re.search(rf"^error: .*{text}", capsys.readouterr().err, re.MULTILINE)


class TestBench:
    def test_it_measures_and_writes(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setitem(models.BENCHMARK, "mlp", models.mlp)
        left_out = ["PyTorch", "PyTorch compiled", "unroll", "full batch", "funcgrad in jit"]
        arguments = ["bench", "--models", "mlp", "--microbatches", "4", "--rounds", "2", "--output", str(tmp_path)]
        assert command_line.main([*arguments, "--without", *left_out]) == 0
        rows = json.loads((tmp_path / f"{jax.devices()[0].platform}.json").read_text())["rows"]
        assert [row["contender"] for row in rows] == ["scan", "stream", "optax.MultiSteps", "train_step", "micro_steps"]
        assert min(row["ratio"] for row in rows[:2]) == 1.0
        assert all(row["seconds"] > 0 and row["temporary_bytes"] >= 0 for row in rows)
        table = (tmp_path / f"{jax.devices()[0].platform}.md").read_text()
        assert re.search(r"^\| train_step \| [0-9.]+ \([0-9.]+\) \|$", table, re.MULTILINE)
        assert (tmp_path / f"{jax.devices()[0].platform}.png").stat().st_size > 10_000
        assert "train_step" in capsys.readouterr().out

    def test_its_contenders_take_the_same_step(self):
        from contenders import jax_contenders

        model = models.mlp()
        losses = {}
        for name, make in jax_contenders(model, 4).items():
            result = jax.tree.leaves(make().run())
            losses[name] = [float(leaf) for leaf in result if leaf.shape == () and leaf.dtype == jnp.float32]
        whole = float(model.loss_fn(model.params, model.batch))
        for name in ("full batch", "scan", "unroll", "stream", "funcgrad in jit", "train_step"):
            assert any(abs(value - whole) <= 1e-5 for value in losses[name]), name
