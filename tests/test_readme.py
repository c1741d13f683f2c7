import re
from pathlib import Path

import jax
import pytest
from comparison import FLOAT32_TOLERANCE, relative_difference

ROOT = Path(__file__).parent.parent


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def namespace():
    """What the README's Python blocks, run one after the other, leave behind."""
    names = {}
    code = "\n".join(blocks("python"))
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_python_blocks_run_and_say_the_truth(namespace):
    assert len(blocks("python")) >= 9
    assert namespace["metrics"]["weight"] == 256
    assert namespace["aux"]["rows"] == 256
    assert namespace["state"].step == 2


def test_the_drop_in_equals_jax(namespace):
    fg, params, batch = namespace["fg"], namespace["params"], namespace["batch"]
    got = jax.jit(fg.value_and_grad(namespace["loss_fn"], num_microbatches=8))(params, batch)
    assert relative_difference(got, jax.value_and_grad(namespace["loss_fn"])(params, batch)) <= FLOAT32_TOLERANCE


def test_commands_set_up_all_they_need():
    commands = blocks("sh")
    assert len(commands) == 2
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")
    assert "examples/digits.py" in commands[0]
    assert "pytest" in commands[1]


def test_the_implicit_face_trains(namespace):
    out = namespace["weights"]["out"]
    assert out.grad.shape == (32,)
    assert float(abs(out.data - 1 / 32).max()) > 1e-3


def test_every_public_name_is_in_the_readme():
    import funcgrad as fg

    text = (ROOT / "README.md").read_text()
    missing = [name for name in fg.__all__ if f"fg.{name}" not in text and name not in ("GradBuffer", "Steps")]
    assert missing == []
