"""Measure names: the field's spellings in, ir-measures notation out, an unknown name answered with the nearest.

Only measures that a pure Python or C provider computes are offered; none here needs perl or a download.
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import sys
from types import ModuleType
from typing import Any

from shortlist.errors import ConfigError

# In order of preference; each ranks by score, and scores come from our ranks (providers.py says why).
PROVIDERS = ("pytrec_eval", "msmarco", "compat", "judged")
# Left out of ir-measures' names: Accuracy averages over a subset of the queries, and BEIR means Success by it.
_NOT_OFFERED = {"Accuracy"}
PSP = "PSP"

# Other spellings of a base name, in lower case: trec_eval, pytrec_eval, BEIR, ranx, sentence-transformers, XC code.
_ALIASES = {
    "ndcg_cut": "nDCG",
    "mrr": "RR",
    "mrr_cut": "RR",
    "recip_rank": "RR",
    "reciprocal_rank": "RR",
    "map": "AP",
    "map_cut": "AP",
    "average_precision": "AP",
    "recall": "R",
    "precision": "P",
    "hit_rate": "Success",
    "psprec": "PSP",
    "psprecision": "PSP",
    "r_prec": "Rprec",
    "r_precision": "Rprec",
    "r-precision": "Rprec",
    "num_q": "NumQ",
    "num_ret": "NumRet",
    "num_rel": "NumRel",
    "num_rel_ret": "NumRelRet",
    "set_p": "SetP",
    "set_recall": "SetR",
    "set_f": "SetF",
    "set_map": "SetAP",
    "iprec_at_recall": "IPrec",
}
_FORM = re.compile(r"(?P<base>[a-z_\-]+?)(?:\((?P<params>[^()]*)\))?(?:(?:@|_|\.|@_)(?P<cutoff>\d+(?:\.\d+)?))?", re.I)


def parse_measure(name: str) -> str:
    """The ir-measures spelling of a measure: `ndcg_cut_10`, `NDCG@10`, `ndcg@10` all give `nDCG@10`.

    Case does not matter. `MRR@10` is `RR@10`, `MAP` is `AP`, `recall_100` is `R@100`; parameters as in
    `P(rel=2)@5`.

    Raises:
        ConfigError: the name is unknown (the nearest one is shown), lacks its cut-off, or no pure provider has it.
    """
    return _parse(str(name).strip())


def is_measure(name: str) -> bool:
    """Whether `name` parses as a measure that can be computed here."""
    try:
        parse_measure(name)
    except ConfigError:
        return False
    return True


def looks_like_measure(name: str) -> bool:
    """Whether `name`, which need not parse, is written like a measure or is close to the name of one."""
    if re.search(r"[/\\]|\.(?!\d+$)", name):
        return False
    return "@" in name or _FORM.fullmatch(name) is not None and _nearest(name) is not None


def load_ir_measures() -> ModuleType:
    """Import ir-measures without the log handler that it attaches; a handler is the application's choice."""
    fresh = "ir_measures" not in sys.modules
    import ir_measures

    if fresh:
        for handler in list(ir_measures.logger.handlers):
            logging.getLogger(ir_measures.logger.name).removeHandler(handler)
    return ir_measures


@functools.cache
def _names() -> dict[str, str]:
    """Lower-case spelling → ir-measures base name, for every measure that is offered."""
    ir_measures = load_ir_measures()
    supported = {
        measure.NAME
        for provider in PROVIDERS
        for measure in ir_measures.providers.registry[provider].SUPPORTED_MEASURES
    } - _NOT_OFFERED
    names = {key.lower(): key for key, measure in ir_measures.measures.registry.items() if measure.NAME in supported}
    names.update(_ALIASES, psp=PSP)
    return names


@functools.cache
def _parse(name: str) -> str:
    match = _FORM.fullmatch(name)
    base = _names().get(match["base"].lower()) if match else None
    if match is None or base is None:
        raise ConfigError(_unknown(name))
    cutoff = match["cutoff"]
    if base == PSP:
        if match["params"] or cutoff is None or not cutoff.isdigit() or int(cutoff) < 1:
            raise ConfigError(
                f"measure {name!r}: propensity-scored precision is written PSP@k with k from 1, as PSP@5."
            )
        return f"PSP@{int(cutoff)}"
    # Keys of parameters are lower case in ir-measures, its booleans are Python's.
    params = re.sub(r"(\w+)\s*=", lambda key: key[1].lower() + "=", match["params"] or "")
    params = re.sub(r"\b(true|false)\b", lambda word: word[1].capitalize(), params, flags=re.I)
    expression = base + (f"({params})" if params else "") + (f"@{cutoff}" if cutoff is not None else "")
    return repr(measure_object(expression, shown=name))


@functools.cache
def measure_object(expression: str, *, shown: str | None = None) -> Any:
    """The ir-measures object of a measure in its notation, parameters checked and put in one order."""
    ir_measures = load_ir_measures()
    shown = shown or expression
    try:
        parsed = ir_measures.parse_measure(expression)
        measure = type(parsed)(**dict(sorted(parsed.params.items())))
        measure.validate_params()
        supported = any(ir_measures.providers.registry[provider].supports(measure) for provider in PROVIDERS)
    except (AssertionError, ValueError, NameError, TypeError, AttributeError, KeyError) as error:
        keys = ", ".join(ir_measures.measures.registry[expression.partition("(")[0].partition("@")[0]].SUPPORTED_PARAMS)
        raise ConfigError(
            f"measure {shown!r}: {error}. Its parameters are {keys or 'none'}, written as P(rel=2)@5."
        ) from None
    cutoff = measure.params.get("cutoff")
    if "cutoff" in measure.params and (isinstance(cutoff, bool) or cutoff < 1):
        raise ConfigError(f"measure {shown!r}: the cut-off is {cutoff}; expected at least 1.")
    if not supported:
        example = repr(measure(cutoff=10)) if cutoff is None and "cutoff" in measure.SUPPORTED_PARAMS else None
        hint = f" Did you leave out a cut-off, as in {example}?" if example else ""
        raise ConfigError(f"measure {shown!r} has no provider that runs without other programs.{hint}")
    return measure


def _nearest(name: str) -> str | None:
    """The closest offered name, with the cut-off that `name` carries."""
    base, cutoff = name, ""
    if match := re.fullmatch(r"(.*?)(?:\(.*\))?(?:@|_|\.)?(\d+)", name):
        base, cutoff = match[1], f"@{int(match[2])}"
    found = difflib.get_close_matches(base.lower(), _names(), n=1, cutoff=0.6)
    if not found:
        return None
    suggestion = _names()[found[0]] + cutoff
    try:
        return _parse(suggestion)
    except ConfigError:
        return suggestion


def _unknown(name: str) -> str:
    nearest = _nearest(name)
    offered = "nDCG@10, R@100, RR@10, AP, P@5, Success@5, Judged@10, PSP@5 and ir-measures' names with a pure provider"
    hint = f"did you mean {nearest}? " if nearest else ""
    return f"unknown measure {name!r}; {hint}Offered: {offered}."
