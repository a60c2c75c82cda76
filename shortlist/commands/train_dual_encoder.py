"""Training a dual encoder: puts collection, encoder, loss and trainer together."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from shortlist.commands.document_side import with_document_side
from shortlist.commands.train import TrainResult
from shortlist.commands.training_loss import check_pool, training_loss
from shortlist.config import dump_config
from shortlist.data import RankedList, load_collection, read_lists
from shortlist.data.label_qrels import positive_counts
from shortlist.data.splits import split_off_dev
from shortlist.errors import ConfigError, DataError, MissingInputError
from shortlist.files import sha256
from shortlist.indexes import ExactIndex, new_index
from shortlist.metrics.xc import DEFAULT_PROPENSITY
from shortlist.retrieval import DualEncoder
from shortlist.retrieval.engine import Forward
from shortlist.retrieval.mining import DenseCandidates, LexicalCandidates
from shortlist.settings import TrainConfig
from shortlist.training import checkpoints, distributed
from shortlist.training.batches import BatchBuilder
from shortlist.training.callbacks import Saved
from shortlist.training.documents import Documents
from shortlist.training.evaluation import DevSet, metric_name
from shortlist.training.examples import ExampleSet, build_examples, examples_from_lists
from shortlist.training.mining import MiningCounts, MiningFilters, write_shortlist
from shortlist.training.negatives import NEGATIVES_FILE, read_negatives, write_negatives
from shortlist.training.objective import Objective
from shortlist.training.plan import plan_steps
from shortlist.training.shortlists import MinedNegatives
from shortlist.training.trainer import RetrievalTrainer, head_parameters, training_arguments, training_dtype
from shortlist.training.weights import log_prior, propensity_weights
from shortlist.types import Qrels, Run

logger = logging.getLogger(__name__)

# Documents a query that the first stage gives, before the known positives are taken out.
MINING_DEPTH = 100


class DualEncoderJob:
    """Reads and checks everything a run needs; `run` trains.

    Raises (on construction):
        ConfigError: loss, measure or a combination of settings; the key is named.
        MissingInputError: no data, split or model of that name.
        DataError: no training query has a positive.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        if config.data.path is None:
            raise ConfigError("data.path is not set: name the collection to train on, as data.path=DIR or in the file.")
        self.metric = metric_name(config.training.metric_for_best_model)
        self.loss = training_loss(config)
        self.teacher = getattr(self.loss, "target", "positives") == "teacher"
        self.sources = {source.name for source in config.data.sources}
        if self.teacher and "given" not in self.sources:
            raise ConfigError(
                f"loss.name is {config.loss.name!r}, which learns from a teacher's scores: it needs lists with scores, "
                f"so data.negatives must be given (it is {config.data.negatives!r})."
            )
        dtype = training_dtype(config.training.dtype)
        self.collection = load_collection(config.data.path, on_empty=config.data.on_empty)
        self.checksums = dict(self.collection.checksums()) | self._lists_checksum()
        transformers.set_seed(config.seed)
        self.encoder = with_document_side(open_encoder(config), config, self.collection.corpus)
        by_row = self.encoder.document_tower.by_row
        self.documents = Documents(self.collection.corpus, template=self.encoder.template, by_row=by_row)
        check_pool(self.loss, len(self.documents.unique_rows()))
        train, dev = self._split()
        self.examples = self._examples(train)
        if config.data.split in self.collection.splits:
            self.examples = self.examples.with_banned(self.collection.filters(config.data.split))
        self.positive_weights = self._positive_weights()
        self.plan = plan_steps(len(self.examples), config.training, processes=distributed.world())
        self.dev_qrels = dev
        self.objective = Objective(
            self.loss,
            temperature=config.training.temperature,
            dim=self.encoder.dim,
            normalise=self.encoder.similarity == "cosine",
            matryoshka=config.training.matryoshka,
            bias=self._logit_adjustment(),
            score_memory=config.training.score_memory,
        )
        if config.training.head_learning_rate is not None:
            head_parameters(self.encoder)  # refuses a model that has none
        training_arguments(config, self.plan, Path(), dtype)  # refuses what transformers would refuse, now
        # What the epoch that first needs it would refuse, is refused now.
        mining = config.data.mining
        self.filters = MiningFilters(
            mining.skip, mining.min_score, mining.max_score, mining.relative_margin, mining.margin
        )
        if "mined" in self.sources:
            new_index(mining.index, self.encoder.dim)
        if "given" in self.sources and "bm25" not in self.sources:
            self._batches()

    def run(self, output: Path, *, resume: bool, saved: Callable[[], None]) -> tuple[TrainResult, dict[str, Any]]:
        """Train into `output`, put the best weights at its top, and say how it went; `saved` after each checkpoint."""
        config, training = self.config, self.config.training
        logger.info("Training: %s", self.plan)
        if training.gradient_accumulation_steps > 1:
            logger.info(
                "training.gradient_accumulation_steps is %d: gradients are averaged over %d batches, but a query meets "
                "only the negatives of its own batch of %d. For more negatives in the memory of a small batch raise "
                "training.batch_size and set training.micro_batch_size (gradient cache), or set data.negatives to all, "
                "sampled(n) or mined(k).",
                training.gradient_accumulation_steps, training.gradient_accumulation_steps,
                training.batch_size * distributed.world(),
            )  # fmt: skip
        if distributed.world() > 1:
            logger.info(
                "%d processes make each step together: a batch has %d queries (training.batch_size %d for each), and "
                "the learning rate is used as it is.",
                distributed.world(), training.batch_size * distributed.world(), training.batch_size,
            )  # fmt: skip
        if config.deterministic:
            logger.info("deterministic: only kernels with one summation order are used; on a GPU this costs speed.")
        if "bm25" in self.sources:
            self.examples = self._mined(output)
        batches = self._batches()
        dev = self._dev_set(batches)
        trainer = RetrievalTrainer(
            self.encoder, batches, self.objective, config=config, plan=self.plan, output=output, dev=dev
        )
        trainer.add_callback(Saved(saved))
        if "mined" in self.sources:
            trainer.add_callback(self._mined_negatives(batches, output))
        distributed.on_main(lambda: checkpoints.remove_unfinished(output))
        steps = distributed.on_main(lambda: checkpoints.checkpoint_steps(output) if resume else [])
        if steps:
            logger.info("Resuming from step %d of %d", steps[-1], self.plan.total_steps)
            trainer.resume_from(steps[-1])
        else:
            if resume:
                logger.warning("%s has no checkpoint yet; training starts from the beginning.", output)
            distributed.on_main(lambda: (output / "train_log.jsonl").unlink(missing_ok=True))
            if dev is not None and training.eval_at_start:
                trainer.evaluate()
            trainer.train()
        return distributed.on_main(lambda: self._finish(trainer, output, dev))

    def _finish(
        self, trainer: RetrievalTrainer, output: Path, dev: DevSet | None
    ) -> tuple[TrainResult, dict[str, Any]]:
        """Save the best weights, and say how it went; on rank 0."""
        best = trainer.load_best()
        measures = next((entry for entry in trainer.measured() if entry["step"] == best), {})
        measures = {name: value for name, value in measures.items() if name != "step"}
        untrained = trainer.untrained()
        if dev is not None and untrained and measures and measures[dev.metric] < untrained[dev.metric]:
            logger.warning(
                "Training did not help: %s on the held-out part is %.4f after it and was %.4f before. The model is "
                "saved all the same; look at learning rate, temperature and negatives.",
                dev.metric, measures[dev.metric], untrained[dev.metric],
            )  # fmt: skip
        self._save(output, dev, measures, untrained)
        result = TrainResult(output, trainer.state.global_step, best, measures, untrained)
        details = {
            "fingerprint": self.encoder.fingerprint,
            "settings": self.encoder.settings(),
            "plan": dataclasses.asdict(self.plan),
            "dtype": trainer.dtype_name,
            "device": str(trainer.args.device),
            "held_out": dev.description if dev else None,
        }
        return result, details

    def _batches(self) -> BatchBuilder:
        data = self.config.data
        return BatchBuilder(
            self.examples,
            self.encoder,
            sources=data.sources,
            share_negatives=data.share_negatives,
            max_positives=self.config.training.max_positives,
            sample_positives=self.config.training.sample_positives,
            graded=data.graded,
            weights=self.positive_weights,
            teacher=self.teacher,
            seed=self.config.seed,
            micro_batch_size=self.config.training.micro_batch_size,
            rank=distributed.rank(),
            world=distributed.world(),
        )

    def _logit_adjustment(self) -> torch.Tensor | None:
        """training.logit_adjustment times the log prior of each document, `(docs,)`; None: not asked for."""
        strength = self.config.training.logit_adjustment
        return torch.from_numpy(strength * log_prior(self.examples)) if strength else None

    def _positive_weights(self) -> NDArray[np.float32] | None:
        """Inverse propensity of each document, scaled to mean 1 over the training positives; None: not asked for."""
        if not self.config.data.propensity_weights:
            return None
        return propensity_weights(self.examples, propensity=self.collection.propensity or DEFAULT_PROPENSITY)

    # Data ---------------------------------------------------------------------------------------------

    def _split(self) -> tuple[Qrels, Qrels | None]:
        """Judgements of the training part and of the part that chooses the checkpoint."""
        data = self.config.data
        train = self._judgements(data.split)
        if data.dev == "none":
            return train, None
        if data.dev == data.split:
            raise ConfigError(
                f"data.dev is {data.dev!r}, the split that is trained on; use auto to hold a part of it out, or none."
            )
        if data.dev != "auto":
            return train, self._judgements(data.dev)
        if data.split == "train" and "train" not in self.collection.list_splits:
            # Every own split is kept for reporting: the part comes off train.
            return self.collection.dev_split(reserve=self.collection.splits, fraction=data.dev_fraction)
        corpus = None if self.collection.kind == "xc" else self.collection.corpus
        return split_off_dev(train, fraction=data.dev_fraction, corpus=corpus)

    def _judgements(self, split: str) -> Qrels:
        """Qrels of a split; for lists without qrels, what the lists grade."""
        try:
            return self.collection.qrels(split)
        except MissingInputError:
            if split not in self.collection.list_splits:
                raise
            lists = self.collection.lists(split)
            return Qrels({item.query_id: {doc.id: 1 for doc in item.positives} for item in lists}, name=split)

    def _examples(self, train: Qrels) -> ExampleSet:
        data = self.config.data
        if "given" in self.sources:
            lists = [item for item in self._lists() if item.query_id in train or self.teacher]
            return examples_from_lists(lists, self.documents, qrels=train, limit=data.max_queries, teacher=self.teacher)
        return build_examples(
            self.collection.all_queries(),
            train,
            self.documents,
            title_queries=data.title_queries,
            limit=data.max_queries,
        )

    def _lists_checksum(self) -> dict[str, str]:
        """SHA-256 of the file of lists, where one is read; a missing one is refused by who reads it."""
        lists = self.config.data.lists
        used = lists is not None and "given" in self.sources and Path(lists).is_file()
        return {f"data.lists ({lists})": sha256(lists)} if lists is not None and used else {}

    def _lists(self) -> Iterable[RankedList]:
        data = self.config.data
        if data.lists is not None:
            return read_lists(data.lists, corpus=self.collection.corpus, queries=self.collection.all_queries())
        if data.split in self.collection.list_splits:
            return self.collection.lists(data.split)
        raise ConfigError(
            f"data.negatives is 'given', but split {data.split!r} of {self.collection.name} has no lists of documents: "
            "name a file with data.lists, or set data.negatives to bm25 (mines them), in_batch or all."
        )

    def _mined(self, output: Path) -> ExampleSet:
        """The examples with BM25's negatives, from the file beside the output if a resumed run has it already."""
        path = output / NEGATIVES_FILE

        def mine() -> None:
            if not path.is_file():
                search = LexicalCandidates(self.collection.corpus)
                counts = write_negatives(path, self.examples, search, system="bm25", k=MINING_DEPTH, depth=MINING_DEPTH)
                logger.info("%s: %s", path, counts)

        distributed.on_main(mine)
        return self.examples.with_negatives("bm25", *read_negatives(path, self.examples))

    def _mined_negatives(self, batches: BatchBuilder, output: Path) -> MinedNegatives:
        """Mines with the encoder's weights of the moment, when an epoch begins that is due for it."""
        mining, filters = self.config.data.mining, self.filters

        def write(path: Path) -> MiningCounts:
            rows = np.arange(len(self.documents))
            vectors = encoded_rows(self.encoder, batches, rows)
            search = DenseCandidates(self.encoder, self.collection.corpus, index=mining.index, vectors=vectors)
            return write_shortlist(path, self.examples, search, depth=mining.depth, filters=filters)

        return MinedNegatives(
            batches,
            write,
            output=output,
            steps_per_epoch=self.plan.steps_per_epoch,
            depth=mining.depth,
            start_epoch=mining.start_epoch,
            refresh_epochs=mining.refresh_epochs,
        )

    # Selection ----------------------------------------------------------------------------------------

    def _dev_set(self, batches: BatchBuilder) -> DevSet | None:
        if self.dev_qrels is None:
            return None
        data, collection = self.config.data, self.collection
        texts = collection.all_queries()
        chosen = [query for query in self.dev_qrels if query in texts and self.dev_qrels.relevant(query)]
        random = np.random.default_rng(self.config.seed)
        if data.dev_queries is not None and len(chosen) > data.dev_queries:
            chosen = sorted(random.choice(np.array(chosen, dtype=object), data.dev_queries, replace=False).tolist())
        if not chosen:
            raise DataError(f"data.dev ({data.dev}) has no query with a relevant document; name another split.")
        qrels = Qrels({query: self.dev_qrels[query] for query in chosen}, name=self.dev_qrels.name)
        rows: NDArray[np.int64] = np.arange(len(self.documents))
        if data.dev_documents is not None and len(rows) > data.dev_documents:
            judged = self.documents.rows_of(document for query in chosen for document in qrels[query])
            drawn = random.choice(rows, data.dev_documents, replace=False)
            rows = np.unique(np.concatenate([np.array(list(judged.values()), np.int64), drawn]))
        search = DevSearch(self.encoder, batches, {query: texts[query] for query in chosen}, rows)
        # An XC collection's own list has PSP; more than the metric and one recall would only slow selection down.
        measures = [measure for measure in collection.measures if not measure.startswith("PSP")]
        search.depth = max(100, *(int(cut) for name in (self.metric, *measures) for cut in re.findall(r"@(\d+)", name)))
        options: dict[str, Any] = {"exclude_self": collection.exclude_self}
        if collection.kind == "xc":
            trained = self.collection.qrels(data.split)
            options |= {"train_counts": positive_counts(trained), "num_train": len(trained)}
            options |= {"propensity": collection.propensity} if collection.propensity else {}
            # As `evaluate` measures a label set: pairs that may not be predicted go first, nDCG is binary.
            options |= {
                "binary_gain": True,
                "filters": collection.filters(data.split if data.dev == "auto" else data.dev),
            }
        where = f"{len(chosen)} queries of {data.split} held out" if data.dev == "auto" else f"split {data.dev}"
        description = f"{where}, {len(rows)} documents"
        logger.info("Checkpoints are chosen by %s on %s", self.metric, description)
        return DevSet(qrels, search, self.metric, measures, description, options)

    # Output -------------------------------------------------------------------------------------------

    def _save(
        self, output: Path, dev: DevSet | None, measures: Mapping[str, float], untrained: Mapping[str, float]
    ) -> None:
        """Write the model folder to the top of `output`, file by file over what is there."""
        table: dict[str, Mapping[str, float]] = {}
        if dev is not None:
            name = f"{self.collection.name} ({self.collection.corpus.fingerprint[:12]}), {dev.description}"
            table = {name: measures} | ({f"{name}, before training": untrained} if untrained else {})
        judged = len(self.examples) - self.examples.num_titles
        positives = int(self.examples.judged.starts[judged])
        options = ", ".join(f"{key}={value}" for key, value in self.config.loss.options.items())
        staged = output / ".model"
        shutil.rmtree(staged, ignore_errors=True)
        self.encoder.save_pretrained(
            staged,
            data={
                f"{self.collection.name}, split {self.config.data.split}": f"{judged:,} queries",
                "positives": f"{positives:,}",
                **({"titles as queries": f"{self.examples.num_titles:,}"} if self.config.data.title_queries else {}),
                "documents": f"{len(self.documents):,}",
                "negatives": " and ".join(map(str, self.config.data.sources)),
            },
            loss=self.config.loss.name + (f" ({options})" if options else ""),
            measures=table,
            config=dump_config(self.config),
        )
        for path in sorted(staged.iterdir()):
            target = output / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        staged.rmdir()


