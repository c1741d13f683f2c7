import os
import subprocess
import sys
from pathlib import Path


def test_eight_devices():
    """In a process of its own: the number of devices is fixed when JAX starts."""
    root = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "eight_devices.py")]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, cwd=root.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert "9 passed" in result.stdout
