"""Claim: the command line answers --help in under 0.3 s and `import shortlist` takes under 0.2 s.

Whole-process wall time, median of several runs after a warm-up, beside an empty Python process and the
sentence-transformers import.

    python benchmarks/startup.py --output startup.json
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import arguments, median, report


def seconds(command: list[str], runs: int) -> float:
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=11)
    options = parser.parse_args()
    script = shutil.which("shortlist", path=str(Path(sys.executable).parent)) or "shortlist"
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import shortlist": [sys.executable, "-c", "import shortlist"],
        "shortlist --help": [script, "--help"],
        "shortlist search --help": [script, "search", "--help"],
        "import sentence_transformers": [sys.executable, "-c", "import sentence_transformers"],
    }
    limits = {"import shortlist": 0.2, "shortlist --help": 0.3, "shortlist search --help": 0.3}
    rows = [
        {"process": name, "seconds": seconds(command, options.runs), "target": limits.get(name)}
        for name, command in commands.items()
    ]
    report("startup", rows, options.output)


if __name__ == "__main__":
    main()
