"""One process of the tests of sharded losses: `shard_worker.py RANK WORLD RENDEZVOUS OUTPUT`."""

import sys

import torch
from pool_reference import LOSSES, blocked, case
from safetensors.torch import save_file
from torch import distributed

from shortlist.losses import Shard

CUTS = {"even": [0, 19, 37], "ragged": [0, 5, 37], "empty first": [0, 0, 37], "empty last": [0, 37, 37]}
BUDGETS = {"one block": None, "blocks of rows": 40 * 8 * 3 * 2, "blocks of columns": 500}
LAYOUTS = [(cut, "one block") for cut in CUTS] + [("ragged", name) for name in BUDGETS if name != "one block"]
LAYOUTS += [("empty first", "blocks of columns")]


def main(rank: int, world: int, rendezvous: str, output: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    results = {}
    for dtype in (torch.float64, torch.float32):
        queries, documents, grades, bias, dropped = case(dtype)
        left_out = dropped.nonzero(as_tuple=True)
        for cut, budget in LAYOUTS if dtype == torch.float64 else [("even", "one block")]:
            start, stop = CUTS[cut][rank : rank + 2]
            for name, loss in LOSSES.items():
                value, left, right = blocked(
                        loss, queries, documents[start:stop], grades, 0.7, bias=bias[start:stop],
                        left_out=left_out if loss.samples_positives else None,
                        memory=BUDGETS[budget], shard=Shard(start, stop, 37),
                    )  # fmt: skip
                key = f"{name}|{cut}|{budget}|{'64' if dtype == torch.float64 else '32'}"
                results |= {f"{key}|value": value, f"{key}|queries": left, f"{key}|documents": right}
    save_file({key: value.contiguous() for key, value in results.items()}, output)
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    import shortlist.losses.pool
    import shortlist.losses.row_statistics

    shortlist.losses.row_statistics.CPU_BLOCK = 100
    shortlist.losses.pool.USEFUL_HEIGHT = 2
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
