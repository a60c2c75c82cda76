import pytest

from shortlist.data.registry import REGISTRY, find, lookup, propensity_family, xc_defaults
from shortlist.errors import ConfigError
from shortlist.metrics import parse_measure

BEIR = (
    "trec-covid nfcorpus bioasq nq hotpotqa fiqa signal1m trec-news robust04 arguana webis-touche2020 cqadupstack "
    "quora dbpedia-entity scidocs fever climate-fever scifact msmarco"
).split()


def test_names_every_beir_set_and_the_twelve_forums():  # user-reports A.15
    assert set(BEIR) <= set(REGISTRY)
    forums = REGISTRY["cqadupstack"].members
    assert len(forums) == 12 and set(forums) <= set(REGISTRY)
    assert sum(REGISTRY[forum].documents for forum in forums) == REGISTRY["cqadupstack"].documents == 457_199
    assert sum(REGISTRY[forum].queries for forum in forums) == REGISTRY["cqadupstack"].queries == 13_145


def test_ms_marco_is_judged_on_dev_and_trec_dl_on_test():  # user-reports A.13
    assert REGISTRY["msmarco"].default_split == REGISTRY["msmarco-passage"].default_split == "dev"
    assert REGISTRY["msmarco"].measures == ("RR@10", "R@1000")
    for name, judged in (("trec-dl-2019", 43), ("trec-dl-2020", 54)):
        assert (REGISTRY[name].default_split, REGISTRY[name].queries) == ("test", judged)
        assert REGISTRY[name].measures == ("nDCG@10", "AP(rel=2)", "R(rel=2)@1000")


def test_only_arguana_and_quora_remove_the_query_itself():  # user-reports E.107, E.109
    assert [name for name, info in REGISTRY.items() if info.exclude_self] == ["arguana", "quora"]


def test_touche_names_its_version_and_checksum():  # user-reports A.14
    assert REGISTRY["webis-touche2020"].version == "2"
    assert REGISTRY["webis-touche2020"].md5 == "46f650ba5a527fc69e0a6521c5a23563"


def test_amazon_label_sets_have_filter_files_and_families_their_propensities():
    assert REGISTRY["LF-AmazonTitles-131K"].filters == ("filter_labels_train.txt", "filter_labels_test.txt")
    assert REGISTRY["LF-AmazonTitles-131K"].titles_only and not REGISTRY["LF-Amazon-131K"].titles_only
    assert REGISTRY["LF-AmazonTitles-1.3M"].propensity == (0.6, 2.6)
    assert REGISTRY["LF-Wikipedia-500K"].propensity == (0.5, 0.4)
    assert REGISTRY["EURLex-4K"].propensity == REGISTRY["LF-WikiSeeAlso-320K"].propensity == (0.55, 1.5)


@pytest.mark.parametrize(
    "text, name",
    [
        ("ArguAna", "arguana"),
        ("/data/beir/quora/", "quora"),
        ("irds:beir/scifact/test", "scifact"),
        ("beir/cqadupstack/tex", "cqadupstack/tex"),
        ("/x/cqadupstack/android", "cqadupstack/android"),
        ("msmarco-passage/trec-dl-2019/judged", "trec-dl-2019"),
        ("/x/LF-AmazonTitles-131K/raw", "LF-AmazonTitles-131K"),
        ("/x/Wikipedia-500K.raw", "LF-Wikipedia-500K"),
        ("trec_dl_2020", "trec-dl-2020"),
    ],
)
def test_folders_and_ids_find_their_entry(text, name):
    assert lookup(text).name == name


@pytest.mark.parametrize("text", ["my-data", "/somewhere/android", "", "/", "test"])
def test_other_folders_are_not_taken_for_a_known_set(text):
    assert lookup(text) is None


def test_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="scifcat.*nearest: scifact"):
        find("scifcat")


def test_unregistered_label_sets_get_the_family_of_their_name():
    assert propensity_family("AmazonCat-13K") == (0.6, 2.6)
    assert propensity_family("WikiTitles-500K") == (0.5, 0.4)
    assert xc_defaults("yso-titles").propensity == (0.55, 1.5)
    assert xc_defaults("yso-titles").measures[0] == "P@1"


def test_every_entry_is_complete():
    for name, info in REGISTRY.items():
        assert info.name == name
        assert info.sources or info.notes, name
        assert (info.propensity is not None) == (info.kind == "xc"), name
        for source in info.sources:
            assert source.url.startswith("https://")
            assert source.md5 is None or len(source.md5) == 32


def test_measures_are_names_the_package_knows():
    for info in REGISTRY.values():
        assert [parse_measure(measure) for measure in info.measures] == list(info.measures)
