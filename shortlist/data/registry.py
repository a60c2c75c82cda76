"""The data sets the package knows by name: how each is judged, measured, filtered, and where it is fetched.

One literal dictionary. Sizes are those published with the data set; a checksum stands only where the publisher
or two independent projects state it. A folder is recognised by its name (`lookup`), so a downloaded BEIR folder
called `arguana` is judged as ArguAna is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import PurePath

from shortlist.errors import ConfigError

BEIR_MEASURES = ("nDCG@10", "R@100")
MSMARCO_MEASURES = ("RR@10", "R@1000")
TREC_DL_MEASURES = ("nDCG@10", "AP(rel=2)", "R(rel=2)@1000")
XC_MEASURES = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@100")
XC_FILTERS = ("filter_labels_train.txt", "filter_labels_test.txt")

# Propensity parameters (A, B) of Jain et al. 2016, by family of label set.
AMAZON, WIKIPEDIA, OTHER = (0.6, 2.6), (0.5, 0.4), (0.55, 1.5)
FAMILIES = {"other": OTHER, "amazon": AMAZON, "wikipedia": WIKIPEDIA}


@dataclass(frozen=True, slots=True)
class Source:
    """One file to fetch: its address, its MD5 where known, and the name it gets if it is not an archive."""

    url: str
    md5: str | None = None
    target: str = ""


@dataclass(frozen=True, slots=True)
class DataSetInfo:
    """What is known about one named data set.

    Attributes:
        kind: `beir`, `msmarco` or `xc`, as Collection.kind.
        default_split: the split that results are reported on.
        exclude_self: a query's own id is removed from its results before measuring (queries are documents too).
        documents, queries: published sizes (labels and test points for XC); None where not published.
        train_queries: published number of training points, for XC.
        propensity: (A, B) for PSP@k.
        filters: files of (point, label) pairs that must never be predicted; without them the numbers are wrong.
        titles_only: the data set is defined on titles, although the archive also holds bodies.
        sources: files to fetch; empty when no public mirror carries the data set, `notes` then says why.
        version: which of several incompatible versions this is.
        members: names of the data sets this one is the union of.
    """

    name: str
    kind: str = "beir"
    default_split: str = "test"
    exclude_self: bool = False
    measures: tuple[str, ...] = BEIR_MEASURES
    documents: int | None = None
    queries: int | None = None
    train_queries: int | None = None
    propensity: tuple[float, float] | None = None
    filters: tuple[str, ...] = ()
    titles_only: bool = False
    sources: tuple[Source, ...] = ()
    version: str | None = None
    members: tuple[str, ...] = ()
    notes: str = ""

    @property
    def url(self) -> str | None:
        """Address of the first file, None if there is no public mirror."""
        return self.sources[0].url if self.sources else None

    @property
    def md5(self) -> str | None:
        """MD5 of the first file, None where it is not known."""
        return self.sources[0].md5 if self.sources else None


def _beir(archive: str, md5: str) -> tuple[Source, ...]:
    return (Source(f"https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets/{archive}.zip", md5),)


def _msmarco(path: str, md5: str | None = None, target: str = "") -> Source:
    return Source(f"https://msmarco.z22.web.core.windows.net/msmarcoranking/{path}", md5, target)


def _drive(file_id: str) -> tuple[Source, ...]:
    return (Source(f"https://drive.usercontent.google.com/download?id={file_id}&export=download&confirm=t"),)


_LICENSED = "The documents are licensed by their owner; get them there and build the folder by BEIR's instructions."
_CQA = _beir("cqadupstack", "4e41456d7df8ee7760a7f866133bda78")
_MSMARCO_PASSAGES = _msmarco("collectionandqueries.tar.gz", "31644046b18952c1386cd4564ba2ae69")
_AMAZON_131K = _drive("1WuquxCAg8D4lKr-eZXPv4nNw2S2lm7_E")
_AMAZON_1300K = _drive("12zH4mL2RX8iSvH0VCNnd3QxO4DzuHWnK")
_SEE_ALSO = _drive("1QZD4dFVxDpskCI2kGH9IbzgQR1JSZT-N")

_CQA_SIZES = {
    "android": (22_998, 699), "english": (40_221, 1_570), "gaming": (45_301, 1_595), "gis": (37_637, 885),
    "mathematica": (16_705, 804), "physics": (38_316, 1_039), "programmers": (32_176, 876), "stats": (42_269, 652),
    "tex": (68_184, 2_906), "unix": (47_382, 1_072), "webmasters": (17_405, 506), "wordpress": (48_605, 541),
}  # fmt: skip

_DATA_SETS = (
    # BEIR (Thakur et al. 2021): sizes and MD5 sums from the table in its README.
    DataSetInfo(
        "msmarco", default_split="dev", measures=MSMARCO_MEASURES, documents=8_841_823, queries=6_980,
        sources=_beir("msmarco", "444067daf65d982533ea17ebd59501e4"),
        notes="Judged on dev (6,980 queries); the test split is TREC DL 2019, 43 queries.",
    ),
    DataSetInfo(
        "trec-covid", documents=171_332, queries=50, sources=_beir("trec-covid", "ce62140cb23feb9becf6270d0d1fe6d1"),
    ),
    DataSetInfo(
        "nfcorpus", documents=3_633, queries=323, sources=_beir("nfcorpus", "a89dba18a62ef92f7d323ec890a0d38d"),
    ),
    DataSetInfo("bioasq", documents=14_914_602, queries=500, notes=_LICENSED),
    DataSetInfo("nq", documents=2_681_468, queries=3_452, sources=_beir("nq", "d4d3d2e48787a744b6f6e691ff534307")),
    DataSetInfo(
        "hotpotqa", documents=5_233_329, queries=7_405, sources=_beir("hotpotqa", "f412724f78b0d91183a0e86805e16114"),
    ),
    DataSetInfo("fiqa", documents=57_638, queries=648, sources=_beir("fiqa", "17918ed23cd04fb15047f73e6c3bd9d9")),
    DataSetInfo("signal1m", documents=2_866_316, queries=97, notes=_LICENSED),
    DataSetInfo("trec-news", documents=594_977, queries=57, notes=_LICENSED),
    DataSetInfo("robust04", documents=528_155, queries=249, notes=_LICENSED),
    DataSetInfo(
        "arguana", exclude_self=True, documents=8_674, queries=1_406,
        sources=_beir("arguana", "8ad3e3c2a5867cdced806d6503f29b99"),
        notes="Every query is a document of the corpus: its own id is removed before measuring.",
    ),
    DataSetInfo(
        "webis-touche2020", documents=382_545, queries=49, version="2",
        sources=_beir("webis-touche2020", "46f650ba5a527fc69e0a6521c5a23563"),
        notes="Version 2 of the judgements; scores differ by up to 25 points from version 1 (another archive).",
    ),
    DataSetInfo(
        "cqadupstack", documents=457_199, queries=13_145, sources=_CQA,
        members=tuple(f"cqadupstack/{forum}" for forum in _CQA_SIZES),
        notes="Twelve collections, searched one by one; the reported figure is the mean over the twelve.",
    ),
    *(
        DataSetInfo(f"cqadupstack/{forum}", documents=documents, queries=queries, sources=_CQA)
        for forum, (documents, queries) in _CQA_SIZES.items()
    ),
    DataSetInfo(
        "quora", exclude_self=True, documents=522_931, queries=10_000,
        sources=_beir("quora", "18fb154900ba42a600f84b839c173167"),
        notes="Queries are documents of the corpus: a query's own id is removed before measuring.",
    ),
    DataSetInfo(
        "dbpedia-entity", documents=4_635_922, queries=400,
        sources=_beir("dbpedia-entity", "c2a39eb420a3164af735795df012ac2c"),
    ),
    DataSetInfo(
        "scidocs", documents=25_657, queries=1_000, sources=_beir("scidocs", "38121350fc3a4d2f48850f6aff52e4a9"),
    ),
    DataSetInfo(
        "fever", documents=5_416_568, queries=6_666, sources=_beir("fever", "5a818580227bfb4b35bb6fa46d9b6c03"),
    ),
    DataSetInfo(
        "climate-fever", documents=5_416_593, queries=1_535,
        sources=_beir("climate-fever", "8b66f0a9126c521bae2bde127b4dc99d"),
    ),
    DataSetInfo(
        "scifact", documents=5_183, queries=300, sources=_beir("scifact", "5f7d1de60b170fc8027bb7898e2efca1"),
        notes="A copy comes with the package: the plain name `scifact` opens it with nothing downloaded.",
    ),
    # MS MARCO and TREC Deep Learning as the organisers distribute them.
    DataSetInfo(
        "msmarco-passage", "msmarco", "dev", measures=MSMARCO_MEASURES, documents=8_841_823, queries=6_980,
        sources=(_MSMARCO_PASSAGES, _msmarco("qrels.train.tsv", "733fb9fe12d93e497f7289409316eccf", "qrels.train.tsv")),
        notes="The 6,980 queries are qrels.dev.small.tsv.",
    ),
    DataSetInfo(
        "trec-dl-2019", "msmarco", measures=TREC_DL_MEASURES, documents=8_841_823, queries=43,
        sources=(
            _MSMARCO_PASSAGES,
            _msmarco("msmarco-test2019-queries.tsv.gz", "eda71eccbe4d251af83150abe065368c", "queries.test.tsv.gz"),
            Source("https://trec.nist.gov/data/deep/2019qrels-pass.txt", "2f4be390198da108f6845c822e5ada14",
                   "qrels.test.tsv"),
        ),
        notes="200 queries, 43 of them judged. Grade 1 counts as not relevant in AP and R, hence rel=2.",
    ),
    DataSetInfo(
        "trec-dl-2020", "msmarco", measures=TREC_DL_MEASURES, documents=8_841_823, queries=54,
        sources=(
            _MSMARCO_PASSAGES,
            _msmarco("msmarco-test2020-queries.tsv.gz", "00a406fb0d14ed3752d70d1e4eb98600", "queries.test.tsv.gz"),
            Source("https://trec.nist.gov/data/deep/2020qrels-pass.txt", "0355ccee7509ac0463e8278186cdd8d1",
                   "qrels.test.tsv"),
        ),
        notes="200 queries, 54 of them judged. Grade 1 counts as not relevant in AP and R, hence rel=2.",
    ),
    # The Extreme Classification Repository (Bhatia et al. 2016); it publishes no checksums.
    DataSetInfo(
        "EURLex-4K", "xc", measures=XC_MEASURES, documents=3_956, queries=3_865, train_queries=15_449,
        propensity=OTHER,
        notes="Raw text is handed round as train_raw_texts.txt, test_raw_texts.txt and label_map.txt; put these "
        "three in one folder with the label matrices Y.trn.npz and Y.tst.npz.",
    ),
    DataSetInfo(
        "LF-AmazonTitles-131K", "xc", measures=XC_MEASURES, documents=131_073, queries=134_835, train_queries=294_805,
        propensity=AMAZON, filters=XC_FILTERS, titles_only=True, sources=_AMAZON_131K,
    ),
    DataSetInfo(
        "LF-Amazon-131K", "xc", measures=XC_MEASURES, documents=131_073, queries=134_835, train_queries=294_805,
        propensity=AMAZON, filters=XC_FILTERS, sources=_AMAZON_131K,
    ),
    DataSetInfo(
        "LF-WikiSeeAlsoTitles-320K", "xc", measures=XC_MEASURES, documents=312_330, queries=177_515,
        train_queries=693_082, propensity=OTHER, titles_only=True, sources=_SEE_ALSO,
    ),
    DataSetInfo(
        "LF-WikiSeeAlso-320K", "xc", measures=XC_MEASURES, documents=312_330, queries=177_515, train_queries=693_082,
        propensity=OTHER, sources=_SEE_ALSO,
    ),
    DataSetInfo(
        "LF-Wikipedia-500K", "xc", measures=XC_MEASURES, documents=501_070, queries=783_743, train_queries=1_813_391,
        propensity=WIKIPEDIA, sources=_drive("1YStqoa6_5Qxd9FpExTNt-_tcXUhYXUFM"),
        notes="The archive holds trn.raw.json.gz, tst.raw.json.gz and the label file Yf.txt.",
    ),
    DataSetInfo(
        "LF-AmazonTitles-1.3M", "xc", measures=XC_MEASURES, documents=1_305_265, queries=970_237,
        train_queries=2_248_619, propensity=AMAZON, filters=XC_FILTERS, titles_only=True, sources=_AMAZON_1300K,
    ),
)  # fmt: skip

REGISTRY: dict[str, DataSetInfo] = {info.name: info for info in _DATA_SETS}

_ALIASES = {
    "touche2020": "webis-touche2020", "touche": "webis-touche2020", "dbpedia": "dbpedia-entity",
    "natural-questions": "nq", "fiqa-2018": "fiqa", "msmarco-passage-dev": "msmarco-passage",
    "dl19": "trec-dl-2019", "dl2019": "trec-dl-2019", "trec-dl-19": "trec-dl-2019",
    "dl20": "trec-dl-2020", "dl2020": "trec-dl-2020", "trec-dl-20": "trec-dl-2020",
    "wikipedia-500k": "LF-Wikipedia-500K", "eurlex": "EURLex-4K",
}  # fmt: skip
_BY_KEY = {name.lower(): info for name, info in REGISTRY.items()}
_BY_KEY.update({alias: REGISTRY[name] for alias, name in _ALIASES.items()})
_SPLITS = {"train", "dev", "test", "judged", "small"}


def lookup(name_or_path: str | os.PathLike[str]) -> DataSetInfo | None:
    """The registered data set of this name, folder (by its last part) or ir_datasets id; None if there is none.

    Case does not matter; a `raw` folder and a `.raw` ending count as the folder they belong to.
    """
    text = str(name_or_path).removeprefix("irds:").replace("\\", "/").lower()
    parts = [part for part in PurePath(text).parts if part != "/"]
    while len(parts) > 1 and parts[-1] in _SPLITS | {"raw"}:
        parts.pop()
    for count in (2, 1):
        key = "/".join(parts[-count:])
        for candidate in (key, key.removesuffix(".raw"), key.replace("_", "-")):
            if candidate in _BY_KEY:
                return _BY_KEY[candidate]
    return None


def find(name: str) -> DataSetInfo:
    """The registered data set of this name. Raises ConfigError with the nearest names for an unknown one."""
    import difflib

    info = lookup(name)
    if info is None:
        near = difflib.get_close_matches(name.lower(), list(_BY_KEY), n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(_BY_KEY[key].name for key in near)}" if near else f"known: {', '.join(REGISTRY)}"
        raise ConfigError(f"no registered data set is called {name!r}; {hint}.")
    return info


def propensity_family(name: str) -> tuple[float, float]:
    """Propensity parameters (A, B) for an XC data set: by registry, else by the family its name shows.

    Amazon-type data 0.6 / 2.6, Wikipedia-type 0.5 / 0.4, all others 0.55 / 1.5 (Jain et al. 2016).
    """
    info = lookup(name)
    if info is not None and info.propensity is not None:
        return info.propensity
    key = PurePath(name).name.lower()
    if "amazon" in key:
        return AMAZON
    if "wikipedia" in key or "wikititles" in key or "wikilshtc" in key:
        return WIKIPEDIA
    return OTHER


def xc_defaults(name: str) -> DataSetInfo:
    """Registry entry of an XC folder, or one made from its family when it is not registered."""
    info = lookup(name)
    if info is not None and info.kind == "xc":
        return info
    return replace(DataSetInfo(name, "xc", measures=XC_MEASURES), propensity=propensity_family(name))
