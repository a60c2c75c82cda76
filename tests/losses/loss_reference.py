"""Every loss as a slow loop written from its formula, and the matrices the tests share."""

import math

import torch


def case(seed=0, queries=6, docs=9, spread=2.0, rate=0.3):
    """Random float64 scores, positives (one row with none, one all positive) and a validity mask."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(queries, docs, generator=generator, dtype=torch.float64) * spread
    positives = torch.rand(queries, docs, generator=generator) < rate
    valid = torch.rand(queries, docs, generator=generator) < 0.85
    positives[1] = False
    positives[2] = True
    positives[3, 4] = True
    valid[3, 4] = True
    return scores, positives, valid


def by_row(row_loss, scores, positives, valid=None, grades=None):
    """Mean of row_loss(scores, positives, grades) over the rows that have a positive, in plain Python floats."""
    losses = []
    for query in range(scores.shape[0]):
        keep = [d for d in range(scores.shape[1]) if valid is None or bool(valid[query, d])]
        s = [float(scores[query, d]) for d in keep]
        y = [float(positives[query, d]) for d in keep]
        if any(grade > 0 for grade in y):
            losses.append(row_loss(s, y))
    return sum(losses) / len(losses) if losses else 0.0


def _weights(y, by_grade):
    raw = [(grade if by_grade else 1.0) if grade > 0 else 0.0 for grade in y]
    return [w / sum(raw) for w in raw]


def info_nce(s, y, by_grade=False):
    total = sum(math.exp(x) for x in s)
    return -sum(w * math.log(math.exp(x) / total) for x, w in zip(s, _weights(y, by_grade), strict=True) if w)


def decoupled(s, y, by_grade=False):
    negatives = sum(math.exp(x) for x, grade in zip(s, y, strict=True) if not grade > 0)
    terms = zip(s, _weights(y, by_grade), strict=True)
    return -sum(w * math.log(math.exp(x) / (math.exp(x) + negatives)) for x, w in terms if w)


def bce(s, y):
    return sum(math.log(1 + math.exp(x)) - (x if grade > 0 else 0.0) for x, grade in zip(s, y, strict=True)) / len(s)


def top_k_probabilities(s, k, sharpness=2.0):
    """p by 200 steps of bisection in Python floats."""
    if k >= len(s):
        return [1.0] * len(s)
    low, high = min(s) - 50.0, max(s) + 50.0
    for _ in range(200):
        middle = (low + high) / 2
        if sum(_sigmoid(sharpness * (x - middle)) for x in s) > k:
            low = middle
        else:
            high = middle
    return [_sigmoid(sharpness * (x - middle)) for x in s]


def top_k(s, y, k, sharpness=2.0, by_grade=False):
    p = top_k_probabilities(s, k, sharpness)
    return -sum(w * math.log(q) for q, w in zip(p, _weights(y, by_grade), strict=True) if w)


def list_net(s, y, temperature=1.0):
    gains = [math.exp(max(grade, 0.0) / temperature) for grade in y]
    total = sum(math.exp(x) for x in s)
    return -sum(g / sum(gains) * math.log(math.exp(x) / total) for x, g in zip(s, gains, strict=True))


def rank_net(s, y):
    y = [max(grade, 0.0) for grade in y]
    pairs = [(i, j) for i in range(len(s)) for j in range(len(s)) if y[i] > y[j]]
    return sum(math.log(1 + math.exp(-(s[i] - s[j]))) for i, j in pairs) / max(1, len(pairs))


def approx_ndcg(s, y, sharpness=10.0):
    y = [max(grade, 0.0) for grade in y]
    gained = 0.0
    for i, x in enumerate(s):
        rank = 1 + sum(_sigmoid(sharpness * (other - x)) for j, other in enumerate(s) if j != i)
        gained += (2 ** y[i] - 1) / math.log2(1 + rank)
    ideal = sum((2**grade - 1) / math.log2(2 + place) for place, grade in enumerate(sorted(y, reverse=True)))
    return 1 - gained / ideal


def _sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def central_differences(function, point, step=1e-6):
    """Gradient of a scalar function of a float64 matrix, entry by entry."""
    gradient = torch.zeros_like(point)
    for index in range(point.numel()):
        for sign in (1, -1):
            moved = point.clone()
            moved.view(-1)[index] += sign * step
            gradient.view(-1)[index] += sign * float(function(moved)) / (2 * step)
    return gradient
