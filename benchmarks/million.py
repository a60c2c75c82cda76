"""Claim: a million documents go through encode → index → search in bounded anonymous memory, and a killed run
that is started again ends with the same bytes.

The collection is the text of --data repeated under new ids. Each command runs in a process of its own; RssAnon is
sampled from after the imports. Then `index` is killed at random moments, started again until it finishes, and its
files are compared with those of the run that nobody disturbed.

    python benchmarks/million.py --data DIR --documents 1000000 --kills 3 --output million.json
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path

from common import anonymous_mib, arguments, report

from shortlist.files import sha256


def write_collection(source: str, folder: Path, documents: int) -> None:
    from shortlist import load_collection

    collection = load_collection(source)
    texts = [(document.title, document.text) for document in collection.corpus]
    folder.mkdir(parents=True)
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as handle:
        for number in range(documents):
            title, text = texts[number % len(texts)]
            handle.write(json.dumps({"_id": f"copy-{number}", "title": title, "text": text}) + "\n")
    queries = list(collection.all_queries().items())[:1000]
    with open(folder / "queries.jsonl", "w", encoding="utf-8") as handle:
        for query, text in queries:
            handle.write(json.dumps({"_id": query, "text": text}) + "\n")
    (folder / "qrels").mkdir()
    with open(folder / "qrels" / "test.tsv", "w", encoding="utf-8") as handle:
        handle.write("query-id\tcorpus-id\tscore\n")
        for number, (query, _) in enumerate(queries):
            handle.write(f"{query}\tcopy-{number}\t1\n")


def child(command: list[str]) -> None:
    """Import everything, then run one command line and print the peak growth of RssAnon in MiB."""
    # The baseline is taken with everything loaded, as the claim says.
    for module in ("faiss", "shortlist.commands.encode", "shortlist.commands.index", "shortlist.commands.search"):
        import_module(module)
    from shortlist.cli import app

    base = peak = anonymous_mib()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, anonymous_mib())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    start = time.perf_counter()
    app(command, standalone_mode=False)
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "base_mib": base, "growth_mib": peak - base}) + "\n")


def run_child(command: list[str], cache: Path, *, kill_after: float | None = None) -> dict[str, float] | None:
    """Figures of the child, or None if it was killed first."""
    environment = {**os.environ, "SHORTLIST_CACHE": str(cache), "SHORTLIST_QUIET": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", *command], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        stdout, _ = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode:
        raise SystemExit(f"{command} failed with exit code {process.returncode}")
    return json.loads(stdout.strip().splitlines()[-1])


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but provenance.json, which holds the time of the build."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "provenance.json"]
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = arguments(__doc__)
    parser.add_argument("--data", default="scifact", help="collection whose texts are repeated")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder for the files [default: a temporary one]")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        root = Path(folder)
        write_collection(options.data, root / "data", options.documents)
        data, cache = str(root / "data"), root / "cache"
        steps = {
            "encode": ["encode", "--data", data, "-o", str(root / "vectors")],
            "index": ["index", "--data", data, "--vectors", str(root / "vectors"), "-o", str(root / "index")],
            "search": [
                "search", "--index", str(root / "index"), "--data", data, "--split", "test", "-k", "100",
                "-o", str(root / "out.run.gz"),
            ],
        }  # fmt: skip
        rows = []
        for name, command in steps.items():
            figures = run_child(command, cache)
            assert figures is not None
            rows.append({"step": name, **figures, "target_growth_mib": 1000})
            sys.stderr.write(f"{rows[-1]}\n")

        whole = ["index", "--data", data, "-o", str(root / "whole")]
        undisturbed = run_child(whole, cache)
        assert undisturbed is not None
        rows.append({"step": "encode and index", **undisturbed, "target_growth_mib": 1000})
        killed = ["index", "--data", data, "-o", str(root / "killed")]
        moments = []
        for _ in range(options.kills):
            moment = generator.uniform(0.1, 0.5) * (undisturbed["seconds"] + 5)
            if run_child(killed, cache, kill_after=moment) is not None:
                break
            moments.append(round(moment, 1))
        if not (root / "killed").exists():
            last = run_child(killed, cache)
            assert last is not None
            rows.append({"step": f"the same after {len(moments)} kills", **last})
        expected, found = checksums(root / "whole"), checksums(root / "killed")
        different = [name for name in expected | found if expected.get(name) != found.get(name)]
        report(
            "million", rows, options.output, documents=options.documents, killed_at_seconds=moments, different=different
        )
        if different:
            raise SystemExit("the resumed index differs from the undisturbed one")


if __name__ == "__main__":
    main()
