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

from shortlist.indexes.specs import SearchSettings, clusters, default_probes

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
ivf-pq    busy = measured in a batch + further codes visited x seconds a code + further centroids x seconds a vector
hnsw      busy = measured in a batch x ln(documents of a machine) / ln(documents measured): at the least
both      latency = what a single call costs more than one in a batch + busy + k' random reads of 0.1 ms (ivf-pq)
          throughput = 16 / busy, for every query keeps one core of every machine busy
encode    = documents / (documents a second of a core x 16 x machines)
build     = documents x seconds a vector / (16 x machines); for hnsw grown by the same logarithm, at the least"""


def measure(count: int, model: str | None) -> dict:
    """Bytes, speeds and build times of each kind on one core."""
    import torch

    torch.set_num_threads(1)
    constants: dict = {"documents": count, "kinds": {kind: {} for kind in KINDS}}
    for dim in (256, 768):
        vectors = clustered(count, dim)
        for kind in KINDS:
            constants["kinds"][kind][str(dim)] = measure_kind(kind, vectors)
    constants["encode"] = {"static": encode_speed("shortlist/static-en", 20_000)}
    if model is not None:
        constants["encode"]["transformer"] = encode_speed(model, 300)
    return constants


def measure_kind(kind: str, vectors: np.ndarray) -> dict:
    from dataclasses import replace

    from shortlist.indexes import build_index, open_index

    count, dim = vectors.shape
    ids = [f"document-{number}" for number in range(count)]
    queries = np.ascontiguousarray(vectors[:: count // 256][:256] + np.float32(0.01))
    batch = np.tile(queries, (BATCH // len(queries), 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        start = time.process_time()
        build_index(path, [(ids, vectors)], dim=dim, spec=kind, count=count)
        seconds = time.process_time() - start
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        index = open_index(path, device="cpu")
        figures = {
            "bytes": size / count, "build_us": seconds / count * 1e6,
            "one_ms": best(lambda: index.search_arrays(queries[:1], K), 15) * 1e3,
            "batch_ms": best(lambda: index.search_arrays(batch, K), 2) / BATCH * 1e3,
        }  # fmt: skip
        if kind == "ivf-pq":
            # All clusters against the default ones: what one code more costs.
            nlist = clusters(count)
            visited = count * default_probes(nlist) / nlist
            index.settings = replace(index.settings, nprobe=nlist)
            every = best(lambda: index.search_arrays(batch, K), 2) / BATCH * 1e3
            figures["code_ns"] = max(0.0, (every - figures["batch_ms"]) / (count - visited) * 1e6)
    return figures


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
    measured, count = constants["kinds"][kind], constants["documents"]
    disk = linear(measured, "bytes", dim)
    resident = {"exact": 4 * dim, "exact:int8": dim, "ivf-pq": dim / 4 + 8}.get(kind, disk)
    machines = max(1, math.ceil(documents * resident / (MEMORY * USABLE)))
    share = documents / machines
    if kind.startswith("exact"):
        speed = count * resident / (linear(measured, "one_ms", dim) / 1e3)  # bytes a second of a core
        latency = share * resident / min(CORES * speed, BANDWIDTH)
        rate = CORES * machines * count / (linear(measured, "batch_ms", dim) / 1e3) / documents
    else:
        batch, call = (linear(measured, key, dim) / 1e3 for key in ("batch_ms", "one_ms"))
        if kind == "ivf-pq":
            code = linear(measured, "code_ns", dim) / 1e9
            centroid = linear(constants["kinds"]["exact"], "batch_ms", dim) / 1e3 / count
            here, there = clusters(count), clusters(int(share))
            codes = share * default_probes(there) / there - count * default_probes(here) / here
            busy = batch + codes * code + (there - here) * centroid
            reads = SearchSettings().candidates(K) * READ_SECONDS
        else:
            busy, reads = batch * math.log(share) / math.log(count), 0.0
        latency, rate = max(call - batch, 0.0) + busy + reads, CORES / busy
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
