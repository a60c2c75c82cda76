"""`python -m shortlist`, for launchers that start modules: `torchrun -m shortlist train …`."""

from shortlist.cli import main

if __name__ == "__main__":
    main()
