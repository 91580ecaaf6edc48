"""`python -m cluster` is `slipstream`, for places where nothing is installed, such as a submitted Ray job.

There `python` is whatever Ray's own PATH finds, which may be another than the one that Ray itself runs with.
"""

import sys

try:
    from cluster.cli import main
except ModuleNotFoundError as missing:
    sys.exit(
        f"error: {sys.executable} has no module {missing.name!r}: it is not the Python that Slipstream was installed "
        "for. In a Ray job: put that environment's bin first on PATH (source .venv/bin/activate) before 'ray start'"
    )

if __name__ == "__main__":
    main()
