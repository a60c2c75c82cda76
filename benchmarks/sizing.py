"""What 10 million, 100 million and 1 billion vectors need: bytes, machines, latency, throughput, hours to build.

The constants are measured on this machine, in processor time of one core, or read from the JSON of an earlier run
(--constants); the table is computed from them by the formulas that are printed with it. Assumed, not measured: machines
of 64 GB and 16 cores, 80 % of the memory usable, 100 GB/s of memory bandwidth a machine, 0.1 ms a random read.

    OMP_NUM_THREADS=1 python benchmarks/sizing.py --output sizing.json
    python benchmarks/sizing.py --constants sizing.json
"""

import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
from common import arguments, report

DOCUMENTS = (10_000_000, 100_000_000, 1_000_000_000)
DIMS = (256, 384, 768, 1024)
KINDS = ("exact", "exact:int8", "ivf-pq", "hnsw")
MEMORY, CORES, USABLE = 64e9, 16, 0.8
BANDWIDTH, READ_SECONDS = 100e9, 1e-4
K, BATCH = 10, 1024

FORMULAS = """disk      = documents x bytes a vector on disk (measured at two dimensions, linear in between)
memory    = documents x bytes that a search keeps busy: exact 4d; exact:int8 d; ivf-pq d/4 + 8; hnsw as on disk
machines  = memory / (64 GB x 0.8), rounded up; the parts of the index are spread over them
exact     latency = bytes of a machine / min(16 x scan speed of a core, 100 GB/s)
          throughput = 16 x machines x multiply-adds a second of a core in batches of 1,024 / (d x documents)
ivf-pq    latency = codes visited by one query on a machine / speed of a core + k' random reads of 0.1 ms
          throughput = 16 / (seconds that a query keeps a core of every machine busy, reads excluded)
hnsw      latency = measured x ln(documents of a machine) / ln(documents measured); throughput = 16 / latency
encode    = documents / (documents a second of a core x 16 x machines)
build     = documents x seconds a vector / (16 x machines); for hnsw grown by the same logarithm"""


