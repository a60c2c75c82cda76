"""OpenSearch: the script that loads and the code that queries, against a small server that checks what it is sent."""

import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from export_samples import DIM, check_search, expected, queries, run_shown, sample

from shortlist import ExactIndex
from shortlist.data import Document
from shortlist.errors import DataError
from shortlist.indexes.export import export_index
from shortlist.indexes.exporters import opensearch

SCORES = {  # of the k-NN spaces, as OpenSearch documents them
    "innerproduct": lambda query, vector: (lambda s: s + 1 if s >= 0 else 1 / (1 - s))(float(vector @ query)),
    "l2": lambda query, vector: 1 / (1 + float(((vector - query) ** 2).sum())),
}
CHECKS = {
    "long": lambda value: type(value) is int and abs(value) < 2**63,
    "double": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
    "keyword": lambda value: type(value) is str,
}


def pairs(body):
    """The (action, source) pairs of a bulk body; raises where OpenSearch would refuse it."""
    assert body.endswith(b"\n") and b"\r" not in body
    lines = body[:-1].split(b"\n")
    assert len(lines) % 2 == 0
    for action, source in zip(lines[::2], lines[1::2], strict=True):
        (operation, details), *rest = json.loads(action).items()
        assert operation == "index" and not rest and 0 < len(details["_id"].encode()) <= 512
        yield details["_id"], json.loads(source, parse_constant=pytest.fail)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.mapping, self.documents, self.requests, self.refuse = None, {}, [], None
        self.url = f"http://127.0.0.1:{self.server_port}"

    def take(self, id, source):
        """None, or why the document does not fit the mapping."""
        if id == self.refuse:
            return "mapper_parsing_exception"
        properties = self.mapping["properties"]
        assert self.mapping["dynamic"] is False
        assert len(source["vector"]) == properties["vector"]["dimension"]
        assert all(np.isfinite(source["vector"])) and set(source) <= set(properties)
        fields = source.get("fields") or {}
        for name, value in fields.items():
            check = CHECKS[properties["fields"]["properties"][name]["type"]]
            assert all(map(check, value if isinstance(value, list) else [value]))
        self.documents[id] = source
        return None