class DevSearch:
    """Exact search over some rows of the corpus with the encoder's weights of the moment."""

    def __init__(
        self, encoder: DualEncoder, batches: BatchBuilder, queries: Mapping[str, str], rows: NDArray[np.int64]
    ):
        self.encoder = encoder
        self.batches = batches
        self.queries = dict(queries)
        self.rows = rows
        self.depth = 100

    def __call__(self) -> Run:
        """The run of the held-out queries."""
        index = ExactIndex(self.encoder.dim, metric="ip")
        for ids, block in encoded_rows(self.encoder, self.batches, self.rows):
            index.add(ids, block)
        queries = Forward(self.encoder, "query")
        vectors = np.zeros((len(self.queries), self.encoder.dim), np.float32)
        queries.vectors(queries.tokens(list(self.queries.values())), vectors)
        run = Run(name="held-out")
        for query, found in zip(self.queries, index.search(vectors, self.depth), strict=True):
            run.add(query, [document for document, _ in found], [score for _, score in found])
        return run


def encoded_rows(
    encoder: DualEncoder, batches: BatchBuilder, rows: NDArray[np.int64]
) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
    """Ids and vectors of rows of the corpus, block by block, from the token ids of the training batches."""
    forward = Forward(encoder, "document")
    for start in range(0, len(rows), 20_000):
        part = rows[start : start + 20_000]
        vectors = np.zeros((len(part), encoder.dim), np.float32)
        tokens = batches.tokens.tokens(part)
        forward.vectors(tokens.at_rows(part) if encoder.document_tower.by_row else tokens, vectors)
        yield batches.documents.ids(part), vectors


