"""A cluster of two nodes, one of which is lost during a search."""

import logging

import numpy as np
import pytest

from shortlist.indexes import build_index, open_index
from shortlist.retrieval import cluster_pool
from shortlist.retrieval.cluster import connect, import_ray
from shortlist.retrieval.cluster_pool import Pool
from shortlist.retrieval.cluster_search import ClusterIndex


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_is_lost_during_a_search_is_made_up_for(tmp_path, monkeypatch):
    ray = import_ray()
    from ray.cluster_utils import Cluster

    random = np.random.default_rng(0)
    ids, vectors = [f"d{number:03d}" for number in range(300)], random.standard_normal((300, 8)).astype(np.float32)
    build_index(tmp_path / "i", [(ids, vectors)], dim=8)
    queries = random.standard_normal((40, 8)).astype(np.float32)
    expected = open_index(tmp_path / "i", device="cpu").search(queries, 25)
    monkeypatch.setattr(cluster_pool, "BATCH", 4)
    options = {"num_cpus": 2, "object_store_memory": 100 << 20}
    machines = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        other = machines.add_node(**options)
        machines.wait_for_nodes()
        ray.init(address=machines.address, log_to_driver=False, logging_level=logging.ERROR, namespace="shortlist")
        with connect() as cluster:
            assert len(cluster.nodes()) == 2
            with ClusterIndex(tmp_path / "i", cluster, replicas=2) as index:
                assert [part.start for part in index.parts] == [0, 192]  # one a node, each on both
                places = [{replica.node.id for replica in group} for group in index._pool._replicas]
                assert places == [{node.id for node in cluster.nodes()}] * 2
                original, taken = Pool._answer, []

                def answer(self, part, *sent):
                    taken.append(part.number)
                    if len(taken) == 5:
                        machines.remove_node(other, allow_graceful=False)
                    return original(self, part, *sent)

                monkeypatch.setattr(Pool, "_answer", answer)
                assert index.search(queries, 25) == expected
                assert len(taken) == 2 * 10
                assert index.search(queries, 25) == expected
    finally:
        ray.shutdown()
        machines.shutdown()
