import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shortlist.data import download as module
from shortlist.data.download import download
from shortlist.data.registry import REGISTRY, DataSetInfo, Source
from shortlist.errors import ConfigError, DataError, MissingInputError

NAME = "toy-set"
FILES = {"corpus.jsonl": b'{"_id": "d1"}\n' * 3000, "qrels/test.tsv": b"q1\td1\t1\n"}


class Mirror(ThreadingHTTPServer):
    """A file server that keeps the Range headers it got, and can lack ranges or break off."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.ranges, self.supports_range, self.break_after = files, [], True, []

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        body = self.server.files.get(self.path.strip("/"))
        if body is None:
            self.send_error(404)
            return
        etag = f'"{hashlib.md5(body).hexdigest()}"'
        start = 0
        fresh = self.headers.get("If-Range") in (None, etag)
        if asked and self.server.supports_range and fresh:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", etag)
        self.end_headers()
        sent = body[start:]
        if self.server.break_after:
            sent = sent[: self.server.break_after.pop(0)]
        self.wfile.write(sent)

    def log_message(self, *arguments):
        pass


def zipped(files, top="toy-set/"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(top + name, content)
    return buffer.getvalue()


@pytest.fixture
def mirror(monkeypatch):
    archive = zipped(FILES)
    server = Mirror({"toy-set.zip": archive})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    source = Source(server.url("toy-set.zip"), hashlib.md5(archive).hexdigest())
    register(monkeypatch, DataSetInfo(NAME, sources=(source,)))
    yield server
    server.shutdown()
    server.server_close()


def register(monkeypatch, info):
    monkeypatch.setitem(REGISTRY, info.name, info)
    monkeypatch.setattr(module, "find", lambda name: REGISTRY[name])


def installed(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_fetches_unpacks_and_leaves_nothing_else(mirror, tmp_path):
    folder = download(NAME, root=tmp_path)
    assert folder == tmp_path / NAME
    assert installed(folder) == FILES
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_a_set_that_is_there_is_not_fetched_again(mirror, tmp_path):
    download(NAME, root=tmp_path)
    download(NAME, root=tmp_path)
    assert len(mirror.ranges) == 1


def test_continues_in_the_same_call_when_the_connection_breaks(mirror, tmp_path):
    mirror.break_after = [100, 50]
    assert installed(download(NAME, root=tmp_path)) == FILES
    assert mirror.ranges == [None, "bytes=100-", "bytes=150-"]


def test_a_later_call_continues_a_partial_file(mirror, tmp_path):
    mirror.break_after = [100, 0, 0, 0]
    with pytest.raises(MissingInputError):
        download(NAME, root=tmp_path)
    assert (tmp_path / "toy-set.zip.part").stat().st_size == 100
    assert not (tmp_path / NAME).exists()
    mirror.ranges.clear()
    assert installed(download(NAME, root=tmp_path)) == FILES
    assert mirror.ranges == ["bytes=100-"]


def test_starts_over_on_a_server_without_ranges(mirror, tmp_path):
    mirror.supports_range = False
    mirror.break_after = [100]
    assert installed(download(NAME, root=tmp_path)) == FILES
    assert mirror.ranges == [None, "bytes=100-"]


def test_starts_over_when_the_file_on_the_server_has_changed(mirror, tmp_path):
    mirror.break_after = [100, 0, 0, 0]
    with pytest.raises(MissingInputError):
        download(NAME, root=tmp_path)
    other = {"corpus.jsonl": b"other\n" * 100}
    mirror.files["toy-set.zip"] = zipped(other)
    folder = download(NAME, root=tmp_path, md5=hashlib.md5(zipped(other)).hexdigest())
    assert installed(folder) == other


def test_wrong_checksum_is_never_installed_and_says_both(mirror, tmp_path):
    expected = REGISTRY[NAME].md5
    mirror.files["toy-set.zip"] = zipped({"corpus.jsonl": b"tampered"})
    found = hashlib.md5(mirror.files["toy-set.zip"]).hexdigest()
    with pytest.raises(DataError, match=f"expected MD5 {expected}, found {found}"):
        download(NAME, root=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["toy-set.zip.bad"]


@pytest.mark.parametrize("member", ["../evil.txt", "/etc/evil.txt", "toy-set/../../evil.txt", "c:\\evil.txt"])
def test_zip_members_cannot_leave_the_folder(mirror, tmp_path, member):
    body = zipped({member: b"x", "ok.txt": b"x"}, top="")
    mirror.files["toy-set.zip"] = body
    with pytest.raises(DataError, match="outside the target folder"):
        download(NAME, root=tmp_path / "root", md5=hashlib.md5(body).hexdigest())
    assert not list(tmp_path.rglob("*evil*")) and not (tmp_path / "root" / NAME).exists()


def tarred(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_tar_archives_are_unpacked_and_their_links_refused(mirror, tmp_path):
    good = tarred((tarfile.TarInfo("corpus.jsonl"), b"a\n"), (tarfile.TarInfo("qrels/dev.tsv"), b"b\n"))
    mirror.files["good.tar.gz"] = good
    folder = download(NAME, root=tmp_path / "a", url=mirror.url("good.tar.gz"), md5=hashlib.md5(good).hexdigest())
    assert installed(folder) == {"corpus.jsonl": b"a\n", "qrels/dev.tsv": b"b\n"}
    link = tarfile.TarInfo("corpus.jsonl")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    bad = tarred((link, b""))
    mirror.files["bad.tar.gz"] = bad
    with pytest.raises(DataError, match="is a link"):
        download(NAME, root=tmp_path / "b", url=mirror.url("bad.tar.gz"), md5=hashlib.md5(bad).hexdigest())


def test_several_files_are_installed_under_their_names(mirror, tmp_path, monkeypatch):
    mirror.files["2019qrels.txt"] = b"q1 0 d1 2\n"
    sources = (*REGISTRY[NAME].sources, Source(mirror.url("2019qrels.txt"), target="qrels.test.tsv"))
    register(monkeypatch, DataSetInfo(NAME, sources=sources))
    assert installed(download(NAME, root=tmp_path)) == {**FILES, "qrels.test.tsv": b"q1 0 d1 2\n"}


def test_a_web_page_instead_of_an_archive_is_named_as_such(mirror, tmp_path, monkeypatch):
    mirror.files["page"] = b"<!DOCTYPE html><html>quota exceeded</html>"
    register(monkeypatch, DataSetInfo(NAME, sources=(Source(mirror.url("page")),)))
    with pytest.raises(DataError, match="neither a zip nor a tar.*DOCTYPE"):
        download(NAME, root=tmp_path)
    assert not (tmp_path / NAME).exists()


def test_without_a_network_says_where_to_put_the_file_and_takes_it_from_there(mirror, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/toy-set.zip"
    place = tmp_path / "toy-set.zip"
    with pytest.raises(MissingInputError, match="no network") as refused:
        download(NAME, root=tmp_path, url=url)
    assert str(place) in str(refused.value) and refused.value.exit_code == 4
    place.write_bytes(mirror.files["toy-set.zip"])
    assert installed(download(NAME, root=tmp_path, url=url)) == FILES


def test_missing_file_on_the_server_names_the_answer(mirror, tmp_path):
    with pytest.raises(MissingInputError, match="answered 404"):
        download(NAME, root=tmp_path, url=mirror.url("gone.zip"))


def test_licensed_sets_and_odd_addresses_are_refused(tmp_path):
    with pytest.raises(MissingInputError, match="no public mirror"):
        download("robust04", root=tmp_path)
    with pytest.raises(ConfigError, match="http"):
        download("scifact", root=tmp_path, url="file:///etc/passwd")


def test_a_forum_of_cqadupstack_comes_from_the_common_archive(mirror, tmp_path):
    body = zipped({"android/corpus.jsonl": b"x\n", "tex/corpus.jsonl": b"y\n"}, top="cqadupstack/")
    mirror.files["cqadupstack.zip"] = body
    folder = module.download(
        "cqadupstack/tex", root=tmp_path, url=mirror.url("cqadupstack.zip"), md5=hashlib.md5(body).hexdigest()
    )
    assert folder == tmp_path / "cqadupstack" / "tex" and installed(folder) == {"corpus.jsonl": b"y\n"}
