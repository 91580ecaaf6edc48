"""Rehearse an image's build without a container engine: `python -m tests.deploy.rehearse_image ROOT FILE`.

ROOT is a fresh root file system that stands for the base image (debootstrap makes one, with python3 and python3-venv).
The steps of the build stage, behind those of the stages that it is built on, run in it as root; then the result runs as
the image's user, with everything but /tmp and /dev/shm read-only: the image's program serves and answers one prompt.
Each --bind PATH is shown inside, for pip.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

from tests.deploy.charts import CLONE
from tests.deploy.images import Stage, ancestry, stages

SERVE = """
set -e
id -u
touch /opt/slipstream/written 2>/dev/null && { echo "the root is writable"; exit 1; }
slipstream serve --pair tiny --listen 127.0.0.1:50951 --threads 1 --max-seq-len 256 > /tmp/serve.log 2>&1 &
server=$!
for _ in $(seq 240); do
    if grep -q "^ready on" /tmp/serve.log; then break; fi
    kill -0 $server 2>/dev/null || { cat /tmp/serve.log; exit 1; }
    sleep 0.5
done
slipstream generate --server 127.0.0.1:50951 --max-tokens 8 hello
kill -TERM $server
wait $server
echo "served, answered, drained as $(id -u)"
"""


def inside(
    root: Path, script: str, *, directory: str, env: list[str], binds: list[str], user: str = ""
) -> None:
    """Run a script in the root, in mount and process namespaces of its own, so that nothing stays mounted."""
    mounts = ["set -e", f"mount --bind {root} {root}"]
    for path in ("/proc", "/sys", "/dev", "/etc/resolv.conf", *binds):
        target = f"{root}{path}"
        made = (
            f"mkdir -p {target}" if Path(path).is_dir() else f"mkdir -p $(dirname {target}); touch {target}"
        )
        mounts += [
            made,
            f"mount --rbind {path} {target}" if path != "/proc" else f"mount -t proc proc {target}",
        ]
    switch = ""
    if user:
        uid, _, gid = user.partition(":")
        mounts += [
            f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp",
            f"mount -o remount,ro,bind {root}",
        ]
        switch = f"--userspec={uid}:{gid} "
    command = shlex.join(["env", "-i", "LANG=C.UTF-8", *env, "/bin/sh", "-ec", f"cd {directory}\n{script}"])
    mounts.append(f"exec chroot {switch}{root} {command}")
    unshared = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(mounts)]
    subprocess.run(unshared, check=True)


def build(root: Path, stage: Stage, binds: list[str]) -> None:
    env, directory = ["PATH=/usr/bin:/bin:/usr/sbin:/sbin", "HOME=/root"], "/"
    for instruction, text in stage.steps:
        print(f"{instruction} {text}", flush=True)
        match instruction:
            case "WORKDIR":
                directory = text
                (root / directory.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "ENV" | "ARG":
                env += [entry.replace('""', "") for entry in shlex.split(text, posix=False)]
            case "COPY":
                *sources, target = text.split()
                for source in sources:
                    into = root / directory.lstrip("/") / target
                    if (CLONE / source).is_dir():
                        shutil.copytree(CLONE / source, into, dirs_exist_ok=True)
                    else:
                        into.mkdir(parents=True, exist_ok=True)
                        shutil.copy(CLONE / source, into)
            case "RUN":
                inside(root, text, directory=directory, env=env, binds=binds)
            case _:
                raise SystemExit(f"cannot rehearse {instruction}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--built", action="store_true", help="ROOT has been built in already; only run it")
    options = parser.parse_args()
    root = options.root.resolve()
    _, found = stages(options.file)
    last = found[-1]
    if not options.built:
        for stage in ancestry(found, "build"):
            build(root, stage, options.bind)
        shutil.rmtree(root / "src")
        for step in last.all("RUN"):
            inside(root, step, directory="/", env=["PATH=/usr/bin:/bin:/usr/sbin:/sbin"], binds=[])
    env = [entry.replace("$PATH", "/usr/bin:/bin") for step in last.all("ENV") for entry in step.split()]
    inside(root, SERVE, directory="/tmp", env=env, binds=[], user=last.all("USER")[0])


if __name__ == "__main__":
    main()