def measure(count: int, model: str | None) -> dict:
    """Bytes, speeds and build times of each kind on one core."""
    import torch

    from shortlist.indexes import build_index, open_index

    torch.set_num_threads(1)
    constants: dict = {"documents": count, "kinds": {}}
    for dim in (256, 768):
        vectors = clustered(count, dim)
        ids = [f"document-{number}" for number in range(count)]
        queries = np.ascontiguousarray(vectors[:: count // 256][:256] + np.float32(0.01))
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "index"
                start = time.process_time()
                build_index(path, [(ids, vectors)], dim=dim, spec=kind, count=count)
                seconds = time.process_time() - start
                size = sum(
                    file.stat().st_size for file in path.rglob("*") if file.is_file() and "docs" not in file.name
                )
                index = open_index(path, device="cpu")
                one = best(lambda index=index, queries=queries: index.search_arrays(queries[:1], K), 15)
                batch = np.tile(queries, (BATCH // len(queries), 1))
                many = best(lambda index=index, batch=batch: index.search_arrays(batch, K), 2) / BATCH
                constants["kinds"].setdefault(kind, {})[str(dim)] = {
                    "bytes": size / count, "build_us": seconds / count * 1e6, "one_ms": one * 1e3,
                    "batch_ms": many * 1e3,
                }  # fmt: skip
    constants["encode"] = {"static": encode_speed("shortlist/static-en", 20_000)}
    if model is not None:
        constants["encode"]["transformer"] = encode_speed(model, 300)
    return constants


def clustered(count: int, dim: int) -> np.ndarray:
    random = np.random.default_rng(0)
    centres = random.standard_normal((max(1, count // 100), dim)).astype(np.float32)
    vectors = centres[random.integers(0, len(centres), count)] + random.standard_normal((count, dim), np.float32) * 0.7
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def best(function, rounds: int) -> float:
    """Processor seconds, so that a busy machine does not enter."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def encode_speed(model: str, texts: int) -> float:
    """Documents a second of one core, on the titles and abstracts of the embedded collection."""
    from shortlist import DualEncoder, load_collection

    encoder = DualEncoder.from_pretrained(model, device="cpu")
    documents = list(load_collection("scifact").corpus.texts())
    sample = (documents * (1 + texts // len(documents)))[:texts]
    encoder.encode_documents(sample[:64])
    return len(sample) / best(lambda: encoder.encode_documents(sample), 1)


def linear(measured: dict, key: str, dim: int) -> float:
    """`key` at `dim`, from its values at the two measured dimensions."""
    low, high = measured["256"][key], measured["768"][key]
    return max(low + (high - low) * (dim - 256) / 512, 0.0)


def requirements(constants: dict, kind: str, documents: int, dim: int) -> dict:
    from shortlist.indexes.specs import SearchSettings, clusters, default_probes

    measured, count = constants["kinds"][kind], constants["documents"]
    disk = linear(measured, "bytes", dim)
    resident = {"exact": 4 * dim, "exact:int8": dim, "ivf-pq": dim / 4 + 8}.get(kind, disk)
    machines = max(1, math.ceil(documents * resident / (MEMORY * USABLE)))
    share = documents / machines
    if kind.startswith("exact"):
        speed = count * resident / (linear(measured, "one_ms", dim) / 1e3)  # bytes a second of a core
        latency = share * resident / min(CORES * speed, BANDWIDTH)
        rate = CORES * machines * count / (linear(measured, "batch_ms", dim) / 1e3) / documents
    elif kind == "ivf-pq":
        nlist = clusters(count)
        visited = count * default_probes(nlist) / nlist
        part = clusters(int(share))
        codes = share * default_probes(part) / part
        busy = linear(measured, "one_ms", dim) / 1e3 * codes / visited
        latency = busy + SearchSettings().candidates(K) * READ_SECONDS
        rate = CORES / busy
    else:
        busy = linear(measured, "one_ms", dim) / 1e3 * math.log(share) / math.log(count)
        latency, rate = busy, CORES / busy
    growth = math.log(share) / math.log(count) if kind == "hnsw" else 1.0
    build = documents * linear(measured, "build_us", dim) / 1e6 * growth / (CORES * machines) / 3600
    return {
        "documents": f"{documents / 1e6:,.0f} M",
        "dim": dim,
        "index": kind,
        "disk GB": round(documents * disk / 1e9, 1),
        "memory GB": round(documents * resident / 1e9, 1),
        "machines": machines,
        "latency ms": float(f"{latency * 1e3:.2g}"),
        "queries/s": float(f"{rate:.2g}"),
        "build h": float(f"{build:.2g}"),
        "encode h": float(f"{documents / (constants['encode']['static'] * CORES * machines) / 3600:.2g}"),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--constants", type=Path, help="JSON of an earlier run, instead of measuring")
    parser.add_argument("--documents", type=int, default=50_000, help="vectors to measure with")
    parser.add_argument("--model", help="a transformer whose encoding speed is measured too")
    options = parser.parse_args()
    if options.constants is not None:
        constants = json.loads(options.constants.read_text(encoding="utf-8"))["constants"]
    else:
        constants = measure(options.documents, options.model)
    print(FORMULAS, end="\n\n")
    rows = [
        {
            "index": kind, "dim": int(dim), "bytes a vector": round(values["bytes"], 1),
            "build us a vector": round(values["build_us"], 1), "one query ms": round(values["one_ms"], 3),
            "in a batch ms": round(values["batch_ms"], 3),
        }
        for kind, by_dim in constants["kinds"].items() for dim, values in by_dim.items()
    ]  # fmt: skip
    report(f"measured on one core with {constants['documents']:,} vectors", rows, None)
    speeds = [{"encoder": name, "documents/s a core": round(rate)} for name, rate in constants["encode"].items()]
    report("encoding", speeds, None)
    table = [requirements(constants, kind, documents, dim) for documents in DOCUMENTS for dim in DIMS for kind in KINDS]
    report("sizing", table, options.output, constants=constants)


if __name__ == "__main__":
    main()
