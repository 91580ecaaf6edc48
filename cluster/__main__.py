"""`python -m cluster` is `slipstream`, for places where nothing is installed, such as a submitted Ray job."""

from cluster.cli import main

if __name__ == "__main__":
    main()