def open_encoder(config: TrainConfig) -> DualEncoder:
    """The encoder of a configuration, with float32 weights and adapters where they are asked for."""
    model = config.model
    encoder = DualEncoder.from_pretrained(
        model.path,
        device="cpu" if not torch.cuda.is_available() else "auto",
        pooling=model.pooling,
        normalise=model.normalise,
        dim=model.dim,
        projection_dim=model.projection_dim,
        prompts=model.prompts.model_dump() if model.prompts else None,
        query_max_length=model.query_max_length,
        doc_max_length=model.doc_max_length,
        shared=None if model.shared else False,
        template=config.data.template,
    )
    encoder.temperature = config.training.temperature
    # Half-precision weights lose small updates; the forward pass may be in half precision, the weights are not.
    encoder.float()
    if model.lora is not None:
        lora = model.lora
        encoder.add_lora(
            rank=lora.r,
            alpha=lora.alpha,
            dropout=lora.dropout,
            target_modules=lora.target_modules or "all-linear",
        )
    if config.training.gradient_checkpointing:
        for module in encoder.modules():
            if isinstance(module, transformers.PreTrainedModel):
                # Renamed within transformers 5; the old name warns and goes in 6.
                getattr(module, "activation_checkpointing_enable", module.gradient_checkpointing_enable)()
                if model.lora is not None:
                    module.enable_input_require_grads()
    return encoder