class Handler(BaseHTTPRequestHandler):
    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        size = int(self.headers["Content-Length"])
        self.server.requests.append((self.command, self.path, size))
        return self.rfile.read(size)

    def do_PUT(self):
        value = json.loads(self.body())
        assert value["settings"]["index"]["knn"] is True
        self.server.mapping = value["mappings"]
        self.answer({"acknowledged": True})

    def do_POST(self):
        path = self.path.split("?")[0]
        if path.endswith("/_refresh"):
            self.answer({})
        elif path.endswith("/_bulk"):
            assert self.headers["Content-Type"] == "application/x-ndjson"
            errors = [self.server.take(id, source) for id, source in pairs(self.body())]
            failed = [{"index": {"error": {"type": error}}} for error in errors if error]
            self.answer({"errors": bool(failed), **({"items": failed} if failed else {})})
        else:
            asked = json.loads(self.body())
            query = asked["query"]["knn"]["vector"]
            vector = np.array(query["vector"], np.float32)
            space = self.server.mapping["properties"]["vector"]["method"]["space_type"]
            scored = [
                (SCORES[space](vector, np.array(source["vector"], np.float32)), source["id"])
                for source in self.server.documents.values()
            ]
            best = sorted(scored, reverse=True)[: min(query["k"], asked["size"])]
            self.answer({"hits": {"hits": [{"_score": score, "_source": {"id": id}} for score, id in best]}})

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OPENSEARCH_URL", server.url)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def load(directory):
    if not shutil.which("curl") or not shutil.which("bash"):
        pytest.skip("needs bash and curl")
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    return subprocess.run(
        ["bash", str(directory / "load.sh")], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_the_script_loads_every_document_and_searches_agree(metric, server, tmp_path, monkeypatch):
    monkeypatch.setattr(opensearch, "FILE_BYTES", 40_000)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    index = sample(metric=metric)
    export_index(index, "opensearch", tmp_path / "out")
    result = load(tmp_path / "out")
    assert result.returncode == 0, result.stderr
    bulk = [size for _, path, size in server.requests if "_bulk" in path]
    assert len(bulk) > 5 and all(size <= 40_000 for size in bulk[:1] + bulk[2:])
    found = {}
    for id, source in server.documents.items():
        assert source["id"] == id or len(source["id"].encode()) > 512
        found[source["id"]] = (source["title"], source["text"], source["fields"])
    assert found == expected(index)
    check_search(run_shown(tmp_path / "out", monkeypatch)["search"], index)


def test_a_refused_document_stops_the_script(server, tmp_path):
    index = sample()
    server.refuse = "doc 20"
    export_index(index, "opensearch", tmp_path / "out")
    result = load(tmp_path / "out")
    assert (
        result.returncode == 1 and "some documents were refused" in result.stderr and "mapper_parsing" in result.stderr
    )


def test_bulk_files_parse_and_end_below_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(opensearch, "FILE_BYTES", 40_000)
    index = sample()
    export_index(index, "opensearch", tmp_path / "out")
    files = sorted((tmp_path / "out").glob("bulk-*.ndjson"))
    assert len(files) > 5 and [file.name for file in files][:2] == ["bulk-00000.ndjson", "bulk-00001.ndjson"]
    found = [pair for file in files for pair in pairs(file.read_bytes())]
    assert [source["id"] for _, source in found] == list(index.ids)
    vectors = np.array([source["vector"] for _, source in found], np.float32)
    np.testing.assert_array_equal(vectors, np.vstack([block.vectors for block in index.blocks()]))
    assert all(file.stat().st_size <= 40_000 for file in files if sum(1 for _ in pairs(file.read_bytes())) > 1)


def test_ids_above_the_limit_of_an_id_are_hashed_and_named(tmp_path):
    index = ExactIndex(DIM)
    index.add(["日" * 171, "x" * 512], queries(2))
    (_, note) = export_index(index, "opensearch", tmp_path / "out").notes
    assert note.startswith("1 ids are longer than the 512 bytes")
    found = list(pairs((tmp_path / "out/bulk-00000.ndjson").read_bytes()))
    assert [source["id"] for _, source in found] == ["日" * 171, "x" * 512]
    assert len(found[0][0]) == 64 and found[1][0] == "x" * 512


def test_names_with_dots_become_plain_names(tmp_path):
    index = ExactIndex(2)
    fields = {"a.b": 1, "a": "x", "a_b": True, " ": 2.5}
    index.add(["d"], [[1.0, 0.0]], documents=[Document("d", "", "", fields)])
    (note,) = export_index(index, "opensearch", tmp_path / "out").notes
    assert "`a.b` is `a_b_`" in note
    mapping = json.loads((tmp_path / "out/index.json").read_text())["mappings"]["properties"]["fields"]["properties"]
    ((_, source),) = pairs((tmp_path / "out/bulk-00000.ndjson").read_bytes())
    assert source["fields"] == {"a_b_": 1, "a": "x", "a_b": True, "_": 2.5}
    assert {name: entry["type"] for name, entry in mapping.items()} == {
        "a_b_": "long", "a": "keyword", "a_b": "boolean", "_": "double",
    }  # fmt: skip


def test_a_document_above_the_limit_of_a_request_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(opensearch, "MAX_REQUEST", 10_000)
    index = ExactIndex(2)
    index.add(["small", "large"], np.eye(2), documents=[Document("small"), Document("large", "", "x" * 10_000)])
    with pytest.raises(DataError, match="document 'large' takes 10,.*--no-documents"):
        export_index(index, "opensearch", tmp_path / "out")
    assert not any(tmp_path.iterdir())
